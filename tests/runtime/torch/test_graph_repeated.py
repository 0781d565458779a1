"""Calls of the operators of graphs like one before: what they leave out, and what they must not."""

import pytest
import torch

import frisket as fk
from frisket.runtime.machine import cpp_build as native_build
from frisket.runtime.torch import operators, running  # noqa: F401, registers operators
from frisket.runtime.torch.ready import PreparedCall

from .test_torch_repeated import BAND, attention, drawn, paths, without_fast_path

pytestmark = pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason())


def operator(att, arrays, *, sinks=None, values=(), numbers=(), names=""):
    return torch.ops.frisket.attend(*arrays, sinks, list(values), list(numbers), att.spec, names)


def warm(att, arrays):
    """The attention of the graph, after calls that leave a record."""
    made = running.attention_of(att.spec, ())
    made.calls.clear()
    for _ in range(2):
        operator(att, [torch.randn_like(x) for x in arrays])
    assert len(paths(made)) == 1
    return made


def anew(monkeypatch, run):
    with monkeypatch.context() as m:
        m.setattr(PreparedCall, "fast", property(lambda ready: None))
        return run()


@pytest.fixture
def prepared_anew(monkeypatch):
    """The calls and the gradients that no fast path ran."""
    seen, gradients = without_fast_path(monkeypatch), running.gradients
    monkeypatch.setattr(running, "gradients", lambda *given: seen.append(given) or gradients(*given))
    return seen


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        *(pytest.param(t, marks=pytest.mark.exhaustive) for t in (torch.float64, torch.float16)),
    ],
)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"q_len": 1},
        pytest.param({"kv_heads": 2, "v_dim": 24}, marks=pytest.mark.exhaustive),
        {"q_len": 70, "kv_len": 90},
    ],
)
def test_repeated_graph_calls_give_the_bits_of_new_ones(dtype, shape, monkeypatch, prepared_anew):
    arrays = drawn(dtype=dtype, **shape)
    att = attention("causal" if dtype == torch.bfloat16 else BAND)
    warm(att, arrays)
    prepared_anew.clear()
    got = operator(att, arrays)
    assert not prepared_anew
    want = anew(monkeypatch, lambda: operator(att, arrays))
    assert prepared_anew
    peaked = want[3][..., 1:2].abs() >= 0.125  # of other rows nothing writes or reads what rounding left out
    for a, b in zip(defined(got, peaked), defined(want, peaked), strict=True):
        assert a.is_contiguous()
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def defined(results, peaked):
    """Results with zeros in place of the memory that a forward leaves as it is."""
    *others, norm = results
    assert norm.is_contiguous()
    return *others, torch.cat([norm[..., :2], torch.where(peaked, norm[..., 2:], 0.0)], -1)


def test_strides_and_signs(monkeypatch):
    q, k, v = drawn()
    att = attention()
    warm(att, (q, k, v))
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    apart = torch.randn(2, 4, 20, 32)[..., ::2]
    for given in ((turned, k, v), (apart, k, v), (q, apart, apart), (q, k[:, :1].expand_as(k), v)):
        for a, b in zip(operator(att, given), anew(monkeypatch, lambda g=given: operator(att, g)), strict=True):
            assert a.is_contiguous()
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    torch.testing.assert_close(operator(att, (torch._neg_view(-q), k, v)), operator(att, (q, k, v)), rtol=0, atol=0)


@pytest.mark.exhaustive
def test_repeated_graph_calls_take_other_shapes_and_dtypes():
    att = attention()
    warm(att, drawn())
    for more in ({"dtype": torch.bfloat16}, {"kv_len": 30}, {"q_len": 12, "kv_len": 12}, {"kv_heads": 2}):
        arrays = drawn(**more)
        out, lse, *_ = operator(att, arrays)
        want, want_lse = attention()(*arrays, return_lse=True)
        torch.testing.assert_close((out, lse), (want, want_lse), rtol=0, atol=0)


def test_repeated_graph_calls_take_sinks_and_origins():
    arrays = drawn()
    att = attention()
    warm(att, arrays)
    out, lse, top, _ = operator(att, arrays)
    assert top.shape == (0,)
    sinks = operator(att, arrays, sinks=torch.zeros(4))
    torch.testing.assert_close(sinks[1], torch.logaddexp(lse, torch.zeros(())))
    assert operator(att, arrays, names="max")[2].shape == lse.shape
    place = (0, 0, 3, 0), (2, 4, 30, 30)
    names = "".join(f",number  {w}{i}" for w in ("origin", "size") for i in range(4))
    moved = operator(att, arrays, numbers=[*place[0], *place[1]], names=names)[0]
    torch.testing.assert_close(moved, att(*arrays, origin=place[0], sizes=place[1]), rtol=0, atol=0)
    assert moved.ne(out).any()


def test_numbers_tables_and_seeds_are_not_kept():
    arrays = drawn()
    n, seed = torch.tensor([3, 6]), [torch.tensor(5), torch.tensor(6)]
    held, wide, dropped = attention("k < n[b]", n=n), attention("causal & window(m)"), attention(dropout=0.5)
    run = torch.compile(lambda q, k, v: held(q, k, v), backend="eager", fullgraph=True)
    for _ in range(3):
        torch.testing.assert_close(run(*arrays), held(*arrays), rtol=0, atol=0)
    n += 4  # the graph's input is the user's tensor, or a copy made when the attention was: as in eager
    torch.testing.assert_close(run(*arrays), held(*arrays), rtol=0, atol=0)
    table = torch.tensor([3, 6])
    given = attention("param n: int[_]\nmask = k < n[b]")
    for _ in range(3):
        found = operator(given, arrays, values=[table], names=",tensor n")[0]
        torch.testing.assert_close(found, given(*arrays, n=table.clone()), rtol=0, atol=0)
        table += 1
    for m in (3, 3, 3, 12):
        found = operator(wide, arrays, numbers=[m], names=",number m")[0]
        torch.testing.assert_close(found, wide(*arrays, m=m), rtol=0, atol=0)
    for s in (*seed[:1] * 3, seed[1]):
        found = operator(dropped, arrays, values=[s], names=",tensor  seed")[0]
        torch.testing.assert_close(found, dropped(*arrays, seed=int(s)), rtol=0, atol=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("needed", [(True, True, True), (False, True, False), (True, False, True)])
def test_repeated_graph_gradients_equal_new_ones(needed, monkeypatch, prepared_anew):
    arrays = [x.requires_grad_(n) for x, n in zip(drawn(), needed, strict=True)]
    leaves = [x for x in arrays if x.requires_grad]
    att = attention()

    def both(q, k, v):
        return att(q, k, v, return_lse=True)

    graph = torch.compile(both, backend="aot_eager", fullgraph=True)

    def found():
        out, lse = graph(*arrays)
        return out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)

    want = anew(monkeypatch, found)
    found(), found()
    prepared_anew.clear()
    got = found()
    assert not prepared_anew
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    with torch.no_grad():
        assert not graph(*arrays)[0].requires_grad


def test_large_scores_keep_what_lse_rounds_away():
    arrays = [x.requires_grad_() for x in drawn()]
    with torch.no_grad():
        arrays[0] *= 3e4
    att = attention()
    graph = torch.compile(lambda q, k, v: att(q, k, v), backend="aot_eager", fullgraph=True)
    for _ in range(3):
        got = torch.autograd.grad(graph(*arrays).square().sum(), arrays)
    want = torch.autograd.grad(attention()(*arrays).square().sum(), arrays)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_eager_calls_and_graphs_keep_records_of_their_own():
    """Eager calls whose axes may be meant otherwise are asked about; the operator's are known."""
    att = attention()
    made = warm(att, drawn())
    assert isinstance(made(*drawn()), torch.Tensor)
    made(*drawn())
    assert len(paths(made)) == 2
    assert len(operator(att, drawn())) == 4


def test_repeated_graph_calls_follow_changed_settings(monkeypatch):
    arrays = drawn()
    att = fk.compile("causal", engines=False)
    monkeypatch.setenv("FRISKET_BACKEND", "native")
    warm(att, arrays)
    out = operator(att, arrays)[0]
    monkeypatch.setenv("FRISKET_BACKEND", "dense")
    assert operator(att, arrays)[0].ne(out).any()  # of another order
    monkeypatch.setenv("FRISKET_BACKEND", "native")
    torch.testing.assert_close(operator(att, arrays)[0], out, rtol=0, atol=0)
    monkeypatch.setenv("FRISKET_CHECK", "2")
    with pytest.raises(fk.ParameterError, match="FRISKET_CHECK=2"):
        operator(att, arrays)
