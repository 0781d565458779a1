"""The binary interface of native kernels: one record, `Call`, of 8-byte words.

A kernel is `extern "C" int64_t frisket_forward(const Call *)`, likewise `frisket_backward`; 0 means done. Every
field is one word, so that a record is written by one `struct.pack` and by an XLA custom call alike. `FIELDS` is
the only place that says what there is: the C text and the offsets come from it.

>>> OFFSET["threads"], OFFSET["q"], OFFSET["k"] - OFFSET["q"]
(0, 36, 4)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Field:
    """One field of the record: its C declaration, its size in words, and its meaning."""

    name: str
    declaration: str
    meaning: str
    words: int = 1


BEHIND = 256  # rows behind a tile that kernels may fetch
SHORT = 4 << 20  # operations of a call that one thread ends before a second one has begun


def _array(name: str, meaning: str) -> Field:
    return Field(name, f"Array {name};", meaning, words=4)


def _numbers(type: str, names: str, meaning: str = "") -> list[Field]:
    """Fields of one type and meaning, which stands at the first."""
    return [Field(name, f"{type}{name};", "" if i else meaning) for i, name in enumerate(names.split())]


FIELDS = (
    Field("threads", "int64_t threads;", "how many workers may run at once, at least 1"),
    Field("parallel", "Parallel parallel;", "runs work(task, worker) on up to `threads` workers; null: one worker"),
    Field("pool", "void *pool;", "first argument of parallel"),
    *_numbers("int64_t ", "batch heads", "lengths of this call, in tokens"),
    Field("kv_heads", "int64_t kv_heads;", "query head h reads key head h / (heads / kv_heads)"),
    *_numbers("int64_t ", "q_len kv_len"),
    Field("scale", "double scale;", ""),
    *_numbers("int64_t ", "size_b size_h size_q size_k", "B, H, Q_LEN, KV_LEN of the whole problem"),
    *_numbers("int64_t ", "b_origin h_origin", "where the call begins in the whole problem"),
    *_numbers("const int64_t *", "q_origin k_origin", "one, or one for each batch entry"),
    *_numbers("int64_t ", "q_origin_step k_origin_step", "0: the same for all batch entries; 1: one each"),
    Field("slots", "const Slot *slots;", "run-time numbers: the plan's, then literals"),
    Field("tables", "const int64_t *tables;", "for each table its data, sizes and strides, in the plan's order"),
    Field("spans", "const int32_t *spans;", "[slices, rows, records, 4]: lo, full_lo, full_hi, hi in key tiles"),
    Field("count", "const int32_t *count;", "[slices, rows]: records in use"),
    Field("slice_of", "const int32_t *slice_of;", "[batch, heads]"),
    Field("rows", "int64_t rows;", "rows of tiles: ceil(q_len / block_q)"),
    Field("records", "int64_t records;", ""),
    Field("block_q", "int64_t block_q;", "queries of a tile, at most BLOCK_Q"),
    Field("q_rows", "const int32_t *q_rows;", "of MOVED kernels: the row of q and the results that has each query"),
    Field("k_rows", "const int32_t *k_rows;", "and that of k and v for each key, the last one again behind the last"),
    Field("sinks", "const Real *sinks;", "[heads], a logit in every row that has no key and no value; or null"),
    Field("lse", "Real *lse;", "[batch, heads, q_len], natural log; written forward, where not null, read backward"),
    Field("top", "Real *top;", "[batch, heads, q_len], the largest visible score of each row, or null"),
    Field("norm", "Real *norm;", "[batch, heads, q_len, norm_width]: shift of scores, factor, for a backward; or null"),
    Field("norm_width", "int64_t norm_width;", "2; or more, with what rounding left out of PEAKED rows of `out`"),
    Field("norm_zeros", "int64_t norm_zeros;", "whether zeros stand there in other rows, instead of anything"),
    Field("pages", "int64_t pages;", "of the pool that keys and values are in, where they are in one"),
    _array("q", "[batch, heads, q_len, HEAD_DIM]"),
    _array("k", "[batch, kv_heads, kv_len, HEAD_DIM], in a pool [pages, kv_heads, PAGE, HEAD_DIM]"),
    _array("v", "[batch, kv_heads, kv_len, V_DIM], likewise"),
    _array("out", "[batch, heads, q_len, V_DIM]; written forward, read backward"),
    _array("dout", "the cotangent of out; of a TANGENT kernel its tangent"),
    _array("dq", "gradients; of a TANGENT kernel tangents of q, k and v, null where there is none"),
    _array("dk", ""),
    _array("dv", ""),
    Field("dlse", "Real *dlse;", "the cotangent of lse, contiguous, or null; of a TANGENT kernel its tangent"),
    Field("gradients", "Real *const *gradients;", "a zeroed buffer for each of the plan's captured gradients, or null"),
)

OFFSET = {f.name: sum(before.words for before in FIELDS[:i]) for i, f in enumerate(FIELDS)}
WORDS = sum(f.words for f in FIELDS)

HEAD = """\
union Slot { int64_t i; double f; };  // Int and Bool parameters in i, Float ones in f
struct Array { void *data; int64_t batch, head, row; };  // strides in entries; a row's entries are neighbours
typedef void (*Work)(void *task, int64_t worker);
typedef void (*Parallel)(void *pool, Work work, void *task, int64_t workers);  // worker 0 always runs, others may
"""


def text() -> str:
    """The C declarations of the record; `Real` (float, or double in float64) is declared before them."""
    width = max(len(f.declaration) for f in FIELDS) + 1
    lines = (f"    {f.declaration:{width}}{'// ' + f.meaning if f.meaning else ''}".rstrip() for f in FIELDS)
    return "\n".join([HEAD.rstrip(), "struct Call {", *lines, "};", f"const double SHORT = {SHORT};"]) + "\n"


BRIDGE = """\
// An XLA call is turned into a Call by runtime/backends/cpp/bridge.cpp, which sets this where JAX is.
extern "C" { void *(*frisket_bridge)(void *frame, int64_t (*kernel)(const Call *)); }
"""


def bridged(*kernels: str) -> str:
    """The handlers of XLA calls, `frisket_forward_xla(frame)` for `frisket_forward`, to be put behind the kernels."""
    handlers = (
        f'extern "C" void *{name}_xla(void *frame) {{ return frisket_bridge(frame, {name}); }}\n' for name in kernels
    )
    return BRIDGE + "".join(handlers)
