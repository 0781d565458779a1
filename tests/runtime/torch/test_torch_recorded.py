"""Every way torch has of recording a function: what is recorded gives what the function gives, of other inputs too."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from support.native.compiler import needs_compiler
from support.native.shared import ALIBI
from support.tiers import default_only
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import frisket as fk
from frisket.caches.torch import KVCache
from frisket.dsl.errors import BackwardError
from frisket.flex import create_block_mask, flex_attention

S = 24
G = torch.Generator().manual_seed(0)
BIAS, DOC = torch.randn(S, S, generator=G), torch.arange(S) // 9
SLOPE = torch.nn.Parameter(torch.randn(2, generator=G))


def inputs(length=S):
    return [torch.randn(1, 2, length, 16, generator=G, requires_grad=True) for _ in range(3)]


@pytest.fixture(autouse=True)
def _native(monkeypatch):
    monkeypatch.setenv("FRISKET_BACKEND", "cpp")


class Module(torch.nn.Module):
    """`torch.export` takes modules."""

    def __init__(self, function):
        super().__init__()
        self.function, self.slope = function, SLOPE

    def forward(self, q, k, v):
        return self.function(q, k, v)


PLAIN = fk.compile("causal & window(7)")
BIASED = fk.compile("causal", ALIBI, slope=np.array([0.5, 0.125], np.float32))
LEARNED = fk.compile(lambda b, h, q, k: q >= k, lambda s, b, h, q, k: s + SLOPE[h] * (k - q), sinks=0.5)
DROPS, SAME = fk.compile("causal", dropout=0.5), fk.compile("causal & same(doc)")
PLAN = SAME.plan(S, S, 1, 2, doc=DOC)
BLOCKS = create_block_mask(lambda b, h, q, k: (q >= k) & (DOC[q] == DOC[k]), 1, 2, S, S, "cpu", BLOCK_SIZE=8)
CALLS = {
    "plain": lambda q, k, v: 2 * PLAIN(q, k, v),
    "numpy": lambda q, k, v: BIASED(q, k, v),
    "learned": lambda q, k, v: LEARNED(q, k, v, return_lse=True),
    "given": lambda q, k, v: SAME(q, k, v, doc=DOC),
    "planned": lambda q, k, v: SAME(q, k, v, plan=PLAN),
    "dropout": lambda q, k, v: DROPS(q, k, v, seed=7),
    "entry": lambda q, k, v: fk.attention(q, k, v, "causal", "softcap(w)", w=20.0, sinks=0.5, return_max=True),
    "entry of a lambda": lambda q, k, v: fk.attention(q, k, v, lambda q, k: q - k < 5, lambda score: score / 2),
    "flex": lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, q, k: s + BIAS[q, k], BLOCKS),
}
WAYS = {
    "real": lambda f, x: make_fx(f)(*x),
    "pre-dispatch": lambda f, x: make_fx(f, pre_dispatch=True)(*x),
    "fake": lambda f, x: make_fx(f, tracing_mode="fake", _allow_non_fake_inputs=True)(*x),
    "symbolic": lambda f, x: make_fx(f, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*x),
    "jit": lambda f, x: torch.jit.trace(Module(f), [t.detach() for t in x], check_trace=False),
    "fx": lambda f, x: torch.fx.symbolic_trace(Module(f)),
    "export": lambda f, x: torch.export.export(Module(f), tuple(x)).module(),
    "strict export": lambda f, x: torch.export.export(Module(f), tuple(x), strict=True).module(),
    "compile": lambda f, x: torch.compile(f, backend="aot_eager", fullgraph=True),
}
# what says no, and the words
REFUSED = {
    ("fx", "planned"): "leave out `plan`",
    ("fx", "flex"): "query is a Proxy\n  .* make_fx, torch.export or torch.compile",
    ("strict export", "planned"): "leave out `plan`",
    ("compile", "planned"): "leave out `plan`",
    ("strict export", "entry of a lambda"): "takes a mask, a score mod and a weight as texts",
    ("compile", "entry of a lambda"): "takes a mask, a score mod and a weight as texts",
    ("export", "entry of a lambda"): "make it outside, and use it there",
}
OPEN = ("plain", "learned", "dropout", "entry", "entry of a lambda")  # nothing they read has a length

OFTEN = ("plain", "numpy", "learned", "planned")


def in_every_run(way, name):
    return (
        name == "numpy"
        or (way, name) == ("jit", "flex")
        or (way in ("real", "jit", "fx") and (name in OFTEN or (way, name) in REFUSED))
    )


PAIRS = [
    pytest.param(way, name, marks=() if in_every_run(way, name) else pytest.mark.exhaustive)
    for way in WAYS
    for name in CALLS
]


def results(call, given):
    found = call(*given)
    found = found if isinstance(found, tuple) else (found,)
    return *found, *torch.autograd.grad(sum(x.square().sum() for x in found[:1]), given)


@needs_compiler
@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("way", "name"), PAIRS)
def test_recorded_functions_give_the_results_of_the_call(way, name):
    call = CALLS[name]
    if (way, name) in REFUSED:
        with pytest.raises(Exception, match=REFUSED[way, name]):
            WAYS[way](call, inputs())(*inputs())
        return
    held = WAYS[way](call, inputs())
    lengths = [S, S, S + 9] if name in OPEN and way not in ("symbolic", "export", "strict export") else [S, S]
    for length in lengths:
        given = inputs(length)
        torch.testing.assert_close(results(held, given), results(call, given))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in CALLS if ("compile", name) not in REFUSED])
def test_calls_compiled_by_inductor_give_their_results(name):
    compiled = torch.compile(CALLS[name], fullgraph=True)
    for length in [S, S, S + 9] if name in OPEN else [S, S]:
        given = inputs(length)
        torch.testing.assert_close(results(compiled, given), results(CALLS[name], given))


@needs_compiler
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_traced_module_is_kept_in_a_file(tmp_path):
    held = torch.jit.trace(Module(CALLS["learned"]), [x.detach() for x in inputs()], check_trace=False)
    torch.jit.save(held, tmp_path / "attention.pt")
    given = inputs(S + 5)
    torch.testing.assert_close(torch.jit.load(tmp_path / "attention.pt")(*given), CALLS["learned"](*given))


@needs_compiler
def test_script_calls_the_operator():
    """torch.jit.script reads Python, and refuses classes that are not its own; the operator it knows."""

    def scripted(q, k, v, spec: str):
        return torch.ops.frisket.attend(q, k, v, None, [], [], spec, "")[0]

    given = inputs()
    deprecated = (DeprecationWarning, FutureWarning)  # of torch 2.13 and 2.14
    with pytest.warns(deprecated, match="torch.jit.script"):
        held = torch.jit.script(scripted)
    torch.testing.assert_close(results(lambda *x: held(*x, PLAIN.spec), given), results(PLAIN, given))
    with pytest.warns(deprecated, match="script"), pytest.raises(ValueError, match="return PLAIN"):
        torch.jit.script(called)


def called(q, k, v):
    return PLAIN(q, k, v)


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("way", ["real", "symbolic", "jit"])
def test_a_step_of_a_cache(way):
    """What C++ writes into a cache nobody would see."""
    cache = KVCache.create(1, 8, 2, 16)
    q, k, v = (x.detach()[:, :, :3] for x in inputs())

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cache = cache

        def forward(self, q, k, v):
            return self.cache.attention(PLAIN, q, k, v, [3])

    if way == "symbolic":
        with pytest.raises(Exception, match="convert all Tensors to FakeTensors"):
            make_fx(Step(), tracing_mode="symbolic")(q, k, v)
        return
    before = {n: x.clone() for n, x in cache.state_dict().items()}
    held = make_fx(Step())(q, k, v) if way == "real" else torch.jit.trace(Step(), (q, k, v), check_trace=False)
    cache.load_state_dict(before)
    again = [x.detach()[:, :, :3] for x in inputs()]
    found = held(*again)
    cache.load_state_dict(before)
    torch.testing.assert_close(found, Step()(*again))


def test_plan_for_other_arrays_is_refused_under_torch_modes():
    with FlopCounterMode(display=False), pytest.raises(fk.ShapeError, match="the plan is for"):
        SAME(*inputs(S + 1), plan=PLAN)
    with FlopCounterMode(display=False), pytest.raises(fk.ParameterError, match="the plan is for another mask"):
        PLAIN(*inputs(), plan=PLAN)
    with FlopCounterMode(display=False), pytest.raises(fk.ParameterError, match="holds the values of all parameters"):
        SAME(*inputs(), plan=PLAN, doc=DOC)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU of NVIDIA")
def test_a_cuda_graph_is_replayed_on_other_inputs():
    held = [x.detach().cuda() for x in inputs()]
    bias, doc = BIAS.cuda(), DOC.cuda()
    att = fk.compile("same(doc)", "score + bias[q, k]", backend="triton")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        att(*held, bias=bias, doc=doc)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = att(*held, bias=bias, doc=doc)
    for x in (*held, bias):
        x.copy_(torch.randn(x.shape, generator=G))
    doc.copy_((torch.arange(S) + 3) // 7)
    graph.replay()
    torch.testing.assert_close(found, att(*held, bias=bias, doc=doc))


@needs_compiler
@pytest.mark.parametrize(
    "name", default_only(["plain", "learned", "planned", "flex", "entry of a lambda"], "plain", "learned", "planned")
)
def test_policies_of_checkpoints_see_the_operator(name):
    """Selective activation checkpointing in eager mode: what is saved is not computed again."""
    seen = []

    def policy(ctx, op, *args, **more):
        seen.append((ctx.is_recompute, op))
        kept = op is torch.ops.frisket.attend.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def checked(q, k, v):
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(CALLS[name], q, k, v, use_reentrant=False, context_fn=contexts)

    given = inputs()
    torch.testing.assert_close(results(checked, given), results(CALLS[name], given))
    assert (False, torch.ops.frisket.attend.default) in seen


def dual(f, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, x))).tangent


def known(f, x):
    """A graph that has run without a tangent."""
    compiled = torch.compile(f, backend="eager")
    compiled(x)
    return dual(compiled, x)


def fake(f, x):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return dual(f, mode.from_tensor(x))


def watched(f, x):
    with FlopCounterMode(display=False):
        return dual(f, x)


FORWARD_MODES = {
    "compile(jvp)": lambda f, x: torch.compile(lambda y: torch.func.jvp(f, (y,), (y,)), backend="aot_eager")(x),
    "compile(jacfwd)": lambda f, x: torch.compile(torch.func.jacfwd(f), backend="aot_eager")(x),
    "compile(dual)": lambda f, x: torch.compile(lambda y: dual(f, y), backend="aot_eager")(x),
    "dual(compile)": known,
    "linearize": lambda f, x: torch.func.linearize(f, x),
    "fake": fake,
    "meta": lambda f, x: dual(f, x.to("meta")),
    "mode": watched,
}


SEEN = {x: create_block_mask(lambda b, h, q, k: q >= k, 1, 2, 8, 8, "cpu", BLOCK_SIZE=8).to(x) for x in ("cpu", "meta")}
TANGENTS = {
    "plain": PLAIN,
    "learned": lambda q, k, v: LEARNED(q, k, v, return_lse=True)[0],
    "flex": lambda q, k, v: flex_attention(q, k, v, block_mask=SEEN[q.device.type]),
}
RARE = [(x, torch.enable_grad) for x in FORWARD_MODES if "compile" in x]  # they compile for seconds
RARE += [(x, torch.no_grad) for x in ("compile(jacfwd)", "compile(dual)", "dual(compile)")]


@needs_compiler
@pytest.mark.parametrize(
    ("way", "grad"),
    [pytest.param(way, g, marks=pytest.mark.exhaustive if (way, g) in RARE else ())
     for way in FORWARD_MODES for g in (torch.no_grad, torch.enable_grad)],
)  # fmt: skip
def test_tangents_are_right_and_never_silently_zero(way, grad):
    x = torch.randn(1, 2, 8, 16)
    for name, call in TANGENTS.items():
        torch._dynamo.reset()

        def f(y, call=call):
            return call(y, y, y).sum()

        want = torch.func.grad(f)(x)
        with grad():
            if way == "compile(dual)" and name != "plain" and (name == "flex" or grad is torch.enable_grad):
                # a graph of AOTAutograd: in its operator we refuse, where it has gradients torch does
                with pytest.raises((BackwardError, NotImplementedError)):
                    FORWARD_MODES[way](f, x)
                continue
            result = FORWARD_MODES[way](f, x)
        if way in ("fake", "meta"):
            assert result.shape == ()
        else:
            tangent = {"compile(jvp)": lambda r: r[1], "linearize": lambda r: r[1](x)}.get(way, lambda r: r)(result)
            torch.testing.assert_close(tangent, want if "jacfwd" in way else (want * x).sum(), rtol=1e-4, atol=1e-4)


@needs_compiler
def test_attention_beside_tangents_has_its_values():
    x = torch.randn(1, 2, 8, 16)
    f = lambda y: 2 * y + PLAIN(y.detach(), x, x)  # noqa: E731
    want = f(x), 2 * x
    torch.testing.assert_close(torch.func.jvp(f, (x,), (x,)), want)
    out, push = torch.func.linearize(f, x)
    torch.testing.assert_close((out, push(x)), want)
    torch.testing.assert_close(torch.compile(lambda y: torch.func.jvp(f, (y,), (y,)), backend="aot_eager")(x), want)


@needs_compiler
@pytest.mark.parametrize("compiled", [False, True])
def test_tangents_of_cotangents_are_right(compiled):
    f = torch.compile(PLAIN, backend="aot_eager") if compiled else PLAIN
    q, k, v = inputs()
    pull = torch.func.vjp(f, q, k, v)[1]
    one = torch.ones_like(q)
    want = pull(one)[0]  # gradients are linear in cotangents
    for _ in range(3):  # anew, prepared, repeated
        out = f(q, k, v)
        torch.testing.assert_close(dual(lambda x, out=out: torch.autograd.grad(out, q, x)[0], one), want)
    torch.testing.assert_close(torch.func.jvp(lambda x: pull(x)[0], (one,), (one,))[1], want)


class Held(torch.Tensor):
    """A tensor that holds another one and has no memory, as DTensors."""

    @staticmethod
    def __new__(cls, x):
        made = torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, strides=x.stride())
        made.held = x
        return made

    @classmethod
    def __torch_dispatch__(cls, call, types, args, kwargs=None):
        bare = tree_map_only(cls, lambda x: x.held, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, call(*bare[0], **bare[1]))


def plain(x):
    return x.held if type(x) is Held else x


ONE = torch.linspace(-1, 1, 4)
BESIDE = {  # which of the arguments have no memory: they ended the process, or were read where nothing is
    "k": ("causal", None, {}),
    "v": ("causal", None, {}),
    "sinks": ("causal", None, {"sinks": ONE}),
    "slopes": ("causal", ALIBI, {"slope": ONE}),
    "documents": ("causal & same(doc)", None, {"doc": torch.arange(40) // 7}),
    "a number": ("causal", "score * c + q", {"c": torch.tensor(0.5)}),
}


@needs_compiler
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "moved"),
    [pytest.param(n, moved, marks=pytest.mark.exhaustive if moved and n not in "kv" else ())
     for n in BESIDE for moved in (False, True)],
)  # fmt: skip
def test_tensors_without_memory_beside_plain_queries(name, moved):
    mask, score, given = BESIDE[name]
    mask, length = ("causal & k % 4 == 0", 192) if moved else (mask, 40)
    given = {} if moved and name == "documents" else given
    att = fk.compile(mask, score, reorder=fk.reorder(mask, length, block=(16, 16), moving=0) if moved else None)
    qkv = torch.randn(3, 2, 4, length, 16, generator=torch.Generator().manual_seed(0))
    want, some = att(*qkv, **given), [Held(x) if n == name else x for n, x in zip("qkv", qkv)]
    for _ in range(2):
        torch.testing.assert_close(plain(att(*some, **{n: Held(x) for n, x in given.items()})), want)


@needs_compiler
@pytest.mark.parametrize("name", ["k", "v", "slopes"])
def test_flex_of_tensors_without_memory_beside_plain_queries(name):
    qkv = torch.randn(3, 2, 4, 40, 16, generator=torch.Generator().manual_seed(0))
    some, outs = [Held(x) if n == name else x for n, x in zip("qkv", qkv)], []
    blocks = create_block_mask(lambda b, h, q, k: q >= k, 2, 4, 40, 40, "cpu")
    for given, held in ((qkv, ONE), (some, Held(ONE) if name == "slopes" else ONE)):
        alibi = lambda x, b, h, q, k, held=held: x + held[h] * (k - q)  # noqa: E731
        outs.append(plain(flex_attention(*given, alibi, blocks)))
    torch.testing.assert_close(*outs)


def test_tables_of_masks_and_origins_have_memory():
    doc = Held(torch.arange(40) // 7)
    with pytest.raises(fk.ParameterError, match="`doc` is a Held; give a plain tensor"):
        fk.mask("doc[q] == doc[k]", doc=doc)
    with pytest.raises(fk.ParameterError, match="`origin` is a Held"):
        fk.attention(*torch.ones(3, 1, 1, 40, 8), "causal", origin=(0, 0, Held(torch.tensor([3])), 0))


@needs_compiler
@pytest.mark.parametrize("score", [None, pytest.param("score * 2", marks=pytest.mark.exhaustive)])
def test_a_cotangent_without_memory_is_refused(score):
    att, (q, k, v) = fk.compile("causal", score), inputs()
    for _ in range(3):  # anew, prepared, repeated
        out = att(q, k, v)
        one = torch.ones_like(out)
        with pytest.raises(BackwardError, match="its forward ran before"):
            torch.autograd.grad(out, q, Held(one), retain_graph=True)
        torch.autograd.grad(out, q, torch.nn.Parameter(one))


@pytest.mark.exhaustive
def test_a_step_of_a_cache_with_tensors_without_memory():
    att, outs = fk.compile("causal", ALIBI), []
    q, k, v = torch.randn(3, 1, 4, 9, 16, generator=torch.Generator().manual_seed(0))
    for put in (lambda x: x, Held):
        cache = KVCache.create(batch=1, capacity=16, kv_heads=4, head_dim=16)
        for new in (slice(8), slice(8, 9)):
            given = {"slope": put(ONE), "sinks": put(ONE)}
            out = cache.attention(att, *(x[:, :, new] for x in (q, k, v)), **given)
        outs.append(plain(out))
    torch.testing.assert_close(*outs)
