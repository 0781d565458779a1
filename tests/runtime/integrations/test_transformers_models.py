"""Models of transformers that do more with attention than to call it: those that choose keys, compute with their mask,
or compute attention themselves."""

import warnings
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from support import hf_models, hf_tiny
from support.tiers import default_only
from transformers import (
    AlignTextModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    ClapTextModel,
    DynamicCache,
    masking_utils,
)

import frisket as fk
from frisket import ParameterError
from frisket.integrations.transformers import attention, register
from frisket.integrations.transformers_masks import symbolic


@pytest.fixture(autouse=True, scope="module")
def registered():
    register()


LENGTH = hf_models.LENGTH
IMAGES = {"minimax_m3_vl"}


def pair(kind, **changes):
    config = next(hf_tiny.configs(kind, changes))
    return hf_models.twins(AutoModelForImageTextToText if kind in IMAGES else AutoModelForCausalLM, config)


def trained(model, ids, seen):
    logits = model(ids, attention_mask=seen, use_cache=False).logits[seen.bool()]
    (logits.tanh() * torch.linspace(-1, 1, logits.shape[-1])).mean().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


# -- keys that a model chooses ----------------------------------------------------------------------------------------

CHOOSING = {
    "deepseek_v32": {"num_key_value_heads": 4, "index_topk": 6},  # keys of an indexer
    "glm_moe_dsa": {"num_key_value_heads": 4, "index_topk": 6},
    "axk2": {"num_key_value_heads": 4, "index_topk": 6},
    "hy_v4": {},
    "minimax_m3_vl": {},  # blocks of keys
    "doge": {"keep_window_size": 6},  # a mask of its own, from values
    "deepseek_v4": {},  # compressed keys beside the window's
}


@pytest.mark.parametrize("kind", default_only(CHOOSING, "deepseek_v32", "doge", "deepseek_v4"))
@pytest.mark.parametrize("side", default_only(["left", "right"], "left"))
def test_models_that_choose_keys(kind, side):
    if (kind, side) == ("minimax_m3_vl", "left"):
        side = "none"  # its indexer reads tokens of padding, whose states differ
    eager, ours = pair(kind, **CHOOSING[kind])
    ids, seen = hf_models.tokens(), hf_models.padded(**({} if side == "none" else {side: 5}))
    want, got = trained(eager, ids, seen), trained(ours, ids, seen)
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-4)
    most = max(float(g.abs().max()) for g in want[1].values())
    for name, gradient in want[1].items():
        torch.testing.assert_close(got[1][name], gradient, rtol=1e-3, atol=1e-4 * most, msg=name)


# -- models that compute with their mask, or without any ---------------------------------------------------------------


def test_encoder_without_is_causal_sees_both_ways():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    torch.testing.assert_close(attention(torch.nn.Module(), q, k, v, None)[0], fk.attention(q, k, v).transpose(1, 2))
    from transformers.models.bridgetower import (
        modeling_bridgetower,
    )  # for eager attention alone; says causal, and is not

    module = type("Layer", (torch.nn.Module,), {"is_causal": True, "__module__": modeling_bridgetower.__name__})()
    torch.testing.assert_close(attention(module, q, k, v, None)[0], fk.attention(q, k, v).transpose(1, 2))


def test_a_mask_of_one_row_is_for_all_queries():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 6, 4) for _ in range(3))
    seen = hf_models.padded(right=2)[:, 18:].bool()
    how = {"mask_function": masking_utils.bidirectional_mask_function, "attention_mask": seen}
    got = attention(torch.nn.Module(), q, k, v, symbolic(2, 1, 6, **how))[0]
    want = fk.attention(q, k, v, "seen[b, k]", seen=seen).transpose(1, 2)
    torch.testing.assert_close(got, want)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["align_text_model", "clap_text_model"])
def test_encoders_without_padding_are_those_of_eager(kind):
    model = {"align_text_model": AlignTextModel, "clap_text_model": ClapTextModel}[kind]
    eager, ours = hf_models.twins(SimpleNamespace(from_config=model._from_config), next(hf_tiny.configs(kind)))
    with torch.no_grad():
        got, want = (m(hf_models.tokens()).last_hidden_state for m in (ours, eager))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_mask_that_is_computed_with_is_that_of_sdpa():
    """Or, in models without, that of eager attention."""
    register()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_models.config("llama"), attn_implementation="frisket")
    seen = hf_models.padded(left=3)[:, :6].bool()
    how = {"mask_function": masking_utils.sliding_window_causal_mask_function(3), "attention_mask": seen}
    made = symbolic(2, 6, 6, config=model.config, **how)
    assert made.dtype == torch.bool
    assert torch.equal(~made, ~masking_utils.sdpa_mask(2, 6, 6, allow_is_causal_skip=False, **how))
    made, want = symbolic(2, 6, 6, **how), masking_utils.eager_mask(2, 6, 6, **how)
    scores = torch.randn(2, 1, 6, 6)
    assert (made.size(), made.size(-1), made.dtype) == ((2, 1, 6, 6), 6, torch.float32)
    assert not hasattr(made, "seq_lengths")  # asking makes no array
    assert "array" not in made.cached
    for use in (
        lambda m: scores + m,
        lambda m: m + scores,
        lambda m: m[:, :, :, :3] != 0,
        lambda m: m.masked_fill(scores > 0, -1.0),
        lambda m: torch.where(scores > 0, m, 0.0),
        lambda m: torch.cat([m, scores], dim=-1),
        lambda m: m.bool(),
    ):
        assert torch.equal(use(made), use(want))
    with pytest.raises(ParameterError, match=r"config\.frisket_mask is set, and this model computes with its own"):
        symbolic(2, 6, 6, config=type("Config", (), {"frisket_mask": "causal"})(), **how)[:, :, :, :3]


@pytest.mark.parametrize(
    "kind", default_only(["openai-gpt", "cpmant", "bloom", "mpt", "falcon", "gpt_neo"], "bloom", "falcon")
)
def test_model_with_internal_attention_warns_and_takes_no_mask(kind):
    warns_and_takes_no_mask(kind)


@pytest.mark.parametrize("kind", default_only(["gptj", "codegen"], "gptj"))
def test_model_that_newer_transformers_dispatch_equals_eager(kind):
    """transformers 5.23 computes it itself, 5.24 asks."""
    if "ALL_ATTENTION_FUNCTIONS" not in vars(import_module(f"transformers.models.{kind}.modeling_{kind}")):
        warns_and_takes_no_mask(kind)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eager, ours = pair(kind)
    ids, seen = hf_models.tokens(), hf_models.padded(left=5)
    want, got = trained(eager, ids, seen), trained(ours, ids, seen)
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-4)
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        torch.testing.assert_close(got[1][name], gradient, rtol=1e-3, atol=1e-4, msg=name)
    with torch.no_grad():
        whole = ours(ids).logits
        ours.config.frisket_mask = "causal & window(4)"
        near = ours(ids).logits
    assert torch.allclose(near[:, :4], whole[:, :4], atol=1e-5)
    assert not torch.allclose(near, whole)


def warns_and_takes_no_mask(kind):
    register()
    config = next(hf_tiny.configs(kind))
    with pytest.warns(UserWarning, match="'frisket' is not used by .*, which computes attention itself: it has taken"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="frisket").eval()
    assert model.config._attn_implementation == ("sdpa" if kind == "falcon" else "eager")
    with torch.no_grad():
        assert model(hf_models.tokens()).logits.isfinite().all()
        model.config.frisket_mask = "causal & window(4)"
        with pytest.raises(ParameterError, match=r"config\.frisket_mask is set, and no attention of .* reads it"):
            model(hf_models.tokens())


def test_a_model_with_a_part_that_computes_attention_itself():
    with pytest.warns(UserWarning, match="GitSelfAttention computes what 'eager' does"):
        eager, ours = pair("git")
    ids, seen = hf_models.tokens(), hf_models.padded(left=5)
    want, got = trained(eager, ids, seen), trained(ours, ids, seen)
    torch.testing.assert_close(got[0], want[0])
    ours.config.frisket_mask = "causal & window(4)"
    with pytest.raises(ParameterError, match="frisket_mask"):
        ours(ids)


def test_transformers_models_give_no_attention_weights():
    eager, ours = hf_models.pair("llama", num_hidden_layers=1)
    ids = hf_models.tokens()
    with pytest.warns(UserWarning, match="gives None for output_attentions=True"), torch.no_grad():
        found = ours(ids, output_attentions=True)
    eager.set_attn_implementation("sdpa")
    assert found.attentions == eager(ids, output_attentions=True).attentions
    torch.testing.assert_close(found.logits, eager(ids).logits, rtol=1e-4, atol=1e-4)


def columns_of(weights, kv_heads):
    """Weights [batch, heads, q_len, kv_len], summed over queries and the query heads of a key head."""
    return weights.sum(2).unflatten(1, (kv_heads, -1)).sum(2)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt-oss"])
def test_columns_stand_in_place_of_attention_weights(kind):
    eager, ours = hf_models.pair(kind)
    ours.config.frisket_columns = True
    ids, more = hf_models.tokens(), {"attention_mask": hf_models.padded(right=5)}
    results = []
    for model in (eager, ours):
        out = model(ids, output_attentions=True, **more)
        results.append(out.attentions if model is ours else [columns_of(x, 2) for x in out.attentions])
        sum(x.square().sum() for x in results[-1]).backward()
    for theirs, columns in zip(*results, strict=True):
        torch.testing.assert_close(columns, theirs, rtol=1e-4, atol=1e-4)
    weights = [next(m.model.layers[0].self_attn.q_proj.parameters()).grad for m in (eager, ours)]
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        assert ours(ids).attentions is None


def test_columns_of_steps_cover_the_keys_of_a_cache():
    eager, ours = hf_models.pair("llama")
    ours.config.frisket_columns = True
    how = {"max_new_tokens": 3, "do_sample": False, "output_attentions": True, "return_dict_in_generate": True}
    theirs, steps = (m.generate(hf_models.tokens(), pad_token_id=0, **how).attentions for m in (eager, ours))
    for weights, columns in zip(theirs, steps, strict=True):
        for of_layer, sums in zip(weights, columns, strict=True):
            torch.testing.assert_close(sums, columns_of(of_layer, 2), rtol=1e-4, atol=1e-4)


def test_a_step_after_eviction_reads_the_tokens_that_are_left():
    """SnapKV with a choice for each key head, as in docs/statistics.md; eager attention has a mask for each layer."""
    eager, ours = hf_models.pair("llama")
    ours.config.frisket_columns = True
    ids, token = hf_models.tokens(batch=1), torch.tensor([[5]])
    full, evicted = (DynamicCache(config=m.config) for m in (eager, ours))
    with torch.no_grad():
        eager(ids, past_key_values=full)
        ours(ids[:, :18], past_key_values=evicted)
        sums = ours(ids[:, 18:], past_key_values=evicted, output_attentions=True).attentions
        for layer, columns, theirs in zip(evicted.layers, sums, eager.model.layers, strict=True):
            path = torch.cat([columns[..., :18].topk(5).indices, torch.arange(18, 24).expand(1, 2, 6)], -1)
            layer.keys, layer.values = (x.take_along_dim(path[..., None], 2) for x in (layer.keys, layer.values))
            hidden = torch.full((1, 2, 1, 25), -torch.inf).index_fill_(-1, torch.tensor([24]), 0)
            hidden = hidden.scatter(-1, path[:, :, None], 0).repeat_interleave(2, 1)
            hook = lambda _, args, kwargs, mask=hidden: (args, kwargs | {"attention_mask": mask})  # noqa: E731
            theirs.self_attn.register_forward_pre_hook(hook, with_kwargs=True)
        want = eager(token, past_key_values=full).logits
        out = ours(token, past_key_values=evicted, position_ids=torch.tensor([[24]])).logits
    assert evicted.get_seq_length() == 12
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)


def test_columns_of_a_config_are_refused_where_none_are():
    _, ours = hf_models.pair("llama", num_hidden_layers=1)
    for columns, changes, says in (
        ("all", {}, "is 'all'; it is True or False"),
        (True, {"frisket_weight": "relu2"}, "frisket_weight replaces the softmax"),
    ):
        ours.config.update({"frisket_columns": columns, **changes})
        with pytest.raises(ParameterError, match=says), torch.no_grad():
            ours(hf_models.tokens(), output_attentions=True)


def test_user_mask_is_refused_where_the_model_chooses_keys():
    _, ours = pair("minimax_m3_vl")
    ours.config.text_config.frisket_mask = "causal & window(4)"
    with pytest.raises(ParameterError, match="this model chooses keys under its own mask"), torch.no_grad():
        ours(hf_models.tokens())


def test_a_mask_on_a_config_that_no_attention_reads():
    for kind, says in (
        ("llava", "set it on the part that has attention: .*config.text_config"),
        ("mamba", "leave it out"),
    ):
        made = AutoModelForImageTextToText if kind == "llava" else AutoModelForCausalLM
        model = made.from_config(next(hf_tiny.configs(kind)), attn_implementation="frisket").eval()
        model.config.frisket_mask = "causal & window(4)"
        with pytest.raises(ParameterError, match=says), torch.no_grad():
            model(hf_models.tokens())
    model = AutoModelForImageTextToText.from_config(
        next(hf_tiny.configs("llava")), attn_implementation="frisket"
    ).eval()
    with torch.no_grad():
        model.config.text_config.frisket_mask = "causal & window(4)"
        near, ids = model(hf_models.tokens()).logits, hf_models.tokens()
        model.config.text_config.frisket_mask = None
        assert not torch.allclose(near, model(ids).logits)
