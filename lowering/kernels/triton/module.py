"""The module of a Triton kernel: the names of its parameters, its head, and the entry through which JAX calls it.

A kernel says what it reads by the names of its parameters: pointers, strides, lengths, and values such as origins and
slots. The entry for JAX takes arrays, lengths, and results, in this order. It works the strides out: their factors tell
the compiler what divides them. It loads values from two vectors, so that they are operands and never compiled in.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import SIZES, var, walk
from frisket.dsl.types import BOOL, FLOAT
from frisket.lowering.dtypes import ACCELERATED, BYTES, DTYPES, FP8
from frisket.lowering.kernels.features import TRITON
from frisket.lowering.kernels.text import Names, Page, filled, parts, words
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import FIRST, K_SCALE, PAGES, Q_SCALE, RATE, SEED, V_SCALE, LoopPlan

from . import expr as expr_triton

SHARED = parts(__package__, "shared")
NAMED = {SEED: "seed", RATE: "rate", K_SCALE: "k_scale", V_SCALE: "v_scale", PAGES: "pages", FIRST: "first_key"}
NAMED |= {Q_SCALE: "q_scale"}
QUERY = var("q")
# Names that a kernel uses itself: a slot or table of such a name gets another one.
OWN = (
    """
attention_forward attention_delta attention_dq attention_dkv attention_dv attention_decode attention_combine
Q K V Out Lse Low Top Sinks DOut DQ DK DV Spans Count SliceOf Order records scale heads q_len kv_len
b_origin h_origin q_origin k_origin ORIGIN_PER_BATCH NEAR b h q k q_first q_last k_first k_last
BLOCK_Q BLOCK_K HEAD_DIM V_DIM DIM DIM_V GROUP LOWEST program row batch head place kv_head distinct entry record used
query keys values d e rows columns start lo full_lo full_hi hi first full_first full_last last key_at value_at
at i j tile inside visible score unit top peak rescale total p kept acc out lse largest sink empty present
range float int bool out_at
attention_diagonal attention_plane attention_total attention_scatter Sums Total PerUnit Into Counted q_at k_at v_at
dout_at dout dp dm modified survivor seen share shift diagonal diagonals turned moved ahead counted per parts to batches
Acc Tops Totals splits part packed QUERIES PACK first_head PARTS row_at begin end tiles border full tops totals
weight query_at pool page paged seen scaled h_first
q_line k_line away here q_row k_tile
Stats stats stats_at pairs factor edge _ DLse low near dq dk dv at_q at_k queries douts own delta ds derivative
Parts LANES lanes rows_of_tiles of_rows needed begun at_row first_at
gluon gl hopper mbarrier tma produce consume load_tile store_tile group_barrier sigmoid ALL STAGES half outs turns
q_full k_full k_free v_full v_free slot phase before before_phase left borders n weights zero dtype
SCORES SUMS ROWS COLUMNS HALF EACH LAYOUT blackwell multiply columns_of seen_as weights_in
s_full p_full o_full scores sums key grown some every of_sequences behind exp2_polynomial exponent biased rest whole
any_grown exponents buffer piece PIECE PIECES ring free turn value tiles_of tiles_as
any_grown
attention_backward attention_convert feed differentiate add_dq gluon_core reduce_tile add_tile PART WEIGHTS
douts stats weights_in q_free g_full g_free kv_full ds_full dq_full dq_free Added Turns turn
tiles number query no_part pair there of_keys at_row _semantic added count descriptor kind length plane member
far
borders_done told cleaned clean either piece token bits word bit lines LINES WIDTH COUNT
Counts divisor
of_slice At Rows within listed part_at attention_dq_sums attention_dkv_sums attention_dv_sums
""".split()
    + [f"stride_{tensor}{axis}" for tensor in "qkvog" for axis in "bhsd"]
    + [f"{name}{part}" for name in "d e query keys values key_at value_at acc".split() for part in "01"]
    + [f"{name}{part}" for name in "Q K V Out queries outs out key weight weights SUMS".split() for part in "01"]
)


@dataclass(frozen=True)
class Argument:
    """A slot or table as a parameter of the kernel: its value or pointer, and for a table its axes."""

    name: str
    sizes: tuple[str, ...] = ()
    strides: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return (self.name, *self.sizes, *self.strides)


def arguments(plan: LoopPlan) -> dict[str, Argument]:
    """The names in the kernel by `Slot.name` and `TableUse.name`: the user's own where they are free."""
    names = Names({*OWN, *SIZES, *expr_triton.LANGUAGE.reserved})
    by_name = {s.name: Argument(names.new(NAMED.get(str(s.source), s.name))) for s in plan.slots}
    for t in plan.every_table:
        wish = NAMED.get(t.source, t.source)
        name = names.new(f"{wish}_{t.derived.split('_')[1]}" if t in plan.run_tables else wish)
        # a table of one axis reads better without a number
        axes = [""] if t.rank == 1 else [str(i) for i in range(t.rank)]
        sizes = tuple(names.new(f"{name}_size{i}") for i in axes)
        by_name[t.name] = Argument(name, sizes, tuple(names.new(f"{name}_stride{i}") for i in axes))
    return by_name


def rows_of_tables(plan: LoopPlan) -> dict[str, int]:
    """The axis of each table, before its last, that counts queries: the 1 of `bias[h, q, k]`, by `TableUse.name`."""
    roots = [e for e in (plan.mask, plan.score, plan.value_scale) if e is not None]
    query_axes: dict[str, set[int]] = {}
    for node in walk(*roots):
        if node.op == "lookup":
            # two reads with q on different axes leave no one axis to count rows along
            axes = [i for i, a in enumerate(node.args[:-1]) if a is QUERY]
            query_axes.setdefault(node.name, set()).add(axes[0] if len(axes) == 1 else -1)
    return {n: axes.pop() for n, axes in query_axes.items() if len(axes) == 1 and -1 not in axes}


def near(shape: Sequence[int], strides: Sequence[int], axis: int, rows: int) -> bool:
    """Whether so many rows of a table, along one of its axes, are within 2**31 entries of one another."""
    return rows * strides[axis] + shape[-1] * strides[-1] < 1 << 31  # Triton computes such offsets in 32 bits


def reserved_names(plan: LoopPlan) -> Names:
    """The names that the kernel of this plan uses for other things."""
    return Names({*OWN, *SIZES, *expr_triton.LANGUAGE.reserved}.union(*(a.all for a in arguments(plan).values())))


def widths(dim: int) -> tuple[int, ...]:
    """The powers of two, one or two, that a head size is worked on in: 96 as 64 and 32, not as a padded 128.

    >>> widths(96), widths(128), widths(72), widths(112), widths(40)
    ((64, 32), (128,), (64, 16), (128,), (64,))
    """
    # dots take powers of two, and a padded one multiplies zeros
    most = 1 << (dim.bit_length() - 1)
    rest = padded(dim - most)
    # two parts only where they are less than one padded power of two
    return (most, rest) if dim > 64 and dim > most > rest else (padded(dim),)


def padded(dim: int) -> int:
    """The power of two, at least 16, that Triton's dot needs."""
    return max(16, 1 << (dim - 1).bit_length())


@dataclass(frozen=True)
class Dims:
    """The properties of the arrays on which a kernel's text depends. These are head sizes, the dtype of q, the query
    heads of a key head, and the dtype of k and v where it is another one. Further the Float slots that come as
    pointers, whose values are on the device, and whether gradients are written as [batch, length, heads, dim], not by
    heads. `shared_values`: values are the first `v_dim` numbers of keys, in the same memory."""

    head_dim: int
    v_dim: int
    dtype: str
    group: int = 1
    kv_dtype: str = ""
    device_slots: tuple[str, ...] = ()
    by_length: bool = False
    shared_values: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in (*ACCELERATED, FP8):
            raise LoweringError(TRITON["float64"].format(dtype=self.dtype))
        if self.kv_dtype and self.kv_dtype not in BYTES:
            raise LoweringError(
                "the Triton kernel takes keys and values in the dtype of the queries, or in "
                f"{', '.join(BYTES[:-1])} or {BYTES[-1]}; they are {self.kv_dtype}, queries {self.dtype}"
            )

    @property
    def values_in_keys(self) -> bool:
        """Whether the tiles of values are the first ones of keys: those of a latent of 512 + 64 numbers are."""
        of_values = widths(self.v_dim)
        return self.shared_values and widths(self.head_dim)[: len(of_values)] == of_values

    @property
    def half(self) -> bool:
        """Whether queries have 16 bits, or 8."""
        return DTYPES[self.dtype].bytes <= 2

    @property
    def fp8(self) -> bool:
        """Whether keys and values are Floats of 8 bits."""
        return self.kv_dtype != "" and DTYPES[self.kv_dtype].kind == "fp8"

    @property
    def kv_bytes(self) -> int:
        """The bytes of an entry of keys and values."""
        return DTYPES[self.kv_dtype or self.dtype].bytes

    def __str__(self) -> str:
        size = str(self.head_dim) if self.head_dim == self.v_dim else f"{self.head_dim} (values {self.v_dim})"
        keys = f", keys and values {self.kv_dtype}" if self.kv_dtype else ""
        group = f", {self.group} query heads to a key head" if self.group > 1 else ""
        shared = ", values are the first numbers of keys" if self.values_in_keys else ""
        return f"Head size {size}, {self.dtype}{keys}{group}{shared}"


@dataclass(frozen=True)
class TritonKernel:
    """The text of one kernel, and the grid of its launch, for the head of the module."""

    name: str
    text: str
    launch: str


def check_tile(target: Target) -> None:
    for name, block in (("block_q", target.block_q), ("block_k", target.block_k)):
        if block < 16 or block & (block - 1):
            raise LoweringError(f"Triton tiles are powers of two from 16 on, {name} is {block}; take 64 or 128")


def module(
    title: str, plan: LoopPlan, dims: Dims, kernels: Sequence[TritonKernel], head: str = SHARED["module"]
) -> str:
    """The text of a module: its head, by a skeleton, the constants and functions that the kernels use, and the
    kernels."""
    # the head comes last: it holds only what the kernels below turn out to use
    texts = "\n\n".join(k.text for k in kernels)
    prelude = expr_triton.prelude(texts, expr_triton.language(dims.half, plan.int64))
    needed = words(prelude + texts)
    constants: dict[str, object] = {
        "GROUP": dims.group,
        "HEAD_DIM": dims.head_dim,
        "V_DIM": dims.v_dim,
        "DIM": padded(dims.head_dim),
        "DIM_V": padded(dims.v_dim),
        "LOG2E": 1.4426950408889634,
        "LN2": 0.6931471805599453,
        "PARTS": 16,
        "LANES": 128,
        "LOWEST": "-3.4028234663852886e38",
        "INFINITY": 'float("inf")',
    }
    filled_head = filled(
        head,
        title=title,
        plan=[line.rstrip() for line in _shown(plan).split("\n")],
        dims=str(dims),
        launches=[k.launch for k in kernels],
        constants=[f"{name} = tl.constexpr({x})" for name, x in constants.items() if name in needed],
    )
    return f"{filled_head}{prelude}\n\n{texts}"


def _shown(plan: LoopPlan) -> str:
    """The text of the plan and the meaning of its slots, fit for a docstring."""
    names = arguments(plan)
    lines = [plan.text or "every key visible, plain scores"]
    for s in plan.slots:
        name = names[s.name].name
        if s.source != name:
            lines.append(f"{name} = {s.source if s.value is None else s.value}")
    # the text of a mask is the user's, and a quote in it would end the docstring
    return "\n".join(lines).replace("\\", "\\\\").replace('"""', "'''")


LENGTHS = ("heads", "q_len", "kv_len", "records", "splits", "pool", "share", "batches", "queries", "pack")
ORIGINS = ("b_origin", "h_origin", "q_origin", "k_origin")
STRIDE = re.compile(r"stride_([qkvog])([bhsd])")
PAIRS = "tl.cast({}, tl.pointer_type(tl.int64), bitcast=True)"  # 64 bits in two int32, as JAX has them


@dataclass(frozen=True)
class Form:
    """The properties of a call, and not of its plan, on which the text of its entries depends. These are head sizes,
    whether `q_origin` and `k_origin` are vectors, the arrays that are pairs of int32, the strides that 16 divides."""

    dims: Dims
    per_batch: bool = False
    pairs: frozenset[str] = frozenset()
    aligned: frozenset[str] = frozenset()


@dataclass(frozen=True)
class JaxEntry:
    """The text of an entry, and its arguments: `arrays` and `results` by the kernel's names, `whole` and `real` the
    contents of the vectors of values."""

    name: str
    text: str
    arrays: tuple[str, ...]
    lengths: tuple[str, ...]
    results: tuple[str, ...]
    constants: tuple[str, ...]
    whole: tuple[str, ...]
    real: tuple[str, ...]


def parameters(source: str) -> dict[str, dict[str, bool]]:
    """The kernels of a module's text, each with its parameters: whether they are constants of the compiler."""
    return {
        node.name: {a.arg: a.annotation is not None for a in node.args.args}
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("attention_")
    }


def entry(kernel: str, named: dict[str, bool], plan: LoopPlan, form: Form, results: Sequence[str]) -> JaxEntry:
    """The entry to a kernel with these parameters; the kernel writes `results`."""
    known = arguments(plan)
    slots = {known[s.name].name: s.type for s in plan.slots}
    tables = [known[t.name] for t in plan.every_table]
    sizes = [n for t in tables for n in t.sizes if n in named]
    steps = {n: t.sizes[i + 1 :] for t in tables for i, n in enumerate(t.strides)}
    vectors = {"q_origin", "k_origin"} if form.per_batch else set()
    constants = tuple(n for n, constant in named.items() if constant)
    lengths = (*(n for n in ("scale", *LENGTHS) if n in named), *sizes)
    values = [n for n in named if n in (*ORIGINS, *SIZES, *slots) and n not in vectors]
    whole = tuple(n for n in values if slots.get(n) is not FLOAT)
    real = tuple(n for n in values if slots.get(n) is FLOAT)
    rest = {*constants, *lengths, *values, *results, *steps}
    arrays = tuple(n for n in named if n not in rest and not STRIDE.fullmatch(n))

    def value_of(n: str) -> str:
        if match := STRIDE.fullmatch(n):
            return _stride(match[1], match[2], form.dims, plan.page)
        if n in steps:
            text = " * ".join(f"tl.cast({x}, tl.int64)" if i else x for i, x in enumerate(steps[n])) or "1"
            # tells the compiler that 16 divides it: loads may be wide
            return f"({text}) // 16 * 16" if n in form.aligned else text
        if n in real:
            return f"tl.load(Real + {real.index(n)})"
        if n in whole:
            load = f"tl.load(Whole + {whole.index(n)})"
            return f"{load} != 0" if slots.get(n) is BOOL else load
        if n in form.pairs:
            return PAIRS.format(n)
        if n in lengths:  # jax-triton makes a constant of every 1
            return f"tl.cast({n}, tl.{'float32' if n == 'scale' else 'int32'})"
        return n

    page, name = Page(), f"{kernel}_from_jax"
    page.line("@triton.jit")
    with page.block(f"def {name}(", "):"):
        vectors_of_values = ("Whole",) * bool(whole) + ("Real",) * bool(real)
        for group in ((*arrays, *vectors_of_values), lengths, results, [f"{n}: tl.constexpr" for n in constants]):
            if group:
                page.line(", ".join(group) + ",")
    head = Page()
    with head.block(str(page).rstrip()):
        if whole and plan.int64:
            head.line(f"Whole = {PAIRS.format('Whole')}")
        with head.block(f"{kernel}(", ")"):
            head.line(*(f"{n}={value_of(n)}," for n in named))
    return JaxEntry(name, str(head), arrays, lengths, tuple(results), constants, whole, real)


def _stride(letter: str, axis: str, dims: Dims, page: int) -> str:
    """The strides of a compact [batch, length, heads, dim], or of keys [pages, tokens of a `page`, heads, dim]."""
    dim = dims.head_dim if letter in "qk" else dims.v_dim
    keys = letter in "kv"
    heads = f"heads // {dims.group}" if keys and dims.group > 1 else "heads"
    step = f"{heads} * {dim}"
    length = str(page) if keys and page else "kv_len" if keys else "q_len"
    return {"b": f"tl.cast({length}, tl.int64) * ({step})", "h": str(dim), "s": step, "d": "1"}[axis]
