"""Graphs without gradients hold the operator that returns the output alone."""

import pytest
import torch
from support.tiers import default_only

import frisket as fk
from frisket.flex import create_block_mask, flex_attention
from frisket.runtime.machine import cpp_build
from frisket.runtime.torch import operators  # noqa: F401, registers operators

from .test_torch_repeated import paths

ALONE, SAVING = torch.ops.frisket.attend_alone.default, torch.ops.frisket.attend.default
ALIBI = "param slope: float[_]\nscore = score + slope[h] * (k - q)"
G = torch.Generator().manual_seed(0)


def drawn(h=4, hkv=2, s=40, d=16, e=8):
    return [torch.randn(2, n, s, m, generator=G) for n, m in ((h, d), (hkv, d), (hkv, e))]


class Seen:
    """A backend of torch.compile that runs what AOT wrote, and says which operators of frisket it has seen."""

    def __init__(self):
        self.graphs, self.operators = 0, []

    def __call__(self, graph, inputs):
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def inner(traced, _):
            self.operators += [n.target for n in traced.graph.nodes if n.target in (ALONE, SAVING)]
            return make_boxed_func(traced)

        self.graphs += 1
        return aot_autograd(fw_compiler=inner)(graph, inputs)


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()


def flex(score_mod, doc):
    mask = create_block_mask(lambda b, h, i, j: (i >= j) & (doc[i] == doc[j]), None, None, 40, 40, device="cpu")
    return lambda q, k, v: flex_attention(q, k, v, score_mod, mask, enable_gqa=True)


DOC, SLOPE = torch.arange(40) // 7, torch.rand(4, generator=G)
CAUSAL, SINKS, DROPOUT = fk.compile("causal"), fk.compile("causal", sinks=0.5), fk.compile("causal", dropout=0.3)
VALUES, PLACE = fk.compile("causal & same(doc) & window(w)", ALIBI), fk.compile("q + 3 >= 2 * k")
CALLS = {
    "mask": lambda q, k, v: CAUSAL(q, k, v),
    "sinks": lambda q, k, v: SINKS(q, k, v),
    "values": lambda q, k, v: VALUES(q, k, v, doc=DOC, slope=SLOPE, w=9),
    "dropout": lambda q, k, v: DROPOUT(q, k, v, seed=11),
    "layout": lambda q, k, v: CAUSAL(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), layout="bshd"),
    "place": lambda q, k, v: PLACE(q, k, v, origin=(0, 0, 5, 2), sizes=(2, 4, 50, 60)),
    "empty": lambda q, k, v: CAUSAL(q, k[:, :, :0], v[:, :, :0]),
    "function": lambda q, k, v: fk.attention(q, k, v, "causal & window(w)", w=5),
    "flex": flex(lambda s, b, h, i, j: s + SLOPE[h] * (j - i), DOC),
}
# torch 2.11 does not say that it compiles while it writes what flex_attention becomes
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
ALONE_IN = {call: SAVING if OLD and call == "flex" else ALONE for call in CALLS}


ELSEWHERE = ("dropout", "layout", "function")  # in graphs of test_torch_compile.py too


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("call", "mode"),
    [*((call, torch.no_grad) for call in CALLS if call not in ELSEWHERE), ("values", torch.inference_mode),
     *(pytest.param(call, torch.no_grad, marks=pytest.mark.exhaustive) for call in ELSEWHERE)],
)  # fmt: skip
def test_results_are_those_of_the_eager_call(call, mode):
    seen, run = Seen(), CALLS[call]
    compiled = torch.compile(run, backend=seen, fullgraph=True)
    with mode():
        for _ in range(3):  # the third call is one like one before
            arrays = drawn()
            out, want = compiled(*arrays), run(*arrays)
            assert out.shape == want.shape
            torch.testing.assert_close(out, want, rtol=0, atol=0)
    assert seen.operators == [ALONE_IN[call]]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("call", ["values", "flex"])
def test_with_gradients_the_graph_is_another(call):
    seen, run = Seen(), CALLS[call]
    compiled = torch.compile(run, backend=seen, fullgraph=True)
    arrays = [x.requires_grad_() for x in drawn()]
    with torch.no_grad():
        compiled(*arrays)
    found = torch.autograd.grad(compiled(*arrays).square().sum(), arrays, allow_unused=True)
    want = torch.autograd.grad(run(*arrays).square().sum(), arrays, allow_unused=True)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)
    assert seen.operators == [ALONE_IN[call], SAVING]


LEARNED = ("q", "k", "v", "sinks", "values", "captured")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("learned", default_only(LEARNED, "q", "sinks", "values", "captured"))
def test_graph_saves_for_backward_if_any_input_learns(learned):
    seen, given = Seen(), dict(zip("qkv", drawn(), strict=True), sinks=torch.rand(4), values=torch.rand(4))
    given["captured"] = torch.rand(4)
    given[learned].requires_grad_()
    att = fk.compile("causal", lambda s, b, h, q, k: s + given["captured"][h] * (k - q))

    def run(q, k, v, sinks, values, captured):
        return att(q, k, v, sinks=sinks) + fk.attention(q, k, v, "causal", ALIBI, slope=values)

    compiled = torch.compile(run, backend=seen, fullgraph=True)
    found, want = (torch.autograd.grad(f(**given).square().sum(), given[learned]) for f in (compiled, run))
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_gradients_by_torch_func_are_never_silently_zero(mode):
    """torch.func.grad looks at gradients without requires_grad, in graphs too."""
    compiled = torch.compile(torch.func.grad(lambda q: CAUSAL(q, q, q).square().sum()), backend="eager", fullgraph=True)
    q = drawn()[0]
    with mode():
        found = compiled(q)
    x = q.clone().requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(CAUSAL(x, x, x).square().sum(), x)[0])


def test_requires_grad_inside_a_graph_gives_gradients():
    def run(q, k, v):
        x = q.detach().requires_grad_()
        return torch.autograd.grad(CAUSAL(x, k, v).square().sum(), x)[0]

    arrays = drawn()
    torch.testing.assert_close(torch.compile(run, backend="aot_eager")(*arrays), run(*arrays))


@pytest.mark.parametrize(
    "asked", [{"return_lse": True}, pytest.param({"return_max": True}, marks=pytest.mark.exhaustive)]
)
def test_lse_and_max_come_from_the_saving_operator(asked):
    att, seen, arrays = fk.compile("causal"), Seen(), drawn()
    with torch.no_grad():
        found = torch.compile(lambda q, k, v: att(q, k, v, **asked), backend=seen, fullgraph=True)(*arrays)
        torch.testing.assert_close(found, att(*arrays, **asked))
    assert seen.operators == [SAVING]


def test_flex_attention_returns_rows_where_they_are_asked_for():
    seen, arrays = Seen(), drawn()
    with torch.no_grad():
        run = lambda q, k, v: flex_attention(q, k, v, enable_gqa=True, return_lse=True)  # noqa: E731
        torch.testing.assert_close(torch.compile(run, backend=seen, fullgraph=True)(*arrays), run(*arrays))
    assert seen.operators == [SAVING]


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_graph_can_be_trained(strict):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return fk.attention(q, k, v, "causal")

    arrays = drawn()
    with torch.no_grad():
        program = torch.export.export(Model(), tuple(arrays), strict=strict)
    assert SAVING in [n.target for n in program.graph.nodes]
    q = arrays[0].requires_grad_()
    found, want = (torch.autograd.grad(f(*arrays).square().sum(), q) for f in (program.module(), Model()))
    torch.testing.assert_close(found, want)


@pytest.mark.skipif(bool(cpp_build.reason()), reason=cpp_build.reason())
def test_eager_calls_in_between_compile_nothing_again():
    att, seen, arrays = fk.compile("causal", backend="native"), Seen(), drawn(e=16)
    run = torch.compile(lambda q, k, v: att(q, k, v), backend=seen, fullgraph=True)
    with torch.no_grad():
        run(*arrays)
        for _ in range(3):
            att(*arrays)
        run(*arrays)
    assert paths(att)
    assert seen.graphs == 1


def test_operator_without_gradients_passes_opcheck():
    q, k, v = drawn(h=2, hkv=2, s=12)
    spec = fk.compile("causal & window(w)", ALIBI, dropout=0.25, backend="aten").spec
    given = [torch.rand(2), torch.tensor(5)], [7], spec, ",tensor slope,tensor  seed,number w"
    torch.library.opcheck(ALONE, (q, k, v, torch.rand(2), *given))
    torch.library.opcheck(ALONE, (q.mT.contiguous().mT, k[:1, :1].expand(2, 2, 12, 16), v, None, *given))
