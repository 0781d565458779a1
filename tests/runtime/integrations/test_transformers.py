"""frisket as an attention implementation of transformers: what its models compute under eager attention."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

import transformers
from support import hf_models
from support.lowering import effort
from transformers import AutoModel, BartConfig, BeitConfig, BertConfig, DynamicCache, StaticCache, T5Config

import frisket as fk
from frisket.dsl.errors import MissingPackageError
from frisket.integrations.transformers import OLDEST, attention, register
from frisket.lowering import pipeline as bind
from frisket.runtime.machine.modules import pip_install

CALLS = {
    "plain": {},
    "left": {"attention_mask": hf_models.padded(left=5)},
    "right": {"attention_mask": hf_models.padded(right=5)},
    "holes": {"attention_mask": hf_models.padded(left=2, holes=(6, 7))},
    "both ways": {"is_causal": False},
    "packed": {"position_ids": hf_models.packed(7, 12, 5), "use_cache": False},
}
FEW = {("llama", "packed"), ("gemma2", "left"), ("gpt-oss", "plain"), ("gemma3", "right")}
CASES = [
    pytest.param(name, how, marks=() if (name, how) in FEW else pytest.mark.exhaustive)
    for name in hf_models.MODELS
    for how in CALLS
]


def trained(model, ids, given):
    """Logits of real tokens, and the gradients of a loss of them by parameter."""
    model.zero_grad()
    logits = model(ids, **given).logits
    real = given.get("attention_mask", torch.ones_like(ids)).bool()
    weights = torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)
    (logits[real] * weights).mean(-1).tanh().sum().backward()  # not saturated: rounding would be most of it
    return logits[real].detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def agree(eager, ours, ids, given, tolerance=2e-5):
    want, got = trained(eager, ids, given), trained(ours, ids, given)
    torch.testing.assert_close(got[0], want[0], rtol=tolerance, atol=tolerance)
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        most = float(gradient.abs().max())
        torch.testing.assert_close(got[1][name], gradient, rtol=0, atol=tolerance * (most + 1e-2), msg=name)


@pytest.mark.parametrize(
    ("version", "refused"), [("5.18.1", True), ("5.9.0.dev0", True), ("5.19.0", False), ("6.0", False)]
)
def test_an_older_transformers_is_refused(monkeypatch, version, refused):
    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.raises(MissingPackageError) if refused else nullcontext() as error:
        register()
    if refused:
        older = ".".join(version.split(".")[:2])
        assert str(error.value) == f"transformers {older} is older than 5.19: {pip_install('transformers')}"
    root = Path(__file__).resolve().parents[3]
    assert f'"transformers>={".".join(map(str, OLDEST))}"' in (root / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "how"), CASES)
def test_logits_and_gradients_are_those_of_eager(name, how):
    eager, ours = hf_models.pair(name)
    agree(eager, ours, hf_models.tokens(), CALLS[how])


class Largest(TorchDispatchMode):
    """The most elements that any tensor made under it has."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor) and not x._is_view():
                self.numel = max(self.numel, x.numel())
        return out


def test_transformers_models_never_make_a_dense_mask():
    length = 2048
    eager, ours = hf_models.pair("mistral", max_position_embeddings=length, num_hidden_layers=1)
    given = {"position_ids": hf_models.packed(1000, 1048), "use_cache": False}
    with torch.no_grad(), Largest() as ours_made:
        ours(hf_models.tokens(1, length), **given)
    assert ours_made.numel < length**2 // 2
    with torch.no_grad(), Largest() as eager_made:
        eager(hf_models.tokens(1, 256), **{**given, "position_ids": hf_models.packed(100, 156)})
    assert eager_made.numel >= 256**2


# -- caches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 5], ids=["whole", "padded"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    "name", ["gemma3", *[pytest.param(n, marks=pytest.mark.exhaustive) for n in hf_models.MODELS if n != "gemma3"]]
)
def test_generate_gives_the_tokens_of_eager(name, cache, left):
    eager, ours = hf_models.pair(name)
    ids, seen = hf_models.tokens(2, 11), hf_models.padded(left)[:, :11]
    how = {"attention_mask": seen, "max_new_tokens": 9, "do_sample": False, "cache_implementation": cache}
    assert torch.equal(ours.generate(ids, **how), eager.generate(ids, **how))


def test_chunks_after_chunks_are_the_whole():
    eager, ours = hf_models.pair("mistral")
    ids = hf_models.tokens()
    with torch.no_grad():
        want = eager(ids, use_cache=False).logits
        for cache in (DynamicCache(config=ours.config), StaticCache(config=ours.config, max_cache_len=32)):
            parts = [ours(part, past_key_values=cache).logits for part in ids.split([5, 9, 1, 9], 1)]
            torch.testing.assert_close(torch.cat(parts, 1), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("left", [0, 3], ids=["whole", "padded"])
def test_a_step_of_decoding_analyses_nothing(left):
    _, ours = hf_models.pair("llama", num_hidden_layers=1)
    ids, seen = hf_models.tokens(), hf_models.padded(left)
    cache = DynamicCache(config=ours.config)

    def step(i):
        how = {"attention_mask": seen[:, : i + 1]} if left else {}
        ours(ids[:, i : i + 1], past_key_values=cache, **how)

    with torch.no_grad():
        ours(ids[:, :10], past_key_values=cache, **({"attention_mask": seen[:, :10]} if left else {}))
        for i in (10, 11):
            step(i)
        before = bind.simplified_program.memo.info().misses
        with effort.at_most(9000):  # of which transformers' own are most
            step(12)
        assert bind.simplified_program.memo.info().misses == before  # all plans share a table


# -- training ---------------------------------------------------------------------------------------------------------


def test_gradient_checkpointing_and_dropout():
    _, ours = hf_models.pair("llama", attention_dropout=0.4)
    ids, given = hf_models.tokens(), CALLS["packed"]
    without = trained(ours, ids, given)
    ours.train()
    torch.manual_seed(3)
    want = trained(ours, ids, given)
    assert not torch.allclose(want[0], without[0], atol=1e-2)
    ours.gradient_checkpointing_enable()
    torch.manual_seed(3)
    got = trained(ours, ids, given)
    assert torch.equal(got[0], want[0])
    for name, gradient in want[1].items():
        torch.testing.assert_close(got[1][name], gradient, msg=name)


def test_dropout_is_that_of_frisket():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 9, 4) for h in (4, 2, 2))
    mask = read_mask(9)
    torch.manual_seed(5)
    out, none = attention(torch.nn.Module(), q, k, v, mask, dropout=0.5, scaling=0.3)
    assert none is None
    torch.manual_seed(5)
    want = fk.attention(q, k, v, "causal", scale=0.3, dropout=0.5)
    assert torch.equal(out, want.transpose(1, 2))


def read_mask(length):
    from frisket.integrations.transformers_masks import symbolic

    return symbolic(1, length, length)


@pytest.mark.exhaustive
def test_transformers_models_in_bfloat16_are_near_eager():
    eager, ours = hf_models.pair("gemma2")
    ids, given = hf_models.tokens(), CALLS["left"]
    with torch.no_grad():
        want = eager(ids, **given).logits[given["attention_mask"].bool()]
        low = {m: m.bfloat16()(ids, **given).logits[given["attention_mask"].bool()].float() for m in (eager, ours)}
    ours_off, eager_off = ((low[m] - want).abs().max() for m in (ours, eager))
    assert ours_off <= 2 * eager_off


# -- other models -----------------------------------------------------------------------------------------------------


def test_encoders_see_both_ways_up_to_padding():
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    eager, ours = hf_models.twins(AutoModel, BertConfig(vocab_size=hf_models.VOCABULARY, **small))
    ids, seen = hf_models.tokens(), hf_models.padded(right=5)
    with torch.no_grad():
        want, got = (m(ids, attention_mask=seen).last_hidden_state[seen.bool()] for m in (eager, ours))
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_cross_attention_and_position_biases(kind):
    if kind == "t5":
        config = T5Config(
            vocab_size=hf_models.VOCABULARY, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, dropout_rate=0.0
        )
    else:
        sizes = {f"{side}_{n}": 2 if "layers" in n else 24 if "ffn" in n else 4
                 for side in ("encoder", "decoder") for n in ("layers", "ffn_dim", "attention_heads")}  # fmt: skip
        config = BartConfig(vocab_size=hf_models.VOCABULARY, d_model=16, max_position_embeddings=64, **sizes)
    eager, ours = hf_models.twins(AutoModel, config)
    ids, seen, answer = hf_models.tokens(), hf_models.padded(right=5), hf_models.tokens(2, 9)
    found = []
    for model in (eager, ours):
        out = model(ids, attention_mask=seen, decoder_input_ids=answer, use_cache=False).last_hidden_state
        out.square().sum().backward()
        found.append((out.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=2e-5, atol=2e-5)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, rtol=1e-3, atol=2e-4, msg=name)


def test_images_under_learned_biases():
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes = {"image_size": 16, "patch_size": 4, "use_relative_position_bias": True, "drop_path_rate": 0.0}
    models = hf_models.twins(AutoModel, BeitConfig(hidden_dropout_prob=0.0, **small, **sizes))
    picture, found = torch.linspace(-1, 1, 3 * 16 * 16).reshape(1, 3, 16, 16), []
    for model in models:
        out = model(picture).last_hidden_state
        out.square().mean().backward()
        found.append((out, [p.grad for n, p in model.named_parameters() if "bias_table" in n]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("way", ["eager", pytest.param("graph", marks=pytest.mark.exhaustive)])
def test_a_sink_of_every_query(way):
    model = pytest.importorskip("transformers.models.inkling2.modeling_inkling2", reason="a model of transformers 5.23")
    torch.manual_seed(0)
    q, k, v, sinks = (torch.randn(2, *x, requires_grad=True) for x in ((4, 9, 4), (2, 9, 4), (2, 9, 4), (4, 9, 1)))
    module = torch.nn.Module().eval()
    module.num_key_value_groups = 2
    hidden = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    want = model.eager_attention_forward(module, q, k, v, hidden, 0.5, sinks=sinks)[0]
    ours = attention if way == "eager" else torch.compile(attention, backend="aot_eager")
    got = ours(module, q, k, v, read_mask(9), scaling=0.5, sinks=sinks)[0]
    torch.testing.assert_close(got, want)
    gradients = [torch.autograd.grad(x.square().sum(), (q, k, v, sinks)) for x in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


# -- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "how"), [("llama", "packed"), ("mistral", "left"), ("gemma2", "plain")])
def test_a_model_is_one_graph(name, how):
    eager, ours = hf_models.pair(name, num_hidden_layers=1 if name != "gemma2" else 2)
    given = {"use_cache": False, **CALLS[how]}
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    ids = hf_models.tokens()
    real = given.get("attention_mask", torch.ones_like(ids)).bool()
    want, got = eager(ids, **given).logits[real], compiled(ids, **given).logits[real]
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    want.square().sum().backward()
    got.square().sum().backward()
    gradients = {n: p.grad for n, p in eager.named_parameters()}
    for n, p in ours.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, gradients[n], rtol=1e-3, atol=1e-3, msg=n)


@pytest.mark.exhaustive
def test_steps_through_a_static_cache_are_one_graph():
    eager, ours = hf_models.pair("llama", num_hidden_layers=1)
    graphs = []
    compiled = torch.compile(ours, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)
    ids, cache = hf_models.tokens(), StaticCache(config=ours.config, max_cache_len=32)
    with torch.no_grad():
        want = eager(ids, use_cache=False).logits
        ours(ids[:, :10], past_key_values=cache)
        for i in range(10, 14):
            got = compiled(ids[:, i : i + 1], past_key_values=cache).logits[:, 0]
            torch.testing.assert_close(got, want[:, i], rtol=2e-5, atol=2e-5)
    assert len(graphs) == 1


def test_importing_frisket_imports_no_transformers():
    code = "import frisket, frisket.integrations, sys; print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
