"""torch's gradients through the public API, on both tiers: gradcheck, learned values, what is refused."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from support.torch.dense import dense
from torch.autograd import gradcheck
from torch.autograd.gradcheck import GradcheckError

import frisket as fk
from frisket.dsl.errors import BackwardError

NATIVE = pytest.mark.skipif(bool(fk.backends()["cpp"]), reason="no compiler")
BACKENDS = ["aten", pytest.param("cpp", marks=NATIVE)]
OFTEN = ["aten", pytest.param("cpp", marks=[NATIVE, pytest.mark.exhaustive])]
G = torch.Generator().manual_seed(0)


def rand(*shape, dtype=torch.float64, grad=True):
    return torch.randn(shape, generator=G, dtype=dtype).requires_grad_(grad)


def qkv(b=1, h=2, hkv=None, s=9, n=None, d=8, e=None, dtype=torch.float64):
    hkv, n, e = hkv or h, n or s, e or d
    return rand(b, h, s, d, dtype=dtype), rand(b, hkv, n, d, dtype=dtype), rand(b, hkv, n, e, dtype=dtype)


DOC = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2])
CASES = {
    "causal": ({"mask": "causal"}, {}, {}),
    "window": ({"mask": "causal & window(3)"}, {"s": 12}, {}),
    "documents": ({"mask": "causal & same(doc)", "doc": DOC}, {"b": 2}, {}),
    "softcap": ({"mask": "causal", "score": "softcap(2)"}, {}, {}),
    "alibi": ({"mask": "causal", "score": "param slope: float[_]\nscore = score + slope[h] * (k - q)"}, {},
              {"slope": (2,)}),
    "relative": ({"score": "param bias: float[_, _]\nscore = score + bias[h, q - k + 8]"}, {}, {"bias": (2, 17)}),
    "scalar": ({"mask": "causal", "score": "param c: float\nscore = c * tanh(score / c)"}, {}, {"c": ()}),
    "pair": ({"score": "param bias: float[_, _]\nscore = score * bias[q, k]"}, {}, {"bias": (9, 9)}),
    "sinks": ({"mask": "q > k"}, {}, {"sinks": (2,)}),
    "one sink": ({"mask": "causal"}, {}, {"sinks": ()}),
    "gqa": ({"mask": "causal"}, {"h": 4, "hkv": 2}, {}),
    "other v": ({"mask": "causal"}, {"d": 8, "e": 16}, {}),
    "dropout": ({"mask": "causal", "dropout": 0.4}, {"seed": 7}, {}),
    "all": ({"mask": "causal & window(5)", "dropout": 0.3,
             "score": "param slope: float[_]\nscore = softcap(3) + slope[h] * (k - q)"},
            {"h": 4, "hkv": 2, "seed": 3}, {"slope": (4,), "sinks": (4,)}),
}  # fmt: skip


QUICK = {"all": [], "relative": [pytest.mark.exhaustive]}  # of the native tier, which compiles every case
TIERS = [("aten", n) for n in CASES] + [
    pytest.param("cpp", n, marks=[NATIVE, *QUICK.get(n, [pytest.mark.slow])]) for n in CASES
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("backend", "name"), TIERS)
def test_public_torch_gradients_pass_gradcheck(backend, name):
    """Gradients of out and lse, in q, k, v, sinks and what the score mod learns."""
    made, shape, learned = CASES[name]
    shape = dict(shape)
    seed = shape.pop("seed", None)
    att = fk.compile(**made, backend=backend)
    values = {n: rand(*s) for n, s in learned.items()}

    def run(q, k, v, *rest):
        out, lse = att(q, k, v, seed=seed, return_lse=True, **dict(zip(values, rest, strict=True)))
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    assert gradcheck(run, (*qkv(**shape), *values.values()), fast_mode=True, nondet_tol=0.0)


@pytest.mark.exhaustive
def test_a_mutant_fails_gradcheck(monkeypatch):
    from frisket.runtime.torch import autograd as torch_autograd

    real = torch_autograd.dsinks
    monkeypatch.setattr(torch_autograd, "dsinks", lambda *a: 1.01 * real(*a))
    with pytest.raises(GradcheckError):
        test_public_torch_gradients_pass_gradcheck("aten", "sinks")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_beside_the_interpreter(dtype):
    """In the dtypes gradcheck is no use for."""
    att = fk.compile("causal & window(20)", "param t: float[_]\nscore = score + t[h]", backend="aten", dropout=0.2)
    q, k, v = (x.to(dtype) for x in qkv(1, 4, 2, 40, d=16))
    sinks = rand(4) if dtype == torch.float32 else None  # in half its gradient is a sum over rows of rounded outputs
    assert att.check(q, k, v, t=rand(4), seed=5, sinks=sinks).good


def test_only_the_wanted_gradients_are_made(monkeypatch):
    from frisket.lowering.aten import backward as aten_backward

    asked = []
    real = aten_backward.backward

    def watched(*args, grad_names, **more):
        asked.append(sorted(grad_names))
        return real(*args, grad_names=grad_names, **more)

    monkeypatch.setattr(aten_backward, "backward", watched)
    q, k, v = qkv()
    att = fk.compile("causal", "param t: float[_]\nscore = score + t[h]", backend="aten")
    t = rand(2)
    att(q, k.detach(), v.detach(), t=t.detach()).sum().backward()
    att(q.detach(), k.detach(), v, t=t).sum().backward()
    att(q.detach(), k.detach(), v.detach(), t=t.detach(), sinks=(s := rand(2))).sum().backward()
    assert asked == [["q"], ["t0", "v"]]  # the gradient of sinks needs no executor
    assert s.grad is not None


def test_learned_values_are_read_anew_and_planned_once(monkeypatch):
    from frisket.lowering import pipeline as bind
    from frisket.runtime.plans import device as flat_laid

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(2, 9))
            self.att = fk.compile("causal", lambda score, b, h, q, k: score + self.bias[h, k])

        def forward(self, q, k, v):
            return self.att(q, k, v)

    layer, (q, k, v) = Layer(), (x.detach().float() for x in qkv())
    step = torch.optim.SGD(layer.parameters(), lr=5.0)
    layer(q, k, v)
    monkeypatch.setattr(bind, "simplified_program", None)  # planning anew would fail
    monkeypatch.setattr(flat_laid, "make_layout", None)
    losses = []
    for _ in range(5):
        step.zero_grad()
        loss = layer(q, k, v).square().mean()
        loss.backward()
        step.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    with torch.no_grad():
        want = fk.reference(q, k, v, "causal", "score + bias[h, k]", layout="bhsd", bias=layer.bias.detach())
    np.testing.assert_allclose(layer(q, k, v).detach(), want, rtol=1e-5, atol=1e-5)


def test_learned_values_given_anywhere():
    """To compile, to a score mod, to a plan, to the call, to frisket.attention, captured."""
    q, k, v = (x.detach().float() for x in qkv())
    t = torch.randn(2, generator=G).requires_grad_()
    text = "param t: float[_]\nscore = score + t[h] * (k - q)"
    att = fk.compile("causal", text)
    results = [
        att(q, k, v, t=t),
        att(q, k, v, plan=att.plan(9, 9, 1, 2, t=t)),
        fk.compile("causal", text, t=t)(q, k, v),
        fk.compile("causal", fk.score(text, t=t))(q, k, v),
        fk.compile("causal", fk.score(text).bind(t=t))(q, k, v),
        fk.attention(q, k, v, "causal", text, t=t),
        fk.attention(q, k, v, "causal", lambda score, b, h, i, j: score + t[h] * (j - i)),
        fk.attention(q, k, v, score=lambda score, b, h, i, j: torch.where(i >= j, score + t[h] * (j - i), -torch.inf)),
    ]
    grads = [torch.autograd.grad(r.square().sum(), t)[0] for r in results]
    for r, g in zip(results, grads, strict=True):
        torch.testing.assert_close(r, results[0])
        torch.testing.assert_close(g, grads[0])


def test_two_modules_that_begin_alike_learn_apart():
    """Equal values are no reason to share a parameter."""
    q, k, v = (x.detach().float() for x in qkv())
    a, b = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))

    def run(t):
        return fk.attention(q, k, v, "causal", lambda score, _, h, i, j: score + t[h] * (j - i))

    run(a).square().sum().backward()
    assert b.grad is None
    run(b).square().sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("backend", OFTEN)
def test_a_learned_value_in_another_dtype_and_of_no_use(backend):
    q, k, v = (x.detach().float() for x in qkv())
    t = torch.randn(2, generator=G).to(torch.bfloat16).requires_grad_()
    score = "param t: float[_]\nscore = score + t[h]"
    fk.attention(q, k, v, score=score, t=t, backend=backend).sum().backward()
    assert t.grad.dtype == torch.bfloat16
    u, c = rand(2, dtype=torch.float32), rand(dtype=torch.float32)
    score = "param t: float[_]\nparam c: float\nscore = where(t[h] > c, score, 2 * score)"
    fk.attention(q, k, v, score=score, t=u, c=c, backend=backend).sum().backward()
    assert (u.grad.tolist(), c.grad.tolist()) == ([0.0, 0.0], 0.0)


SHIFTED = "param c: float\nparam bias: float[_, _]\nscore = c * score + bias[h, q - k + 8]"
CALLS = {
    "a compiled attention": lambda: fk.compile("causal", SHIFTED),
    "one call": lambda: lambda q, k, v, **values: fk.attention(q, k, v, "causal", SHIFTED, **values),
    "a function": lambda: (
        # of a number that no other test has: the first plan of a program is the one that memos keep
        lambda q, k, v, c, bias: fk.attention(q, k, v, "causal", lambda s, b, h, i, j: c * s + bias[h, i - j + 8] / 7)
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_torch_step_values_do_not_outlive_the_step(name):
    """What was made for one call serves the next ones, and holds neither its tensors nor their graph."""
    attend, weight, left = CALLS[name](), rand(2, 17), []
    for _ in range(2):
        values = {"c": weight.mean(), "bias": weight * 2}
        left += map(weakref.ref, values.values())
        attend(*qkv(), **values).sum().backward()
        del values
        gc.collect()
    assert [x() for x in left] == [None] * 4


def test_max_scores_have_no_gradient_and_lse_has():
    q, k, v = qkv()
    out, lse, top = fk.attention(q, k, v, "causal", return_lse=True, return_max=True)
    assert out.requires_grad
    assert lse.requires_grad
    assert not top.requires_grad
    (only,) = torch.autograd.grad(lse.sum(), q)
    (want,) = torch.autograd.grad(dense(q, k, v, torch.ones(9, 9).tril().bool())[1].sum(), q)
    torch.testing.assert_close(only, want)


def test_dense_backend_refuses_gradients():
    q, k, v = qkv()
    with pytest.raises(BackwardError) as error:
        fk.attention(q, k, v, "causal", backend="dense")
    assert str(error.value) == (
        "backend 'dense' has no gradients; aten, cpp, gluon, triton and xla have\n"
        "  for the forward alone write `with torch.no_grad():`, or detach the tensors"
    )
    with torch.no_grad():
        fk.attention(q, k, v, "causal", backend="dense")


def test_tensor_changed_before_the_backward_raises():
    q, k, v = (x.float() for x in qkv())
    t = torch.zeros(2, requires_grad=True)
    out = fk.attention(q, k, v, score="param t: float[_]\nscore = score + t[h]", t=t)
    with torch.no_grad():
        t += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["q", "k", "dout"])
def test_torch_hidden_nan_reaches_no_gradient(where, backend):
    """Query 5 sees nothing and nobody sees key 5: 0 times what they hold is not 0."""
    att = fk.compile("causal & q != 5 & k != 5", backend=backend)

    def gradients(held):
        given = dict(zip(("q", "k", "v", "dout"), (x.detach() for x in (*inputs, cotangent))))
        given[where] = given[where].index_fill(2, torch.tensor(5), held)
        leaves = [given[n].requires_grad_() for n in "qkv"]
        return torch.autograd.grad(att(*leaves), leaves, given["dout"])

    inputs, cotangent = qkv(s=20), rand(1, 2, 20, 8)
    for held in (float("nan"), float("inf")):
        torch.testing.assert_close(gradients(held), gradients(0.0))


@pytest.mark.parametrize("backend", OFTEN)
def test_a_table_changed_before_the_backward_is_refused(backend):
    doc = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
    att = fk.compile("causal & same(doc)", backend=backend)
    plan = att.plan(9, 9, heads=2, doc=doc, flat=True)
    q, k, v = qkv()
    out = att(q, k, v, plan=plan)
    doc += torch.arange(9)
    with pytest.raises(BackwardError, match="changed in place between the forward and the backward"):
        out.sum().backward()
    att(q, k, v, plan=att.plan(9, 9, heads=2, doc=doc, flat=True)).sum().backward()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_inference_mode_and_frozen_tensors(backend, threads):
    q, k, v = torch.randn(3, 2, 4, 40, 16)  # enough blocks for two threads, each of which has a mode of its own
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            out = fk.attention(q, k, v, "causal", backend=backend)
    finally:
        torch.set_num_threads(before)
    assert out.is_inference()
    torch.testing.assert_close(out, fk.attention(q, k, v, "causal", backend=backend))
    assert not fk.attention(q.detach(), k.detach(), v.detach(), "causal").requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_strides_of_inputs_and_cotangents(layout, backend):
    """Views of one projection, expanded cotangents, transposed ones: as contiguous copies of them."""
    x = rand(1, 9, 3, 2, 16, dtype=torch.float32)
    q, k, v = x.unbind(2)
    if layout == "bhsd":
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    out = fk.attention(q, k, v, "causal", layout=layout, backend=backend)
    sums = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    same = torch.autograd.grad((out * torch.ones_like(out)).sum(), x, retain_graph=True)[0]
    torch.testing.assert_close(sums, same)
    cotangent = rand(*out.mT.shape, dtype=torch.float32, grad=False).mT
    assert not cotangent.is_contiguous()
    twisted = torch.autograd.grad(out, x, cotangent)[0]
    copies = (y.contiguous() for y in (q, k, v))
    straight = fk.attention(*copies, "causal", layout=layout, backend=backend)
    torch.testing.assert_close(twisted, torch.autograd.grad(straight, x, cotangent.contiguous())[0])


MEMORY = """
import resource, torch, frisket as fk
torch.set_num_threads(1)
backends = [b for b in ("cpp", "aten") if not fk.backends()[b]]
def step(s):
    for backend in backends:
        q, k, v = (torch.randn(1, 2, s, 16, requires_grad=True) for _ in range(3))
        fk.attention(q, k, v, "causal & window(128)", backend=backend).sum().backward()
step(256)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(8192)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.exhaustive
def test_memory_is_linear():
    """8,192 tokens: inputs, output and gradients are 1 MB each; scores would be 512 MB."""
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 150
