"""torch.compile without graph breaks, torch.export, opcheck, autocast, torch.func: one operator stands for a call."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from support.tiers import default_only
from torch._dynamo import compiled_autograd

import frisket as fk
from frisket.dsl.errors import FrisketError

G = torch.Generator().manual_seed(0)
ALIBI = "param slope: float[_]\nscore = score + slope[h] * (k - q)"


def rand(*shape, grad=True):
    return torch.randn(shape, generator=G).requires_grad_(grad)


def qkv(s=40, h=4, hkv=2, b=2, d=16, e=8):
    return rand(b, h, s, d), rand(b, hkv, s, d), rand(b, hkv, s, e)


class Layer(torch.nn.Module):
    """What a model may hold: a captured bias, a score table given to the call, sinks, documents, dropout."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(4, generator=G))
        self.slope = torch.nn.Parameter(torch.randn(4, generator=G))
        self.sinks = torch.nn.Parameter(torch.randn(4, generator=G))
        self.learned = fk.compile(
            lambda b, h, q, k: (q >= k) & (q - k < 9),
            lambda s, b, h, q, k: s + self.bias[h] * (k - q),
            sinks=self.sinks,
        )
        self.given = fk.compile("causal & same(doc)", ALIBI, dropout=0.2)

    def forward(self, q, k, v, doc, seed):
        out, lse = self.learned(q, k, v, return_lse=True)
        out = out + self.given(q, k, v, doc=doc, slope=self.slope, seed=seed)
        last = fk.attention(q, k, v, "causal & window(w)", ALIBI, w=5, slope=self.bias, sinks=0.5)
        return out + last, lse


def results(f, layer, arrays, *rest):
    out, lse = f(*arrays, *rest)
    wanted = (*arrays, *layer.parameters())
    return out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), wanted)


def counting():
    """A backend that counts its graphs."""
    from torch._dynamo.testing import CompileCounter

    return CompileCounter()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_layer_in_one_graph(backend):
    layer, arrays = Layer(), qkv()
    rest = torch.arange(40) // 7, 11
    want = results(layer, layer, arrays, *rest)
    got = results(torch.compile(layer, fullgraph=True, backend=backend), layer, arrays, *rest)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
def test_two_layers_of_one_class_are_told_apart():
    """Their forward is one code: a graph made of one mask must not serve the other."""

    class Small(torch.nn.Module):
        def __init__(self, mask):
            super().__init__()
            self.att = fk.compile(mask)

        def forward(self, q, k, v):
            return self.att(q, k, v)

    arrays = [x.detach() for x in qkv()]
    for mask in ("causal", "causal & window(3)", "full"):
        layer = Small(mask)
        torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(*arrays), layer(*arrays))


@pytest.mark.parametrize("dynamic", [True, None])
def test_many_lengths_are_one_graph(dynamic):
    att, counter = fk.compile("causal & window(9) & q < Q_LEN - 2"), counting()
    run = torch.compile(lambda q, k, v: att(q, k, v), fullgraph=True, dynamic=dynamic, backend=counter)
    for s in (30, 41, 52, 77):
        arrays = [x.detach() for x in qkv(s)]
        if dynamic is None:
            for x in arrays:
                torch._dynamo.mark_dynamic(x, 2)
        torch.testing.assert_close(run(*arrays), att(*arrays))
    assert counter.frame_count == 1


def test_a_decoding_loop_is_one_graph():
    """Positions are numbers of the graph, not constants."""
    att, counter = fk.compile("causal & window(9)"), counting()
    q, k, v = (x.detach() for x in qkv())

    def step(x, at):
        return att(x, k, v, origin=(0, 0, at, 0), sizes=(2, 4, 40, 40))

    run = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    whole = att(q, k, v)
    for at in (7, 20, 33):
        torch.testing.assert_close(run(q[:, :, at : at + 1], at), whole[:, :, at : at + 1], rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1


def test_documents_and_seeds_change_without_a_new_graph():
    att, counter = fk.compile("causal & same(doc)", dropout=0.3), counting()
    arrays = [x.detach() for x in qkv()]
    run = torch.compile(
        lambda doc, seed: att(*arrays, doc=doc, seed=seed), fullgraph=True, backend=counter, dynamic=True
    )
    for n, seed in ((3, 5), (7, 6), (40, 9)):
        doc = torch.arange(40) // n
        torch.testing.assert_close(run(doc, seed), att(*arrays, doc=doc, seed=seed))
    assert counter.frame_count == 1


WINDOW = fk.compile("causal & window(w)")
FACTOR = fk.compile("causal", "score * c")
NUMBERS = {
    "window": (lambda x, n: WINDOW(x, x, x, w=n), (8, 9, 10, 11)),
    "factor": (lambda x, n: FACTOR(x, x, x, c=n), (0.5, -0.0, 0.25)),
    "factor that is a whole number": (lambda x, n: FACTOR(x, x, x, c=n), (1, 2, 3)),
    "factor of attention": (lambda x, n: fk.attention(x, x, x, "causal", "score * c", c=n), (0.5, 0.25, 0.75)),
    "distance": (lambda x, n: fk.attention(x, x, x, "causal & q - k < d", d=n), (5.5, 6.5, 7.5)),
    "divisor": (
        lambda x, n: fk.attention(x, x, x, "causal", weight="sigmoid(score)", divide="count + c", c=n),
        (0.5, 0.25, 0.75),
    ),
    "scale": (lambda x, n: fk.attention(x, x, x, "causal", scale=n), (0.5, 0.25, 0.75)),
    "scale that is a whole number": (lambda x, n: fk.attention(x, x, x, "causal", scale=n), (1, 2, 3)),
    "dropout": (lambda x, n: fk.attention(x, x, x, "causal", dropout=n, seed=3), (0.5, 0.25, 0.75)),
    "sinks": (lambda x, n: fk.attention(x, x, x, "causal", sinks=[n, 0.0]), (0.5, 0.25, 0.75)),
    "origin": (lambda x, n: WINDOW(x[:, :, :4], x, x, w=9, origin=(0, 0, n, 0), sizes=(1, 2, 40, 40)), (5, 6, 7)),
}


@pytest.mark.parametrize("name", default_only(NUMBERS, "window", "factor", "scale"))
def test_numbers_change_between_calls_of_a_graph(name):
    """torch.compile makes a number symbolic when it changes."""
    torch._dynamo.reset()
    call, numbers = NUMBERS[name]
    compiled, x = torch.compile(call, fullgraph=True, backend="aot_eager"), rand(1, 2, 40, 8)
    for n in numbers:
        results = []
        for f in (compiled, call):
            out = f(x, n)
            results.append((out, *torch.autograd.grad(out.square().sum(), x)))
        torch.testing.assert_close(*results)


def test_whole_numbers_change_without_a_new_graph():
    torch._dynamo.reset()
    counter, x = counting(), rand(1, 2, 40, 8, grad=False)
    compiled = torch.compile(lambda w: WINDOW(x, x, x, w=w), fullgraph=True, backend=counter)
    for w in range(8, 20):
        torch.testing.assert_close(compiled(w), WINDOW(x, x, x, w=w))
    assert counter.frame_count == 2


def test_compiled_autograd_runs_backwards_of_other_lengths():
    """torch's compiler of backwards, of a call outside of a graph."""
    torch._dynamo.reset()
    c = torch.tensor(0.6, requires_grad=True)
    for length in (24, 13, 24):
        q, k, v = qkv(length)
        grads = []
        for context in (contextlib.nullcontext(), compiled_autograd._enable(torch.compile(backend="aot_eager"))):
            with context:
                out = FACTOR(q, k, v, c=c)
                out.square().sum().backward()
            grads.append([x.grad for x in (q, k, v, c)])
            q.grad = k.grad = v.grad = c.grad = None
        torch.testing.assert_close(*grads)


def test_seeds_are_drawn_in_the_graph_as_outside():
    att = fk.compile("causal", dropout=0.3)
    arrays = [x.detach() for x in qkv()]
    run = torch.compile(lambda: att(*arrays), fullgraph=True, backend="aot_eager")
    found = []
    for f in (run, lambda: att(*arrays)):
        torch.manual_seed(4)
        found.append((f(), f()))
    torch.testing.assert_close(found[0], found[1])
    assert not torch.equal(found[0][0], found[0][1])


@pytest.mark.exhaustive
def test_results_in_a_graph():
    att = fk.compile("causal & q > 0")
    q, k, v = (x.detach() for x in qkv())
    run = torch.compile(lambda: att(q, k, v, return_lse=True, return_max=True), fullgraph=True, backend="aot_eager")
    for a, b in zip(run(), att(q, k, v, return_lse=True, return_max=True), strict=True):
        torch.testing.assert_close(a, b)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    run = torch.compile(lambda *x: att(*x, layout="bshd"), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(*turned), att(q, k, v).transpose(1, 2))


def test_full_graph_refuses_plans_and_objects():
    q, k, v = (x.detach() for x in qkv())
    att = fk.compile("causal")
    plan = att.plan(40, 40, 2, 4)
    for run, text in (
        (lambda: att(q, k, v, plan=plan), "plans when it runs"),
        (lambda: fk.attention(q, k, v, "causal", scale=q[0, 0, 0]), "an array of one without axes"),
        (lambda: fk.attention(q, k, v, fk.mask("causal")), "takes a mask and a score mod as texts"),
    ):
        with pytest.raises(Exception, match=text):
            torch.compile(run, fullgraph=True, backend="eager")()


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_export_keeps_everything(apart, tmp_path):
    """An exported program runs from its file, `apart` in a process that knows nothing but `import frisket`."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.slope = torch.nn.Parameter(torch.randn(4, generator=G))
            self.att = fk.compile("causal & same(doc) & window(w)", ALIBI, w=12, doc=np.arange(300) // 7)

        def forward(self, q, k, v):
            return self.att(q, k, v, slope=self.slope)

    model, arrays = Model(), [x.detach() for x in qkv()]
    long = torch.export.Dim("long", min=8, max=256)
    program = torch.export.export(model, tuple(arrays), dynamic_shapes=[{2: long}] * 3)
    others = [x.detach() for x in qkv(57)]
    torch.testing.assert_close(program.module()(*others), model(*others))
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save((others, model(*others).detach()), tmp_path / "arrays.pt")
    if not apart:
        torch.testing.assert_close(torch.export.load(tmp_path / "model.pt2").module()(*others), model(*others))
        return
    code = (
        "import torch, frisket, sys\n"
        "program = torch.export.load(sys.argv[1] + '/model.pt2')\n"
        "arrays, want = torch.load(sys.argv[1] + '/arrays.pt')\n"
        "torch.testing.assert_close(program.module()(*arrays), want)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)


@pytest.mark.parametrize(
    "kind",
    [pytest.param("plain", marks=pytest.mark.slow), "permuted", pytest.param("expanded", marks=pytest.mark.exhaustive)],
)
def test_attend_operator_passes_opcheck(kind):
    from frisket.runtime.torch import operators  # noqa: F401

    q, k, v = qkv(s=12, d=8, e=8)
    if kind == "permuted":
        q, k, v = (x.detach().permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3).requires_grad_() for x in (q, k, v))
    if kind == "expanded":
        k, v = (x[:1, :1].detach().expand(2, 2, 12, 8).requires_grad_() for x in (k, v))
    spec = fk.compile("causal & window(w)", ALIBI, dropout=0.25, backend="aten").spec
    values, numbers, names = [rand(4), torch.tensor(5)], [7], "max,tensor slope,tensor  seed,number w"
    sinks = rand(4)
    attend = torch.ops.frisket.attend.default
    torch.library.opcheck(attend, (q, k, v, sinks, values, numbers, spec, names))
    torch.library.opcheck(attend, (q, k, v, None, values, numbers, spec, names[3:]))
    with torch.no_grad():
        out, lse, _, norm = attend(q, k, v, sinks, values, numbers, spec, names)
        given = (q.detach(), k.detach(), v.detach(), sinks.detach(), [x.detach() for x in values], out, lse, norm)
    dout, dlse = torch.randn(out.shape[::-1], generator=G).permute(3, 2, 1, 0), torch.ones(()).expand(lse.shape)
    for cotangents in ((dout, dlse), (dout, None)):
        rest = (numbers, spec, names, [True, False, True, True, True])
        torch.library.opcheck(torch.ops.frisket.attend_backward.default, (*cotangents, *given, *rest))


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_is_that_of_torchs_attention(compiled):
    q, k, v = qkv(hkv=4, e=16)
    peer = torch.nn.functional.scaled_dot_product_attention

    def ours(q, k, v):
        return fk.attention(q, k, v, "causal")

    run = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    with torch.autocast("cpu", torch.bfloat16):
        out, want = run(q, k.bfloat16(), v), peer(q, k.bfloat16(), v, is_causal=True)
    assert out.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert grad.dtype == torch.float32
    exact = [x.detach().double() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(*exact).dtype == torch.float64


def test_fake_and_meta_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    att = fk.compile("causal")
    with FakeTensorMode():
        out, lse = att(torch.empty(2, 4, 9, 8), *(torch.empty(2, 2, 9, n) for n in (8, 5)), return_lse=True)
    assert (out.shape, lse.shape) == ((2, 4, 9, 5), (2, 4, 9))
    q = torch.empty(2, 4, 9, 8, device="meta", dtype=torch.bfloat16)
    out, lse = att(q, q, q, return_lse=True)
    assert (out.device.type, out.dtype, lse.dtype) == ("meta", torch.bfloat16, torch.float32)


def test_torch_func_gives_grad_vmap_and_jvp():
    """grad, vmap, jvp and derivatives of gradients, in a graph too; vmap runs entry by entry of the mapped axis."""
    q, k, v = (x.detach() for x in qkv())
    att = fk.compile("causal")

    def loss(q):
        return att(q, k, v).square().sum()

    x = q.clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(torch.func.grad(loss)(q), want)
    many = torch.stack([q, 2 * q, -q])
    torch.testing.assert_close(torch.func.vmap(loss)(many), torch.stack([loss(x) for x in many]))
    each = torch.func.vmap(torch.func.grad(loss))(many)
    torch.testing.assert_close(each[0], want)
    torch.testing.assert_close(torch.func.jvp(loss, (q,), (q,))[1], (want * q).sum())
    y = q.clone().requires_grad_()
    with torch.compiler.set_stance("default"):
        run = torch.compile(lambda y: att(y, k, v), fullgraph=True, backend="eager")
    (dq,) = torch.autograd.grad(run(y).square().sum(), y, create_graph=True)
    second = torch.autograd.grad(dq.sum(), y)[0]
    torch.testing.assert_close(second, torch.func.jvp(torch.func.grad(loss), (q,), (torch.ones_like(q),))[1])


def test_a_bad_call_in_a_graph_is_an_error_of_frisket():
    q, k, v = (x.detach() for x in qkv(hkv=3))
    with pytest.raises(FrisketError, match="4 query heads do not divide among 3 key heads"):
        torch.compile(lambda: fk.attention(q, k, v, "causal"), fullgraph=True, backend="eager")()


def test_an_unknown_backend_in_a_graph_is_an_error_of_frisket():
    q, k, v = (x.detach() for x in qkv())
    with pytest.raises(FrisketError, match="no backend 'atem' \\(did you mean 'aten'\\?\\)"):
        torch.compile(lambda: fk.attention(q, k, v, "causal", backend="atem"), fullgraph=True, backend="eager")()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("backend", ["aten", "library"])
def test_a_named_backend_warns_of_nothing_in_a_graph(backend):
    """Dynamo warned of remembered lists of backends."""
    q, k, v = (x.detach() for x in qkv())
    run = torch.compile(lambda: fk.attention(q, k, v, "causal", backend=backend), fullgraph=True, backend="eager")
    torch.testing.assert_close(run(), fk.attention(q, k, v, "causal", backend=backend))


class Scaled(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, q, k, v):
        return fk.attention(q, k, v, "causal", scale=self.scale, backend="aten")


@pytest.mark.parametrize("scale", [1 / np.sqrt(8), np.float32(0.3), np.int64(2), np.asarray(0.5)])
def test_a_scale_of_numpy_in_one_graph(scale):
    layer, arrays = Scaled(scale), [x.detach().requires_grad_() for x in qkv()]
    out, want = torch.compile(layer, fullgraph=True, backend="aot_eager")(*arrays), layer(*arrays)
    torch.testing.assert_close(out, want)
    for x, y in zip(*(torch.autograd.grad(o.square().sum(), arrays) for o in (out, want)), strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("mask", ["causal", "causal & (b == 0 | q - k < 5)"])
def test_a_mapped_axis_is_one_call_where_nothing_hangs_on_b(monkeypatch, mask, learned):
    """Forward and backward, by any axis, keys mapped or not; with a gradient of a table for every entry."""
    from frisket.runtime.torch import ready as torch_ready

    att = fk.compile(mask, ALIBI, backend="aten")
    q, k, v = (x.detach() for x in qkv())
    slope = rand(4, grad=False)
    many, keys = torch.stack([q, 2 * q, -q], 2), torch.stack([k, -k, 3 * k])

    def loss(q, k, slope):
        out, lse = att(q, k, v, slope=slope, return_lse=True)
        return out.square().sum() + lse.sum()

    calls = []
    real = torch_ready.PreparedCall.run
    monkeypatch.setattr(torch_ready.PreparedCall, "run", lambda self, *given: calls.append(1) or real(self, *given))
    by = (0, 1, 2) if learned else (0, 1)
    for over in (keys, k):
        calls.clear()
        dims = 2, 0 if over is keys else None, None
        found = torch.func.vmap(torch.func.grad(loss, argnums=by), dims)(many, over, slope)
        assert len(calls) == (1 if mask == "causal" else 3)
        for i in range(3):
            leaves = [x.clone().requires_grad_() for x in (many.select(2, i), keys[i] if over is keys else k, slope)]
            want = torch.autograd.grad(loss(*leaves), leaves)
            torch.testing.assert_close([x[i] for x in found], list(want[: len(by)]))


INSIDE, AUTO = fk.compile("causal & same(doc)"), fk.compile("causal & same(doc)", reorder="auto")
HELD = fk.mask("same(doc)", doc=torch.arange(128) % 5)
PLANNED = {
    "plan": lambda q, doc: q * INSIDE.plan(128, 128, 1, 2, doc=doc).heads,
    "planned call": lambda q, doc: INSIDE(q, q, q, plan=INSIDE.plan(128, 128, 1, 2, doc=doc)),
    "check": lambda q, doc: q * float(INSIDE.check(q, q, q, doc=doc).good),
    "layout": lambda q, doc: q * float(HELD.layout(128, 128, block=(16, 16)).density),
    "dense": lambda q, doc: q * torch.from_numpy(HELD.dense(128, 128)).sum(),
    "BlockMask": lambda q, doc: q * HELD.layout(128, 128, block=(16, 16)).to_block_mask().kv_num_blocks.sum(),
    "reorder": lambda q, doc: q * fk.reorder("causal & k % 4 == 0", 128, 128).gain,
    "auto": lambda q, doc: AUTO(q, q, q, doc=doc),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", default_only(PLANNED, "plan", "BlockMask"))
def test_planning_runs_between_two_graphs(name):
    """Dynamo does not compile the analysis, which is numpy's and in part another thing in torch."""
    torch._dynamo.reset()
    q, doc = torch.randn(1, 2, 128, 16), torch.arange(128) % 5
    run = lambda q, doc: 2 * PLANNED[name](q + 1, doc)  # noqa: E731
    torch.testing.assert_close(torch.compile(run, backend="aot_eager")(q, doc), run(q, doc))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"between two graphs|has no lengths to look at"):
        torch.compile(run, backend="aot_eager", fullgraph=True)(q, doc)
