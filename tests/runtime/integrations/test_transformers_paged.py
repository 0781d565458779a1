"""Continuous batching of transformers under frisket: `generate_batch` beside `generate` of eager attention."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from runtime.integrations.kernels_built import built
from support import hf_models
from support.triton.process import run
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from frisket.dsl.errors import ParameterError
from frisket.integrations import transformers as plugin
from frisket.runtime.machine.cpp_build import reason

NEW = 12
PROMPTS = 5, 19, 1, 11, 30  # tokens; the third is a step from the first, the last two come in chunks
FEW = "llama", "gemma3"
MODELS = [pytest.param(n, marks=() if n in FEW else pytest.mark.exhaustive) for n in hf_models.MODELS]


def prompts():
    torch.manual_seed(3)
    return [torch.randint(3, hf_models.VOCABULARY, (n,)).tolist() for n in PROMPTS]


def served(model, asked, new=NEW, **changes):
    """Tokens and their log probabilities of every prompt, through pages of 16 tokens and batches of at most 24."""
    how = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 24, "return_logprobs": True, **changes}
    found = model.generate_batch(
        asked, generation_config=how, continuous_batching_config=ContinuousBatchingConfig(**sizes)
    )
    assert [x.error for x in found.values()] == [None] * len(asked)
    by_prompt = {tuple(x.prompt_ids): x for x in found.values()}
    return [(by_prompt[tuple(p)].generated_tokens, by_prompt[tuple(p)].logprobs) for p in asked]


def alone(model, prompt, new=NEW):
    """What a model answers to one prompt, without any cache."""
    row, found, chances = torch.tensor([prompt]), [], []
    with torch.no_grad():
        for _ in range(new):
            said = model(row, use_cache=False).logits[0, -1].log_softmax(-1)
            found.append(int(said.argmax()))
            chances.append(float(said.max()))
            row = torch.cat([row, torch.tensor([[found[-1]]])], 1)
    return found, chances


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_batched_requests_get_the_tokens_of_single_ones(name):
    eager, ours = hf_models.pair(name)
    for prompt, (tokens, chances) in zip(prompts(), served(ours, prompts()), strict=True):
        want = alone(eager, prompt)
        assert tokens == want[0]
        torch.testing.assert_close(chances, want[1], rtol=0, atol=2e-4)
    assert ours.config._attn_implementation == "frisket"


@pytest.mark.parametrize("theirs", ["eager", pytest.param("sdpa", marks=pytest.mark.exhaustive)])
def test_batched_generation_equals_that_of_transformers(theirs):
    eager, ours = hf_models.pair("mistral")
    eager.set_attn_implementation(theirs)
    (mine, chances), (wanted, likely) = (list(zip(*served(m, prompts()))) for m in (ours, eager))
    assert mine == wanted
    torch.testing.assert_close(chances, likely, rtol=0, atol=2e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llama", pytest.param("mistral", marks=pytest.mark.exhaustive)])
def test_transformers_config_sets_mask_and_score_in_batches(name):
    """They speak of positions in a request, wherever its tokens lie."""
    _, ours = hf_models.pair(name)
    ours.config.frisket_mask = "causal & q - k < w & (k % 3 != 1 | q - k < 2)"
    ours.config.frisket_score = "score + slope[h] * (k - q) then softcap(2)"
    ours.config.frisket_params = {"w": 7, "slope": [0.5, 0.25, 0.125, 0.0]}
    for prompt, (tokens, chances) in zip(prompts(), served(ours, prompts()), strict=True):
        want = alone(ours, prompt)
        assert tokens == want[0]
        torch.testing.assert_close(chances, want[1], rtol=0, atol=2e-4)


# -- a step compiles nothing and waits for nothing --------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.skipif(bool(reason()), reason="no C++ compiler")
def test_transformers_serving_steps_do_not_recompile(monkeypatch):
    monkeypatch.setenv("FRISKET_BACKEND", "cpp")
    _, ours = hf_models.pair("mistral")
    asked, calls, plain = prompts()[:3], [], plugin.paged
    with built() as kernels:
        served(ours, asked, new=3)  # chunks of prompts and steps
    assert kernels

    def paged(*given):
        calls.append(given[1].shape)
        return plain(*given)

    monkeypatch.setattr(plugin, "paged", paged)
    with built() as kernels:
        served(ours, asked, new=54)
    assert len(calls) >= 2 * 54  # both layers, at every step
    assert kernels == []


@pytest.mark.exhaustive
def test_on_a_gpu_they_look_at_no_value():
    """Launched into nothing, so that no value is there to look at."""
    run(Path(__file__).parent / "children/serving_launched.py")


# -- where a request is -----------------------------------------------------------------------------------------------


def test_places_of_padded_rows_and_of_dropped_keys():
    """Three requests of 2, 1 and 3 new tokens, two rows of padding; the last has dropped the keys before its fifth."""
    found = plugin.where(
        torch.tensor([0, 2, 3, 6, 6]), torch.tensor([0, 4, 5, 12, 12]), 8, torch.tensor([2, 3, 0, 9, 10, 11, 0, 0])
    )
    assert found["request_low"].tolist() == [0, 0, 4, 5, 5, 5, 12, 12]
    assert found["request_high"].tolist() == [4, 4, 5, 12, 12, 12, 12, 12]
    assert found["request_at"].tolist()[:6] == [2, 3, 0, 9, 10, 11]
    assert found["request_shift"].tolist()[:6] == [0, 0, 4, 0, 0, 0]


def test_masks_that_have_no_place_among_requests():
    _, ours = hf_models.pair("mistral")
    ours.config.frisket_mask = "causal"
    with pytest.raises(ParameterError, match=r"looks behind the cache of a sliding-window layer: a ring of 8 tokens"):
        first(ours)
    ours.config.frisket_mask = "causal & window(4) & k < KV_LEN - 1"
    with pytest.raises(ParameterError, match=r"the mask reads KV_LEN, which changes from step to step"):
        first(ours)
    ours.config.frisket_mask = "window(4)"
    with pytest.raises(ParameterError, match=r"has to be causal: a prompt that is read in chunks"):
        first(ours)
    ours.config.frisket_mask, ours.config.frisket_params = "q + ahead >= k & q - k < back", {"ahead": 0, "back": 4}
    first(ours)
    for value, why in (({"ahead": 1}, "has to be causal"), ({"back": 40}, "looks behind the cache")):  # of a later step
        ours.config.frisket_params = {"ahead": 0, "back": 4} | value
        with pytest.raises(ParameterError, match=why):
            first(ours)
    behind = plugin.SymbolicMask("q >= k", 1, 4, 4)  # of a model that leaves its window to the cache
    with pytest.raises(ParameterError, match=r"the mask of this model looks behind the cache of a sliding-window"):
        first(hf_models.pair("mistral")[1], behind)
    seen = plugin.SymbolicMask("", 1, 4, 4)  # of a model whose attention is not causal
    with pytest.raises(ParameterError, match=r"`generate_batch`: a mask of a serving engine has to be causal"):
        first(hf_models.pair("llama")[1], seen)
    groups = {"groups": torch.ones(1, 4)}
    given = plugin.SymbolicMask("groups[b, q] == groups[b, k]", 1, 4, 4, tables=groups)
    with pytest.raises(ParameterError, match=r"reads the table 'groups' of the tokens of a call"):
        plugin.refuse_tables(given)


def test_a_model_that_keeps_the_cache_from_its_layers():
    """StableLM passes no keywords to its attention: requests in a row would see each other. Since transformers 5.24 its
    layers ask the cache for what they have not got, a `KeyError` of their own."""
    from transformers import StableLmConfig, StableLmForCausalLM

    config = StableLmConfig(
        vocab_size=hf_models.VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = StableLmForCausalLM._from_config(config, attn_implementation="frisket").eval()
    how = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = model.generate_batch(prompts()[:2], generation_config=how)
    refused = "does not hand the cache of continuous batching", "'cu_seq_lens_k'"
    assert all(any(why in x.error for why in refused) for x in found.values())
    with torch.no_grad():
        assert model(torch.tensor([[5, 7]])).logits.shape == (1, 2, hf_models.VOCABULARY)


def first(model, mask=None):
    """The first layer's call of a step with two requests."""
    module = model.model.layers[0].self_attn
    ends = torch.tensor([0, 2, 4], dtype=torch.int32)

    def update(key, value, layer, rest):
        rest["cu_seq_lens_k"] = rest["cu_seq_lens_k"]["sliding_attention"]
        return key, value

    kinds = [SimpleNamespace(layer_type="sliding_attention")]
    rest = {
        "cache": SimpleNamespace(layer_to_allocator=kinds, update=update), "cu_seq_lens_q": ends,
        "cu_seq_lens_k": {"sliding_attention": ends}, "max_length_q": 2,
        "position_ids": torch.tensor([[0, 1, 0, 1]]),
    }  # fmt: skip
    q, k = torch.ones(1, 4, 4, 4), torch.ones(1, 2, 4, 4)
    return plugin.attention(module, q, k, k, mask, is_causal=True, **rest)
