"""What is captured, what the trace leaves alone, and what may be active around it."""

# ruff: noqa: E501 (one row, one case)

from __future__ import annotations

import functools
import math
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
from support.lowering.effort import at_most

torch = pytest.importorskip("torch")

from torch.nn.attention.flex_attention import and_masks  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

import frisket as fk  # noqa: E402
from frisket.dsl.from_python.trace import trace  # noqa: E402
from frisket.dsl.show import show  # noqa: E402

doc = torch.tensor([0, 0, 1, 1, 2])
slopes = torch.nn.Parameter(torch.tensor([0.5, 0.25]))


def shown(fn):
    found = trace(fn)
    return show(found.expr, found.tables)


def alibi(score, b, h, q, k):
    return score + slopes[h] * (k - q)


# -- what is captured -------------------------------------------------------------------------------


def test_captured_tensors_are_kept_and_their_values_copied():
    mod = fk.score(alibi)
    assert mod.origin.captured == {"slopes": slopes}
    assert isinstance(mod.params["slopes"], np.ndarray)
    assert not mod.params["slopes"].flags.writeable
    assert mod.then("softcap(5.0)").origin.captured["slopes"] is slopes
    assert mod.bind(slopes=np.ones(2)).origin.captured == {}
    assert fk.score(alibi, slopes=np.ones(2)).origin.captured == {}
    again = pickle.loads(pickle.dumps(mod))
    assert again == mod
    assert list(again.origin.captured) == ["slopes"]  # a learned tensor travels along
    assert torch.equal(again.origin.captured["slopes"], slopes)
    assert again.origin.captured["slopes"].requires_grad


def test_renamed_parameters_keep_their_originals():
    def other(doc):
        return fk.mask(lambda b, h, q, k: doc[k] > 0)

    mine, theirs = fk.mask(lambda b, h, q, k: doc[q] > 0), other(torch.tensor([5, 6]))
    both = mine & theirs
    assert sorted(both.origin.captured) == ["doc", "doc_2"]
    assert both.origin.captured["doc"] is doc
    assert both.origin.captured["doc_2"].tolist() == [5, 6]
    assert (~both).origin.captured.keys() == {"doc", "doc_2"}
    assert both.at(q="q // 2").origin.captured.keys() == {"doc", "doc_2"}


def test_learned_scalars_are_parameters_constants_are_literals():
    gain, one = torch.nn.Parameter(torch.tensor(0.5)), torch.nn.Parameter(torch.tensor([2.0]))
    fixed = torch.tensor(3)
    made = fk.score(lambda s, b, h, q, k: gain * s + one[0] * torch.tensor(0.1) + fixed + one.exp()[0])
    assert str(made) == "gain * score + one[0] * 0.1 + fixed + exp(one[0])"
    assert {n: x for n, x in made.params.items() if n != "one"} == {"gain": 0.5, "fixed": 3}
    assert made.origin.captured["gain"] is gain


def test_torch_expressions_of_captures_alone_are_computed_once():
    lens, tree = torch.tensor([3, 4]), torch.ones(4, 3)
    assert shown(lambda b, h, q, k: (doc * 2)[q] == k) == "doc[q] * 2 == k"  # stays an expression of the tensor
    assert shown(lambda b, h, q, k: k < doc.max()) == "k < scalar"  # a whole array gone through: once, now
    assert shown(lambda b, h, q, k: torch.softmax(slopes, 0)[h] > 0.5) == "table[h] > 0.5"
    assert shown(lambda b, h, q, k: k < int(lens.sum()) + lens.numel() + len(lens)) == "k < 11"
    assert shown(lambda b, h, q, k: (q >= k) if lens[0] > 2 else (q < k)) == "q >= k"
    assert shown(lambda b, h, q, k: doc[-1] == doc[k]) == "doc[4] == doc[k]"
    assert shown(lambda b, h, q, k: tree[q][torch.tensor(-1)] > k) == "tree[q, 2] > k"
    assert shown(lambda b, h, q, k: torch.arange(8)[q] == k) == "table[q] == k"
    assert shown(lambda s, b, h, q, k: s + slopes.sum()) == "score + sum(j in 0..extent(slopes, 0): slopes[j])"


def test_names_that_the_language_has_taken_get_a_line():
    scale, param, dot = torch.ones(8), torch.ones(8), torch.ones(8)
    assert shown(lambda s, b, h, q, k: s + scale[q] * param[q] + dot[k]) == "score + scale_[q] * param_[q] + dot_[k]"
    assert str(fk.score(lambda s, b, h, q, k: s * scale[q]).bind(scale_=np.zeros(8))) == "score * scale_[q]"


def test_captured_tensors_may_have_any_dtype_and_view():
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool):
        t = (torch.arange(8) % 3).to(dtype)
        want = (t[:, None] == t[None])[:5, :5].numpy()
        np.testing.assert_array_equal(fk.mask(lambda b, h, q, k: t[q] == t[k]).dense(5, 5)[0, 0], want)  # noqa: B023
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn):
        t = torch.arange(8.0).to(dtype)
        found = fk.score(lambda s, b, h, q, k: s + t[q])  # noqa: B023
        np.testing.assert_array_equal(found.params["t"].astype(float), np.arange(8.0))
    wide = torch.arange(24).reshape(4, 6)
    view = wide.t()[1::2]
    np.testing.assert_array_equal(fk.mask(lambda b, h, q, k: view[q, k] > 9).dense(3, 4)[0, 0], (view > 9).numpy())


def test_indexing_of_every_kind():
    x = torch.arange(120).reshape(2, 3, 4, 5)
    pairs = torch.tensor([[0, 2], [1, 3]])
    cases = [
        (lambda b, h, q, k: x[b][h][q, k] > 50, lambda b, h, q, k: x[b, h, q, k] > 50),
        (lambda b, h, q, k: x[..., k][b, h, q] > 50, lambda b, h, q, k: x[b, h, q, k] > 50),
        (lambda b, h, q, k: x[b, None, h, :, k][0, q] > 50, lambda b, h, q, k: x[b, h, q, k] > 50),
        (lambda b, h, q, k: x[b, :, q][h, k] > 50, lambda b, h, q, k: x[b, h, q, k] > 50),
        (lambda b, h, q, k: x[b, h, 1:, ::2][q % 3, k % 3] > 50, lambda b, h, q, k: x[b, h, q % 3 + 1, k % 3 * 2] > 50),
        (lambda b, h, q, k: x[b, h, pairs[q % 2], k].sum() > 99, lambda b, h, q, k: x[b, h, pairs[q % 2, 0], k] + x[b, h, pairs[q % 2, 1], k] > 99),
        (lambda b, h, q, k: x.permute(3, 2, 1, 0)[k, q, h, b] > 50, lambda b, h, q, k: x[b, h, q, k] > 50),
        (lambda b, h, q, k: x.flatten(0, 1)[b * 3 + h, q, k] > 50, lambda b, h, q, k: x[b, h, q, k] > 50),
        (lambda b, h, q, k: x[b, h].view(2, 10)[q // 2, q % 2 * 5 + k] > 50, lambda b, h, q, k: x[b, h, q, k] > 50),
        (lambda b, h, q, k: x.unsqueeze(0).squeeze(0).transpose(0, 1)[h, b, q, k] > 50, lambda b, h, q, k: x[b, h, q, k] > 50),
        (lambda b, h, q, k: torch.stack([x[b, h, q, k], q * 30])[k % 2] > 50, lambda b, h, q, k: torch.where(k % 2 == 0, x[b, h, q, k], q * 30) > 50),
        (lambda b, h, q, k: (x[b, h] == q * k).any(), lambda b, h, q, k: torch.isin(q * k, x[b, h])),
    ]  # fmt: skip
    for strange, plain in cases:
        np.testing.assert_array_equal(fk.mask(strange).dense(4, 5, 2, 3), fk.mask(plain).dense(4, 5, 2, 3))
    direct = np.stack([(x > 50).numpy()] * 1)[0]
    np.testing.assert_array_equal(fk.mask(cases[0][0]).dense(4, 5, 2, 3), direct)


def test_searchsorted_is_torchs():
    off = torch.tensor([2, 5, 5, 9])
    for right in (False, True):
        found = fk.mask(lambda b, h, q, k: torch.searchsorted(off, q, right=right) == k)  # noqa: B023
        want = torch.searchsorted(off, torch.arange(12), right=right)[:, None] == torch.arange(6)
        np.testing.assert_array_equal(found.dense(12, 6)[0, 0], want.numpy())


# -- a custom gradient ------------------------------------------------------------------------------


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.round(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_custom_autograd_function_is_read_through_its_forward():
    applied = Straight.apply
    for fn in (lambda s, b, h, q, k: Straight.apply(s) + 1, lambda s, b, h, q, k: applied(s) + 1):
        found = trace(fn)
        assert found.notes == (
            "`Straight` is read through its forward: gradients are those of the forward, not its backward's",
        )
        assert fk.score(fn).origin.notes == found.notes
    assert trace(alibi).notes == ()


def test_operators_of_libraries():
    made = torch.library.Library("approx", "DEF")
    made.define("tanh(Tensor x) -> Tensor")
    made.define("sinh(Tensor x) -> Tensor")
    assert shown(lambda s, b, h, q, k: torch.ops.approx.tanh(s / 2.0)) == "tanh(score / 2.0)"  # attention-gym's
    assert (
        shown(lambda s, b, h, q, k: torch.ops.aten.tanh(s) + torch.ops.aten.sin.default(s))
        == "tanh(score) + sin(score)"
    )
    with pytest.raises(fk.FrisketError, match=r"`approx\.sinh` of a position has no counterpart in the language"):
        trace(lambda s, b, h, q, k: torch.ops.approx.sinh(s))  # only its name is known


def test_a_position_can_be_printed(capsys):
    def mask(b, h, q, k):
        print(q - k, doc[q], f"{bias[b, h]}")
        return q >= k

    bias = torch.ones(2, 3, 4)
    assert trace(mask).expr is trace(lambda q, k: q >= k).expr
    assert capsys.readouterr().out == "q - k doc[q] bias[b, h, i0] [4]\n"


# -- what the trace leaves alone ------------------------------------------------------------------------------


def test_torch_trace_leaves_function_and_tensors_unchanged():
    table = torch.ones(3)

    def fn(b, h, q, k, t=table):
        return (t[q] > 0) & (doc[k] > 0)

    before = fn.__code__, fn.__defaults__, fn.__globals__["doc"]
    trace(fn)
    assert (fn.__code__, fn.__defaults__, fn.__globals__["doc"]) == before
    assert fn.__defaults__[0] is table
    assert not fn(0, 0, 1, 0)
    assert slopes.grad is None


def test_torch_is_not_imported_for_a_lambda():
    code = "import frisket as fk, sys; fk.mask(lambda q, k: q >= k); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.exhaustive
def test_a_function_that_imports_torch_itself():
    code = (
        "import frisket as fk\n"
        "def fn(b, h, q, k):\n    import torch\n    return torch.tensor([0, 1])[q] == torch.abs(k)\n"
        "assert str(fk.mask(fn)) == 'table[q] == abs(k)'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- what is active around it -----------------------------------------------------------------------


class Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        Counting.calls += 1
        assert not any(type(a).__name__ == "Symbol" for a in args), "no symbol reaches another mode"
        return func(*args, **(kwargs or {}))


def with_constant(s, b, h, q, k):
    return s + torch.tensor(2.0) * slopes[h] + torch.zeros_like(s)


@pytest.mark.parametrize(
    "around",
    [torch.no_grad, torch.inference_mode, Counting, functools.partial(torch.device, "meta"), torch.enable_grad,
     functools.partial(torch.autocast, "cpu")],
)  # fmt: skip
def test_torch_trace_ignores_active_modes_and_devices(around):
    plain = trace(with_constant).expr
    with around():
        assert trace(with_constant).expr is plain
        assert torch.ones(1).device.type == ("meta" if "meta" in str(around) else "cpu")  # and it is still on


def test_a_default_device_and_dtype():
    torch.set_default_device("meta")
    try:
        assert shown(with_constant) == "score + 2.0 * slopes[h] + 0.0"
    finally:
        torch.set_default_device(None)


@pytest.mark.slow  # torch.compile takes ten seconds to import
def test_a_compiled_callable_is_read_as_it_was_written():
    assert shown(torch.compile(lambda b, h, q, k: doc[q] == doc[k])) == "doc[q] == doc[k]"


def test_a_trace_inside_a_trace():
    def outer(b, h, q, k):
        mask = fk.mask(lambda b, h, q, k: doc[q] == doc[k])
        return (q >= k) & (doc[q] > 0) & (str(mask) == "doc[q] == doc[k]")

    assert shown(outer) == "q >= k & doc[q] > 0 & true"


def test_threads_do_not_see_each_other():
    tables = [torch.full((4,), i) for i in range(8)]
    found, stop = [None] * 8, threading.Barrier(8)

    def work(i):
        mine = tables[i]

        def fn(b, h, q, k):
            stop.wait(10)  # all traces are open at once
            assert float(torch.ones(2).sum()) == 2.0
            return mine[q] == and_masks(lambda b, h, q, k: q >= k)(b, h, q, k)

        found[i] = trace(fn)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(f.tables["mine"] is t for f, t in zip(found, tables))


def test_tracing_is_fast():
    bias = torch.randn(2, 2, 8, 8)

    def traced():
        trace(lambda s, b, h, q, k: torch.where((q >= k) & (doc[q] == doc[k]), s + bias[b, h, q, k], -math.inf))

    traced()
    with at_most(5000):  # 1 ms; half of these calls
        traced()
