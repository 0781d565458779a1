"""Run by test_triton_interpret.py with TRITON_INTERPRET=1: the backward kernels against the reference's gradients."""

import math
from dataclasses import replace

import pytest
import torch
from support.attention_cases import CASES, DOCUMENTS, STEEP, STEEP_BOUNDS, Case, Source, causal
from support.torch import gradients as torch_gradients
from support.torch.gradients import MODS, learned, window
from support.triton import bf16 as triton_bf16
from support.triton.call import poisoned

import frisket as fk
from frisket.dsl import ir
from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import lookup
from frisket.dsl.sugar import k, score
from frisket.dsl.types import FLOAT
from frisket.lowering.kernels.triton.backward import emit
from frisket.lowering.kernels.triton.module import Dims, padded
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import Bounds, ProgramFacts, make_plan
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.triton import launch as triton_launch
from frisket.runtime.backends.triton import torch as triton_torch

triton_bf16.install()
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid|divide)")


class Both(torch_gradients.Both):
    """A case run by the kernels and by the reference; `tiles` are those of dq and of dk and dv, or of each of them."""

    forward, backward = staticmethod(triton_torch.forward), staticmethod(triton_torch.backward)
    stored = ("out",)

    def __init__(self, case, *, tiles=None, descriptors=False, **options):
        super().__init__(case, **options)
        self.spans = Source(case)
        self.sinks = None if self.sinks is None else self.sinks.float()
        parts = {n: Target("triton", *t) for n, t in zip(("dq", "dkv", "dv"), tiles or ())}
        self.target = Target("triton", *case.block, **parts).everywhere(descriptors=descriptors)


small = Case(window, q_len=90, kv_len=90, block=(32, 32))
EMPTY = Case((k < 20) & (ir.var("q") % 32 >= 20), q_len=70, kv_len=60, block=(16, 32))  # rows and keys without pairs
GROUPS = Case(
    causal & (ir.var("q") - k < 12 * (ir.var("h") + 1)), heads=4, kv_heads=2, q_len=45, kv_len=50, block=(32, 16)
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_triton_gradient_cases_equal_the_reference(name):
    case = CASES[name]
    Both(case.but(q_len=min(case.q_len, 110), kv_len=min(case.kv_len, 120)) if case.sizes is None else case).check()


APART = [(16, 32), (32, 16), (16, 64)]  # tiles of dq, of dk and of dv


@pytest.mark.parametrize(
    "name", ["full", "causal", "documents-by-batch", "gqa", "empty-rows", "holes", "softcap", "v-wider"]
)
def test_triton_dv_in_a_separate_kernel_equals_the_reference(name):
    case = CASES[name]
    both = Both(
        case.but(q_len=min(case.q_len, 110), kv_len=min(case.kv_len, 120)), tiles=APART, dropout=0.2, sinks=True
    )
    both.check()
    text = emit(both.plan, both.target, Dims(case.dim, case.v_dim, case.dtype, case.heads // case.kv_heads), set("qkv"))
    assert [n for n in ("dkv", "dv") if f"def attention_{n}(" in text] == ["dkv", "dv"]
    both.wanted = frozenset("qk")
    both.check()
    both.wanted = frozenset("v")
    both.check()


def test_triton_dv_in_a_separate_kernel_with_captured_gradients():
    for name in ("by row", "by column, gqa", "learned softcap"):
        Both(MODS[name].but(q_len=70, kv_len=60), tiles=APART).check()


@pytest.mark.parametrize("tiles", [1, 2])
def test_whole_tiles_alone(tiles):
    """No tile has an edge, and the only one is the first and the last."""
    Both(Case(None, q_len=16 * tiles, kv_len=32 * tiles, heads=1, kv_heads=1, block=(16, 32))).check()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_triton_gradients_of_documents_equal_the_reference(name):
    case, _ = DOCUMENTS[name]
    Both(case).check()


ELSEWHERE = {"by distance", "by bucket", "by distance, full", "plane", "pairs"}  # captured_interpreted.py


@pytest.mark.parametrize("name", [n for n in MODS if n not in ELSEWHERE])
def test_triton_captured_gradients_equal_the_reference(name):
    Both(MODS[name].but(q_len=70, kv_len=60), dropout=0.3 if name == "by row" else 0.0).check()


HALF = ["gqa bfloat16", "empty rows float16", "alibi float16", "by column, gqa bfloat16", "learned softcap float16"]


@pytest.mark.parametrize("which", HALF)
def test_captured_in_half_precision(which):
    name, dtype = which.rsplit(" ", 1)
    case = {"gqa": GROUPS, "empty rows": EMPTY, **MODS}[name].but(dtype=dtype)
    Both(case.but(batch=1, q_len=50, kv_len=60), sinks=name == "gqa").check_half()


@pytest.mark.parametrize(("sinks", "dropout"), [(True, 0.0), (False, 0.3), (True, 0.6)])
@pytest.mark.parametrize(
    "case", [GROUPS, EMPTY, CASES["softcap"].but(q_len=70, kv_len=70)], ids="gqa empty softcap".split()
)
def test_sums_with_sinks_and_dropout(case, sinks, dropout):
    Both(case, sinks=sinks, dropout=dropout).check()


@pytest.mark.parametrize(("dim", "v_dim"), [(8, 40), (24, 16), (80, 96), (128, 64), (192, 256)])
def test_shapes_of_any_head_size(dim, v_dim):
    Both(small.but(dim=dim, v_dim=v_dim, q_len=50)).check(5e-5)


@pytest.mark.parametrize("tiles", [((16, 16), (64, 16)), ((64, 32), (16, 64)), ((16, 128), (128, 16))])
def test_shapes_of_any_tile(tiles):
    Both(GROUPS, tiles=tiles).check()


def test_shapes_of_any_strides():
    def twisted(x, y, z):
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
        y = y.transpose(2, 3).contiguous().transpose(2, 3)
        return x, y, torch.cat([z, z], -1)[..., : z.shape[-1]]

    both = Both(GROUPS, change=twisted)
    both.dout = both.dout.transpose(2, 3).contiguous().transpose(2, 3)
    both.check()
    both = Both(GROUPS, change=lambda x, y, z: (x, y[:, :1].expand_as(y), z[:, :, :1].expand_as(z)))
    both.dout = both.dout[:1, :1, :1, :1].expand_as(both.dout)
    both.dlse = both.dlse[:1, :1, :1].expand_as(both.dlse)
    both.check()


@pytest.fixture
def described(monkeypatch):
    """The blocks of the tensor descriptors that are made."""
    made = []
    real = triton_launch.descriptor
    monkeypatch.setattr(triton_launch, "descriptor", lambda x, block: made.append(block) or real(x, block))
    return made


def views(*arrays):
    """The arrays as views with NaN all around, of strides that tensor descriptors have."""
    return [poisoned(x.float().numpy(), x.dtype, by=16) for x in arrays]


DESCRIBED = {
    **{n: CASES[n] for n in ("full", "window", "softcap", "nothing", "crop", "documents-by-batch", "v-wider")},
    "gqa": GROUPS, "empty rows": EMPTY, "alibi": MODS["alibi"].but(q_len=70, kv_len=60),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", DESCRIBED)
def test_triton_gradients_by_tensor_descriptors(name, dtype, described):
    """What lies past the lengths of a view is NaN, and is not read; tiles of both kernels are their own."""
    both = Both(DESCRIBED[name].but(dtype=dtype), tiles=((16, 32), (32, 16)), descriptors=True, change=views)
    (both.dout,) = views(both.dout)
    both.check_half()
    assert len(described) == 3 + 4 + 4
    dims = (both.g.head_dim, both.g.head_dim, both.g.v_dim, both.g.v_dim)
    for (queries, keys), made in zip(((16, 32), (32, 16)), (described[3:7], described[7:]), strict=True):
        rows = (queries, keys, keys, queries)
        assert made == [(1, 1, n, max(16, padded(d))) for n, d in zip(rows, dims, strict=True)]


def test_descriptors_of_what_is_wanted(described):
    """A kernel of dv alone reads no values."""
    Both(GROUPS.but(dtype="float16"), descriptors=True, wanted=frozenset({"v"})).check_half()
    assert len(described) == 3 + 3


@pytest.mark.parametrize("change", [
    lambda x: x.transpose(2, 3).contiguous().transpose(2, 3), lambda x: x[:1, :1, :1, :1].expand_as(x),
    lambda x: torch.cat([x, x[..., :1]], -1)[..., :-1],
    lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x),
], ids="dim-first expanded odd unaligned".split())  # fmt: skip
def test_descriptors_are_not_for_these_strides(change, described):
    both = Both(GROUPS.but(dtype="float16"), descriptors=True)
    both.dout = change(both.dout)
    both.check_half()
    assert len(described) == 3  # the forward's, which does not read dout


def test_shapes_of_strides_whose_tiles_span_more_than_32_bits(tmp_path):
    def far(x):  # in a file without contents: 5 GiB of addresses, a few pages
        n, stride = x.shape[2], 1 << 26
        whole = torch.from_file(str(tmp_path / "far"), shared=True, size=n * stride, dtype=x.dtype)
        return whole.as_strided(x.shape, (n * stride, n * stride, stride, 1)).copy_(x)

    case = Case(causal, batch=1, heads=1, kv_heads=1, q_len=40, kv_len=40, block=(16, 16), dtype="float16")
    tiles = ((16, 16), (16, 64))  # those of dkv alone reach that far
    Both(case, tiles=tiles, change=lambda x, y, z: (x, far(y), z)).check_half()


def test_shapes_in_64_bits():
    q = ir.var("q")
    case = small.but(mask=(q << 40) - k * 2**33 >= ir.param("w"), slots={"w": 5 * 2**35}, q_len=70, kv_len=70)
    both = Both(case)
    both.plan = make_plan(ProgramExprs(case.mask), facts=ProgramFacts(limits={"q": 2**12, "k": 2**12, "w": 2**40}))
    assert both.plan.int64
    both.check()
    both = Both(small.but(mask=STEEP, q_len=70, kv_len=70, block=(16, 16)))
    both.plan = make_plan(ProgramExprs(STEEP), facts=ProgramFacts(bounds=STEEP_BOUNDS, limits={"q": 2**12, "k": 2**12}))
    assert both.plan.int64
    both.check()


@pytest.mark.parametrize(
    "place", [{}, {"q_len": 70, "kv_len": 80, "origin": (0, 1, 30, 13), "sizes": (1, 4, 200, 210)}]
)
def test_shapes_with_closed_form_bounds(place):
    w, q0, q1 = ir.param("w"), ir.var("q0"), ir.var("q1")
    both = Both(small.but(mask=causal & (ir.var("q") - k < w), slots={"w": 40}, **place))
    both.plan = make_plan(
        ProgramExprs(both.case.mask),
        facts=ProgramFacts(bounds=Bounds(q0 - w + 1, q1 - w + 1, q0, q1), limits=dict.fromkeys("qkw", 2.0**14)),
    )
    both.check()


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_shapes_at_any_scale(scale):
    both = Both(small)
    both.g = replace(both.g, scale=scale)
    both.check()


@pytest.mark.parametrize("wanted", [{"q"}, {"k"}, {"v"}, {"t0"}, {"q", "t0"}, {"v", "t1"}, set()])
def test_triton_computes_requested_gradients_alone(wanted):
    case = MODS["by column, gqa"].but(q_len=40, kv_len=50, batch=1)
    case = case.but(
        score=case.score + lookup("s", (ir.var("h"),), FLOAT) * score, tables={**case.tables, "s": learned(4)}
    )
    Both(case, wanted=frozenset(wanted)).check()


def test_wanted_but_without_influence():
    both = Both(Case(causal, score + ir.to_float(ir.build("int", lookup("t", (k,), FLOAT))), q_len=40, kv_len=40,
                     tables={"t": learned(150)}), wanted=frozenset({"t0"}))  # fmt: skip
    assert both.ours()["t0"].tolist() == [0.0] * 150


def test_wanted_of_lse_or_out_alone():
    both = Both(GROUPS, dlse=False)
    both.check()
    whole, both.dout = both.dout, None
    both.dlse = torch.randn(both.lse.shape)
    alone = both.again()
    both.dout = torch.zeros_like(whole)
    assert all(torch.equal(x, alone[n]) for n, x in both.again().items())
    both.check()


def test_wanted_of_nothing():
    case = small.but(q_len=0)
    both = Both(case.but(score=score * lookup("t", (k,), FLOAT), tables={"t": learned(90)}))
    both.out, both.lse = both.qkv[0], both.dlse
    assert {n: (x.shape, x.any().item()) for n, x in both.again().items()} == {
        "q": ((1, 2, 0, 32), False), "k": ((1, 2, 90, 32), False), "v": ((1, 2, 90, 32), False), "t0": ((90,), False),
    }  # fmt: skip


def test_triton_row_without_keys_has_no_gradient():
    both = Both(EMPTY)
    both.check()
    empty = both.lse == -math.inf
    assert empty.any()
    both.dlse = torch.where(empty, math.nan, both.dlse)
    got = both.again()
    assert all(x.isfinite().all() for x in got.values())
    assert (got["q"][empty] == 0).all()


@pytest.mark.parametrize("name", ["groups", "by column, gqa", "alibi"])
def test_triton_gradients_repeat_bit_for_bit(name):
    both = Both({"groups": GROUPS, **MODS}[name].but(q_len=50, kv_len=50, batch=1), dropout=0.2)
    first = both.ours()
    assert all(torch.equal(x, first[n]) for n, x in both.again().items())


def test_keys_of_another_dtype_are_refused():
    both = Both(small.but(dtype="float16"))
    both.ours()
    both.qkv[1:] = [x.to(torch.float8_e5m2) for x in both.qkv[1:]]
    with pytest.raises(LoweringError) as caught:
        both.again()
    assert str(caught.value) == (
        "gradients need q, k and v of one dtype, not float16 and float8_e5m2; convert k and v before"
    )


def test_triton_hidden_nan_reaches_gradients_of_its_tiles():
    """As docs/triton.md says: the forward does not see them."""
    query, keys, values = torch.randn(3, 1, 1, 64, 16).unbind()
    keys[:, :, 40] = math.nan
    query.requires_grad_()
    seen = fk.compile("causal & k < 40", backend="triton", tile=(32, 16))
    out = seen(query, keys, values)
    out.sum().backward()
    assert torch.isfinite(out).all()
    assert torch.isfinite(query.grad[:, :, :32]).all()
    assert torch.isnan(query.grad[:, :, 32:]).all()
