"""Run by test_triton_interpret.py with TRITON_INTERPRET=1: the forward kernel against dense attention."""

import numpy as np
import pytest
import torch
from lowering.kernels.triton.children import operators as triton_operators
from support import attention_cases as cases
from support.attention_cases import CASES, DOCUMENTS, Case, causal
from support.triton.call import check, run, with_everything
from triton.runtime.interpreter import InterpretedFunction

from frisket.dsl import ir
from frisket.dsl.errors import BackendError, ParameterError
from frisket.dsl.ir import lit, var
from frisket.dsl.sugar import eq, h, k, q, score
from frisket.dsl.types import FLOAT
from frisket.lowering.kernels.triton.module import Dims
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import Bounds, Geometry, KernelInputs, ProgramFacts, make_plan
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.triton import kernels as triton_kernels
from frisket.runtime.backends.triton import launch as triton_launch
from frisket.runtime.backends.triton import torch as triton_torch
from frisket.runtime.machine import modules

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid|divide)")


@pytest.mark.parametrize("name", CASES)
def test_triton_cases_equal_the_reference(name):
    check(CASES[name], *run(CASES[name]))


@pytest.mark.parametrize(
    "name", ["gqa", "empty-rows", "nothing", "softcap", "visible-minus-inf", "documents-by-batch", "crop"]
)
def test_triton_cases_with_sinks_and_dropout(name):
    with_everything(CASES[name])


@pytest.mark.parametrize("name", DOCUMENTS)
def test_triton_document_masks_equal_the_reference(name):
    """Rows that are runs of a table, by the ends of the runs where the table has such; by its entries elsewhere."""
    case, proven = DOCUMENTS[name]
    made = cases.plan(case)
    assert bool(made.run_tables) == bool(proven)
    check(case, *run(case, made))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["window", "gqa", "softcap", "empty-rows", "crop", "documents-by-batch"])
def test_triton_cases_in_half_precision(name, dtype):
    case = CASES[name].but(dtype=dtype)
    check(case, *run(case))


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100", "gfx1201"])
@pytest.mark.parametrize("name", ["window", "causal", "gqa", "empty-rows", "crop", "documents-by-batch"])
def test_triton_cases_with_the_text_of_amd(name, arch):
    """Masks tell other bits of a column apart."""
    check(CASES[name], *run(CASES[name], arch=arch))


def test_options_of_amd_reach_a_launch(monkeypatch):
    launched, names = [], ("num_warps", "waves_per_eu", "matrix_instr_nonkdim")

    def recorded(self, *args, **options):
        launched.append([options.pop(n, None) for n in names])
        return run_as_before(self, *args, **options)

    run_as_before = InterpretedFunction.run
    monkeypatch.setattr(InterpretedFunction, "run", recorded)
    case = CASES["window"]
    check(case, *run(case, arch="gfx942", mfma=16, waves=2))
    check(case, *run(case))
    assert launched == [[4, 2, 16], [4, None, None]]


REMAINDERS = {
    "dilated": causal & eq((q - k) % 5, 0),
    "not alike": ir.build("ne", (q - 2 * k + 3) % 7, ir.param("w")),
    "by a slot": eq((k - q) % ir.param("n"), 2),
    "along the other diagonal": eq((q + k) % 6, 4) | (q >= k),
    "no remainder": causal & ir.build("ne", (q - k) % 3, lit(5)),
    "of keys": causal & eq(k % 5, 1) & (k // 12 <= q // 10),
}  # fmt: skip


@pytest.mark.parametrize("place", ["whole", "crop"])
@pytest.mark.parametrize("name", REMAINDERS)
def test_triton_remainders_of_a_distance_equal_the_reference(name, place):
    """Remainders of q - k are those of the query and of the key."""
    case = Case(REMAINDERS[name], slots={"w": 4, "n": -4}, q_len=70, kv_len=80, block=(32, 32)).but(**PLACES[place])
    check(case, *run(case))


DESCRIBED = ["full", "window", "gqa", "softcap", "empty-rows", "nothing", "crop", "documents-by-batch", "v-wider"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", DESCRIBED)
def test_triton_forward_by_tensor_descriptors(name, dtype, described):
    """What lies past the lengths of a view is NaN, and is not read."""
    case = CASES[name].but(dtype=dtype)
    check(case, *run(case, by=16, descriptors=True))
    assert len(described) == 3


@pytest.mark.parametrize(
    ("dim", "v_dim", "layout", "count"),
    [(32, 32, "bshd", 3), (40, 112, "bhsd", 3), (24, 24, "bhds", 0), (96, 64, "bhsd", 0), (256, 16, "sbhd", 3)],
)
def test_tensor_descriptors_of_any_head_size(dim, v_dim, layout, count, described):
    """Strides that descriptors cannot have, and sizes in two parts, are read by pointers."""
    case = Case(causal & (q - k < 70), q_len=100, kv_len=83, heads=4, kv_heads=2, dim=dim, v_dim=v_dim, dtype="float16")
    check(case, *run(case, layout=layout, by=16, descriptors=True))
    assert len(described) == count


@pytest.mark.parametrize("name", ["gqa", "empty-rows", "softcap"])
def test_tensor_descriptors_with_everything(name, described):
    with_everything(CASES[name].but(dtype="float16"), by=16, descriptors=True)
    assert len(described) == 3


@pytest.fixture
def described(monkeypatch):
    """The blocks of the tensor descriptors that are made."""
    made = []
    real = triton_launch.descriptor
    monkeypatch.setattr(triton_launch, "descriptor", lambda x, block: made.append(block) or real(x, block))
    return made


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(16, "float32"), (24, "bfloat16"), (40, "float16"), (64, "bfloat16"), (72, "float32"), (80, "float16"),
     (96, "bfloat16"), (96, "float32"), (128, "float32"), (128, "float16"), (192, "bfloat16"), (256, "float16"),
     (320, "float32")],
)  # fmt: skip
def test_tensors_of_any_head_size(dim, dtype):
    case = Case(causal & (q - k < 70), q_len=100, kv_len=100, heads=1, kv_heads=1, dim=dim, v_dim=dim, dtype=dtype)
    check(case, *run(case))


@pytest.mark.parametrize("layout", ["bshd", "bhds", "sbhd", "dhsb"])
def test_tensors_of_any_strides(layout):
    case = Case(causal, dim=48, v_dim=80, heads=4, batch=2, q_len=70, kv_len=70)
    check(case, *run(case, layout=layout))


@pytest.mark.parametrize("block", [(16, 16), (32, 64), (128, 32), (64, 128)])
@pytest.mark.parametrize("name", ["crop", pytest.param("gqa", marks=pytest.mark.slow)])
def test_tensors_in_any_tile(name, block):
    case = CASES[name].but(block=block)
    check(case, *run(case, order="forward"))


# Closed forms: first..last is what some query of the tile sees, full_first..full_last what every one does.
q0, q1, k0, k1 = (var(n) for n in ("q0", "q1", "k0", "k1"))
w = ir.param("w")
NEVER = lit(1), lit(0)
CLOSED = {
    "causal": (causal, Bounds(k0, k0, q0, q1)),
    "anticausal": (k >= q, Bounds(q0, q1, k1, k1)),
    "window": (causal & (q - k < w), Bounds(q0 - w + 1, q1 - w + 1, q0, q1)),
    "band": ((q - k < w) & (k - q < 9), Bounds(q0 - w + 1, q1 - w + 1, q0 + 8, q1 + 8)),
    "by-head": (causal & (q - k < w + 20 * h), Bounds(q0 - w - 20 * h + 1, q1 - w - 20 * h + 1, q0, q1)),
    "chunked": (causal & eq(q // 48, k // 48), Bounds(q0 // 48 * 48, q1 // 48 * 48, q0, q1)),
    "nothing": (ir.FALSE, Bounds(*NEVER[:1], lit(1), lit(0), lit(0))),
    "far away": (k > q + 10**6, Bounds(q0 + 10**6 + 1, q1 + 10**6 + 1, k1, k1)),
    "sizes": (k - q <= ir.KV_LEN - ir.Q_LEN, Bounds(k0, k0, q0 + ir.KV_LEN - ir.Q_LEN, q1 + ir.KV_LEN - ir.Q_LEN)),
}  # fmt: skip
PLACES = {
    "whole": {},
    "ragged": {"q_len": 149, "kv_len": 131},
    "crop": {"q_len": 90, "kv_len": 77, "origin": (0, 1, 137, 101), "sizes": (1, 4, 400, 410)},
    "per batch": {
        "batch": 2, "q_len": 40, "kv_len": 120, "origin": (0, 0, np.array([80, 30]), 5), "sizes": (2, 2, 120, 130),
    },
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CLOSED)
def test_triton_cases_with_closed_form_bounds(name, place):
    mask, bounds = CLOSED[name]
    case = Case(mask, slots={"w": 50}, block=(32, 16), dim=16, v_dim=16).but(**PLACES[place])
    made = make_plan(ProgramExprs(mask), name, ProgramFacts(bounds=bounds))
    check(case, *run(case, made, spans=cases.Source(CASES["nothing"])))  # the table is not read


def test_launch_reads_no_table_with_bounds():
    case = Case(causal)
    made = make_plan(ProgramExprs(causal), "causal", ProgramFacts(bounds=CLOSED["causal"][1]))
    arrays = (torch.as_tensor(np.asarray(x)).transpose(1, 2) for x in cases.arrays(case))
    inputs = KernelInputs(made, None, cases.geometry(case), Target("triton", 32, 32), {}, {})
    check(case, *triton_torch.forward(inputs, *arrays))


def test_launch_without_guard():
    case = Case(causal & (q - k < 20), block=(32, 32))
    check(case, *run(case, make_plan(ProgramExprs(case.mask), facts=ProgramFacts(rows_nonempty=True))))


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_launch_with_a_scale_that_cannot_be_folded(scale):
    from frisket.lowering import dense

    case = Case(causal)
    arrays = [np.asarray(x).transpose(0, 2, 1, 3) for x in cases.arrays(case)]
    g = Geometry(1, 2, 2, 150, 150, 32, 32, scale)
    made = make_plan(ProgramExprs(causal))
    inputs = KernelInputs(made, cases.Source(case), g, Target("triton", 64, 64), {}, {})
    out, lse, _ = triton_torch.forward(inputs, *map(torch.tensor, arrays))
    want, want_lse = dense.attention(*arrays, dense.DenseCall(ProgramExprs(causal), scale=scale, params={}, tables={}))
    np.testing.assert_allclose(out.numpy(), want, atol=2e-6)
    np.testing.assert_allclose(lse.numpy(), want_lse, atol=2e-6)


def test_launch_in_64_bits():
    far = (q << 40) - k * 2**33 >= ir.param("w")
    case = Case(far & eq((q << 40) >> 40, q), slots={"w": 5 * 2**35}, block=(32, 32))
    made = make_plan(ProgramExprs(case.mask), facts=ProgramFacts(limits={"q": 2**12, "k": 2**12, "w": 2**40}))
    assert made.int64
    check(case, *run(case, made))


def test_launch_with_closed_form_bounds_in_64_bits():
    case = Case(cases.STEEP, block=(16, 16), q_len=70, kv_len=70)
    made = make_plan(
        ProgramExprs(case.mask), facts=ProgramFacts(bounds=cases.STEEP_BOUNDS, limits={"q": 2**12, "k": 2**12})
    )
    assert made.int64
    check(case, *run(case, made, spans=cases.Source(CASES["nothing"])))


def test_launch_huge_shift_of_a_small_integer():
    case = Case(eq(q >> 40, 0) & (k >> 63 >= 0), block=(32, 32))
    made = make_plan(ProgramExprs(case.mask), facts=ProgramFacts(limits={"q": 2**12, "k": 2**12}))
    check(case, *run(case, made))


def test_launch_keeps_user_names_apart_from_the_kernels():
    names = ["Q", "tile", "tanh", "lambda", "start", "row0", "doc"]
    mask = causal
    for n in names:
        mask = mask & (ir.lookup(n, (q,)) >= ir.lookup(n, (k,)))
    case = Case(mask, tables={n: np.arange(150) for n in names}, block=(64, 64))
    check(case, *run(case))


def test_launch_another_plan_of_the_same_shape():
    bias = np.random.default_rng(3).standard_normal(150).astype(np.float32)
    for name in ("first", "second"):  # equal plans: the second runs the kernel of the first
        case = Case(causal, score + ir.lookup(name, (k,), FLOAT), tables={name: bias})
        check(case, *run(case))


def test_launch_narrow_and_wide_tables():
    for dtype in (np.uint8, np.int16, np.int64):
        case = Case(
            ir.lookup("doc", (q,)) - ir.lookup("doc", (k,)) >= 0, tables={"doc": (cases.DOC % 200).astype(dtype)}
        )
        check(case, *run(case))


def test_launch_refuses_tables_that_do_not_fit():
    case = CASES["documents"]
    made, wrong = cases.plan(case), {"t0": torch.zeros(2, 3)}
    arrays = [torch.zeros(1, 2, 333, 32)] * 3
    inputs = KernelInputs(made, cases.Source(case), cases.geometry(case), Target("triton", 64, 64), {}, wrong)
    with pytest.raises(ParameterError) as caught:
        triton_torch.forward(inputs, *arrays)
    assert str(caught.value) == "table `doc` has 1 axes of at least one entry, not shape [2, 3]"


def test_launch_never_trusts_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("FRISKET_CACHE_DIR", str(tmp_path))
    path = modules.write_source("x = 1\n")
    assert path.parent == tmp_path / "triton"
    path.write_text("x = 2\n")
    assert modules.load_from_file("x = 1\n").x == 1
    assert path.read_text() == "x = 1\n"
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_launch_reports_only_compiled_kernels():
    made = make_plan(ProgramExprs(causal))
    target = Target("triton", 64, 64)
    source = triton_torch.triton_forward.emit(made, target, Dims(64, 64, "float16"))
    with pytest.raises(BackendError, match="TRITON_INTERPRET=1 is set"):
        next(triton_kernels.compile_reports(source, made, target, Dims(64, 64, "float16")))


@pytest.mark.parametrize("int64", [False, True])
@pytest.mark.parametrize("name", triton_operators.EXPRESSIONS)
def test_triton_operators_equal_the_reference(name, int64):
    triton_operators.check(name, int64)
