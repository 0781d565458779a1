"""The text of the Triton kernels: golden files, names, operators, errors. Nothing here imports triton."""

import ast
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.attention_cases import CASES, plan, plan_of_text
from support.kernel_names import unknown_names, unreserved
from support.tiers import thinned

from frisket.dsl import ir
from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import build, lit, param, var
from frisket.dsl.sugar import b, eq, function, h, k, minimum, q, score
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.kernels import expr
from frisket.lowering.kernels.expr import COLUMN, POSITION, ROW, SCALAR
from frisket.lowering.kernels.language import Text, words
from frisket.lowering.kernels.text import Names, Page
from frisket.lowering.kernels.triton import backward as triton_backward
from frisket.lowering.kernels.triton import expr as expr_triton
from frisket.lowering.kernels.triton.captured import emit_all
from frisket.lowering.kernels.triton.forward import OptionalArrays, emit, emit_decode
from frisket.lowering.kernels.triton.module import Dims, arguments, widths
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import Bounds, Geometry, Pages, ProgramFacts, make_plan, survives
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.triton import tiles

TARGET = Target("triton", 128, 64, 8, 3)
causal = q >= k
q0, q1 = var("q0"), var("q1")
window = causal & (q - k < param("w"))
documents = eq(ir.lookup("doc", (b, q)), ir.lookup("doc", (b, k)))
softcap = 50 * function("tanh", score / 50)
alibi = ir.lookup("slope", (h,), FLOAT) * (k - q)
last = minimum(q1, ir.KV_LEN - 1)
GOLDEN = {
    "full.py": (
        make_plan(ProgramExprs(), facts=ProgramFacts(rows_nonempty=True, score_finite=True)),
        128,
        128,
        "bfloat16",
        1,
    ),
    "window.py": (
        make_plan(
            ProgramExprs(window),
            "causal & window(w)",
            ProgramFacts(rows_nonempty=True, bounds=Bounds(q0 - param("w") + 1, q1 - param("w") + 1, q0, last)),
        ),
        128,
        128,
        "bfloat16",
        8,
    ),
    "documents.py": (
        make_plan(
            ProgramExprs(causal & documents, softcap + alibi), "causal & same(doc)\nsoftcap(50) + slope[h] * (k - q)"
        ),
        80,
        64,
        "float16",
        1,
    ),
    "relative_bias.py": (
        make_plan(
            ProgramExprs(causal & eq(q // 3 % 8, k // 3 % 8), score + ir.lookup("bias", (h, k - q + 512), FLOAT)),
            "causal & q // 3 % 8 == k // 3 % 8\nscore + bias[h, k - q + 512]",
            ProgramFacts(limits={"q": 2**33, "k": 2**33}),
        ),
        64,
        64,
        "float32",
        4,
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_triton_forward(name, golden):
    made, *rest = GOLDEN[name]
    golden(name, emit(made, TARGET, Dims(*rest)))


def test_golden_triton_forward_with_tensor_descriptors(golden):
    made, *rest = GOLDEN["window.py"]
    golden("window_descriptors.py", emit(made, replace(TARGET, descriptors=True), Dims(*rest)))


def test_triton_forward_falls_back_to_pointers_per_dtype():
    """Float32, head sizes in two parts, 8 bits, pages and keys that may hold anything are read by pointers."""
    target = replace(TARGET, descriptors=True)
    for made, dims in (
        (make_plan(ProgramExprs(causal)), Dims(64, 64, "float32")),
        (make_plan(ProgramExprs(causal)), Dims(96, 64, "float16")),
        (make_plan(ProgramExprs(causal)), Dims(64, 64, "float16", 1, "int8")),
        (make_plan(ProgramExprs(causal), unwritten=True), Dims(64, 64, "float16")),
        (stored(64), Dims(64, 64, "float16")),
    ):
        assert emit(made, target, dims) == emit(made, TARGET, dims)
    few = emit_decode(make_plan(ProgramExprs(causal)), target, Dims(64, 64, "float16"))
    assert few == emit_decode(make_plan(ProgramExprs(causal)), TARGET, Dims(64, 64, "float16"))


GLOBAL = make_plan(ProgramExprs((abs(q - k) <= 256) | (k < 64) | (q < 64)), "abs(q - k) <= 256 | k < 64 | q < 64")


def test_golden_triton_forward_of_long_rows_in_parts(golden):
    optional = OptionalArrays(sinks=True, lse_residual=True)
    golden("long_rows.py", emit(GLOBAL, TARGET, Dims(128, 128, "bfloat16", 4), optional, listed=True))


EVERYTHING = plan_of_text("causal & same_by_batch(doc)", "softcap(50) + slope[h] * (k - q)", keep_mask=survives())
ALL_ARRAYS = OptionalArrays(sinks=True, row_max=True, lse_residual=True)


def test_golden_text_with_all_there_is(golden):
    golden("everything.py", emit(EVERYTHING, TARGET, Dims(96, 80, "bfloat16", 4, "float8_e4m3fn"), ALL_ARRAYS))


def test_golden_text_of_few_queries(golden):
    few = replace(TARGET, block_q=16, num_warps=4)
    made, *rest = GOLDEN["window.py"]
    golden("decode_window.py", emit_decode(made, few, Dims(*rest)))
    golden("decode_everything.py", emit_decode(EVERYTHING, few, Dims(96, 80, "bfloat16", 3), ALL_ARRAYS))


def scale(name):
    """The scale of a token and key head in a page."""
    return ir.lookup(name, (ir.lookup("pages", (b, k // 64)), h // 4, k % 64), FLOAT)


def stored(page):
    return make_plan(
        ProgramExprs((k <= q + ir.lookup("start", (b,))) & (k < ir.lookup("end", (b,))), score * scale("k_scale")),
        "stored",
        value_scale=scale("v_scale"),
        pages=Pages("pages", page),
    )


def test_golden_text_of_stored_keys_and_values(golden):
    """Few queries over pages that hold a tile, and a forward whose tiles hold pages."""
    few, dims = replace(TARGET, block_q=16, num_warps=4), Dims(128, 128, "bfloat16", 4, "int8")
    golden("decode_stored.py", emit_decode(stored(64), few, dims))
    golden("decode_balanced.py", emit_decode(stored(64), few, dims, balanced=True))
    golden("stored.py", emit(stored(16), TARGET, dims))


def test_stored_keys_and_values_have_no_backward():
    for made, dims in (
        (stored(16), Dims(64, 64, "float16")),
        (make_plan(ProgramExprs(causal)), Dims(64, 64, "float16", 1, "int8")),
    ):
        kernels = re.findall(r"def (attention_\w+)", emit_all(made, TARGET, dims))
        assert kernels == ["attention_forward"]


def test_triton_tile_of_packed_heads_reads_shared_values_once():
    """The scale of a key head for all rows of a packed tile, but a mask's own `(h + 1) // 4` for each."""
    dims = Dims(64, 64, "float16", 4)
    shared, own = (
        emit_decode(make_plan(ProgramExprs(causal, score * ir.lookup("scale", (at, k), FLOAT))), TARGET, dims)
        for at in (h // 4, (h + 1) // 4)
    )
    assert "h_first = h_origin + kv_head * GROUP" in shared
    assert "h = (h_origin + head)[:, None]" not in shared
    assert "h_first" not in own


@pytest.mark.parametrize(("head_dim", "v_dim"), [(48, 80), (64, 192), (80, 64), (80, 96), (576, 512), (64, 64)])
@pytest.mark.parametrize("of", [emit, emit_decode])
def test_parts_of_values_are_all_added(head_dim, v_dim, of):
    text = of(make_plan(ProgramExprs(causal)), TARGET, Dims(head_dim, v_dim, "float16"))
    marks = ["0", "1"] if len(widths(v_dim)) > 1 else [""]
    for part in marks:
        # once for partial tiles and once for full ones
        product = rf"acc{part} = tl\.dot\(p\.to\(values{part}\.dtype\), values{part}, acc{part} "
        assert len(re.findall(product, text)) == 2


@pytest.mark.parametrize("name", CASES)
def test_triton_forward_text_is_deterministic_and_parses(name):
    case = CASES[name]
    text = emit(plan(case), TARGET, Dims(case.dim, case.v_dim, "float32", case.heads // case.kv_heads))
    assert text == emit(plan(case), TARGET, Dims(case.dim, case.v_dim, "float32", case.heads // case.kv_heads))
    tree = ast.parse(text)
    assert [n.name for n in tree.body if isinstance(n, ast.FunctionDef)][-1] == "attention_forward"
    assert not [line for line in text.split("\n") if line != line.rstrip() or len(line) > 140]


@pytest.mark.parametrize(
    ("mask", "bounds", "turned"),
    [
        (causal, Bounds(ir.lit(0), ir.lit(0), q0, last), True),
        (k >= q, Bounds(q0, q1, ir.var("k1"), ir.var("k1")), False),
        (window, Bounds(q0 - param("w"), q1 - param("w"), q0, last), True),
    ],
)
def test_triton_longest_rows_of_closed_bounds_come_first(mask, bounds, turned):
    """The last rows of a causal mask, and the first of its transpose, in the forward and in dq."""
    text = emit_all(make_plan(ProgramExprs(mask), facts=ProgramFacts(bounds=bounds)), TARGET, Dims(64, 64, "float16"))
    assert text.count("row = tl.num_programs(0) - 1 - tl.program_id(0)  # longest first") == 2 * turned
    assert ("    row = tl.program_id(0)\n" in text) is not turned


def test_windows_of_any_size_are_one_kernel():
    def kernel(n):
        text = emit(make_plan(ProgramExprs(causal & (q - k < n)), f"window({n})"), TARGET, Dims(64, 64, "float16", 1))
        return text[text.index("@triton.jit") :]

    assert kernel(256) == kernel(512)


def test_only_what_is_used_is_a_parameter():
    text = emit(make_plan(ProgramExprs()), TARGET, Dims(64, 64, "float16", 1))
    assert "origin" not in text
    assert "Spans" not in text
    text = emit(make_plan(ProgramExprs(k < ir.KV_LEN - 3 * h)), TARGET, Dims(64, 64, "float16", 1))
    assert "    h_origin, k_origin,  # of this call" in text
    assert "    KV_LEN,\n" in text


def test_triton_forward_has_no_guard_where_rows_are_nonempty():
    proved = emit(
        make_plan(ProgramExprs(causal), facts=ProgramFacts(rows_nonempty=True)), TARGET, Dims(64, 64, "float16", 1)
    )
    assert "empty" not in proved
    assert "empty = total == 0.0" in emit(make_plan(ProgramExprs(causal)), TARGET, Dims(64, 64, "float16", 1))


def test_triton_computes_rows_before_loops_columns_per_key():
    made = make_plan(ProgramExprs(causal & documents & (q // 48 <= k // 48 % 7)))
    lines = emit(made, TARGET, Dims(64, 64, "float16", 1)).split("\n")
    loop = next(i for i, line in enumerate(lines) if line.lstrip().startswith("for j in"))
    assert [i < loop for i, line in enumerate(lines) if line.lstrip().startswith(("doc_b_q =", "row0 ="))] == [
        True,
        True,
    ]
    assert [i > loop for i, line in enumerate(lines) if line.lstrip().startswith(("doc_b_k =", "column0 ="))] == [
        True,
        True,
    ]


@pytest.mark.parametrize("name", thinned(CASES, 4))
def test_triton_forward_names_are_reserved(name):
    case = CASES[name]
    made = plan(case)
    dims = Dims(80, 48, "float16", 2, "float8_e5m2")
    decode = [emit_decode(made, TARGET, dims, ALL_ARRAYS, balanced=balanced) for balanced in (False, True)]
    assert not unreserved("".join([emit(made, TARGET, dims, ALL_ARRAYS), *decode]), made)
    if made.mask is not None:
        assert not unreserved(emit(made, TARGET, dims, ALL_ARRAYS, listed=True), made)


def test_triton_text_has_no_sinks_or_dropout_unless_asked():
    made = make_plan(ProgramExprs(causal))
    for text in (
        emit(made, TARGET, Dims(64, 64, "float16")),
        emit_decode(made, TARGET, Dims(64, 64, "float16")),
    ):
        assert not {"Sinks", "sink", "Top", "rate", "uniform"} & words(text)


@pytest.mark.parametrize("packs", [True, False])
def test_heads_are_packed_where_the_mask_is_the_same_for_all(packs):
    mask = causal if packs else causal & (q - k < 20 * h)
    text = emit_decode(make_plan(ProgramExprs(mask, score * h)), TARGET, Dims(64, 64, "float16", 4))
    assert ("QUERIES: tl.constexpr = BLOCK_Q // GROUP" in text) is packs
    assert ("h = (h_origin + head)[:, None]" in text) is packs


def test_user_names_give_way():
    made = make_plan(ProgramExprs(ir.lookup("tile", (q,)) > ir.lookup("row0", (q // 3 + q,))))
    names = arguments(made)
    assert names["t0"].all == ("tile_", "tile__size", "tile__stride")
    assert names["t1"].all == ("row0", "row0_size", "row0_stride")


def test_triton_forward_text_refuses_bad_dtypes_and_tiles():
    made = make_plan(ProgramExprs(causal))
    with pytest.raises(LoweringError) as caught:
        emit(made, TARGET, Dims(64, 64, "float64", 1))
    assert str(caught.value) == (
        "the Triton kernel takes float32, float16 or bfloat16, not float64; "
        "float64 runs on the CPU backends (aten, xla)"
    )
    with pytest.raises(LoweringError) as caught:
        Dims(64, 64, "float32", 1, "float8_e4m3fnuz")
    assert str(caught.value) == (
        "the Triton kernel takes keys and values in the dtype of the queries, or in int8, float8_e4m3fn or "
        "float8_e5m2; they are float8_e4m3fnuz, queries float32"
    )
    for block in (8, 24):
        with pytest.raises(LoweringError) as caught:
            emit(made, replace(TARGET, block_k=block), Dims(64, 64, "float16"))
        message = f"Triton tiles are powers of two from 16 on, block_k is {block}; take 64 or 128"
        assert str(caught.value) == message


def test_a_name_outside_the_plan():
    made = replace(make_plan(ProgramExprs(causal)), mask=k < param("w"), by_query=None)
    with pytest.raises(LoweringError) as caught:
        emit(made, TARGET, Dims(64, 64, "float16", 1))
    assert str(caught.value) == "`w` is neither a slot nor a table of the plan; make it one first"


# -- the tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["segment", "reduce", "extent", "bound"])
def test_triton_refuses_planner_operators_by_name(op):
    node = ir.make(op, (), "n", INT)
    made = replace(make_plan(ProgramExprs(causal)), mask=build("lt", k, node), by_query=None)
    with pytest.raises(LoweringError) as caught:
        emit(made, TARGET, Dims(64, 64, "float16", 1))
    assert str(caught.value) == (
        f"`{op}` has no Triton form; rewrite the expression without it, "
        "or choose another backend (frisket doctor lists them)"
    )


def printed(e):
    def leaf(node, args):
        return Text(node.name) if node.op in ("var", "param") else expr_triton.operator(node, args)

    made = expr.printed([e], expr_triton.LANGUAGE, leaf, lambda node, level: f"n{level}")
    return [f"{line.name} = {line.text}" for line in made.lines], made.values[e]


x, y, z = param("x"), param("y"), param("z")


@pytest.mark.parametrize(
    ("e", "text"),
    [
        (x - (y - z), "x - (y - z)"),
        ((x - y) - z, "x - y - z"),
        (x * (y + z), "x * (y + z)"),
        (-(x + y), "-(x + y)"),
        (~(x ^ y) & z, "~(x ^ y) & z"),
        ((x < y) & ((y < z) | (x < z)), "(x < y) & ((y < z) | (x < z))"),
        (eq(x < y, y < z), "(x < y) == (y < z)"),
        (x << 3, "x << 3"),
        ((x + y) >> 40, "x + y >> 31"),
        (build("float", x + y), "(x + y).to(tl.float32)"),
        (build("int", x < y), "(x < y).to(INT)"),
        (
            build("max", lit(0.5), build("float", x)),
            "tl.maximum(0.5, x.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)",
        ),
        (build("where", x < y, lit(-2.0), ir.NEG_INF), "tl.where(x < y, -2.0, -INFINITY)"),
        (ir.random(x, y), "uniform(stirred(seeded(x), y))"),
    ],
)
def test_parentheses_only_where_needed(e, text):
    assert printed(e) == ([], text)


def test_names_for_what_is_shared_or_known_sooner():
    assert printed((q * 3 - k) * (q * 3 - k)) == (["n1 = q * 3", "n3 = n1 - k"], "n3 * n3")
    found = expr.levels(q * 3 - k)
    assert (found[q * 3], found[k], found[q * 3 - k], found[lit(3)]) == (ROW, COLUMN, POSITION, SCALAR)


@pytest.mark.parametrize(
    ("e", "better"),
    [
        (x // 8, x >> 3),
        (x % 8, build("bitand", x, lit(7))),
        (x // 1, x),
        (x // 3, x // 3),
        (x % -8, x % -8),
        (x**3, x * x * x),
        (x**1, x),
        (x**0, lit(1)),
        (lit(2) ** 5 + x, 32 + x),
        (lit(7) // 0 + x, 0 + x),
        (build("and", x < 1, lit(2) < lit(1)), build("and", x < 1, ir.FALSE)),
    ],
)
def test_machine_expressions_take_cheaper_forms(e, better):
    assert expr.machine(e) is better


def test_pages_and_names():
    page = Page()
    with page.block("if x:"):
        page.comment("one\n\ntwo")
        page.line("y = 1")
    assert str(page) == "if x:\n    # one\n    #\n    # two\n    y = 1\n"
    names = Names({"q"})
    assert [names.new(n) for n in ("q", "w", "w", "a b", "if")] == ["q_", "w", "w_", "x", "if_"]
    assert [names.numbered("x") for _ in range(2)] == ["x0", "x1"]


def test_bools_are_read_as_bytes_and_floats_as_float32():
    keep = make_plan(ProgramExprs(ir.lookup("keep", (k,), BOOL), score + ir.lookup("bias", (k,), FLOAT)))
    text = emit(keep, TARGET, Dims(64, 64, "float16", 1))
    assert "visible &= tl.load(keep + clamp(k, keep_size) * keep_stride) != 0\n" in text
    assert "bias_k = tl.load(bias + clamp(k, bias_size) * bias_stride).to(tl.float32)\n" in text


def test_table_offsets_of_all_axes_but_the_last_are_64_bits():
    text = emit(make_plan(ProgramExprs(ir.lookup("keep", (q, k), BOOL))), TARGET, Dims(64, 64, "float16", 1))
    assert "keep + step(q, keep_size0, keep_stride0) + clamp(k, keep_size1) * keep_stride1" in text


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("order", "group"),
    thinned([(order, n) for order in ("forward", "longest-first", "longest-of-all-first") for n in (1, 4)]),
)
@pytest.mark.parametrize("name", GOLDEN)
def test_triton_kernels_read_no_undefined_name(name, order, group):
    made, dim, v_dim, dtype, _ = GOLDEN[name]
    target, dims = replace(TARGET, order=order), Dims(dim, v_dim, dtype, group=group)
    listed = ("attention_dq", "attention_dkv") if made.mask is not None and made.bounds is None else ()
    texts = [emit(made, target, dims)]
    texts += [triton_backward.emit(made, target, dims, {"q", "k", "v"}, listed=some) for some in ((), listed)]
    texts += [emit(made, target, dims, listed=True)] if listed else []
    assert [unknown_names(x) for x in texts] == [set()] * len(texts)


def test_triton_table_rows_are_offsets_from_the_first_of_a_tile():
    """In 32 bits in `attention_dkv`, which walks queries; where another axis counts them, or none, in 64."""
    for index, near in (((h, q, k), True), ((q, h, k), True), ((h, k, q), False), ((h, q % 8, k), False)):
        text = triton_backward.emit(
            make_plan(ProgramExprs(causal, score + ir.lookup("bias", index, FLOAT))),
            TARGET,
            Dims(64, 64, "bfloat16"),
            set("qkv"),
        )
        dq, dkv = text.split("def attention_dkv(")
        assert ("step_from(q, q_origin + tile * BLOCK_Q, " in dkv, "NEAR: tl.constexpr" in dkv) == (near, near), index
        assert "NEAR" not in dq.split("def attention_delta(")[1]


def test_words_hold_the_bits_of_intervals():
    """What NVIDIA's GPUs compute in place of `one_of`, by what the PTX manual says of bmsk."""

    def assembly(text, constraints, args, dtype, is_pure, pack):
        first, second = (np.broadcast_to(x, np.broadcast_shapes(*map(np.shape, args))).astype(np.uint64) for x in args)
        if text == "and.b32 $0, $1, $2;":
            return first & second & 0xFFFFFFFF
        assert text == "bmsk.clamp.b32 $0, $1, $2;"
        ones = np.uint64(0xFFFFFFFF)
        low = np.where(first >= 32, 0, ones << np.minimum(first, 31) & ones)
        end = (np.minimum(first, 31)) + np.minimum(second, 32)
        return low & ~np.where((end >= 32) | (second >= 32), 0, ones << np.minimum(end, 31) & ones)

    tl = SimpleNamespace(maximum=np.maximum, inline_asm_elementwise=assembly, int32=np.int32)
    known = {"tl": tl, "INTERPRETED": False}
    exec(expr_triton.PRELUDE["among"].replace("@triton.jit", ""), known)
    columns = np.arange(128)[None, :]
    least, many = (x.ravel()[:, None] for x in np.meshgrid(np.arange(-140, 140, 3), [0, 1, 2, 31, 32, 33, 95, 300]))
    assert (known["among"](columns, least, many) == ((columns >= least) & (columns < least + many))).all()


def test_masks_of_amd_tell_their_own_bits_apart():
    made = make_plan(
        ProgramExprs(window), "causal & window(w)", ProgramFacts(limits={"q": 2**20, "k": 2**20, "w": 2**20})
    )
    dims = Dims(64, 64, "bfloat16")
    call = Geometry(1, 8, 8, 512, 512, 64, 64, 1.0)
    bits = {}
    for arch in ("gfx942", "gfx1100", "gfx1201"):
        text = emit_all(made, tiles.default_target(call, "bfloat16", arch=arch), dims)
        assert "~6" not in text
        assert "asm" not in text
        bits[arch] = set(re.findall(r"one_of_apart\(.*, (\d+)\)", text))
    assert bits["gfx942"] <= {"4", "12"}
    assert (bits["gfx1100"], bits["gfx1201"]) == ({"1"}, {"8"})
    assert "_apart" not in emit_all(made, TARGET, dims)
    assert [Target("triton", 64, 64, arch="gfx942", mfma=n).thread_bits for n in (0, 16)] == [4, 12]


@pytest.mark.parametrize("bits", [1, 4, 6, 8, 12])
def test_columns_told_apart_are_the_same_columns(bits):
    tl = SimpleNamespace(constexpr=int, uint32=np.uint32)
    columns = np.arange(64)[None, :]
    for name, given, wanted in (
        ("up_to_apart", [np.arange(-9, 70)[:, None]], lambda most: columns <= most),
        (
            "one_of_apart",
            [np.arange(-70, 70)[:, None], 20],
            lambda least, n: (columns >= least) & (columns < least + n),
        ),
    ):
        source = expr_triton.PRELUDE[name].replace("@triton.jit", "").replace(".to(tl.uint32)", ".astype('uint32')")
        known = {"tl": tl}
        exec(source.replace("many.astype('uint32')", "many"), known)
        assert (known[name](columns, *given, bits) == wanted(*given)).all()


def test_words_are_for_the_forward_of_gpus_that_make_them():
    made = make_plan(
        ProgramExprs(window), "causal & window(w)", ProgramFacts(limits={"q": 2**20, "k": 2**20, "w": 2**20})
    )
    texts = [emit_all(made, replace(TARGET, words=x), Dims(64, 64, "bfloat16")) for x in (False, True)]
    found = [re.findall(r"visible = (\w+)\(", text) for text in texts]
    assert found == [["one_of"] * 3, ["among", "one_of", "one_of"]]
    call = Geometry(1, 8, 8, 64, 64, 64, 64, 1.0)
    assert [tiles.default_target(call, "float32", arch=x).words for x in ("sm_80", "sm_100", "gfx942")] == [1, 0, 0]
