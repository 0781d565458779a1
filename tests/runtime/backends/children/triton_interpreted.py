"""Run by test_triton_binding.py with TRITON_INTERPRET=1: torch's transforms and gradients with backend="triton".

Shapes are small, and heads are not shared but where that is the point: an interpreted program takes milliseconds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import frisket as fk
from frisket.dsl.errors import BackendError, BackwardError, LoweringError, ShapeError
from frisket.runtime.backends.triton import launch as triton_launch
from frisket.runtime.machine.caller import SAID

G = torch.Generator().manual_seed(0)
ALIBI = "param slope: float[_]\nscore = score + slope[h] * (k - q)"
LEARNED = "param c: float\nparam bias: float[_, _]\nscore = c * score + bias[h, k]"
NARROW = {"tile": (16, 16), "backend": "triton"}
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid|divide)")


def rand(*shape, grad=True):
    return torch.randn(shape, generator=G).requires_grad_(grad)


def qkv(s=20, h=2, hkv=None, b=1, d=16, e=None, grad=True):
    hkv, e = hkv or h, e or d
    return rand(b, h, s, d, grad=grad), rand(b, hkv, s, d, grad=grad), rand(b, hkv, s, e, grad=grad)


def close(got, want, tolerance=1e-5):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def grads(out, lse, wanted):
    return torch.autograd.grad(out.square().sum() + lse.sum(), wanted)


# -- graphs -----------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """A captured table, a table and a number given to the call, sinks, documents, dropout."""

    def __init__(self, backend):
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.bias = torch.nn.Parameter(torch.randn(2, generator=g))
        self.slope = torch.nn.Parameter(torch.randn(2, generator=g))
        self.c = torch.nn.Parameter(torch.tensor(1.5))
        self.sinks = torch.nn.Parameter(torch.randn(2, generator=g))
        tiled = {"tile": (32, 32), "backend": backend}
        self.captured = fk.compile(
            lambda b, h, q, k: (q >= k) & (q - k < 9), lambda s, b, h, q, k: s + self.bias[h] * (k - q),
            sinks=self.sinks, **tiled,
        )  # fmt: skip
        score = "param slope: float[_]\nparam c: float\nscore = c * score + slope[h] * (k - q)"
        self.given = fk.compile("causal & same(doc)", score, dropout=0.2, **tiled)

    def forward(self, q, k, v, doc, seed):
        out, lse = self.captured(q, k, v, return_lse=True)
        return out + self.given(q, k, v, doc=doc, slope=self.slope, c=self.c, seed=seed), lse


def results(f, layer, arrays, *rest):
    out, lse = f(*arrays, *rest)
    return out, lse, *grads(out, lse, (*arrays, *layer.parameters()))


def test_graph_of_a_layer():
    """One graph for two lengths, forward and backward; as the layer run eagerly, and as the CPU's tier."""
    layer, peer = Layer("triton"), Layer("aten")
    graphs: list[object] = []

    def counted(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    run = torch.compile(layer, fullgraph=True, dynamic=True, backend=counted)
    counts = []
    for s in (20, 27):
        given, rest = qkv(s), (torch.arange(s) // 7, 11)
        want = results(peer, peer, given, *rest)
        close(results(run, layer, given, *rest), want, 3e-5)
        counts.append(len(graphs))
    close(results(layer, layer, given, *rest), want, 3e-5)
    assert counts[0] == counts[1] > 0


def test_graph_that_is_exported(tmp_path):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.slope = torch.nn.Parameter(torch.randn(2, generator=G))
            self.att = fk.compile("causal & window(w)", ALIBI, w=12, **NARROW)

        def forward(self, q, k, v):
            return self.att(q, k, v, slope=self.slope)

    model, arrays = Model(), qkv(grad=False)
    long = torch.export.Dim("long", min=8, max=256)
    torch.export.save(torch.export.export(model, arrays, dynamic_shapes=[{2: long}] * 3), tmp_path / "model.pt2")
    others = qkv(27, grad=False)
    close([torch.export.load(tmp_path / "model.pt2").module()(*others)], [model(*others)])


@pytest.mark.parametrize("top", ["", "max"])
def test_graph_operators_are_sound(top):
    """Schemas, fakes with the strides of what runs, autograd, on arrays that are not contiguous."""
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in qkv(12))
    spec = fk.compile("causal & window(w)", ALIBI, dropout=0.25, **NARROW).spec
    values, numbers, names = [rand(2), torch.tensor(5)], [7], f"{top},tensor slope,tensor  seed,number w"
    attend = torch.ops.frisket.attend.default
    sinks = rand(2)
    torch.library.opcheck(attend, (q, k, v, sinks, values, numbers, spec, names))
    with torch.no_grad():
        out, lse, _, norm = attend(q, k, v, sinks, values, numbers, spec, names)
    given = (q.detach(), k.detach(), v.detach(), sinks.detach(), [x.detach() for x in values], out, lse, norm)
    dout, dlse = torch.randn(out.shape[::-1], generator=G).permute(3, 2, 1, 0), torch.ones(()).expand(lse.shape)
    rest = (numbers, spec, names, [True, False, True, True, True])
    torch.library.opcheck(torch.ops.frisket.attend_backward.default, (dout, dlse, *given, *rest))


def test_graph_of_a_checkpoint():
    """Computed again in the backward, by the same seed."""
    att, (q, k, v), c, bias = fk.compile("causal", LEARNED, dropout=0.3, **NARROW), qkv(), rand(), rand(2, 20)

    def run(q, k, v):
        return att(q, k, v, c=c, bias=bias, return_lse=True)

    found = []
    for f in (run, lambda *x: checkpoint(run, *x, use_reentrant=False)):
        torch.manual_seed(5)
        found.append(grads(*f(q, k, v), (q, k, v, c, bias)))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_graph_of_torch_func():
    """grad and vmap, and both, and a gradient of a gradient."""
    q, k, v = qkv(grad=False)
    att, slope = fk.compile("causal", ALIBI, **NARROW), rand(2, grad=False)

    def loss(q, slope):
        return att(q, k, v, slope=slope).square().sum()

    x, y = q.clone().requires_grad_(), slope.clone().requires_grad_()
    want = torch.autograd.grad(loss(x, y), (x, y))
    many, slopes = torch.stack([q, -q]), torch.stack([slope, slope])
    found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(many, slopes)
    close([found[0][0], found[1][0]], want)
    (dq,) = torch.autograd.grad(loss(x, y), x, create_graph=True)
    want = torch.func.jvp(torch.func.grad(loss), (q, slope), (torch.ones_like(q), torch.zeros_like(slope)))[1]
    close(torch.autograd.grad(dq.sum(), x), [want])


def test_graph_under_autocast():
    q, k, v = qkv()
    with torch.autocast("cpu", torch.float16):
        out = fk.attention(q, k.half(), v, "causal", backend="triton")
        want = torch.nn.functional.scaled_dot_product_attention(q, k.half(), v, is_causal=True)
    assert out.dtype == want.dtype == torch.float16
    torch.testing.assert_close(out, want, rtol=2e-3, atol=2e-3)
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert grad.dtype == torch.float32


# -- eager calls ------------------------------------------------------------------------------------------------------

CHECKED = {
    "window": ({"mask": "causal & window(9)"}, {}, {}),
    "table and scalar": ({"mask": "causal", "score": LEARNED}, {}, {"c": (), "bias": (2, 20)}),
    "shared heads": ({"mask": "causal", "score": ALIBI}, {"h": 4, "hkv": 2}, {"slope": (4,)}),
    "sinks and dropout": ({"mask": "q > k", "dropout": 0.3}, {"b": 2}, {"sinks": (2,), "seed": 5}),
    "values of another size": ({"mask": "k <= q + 3", "score": "softcap(2)"}, {"e": 32}, {}),
}


@pytest.mark.parametrize("name", CHECKED)
def test_eager_beside_the_interpreter(name):
    """`att.check` covers gradients, those of tables, scalars and sinks too."""
    made, shape, given = CHECKED[name]
    given = {n: rand(*s) if isinstance(s, tuple) else s for n, s in given.items()}
    report = fk.compile(**made, **NARROW).check(*qkv(**shape), **given)
    learned = {"d" + n for n in given if n != "seed"}
    assert report.good
    assert {"dq", "dk", "dv"} | learned == set(report.gradients)


def test_triton_interpreter_warns_that_it_is_slow():
    SAID.clear()
    with pytest.warns(UserWarning, match="'triton' runs in Triton's interpreter on this CPU"):
        fk.compile("causal", **NARROW)(*qkv(9))


def test_eager_plans_of_the_device():
    """Documents in a plan made where they live; one changed in place before the backward is refused."""
    doc = torch.arange(40) // 9
    att = fk.compile("causal & same(doc)", **NARROW)
    plan, (q, k, v) = att.plan(40, 40, 1, 2, doc=doc, flat=True), qkv(40)
    out, lse = att(q, k, v, plan=plan, return_lse=True)
    peer = fk.attention(q, k, v, "causal & same(doc)", doc=doc.numpy(), backend="aten", return_lse=True)
    close([out, lse, *grads(out, lse, (q, k, v))], [*peer, *grads(*peer, (q, k, v))], 3e-5)
    out = att(q, k, v, plan=plan)
    doc += 1
    with pytest.raises(BackwardError, match="changed in place between the forward and the backward"):
        out.sum().backward()


def test_eager_only_what_is_wanted(monkeypatch):
    """Kernels of gradients that nobody asks for do not run; the scalar's value is never read by the host."""
    ran = []
    real = triton_launch.Launch.__call__

    def watched(self, *given):
        ran.append(self.kernel.fn.__name__)
        return real(self, *given)

    monkeypatch.setattr(triton_launch.Launch, "__call__", watched)
    att = fk.compile("causal", "param c: float\nscore = c * tanh(score / c)", **NARROW)
    q, k, v = qkv()
    c = torch.tensor(3.0)
    att(q, k.detach(), v.detach(), c=c).sum().backward()
    assert ran == ["attention_forward", "attention_delta", "attention_dq"]
    ran.clear()
    att(q.detach(), k.detach(), v, c=c).sum().backward()
    assert ran == ["attention_forward", "attention_delta", "attention_dkv"]
    ran.clear()
    with torch.no_grad():
        att(q, k, v, c=c)
    with torch.inference_mode():
        assert att(q, k, v, c=c).is_inference()
    assert ran == ["attention_forward"] * 2


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_eager_triton_calls_take_views_without_copies(monkeypatch, layout):
    """Views of one projection, one array as keys and values, expanded ones, cotangents of all kinds: as contiguous
    copies of them, and none is copied."""
    seen = []
    real = triton_launch.Launch.__call__

    def watched(self, values, *tensors):
        if self.kernel.fn.__name__ == "attention_forward":
            seen.append([x.data_ptr() for x in tensors[:3]])
        return real(self, values, *tensors)

    monkeypatch.setattr(triton_launch.Launch, "__call__", watched)
    x = rand(1, 20, 3, 2, 16)
    one = x[:, :, 0] if layout == "bshd" else x[:, :, 0].transpose(1, 2)
    few = x[:, :, 1, :1] if layout == "bshd" else x[:, :, 1, :1].transpose(1, 2)
    shape = one.shape
    turned = rand(*one.mT.shape, grad=False).mT
    for q, k, v in ((one, x[:, :, 1].view(shape) if layout == "bshd" else x[:, :, 1].transpose(1, 2), one),
                    (one, few.expand(shape), few.expand(shape)),
                    (one, one, one)):  # fmt: skip
        out = fk.attention(q, k, v, "causal", layout=layout, backend="triton")
        straight = fk.attention(*(y.contiguous() for y in (q, k, v)), "causal", layout=layout, backend="triton")
        assert torch.equal(out, straight)
        assert seen[-2] == [y.data_ptr() for y in (q, k, v)]
        for cotangent in (turned, torch.ones(()).expand(out.shape)):
            found = [torch.autograd.grad(o, x, cotangent, retain_graph=True)[0] for o in (out, straight)]
            torch.testing.assert_close(*found)


def test_eager_results_beside_out():
    """lse and max with gradients from lse alone; a learned value in another dtype, and one without influence."""
    q, k, v = qkv()
    t = torch.randn(2, generator=G).half().requires_grad_()
    u = rand(2)
    score = "param t: float[_]\nparam u: float[_]\nscore = where(u[h] > 9, score, score + t[h])"
    att = fk.compile("q > k", score, **NARROW)
    out, lse, top = att(q, k, v, t=t, u=u, return_lse=True, return_max=True)
    assert (out.requires_grad, lse.requires_grad, top.requires_grad) == (True, True, False)
    assert lse[0, 0, 0] == top[0, 0, 0] == -torch.inf
    lse[:, :, 1:].sum().backward()
    assert t.grad.dtype == torch.float16
    assert u.grad.tolist() == [0.0, 0.0]
    assert v.grad.abs().max() == 0.0
    assert q.grad[0, 0, 0].tolist() == [0.0] * 16


def test_eager_triton_calls_refuse_bad_dtypes_and_sizes():
    q, k, v = qkv(grad=False)
    with pytest.raises(LoweringError, match="float64 runs on the CPU backends"):
        fk.attention(q.double(), k.double(), v.double(), "causal", backend="triton")
    with pytest.raises(BackendError, match="takes the bits of bfloat16 for integers"):
        fk.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), "causal", backend="triton")
    with pytest.raises(ShapeError, match="a head size is zero"):
        fk.attention(q[..., :0], k[..., :0], v, "causal", backend="triton")
    for empty in (q[:, :, :0], q[:0]):
        assert fk.attention(empty, empty, empty, "causal", backend="triton").shape == empty.shape


def test_eager_triton_stages_show_the_running_kernels(monkeypatch, capsys):
    """What is shown is what runs: the source of every kernel of the call."""
    monkeypatch.setenv("FRISKET_SHOW", "source,target")
    att = fk.compile("causal & window(9)", **NARROW)
    q, k, v = qkv(grad=False)
    att(q, k, v)
    shown = capsys.readouterr().err
    assert "def attention_forward(" in shown
    assert "triton: 16 queries x 16 keys" in shown
    stages = att.stages(q, k, v, backend="triton")
    assert stages.source == att.source("triton", q, k, v)
    assert stages.source in shown
    assert "def attention_dkv(" in stages.source
    score = "param c: float\nscore = c * tanh(score / c)"
    fk.compile("causal", score, **NARROW)(q, k, v, c=torch.tensor(2.0, requires_grad=True))
    shown = capsys.readouterr().err
    assert shown.count("s0 = tl.load(s0).to(tl.float32)") == 3  # the scalar, loaded by the forward, dq, and dk and dv


@pytest.mark.parametrize("text", ["causal & dilated(32, 4)", "causal & same(doc)", "causal & k % 4 == 0", "t[q, k]"])
def test_triton_calls_in_an_order_equal_plain_ones(text):
    """Tokens in an order by a formula, by a table, of keys alone, and by a graph; shared heads, sinks and dropout."""
    rng = np.random.default_rng(0)
    band = abs(np.subtract.outer(np.arange(64), np.arange(64))) <= 4
    shuffled = rng.permutation(64)
    tables = {"doc": rng.permutation(np.arange(64) % 4), "t": band[shuffled][:, shuffled]}
    given = {n: x for n, x in tables.items() if n in fk.mask(text).unbound}
    order = fk.reorder(text, 64, block=(16, 16), moving=0, **given)
    assert order.gain > 1
    arrays, sinks = qkv(64, 2, 1), rand(2)
    options = {"tile": (16, 16), "sinks": sinks, "dropout": 0.2, **given}
    found = []
    for att in (
        fk.compile(text, ALIBI, backend="triton", reorder=order, **options),
        fk.compile(text, ALIBI, **options),
    ):
        out, lse = att(*arrays, slope=torch.tensor([0.1, 0.2]), seed=3, return_lse=True)
        found.append((out, lse, *grads(out, lse, (*arrays, sinks))))
    close(*found, 2e-5)
