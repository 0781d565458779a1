"""What transformers says of a mask as text; masks and score mods of users; what is refused."""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from support import hf_models
from transformers import AttentionInterface, DynamicCache, LlamaConfig, masking_utils

import frisket as fk
from frisket.dsl.errors import MaskSyntaxError, ParameterError, ShapeError
from frisket.integrations.transformers import attention
from frisket.integrations.transformers_masks import padded, parted, read, symbolic

LEFT = torch.tensor([0, 2])
BLOCKS = torch.tensor([[-1, 0, 0, 1, 1, -1], [0, 0, -1, -1, 1, 1]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 3, 4]])
REMAP = getattr(masking_utils, "remap_positions_for_packed_sequence", None)  # transformers 5.22 has none
DOCUMENTS = masking_utils.find_packed_sequence_indices(POSITIONS)
causal, sliding = masking_utils.causal_mask_function, masking_utils.sliding_window_causal_mask_function(2)
chunked = masking_utils.chunked_causal_mask_function(2, LEFT)


def packed(function):
    """A mask in each of the sequences of a row, as `create_causal_mask` joins them."""
    here = function if REMAP is None else REMAP(function, POSITIONS)
    return masking_utils.and_masks(masking_utils.packed_sequence_mask_function(DOCUMENTS), here)


FUNCTIONS = {
    "causal": causal,
    "both ways": masking_utils.bidirectional_mask_function,
    "sliding": sliding,
    "sliding, both ways": masking_utils.sliding_window_bidirectional_mask_function(2),
    "chunked": chunked,
    "blocks": masking_utils.or_masks(causal, masking_utils.blockwise_overlay(BLOCKS)),
    "packed": packed(causal),
    "packed, sliding": packed(sliding),
    "packed, chunked": packed(chunked),
    "torch.where": masking_utils.and_masks(causal, lambda b, h, q, k: torch.where(q > 2, k % 2 == 0, k >= 0)),
}


def shown(made, batch=2, length=6):
    """A symbolic mask, dense."""
    text = made.text(made.structure)
    mask = fk.mask(text or "full", **made.read_by(text))
    return mask.dense(length, length, batch=batch)[:, 0]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_mask_function_is_read_as_what_it_shows(name):
    want = masking_utils.sdpa_mask(2, 6, 6, mask_function=FUNCTIONS[name], allow_is_causal_skip=False)[:, 0]
    for user in (False, True):  # with functions of other people, nothing is known of what tables hold
        made = symbolic(2, 6, 6, mask_function=FUNCTIONS[name], use_vmap=user)
        np.testing.assert_array_equal(shown(made), want.numpy())


def test_packed_masks_of_distances_read_no_positions():
    assert parted(*[read(FUNCTIONS["packed, sliding"])[0], True]) == ("q >= k & q - k <= 1", "t0[b, q] == t0[b, k]")
    for name, apart in (("packed, sliding", False), ("packed, chunked", True)):
        assert ("t1[b, q]" in parted(read(FUNCTIONS[name])[0], apart)[0]) == (REMAP is not None)


@pytest.mark.parametrize("stop", [6, 9], ids=["all there", "a static cache"])
@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], set()),
        ([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], {"start"}),
        ([[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]], {"stop"}),
        ([[0, 1, 1, 1, 0, 0], [1, 0, 1, 1, 1, 1]], {"real"}),
    ],
)
def test_transformers_padding_becomes_text_and_values(rows, names, stop):
    real = torch.tensor(rows, dtype=torch.bool)
    texts, values = padded(real, stop)
    assert values.keys() == names | ({"stop"} if stop > 6 and "real" not in names else set())
    text = " & ".join(t for t in texts if t) or "full"
    want = np.pad(real.numpy(), ((0, 0), (0, stop - 6)))[:, None].repeat(stop, 1)
    np.testing.assert_array_equal(fk.mask(text, **values).dense(stop, stop, batch=2)[:, 0], want)


# -- masks of users ---------------------------------------------------------------------------------------------------


def dense(text, batch=2, **values):
    return torch.from_numpy(fk.mask(text, **values).dense(hf_models.LENGTH, hf_models.LENGTH, batch=batch, heads=4))


def additive(seen):
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)


def test_a_mask_of_a_user_replaces_the_models_and_padding_stays():
    eager, ours = hf_models.pair("gemma2")
    ours.config.frisket_mask = "causal & (q - k < w | k < 3)"
    ours.config.frisket_params = {"w": 4}
    ids, seen = hf_models.tokens(), hf_models.padded(right=5)
    want = dense("causal & (q - k < 4 | k < 3)") & seen.bool()[:, None, None]
    kinds = dict.fromkeys(eager.config.layer_types, additive(want))
    real = seen.bool()
    with torch.no_grad():
        given = ours(ids, attention_mask=seen).logits[real]
        torch.testing.assert_close(given, eager(ids, attention_mask=kinds).logits[real], rtol=2e-5, atol=2e-5)


def test_masks_by_the_type_of_layer_and_values_of_a_call():
    eager, ours = hf_models.pair("gemma3")
    ours.config.frisket_mask = {"sliding_attention": "causal & part[b, q] == part[b, k]"}
    ids = hf_models.tokens()
    part = torch.arange(hf_models.LENGTH).expand(2, -1) // torch.tensor([[5], [9]])
    kinds = {"sliding_attention": additive(dense("causal & part[b, q] == part[b, k]", part=part)),
             "full_attention": additive(dense("causal"))}  # fmt: skip
    with torch.no_grad():
        got = ours(ids, frisket_params={"part": part}).logits
        torch.testing.assert_close(got, eager(ids, attention_mask=kinds).logits, rtol=2e-5, atol=2e-5)


def test_a_score_mod_of_a_user_comes_after_the_models_and_learns():
    eager, ours = hf_models.pair("llama", num_hidden_layers=1)
    ours.config.frisket_score = "param slope: float[H]\nscore = score + slope[h] * (k - q)"
    ids = hf_models.tokens()
    found = []
    distance = torch.arange(hf_models.LENGTH) - torch.arange(hf_models.LENGTH)[:, None]
    for model in (eager, ours):
        slope = torch.tensor([0.1, 0.2, 0.3, 0.4], requires_grad=True)
        bias = slope[None, :, None, None] * distance
        hidden = additive(dense("causal", 1))
        how = {"frisket_params": {"slope": slope}} if model is ours else {"attention_mask": bias + hidden}
        out = model(ids, use_cache=False, **how).logits
        out.square().sum().backward()
        found.append((out, slope.grad))
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_transformers_config_sets_weight_and_divisor():
    plain, ours = hf_models.pair("llama")

    def weighted(module, query, key, value, attention_mask, scaling=None, **rest):
        key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
        weights = torch.sigmoid(query @ key.mT * scaling + 0.5).tril()
        return (weights @ value / torch.arange(1, query.shape[2] + 1)[:, None]).transpose(1, 2), None

    AttentionInterface.register("weighted", weighted)
    plain.set_attn_implementation("weighted")
    ours.config.frisket_weight, ours.config.frisket_divide = "sigmoid_attention(bias)", "count"
    ours.config.frisket_params = {"bias": 0.5}
    ids = hf_models.tokens()
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, plain(ids).logits, rtol=2e-5, atol=2e-5)


def test_generate_under_a_mask_of_a_user():
    eager, ours = hf_models.pair("llama")
    text = "causal & (q - k < 6 | k < 2)"
    ours.config.frisket_mask = text
    ids = hf_models.tokens(2, 9)
    found = ours.generate(ids, max_new_tokens=6, do_sample=False)
    with torch.no_grad():
        for length in range(9, 15):
            seen = additive(dense(text)[:, :, :length, :length])
            want = eager(found[:, :length], attention_mask=seen, use_cache=False).logits[:, -1].argmax(-1)
            assert torch.equal(found[:, length], want)


def test_configs_with_masks_are_saved(tmp_path):
    config = LlamaConfig(frisket_mask="causal & q - k < w", frisket_params={"w": 4})
    config.save_pretrained(tmp_path)
    again = LlamaConfig.from_pretrained(tmp_path)
    assert (again.frisket_mask, again.frisket_params) == ("causal & q - k < w", {"w": 4})
    assert json.loads(config.to_json_string())["frisket_mask"] == "causal & q - k < w"


# -- masks that a call brings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bool", "hidden", "bias"])
def test_transformers_dense_masks_and_biases_equal_eager(kind):
    eager, ours = hf_models.pair("llama")
    ids = hf_models.tokens()
    seen = dense("causal & (k < 4 | q - k < 5)", 1)
    bias = torch.randn(1, 4, hf_models.LENGTH, hf_models.LENGTH) + additive(seen)
    given = {"bool": seen, "hidden": additive(seen), "bias": bias}[kind]
    with torch.no_grad():
        want = eager(ids, attention_mask=bias if kind == "bias" else additive(seen)).logits
        torch.testing.assert_close(ours(ids, attention_mask=given).logits, want, rtol=2e-5, atol=2e-5)


def test_a_dense_mask_is_written_to():
    """By numpy, which torch does not count, and in inference mode, where it counts nothing."""
    eager, ours = hf_models.pair("llama")
    ids, given = hf_models.tokens(), additive(dense("causal", 1))
    for inference in (False, True):
        with torch.inference_mode(inference):
            given = given.clone()
            for text in ("causal", "causal & q - k < 3"):
                given.numpy()[:] = additive(dense(text, 1))
                got, want = (model(ids, attention_mask=given).logits for model in (ours, eager))
                torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_tables_of_a_call_are_written_to_beside_one_dense_mask():
    eager, ours = hf_models.pair("llama")
    ids, seen, doc = hf_models.tokens(), dense("causal", 1), torch.arange(hf_models.LENGTH)
    ours.config.frisket_score = "where(doc[q] == doc[k], score, -inf)"
    for ids_of in (lambda: doc // 5, lambda: doc.flip(0) // 9):
        doc.numpy()[:] = ids_of()
        with torch.no_grad():
            got = ours(ids, attention_mask=seen, frisket_params={"doc": doc}).logits
            want = eager(ids, attention_mask=additive(seen & (doc[:, None] == doc))).logits
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_a_dense_mask_learns():
    eager, ours = hf_models.pair("llama")
    ids, found = hf_models.tokens(), []
    for model in (eager, ours):
        bias = torch.linspace(-1, 1, 4).reshape(1, 4, 1, 1).repeat(1, 1, hf_models.LENGTH, hf_models.LENGTH)
        bias.requires_grad_()
        given = bias + additive(dense("causal", 1))
        (model(ids, attention_mask=given, use_cache=False).logits / 10).square().mean().backward()
        found.append(bias.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6 + 1e-4 * float(found[0].abs().max()))


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused(says, error=ParameterError, model="llama", call=None, **config):
    _, ours = hf_models.pair(model, num_hidden_layers=1 if model == "llama" else 2)
    for name, value in config.items():
        setattr(ours.config, name, value)
    with pytest.raises(error, match=says), torch.no_grad():
        ours(hf_models.tokens(), **(call or {}))


def test_transformers_config_names_a_misspelt_field():
    refused(r"config\.frisket_masks is not read; did you mean `frisket_mask`\?", frisket_masks="causal & k < 4")
    refused(
        r"the fields are frisket_mask, frisket_score, frisket_weight, frisket_divide, frisket_params", frisket_scale=3
    )
    refused(r"did you mean `frisket_params`\?", frisketparams={})


def test_errors_in_the_text_come_with_a_caret():
    refused(r"causall & k < 4\n +\^", MaskSyntaxError, frisket_mask="causall & k < 4")
    refused(r"a score mod needs a number", MaskSyntaxError, frisket_score="q - k < 4")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_square_masks_of_ints_are_refused(dtype):
    """Eager attention adds them and sdpa refuses them; they were read as Bools."""
    seen = torch.ones(2, 1, hf_models.LENGTH, hf_models.LENGTH, dtype=dtype)
    message = (
        rf"attention_mask is {str(dtype).removeprefix('torch.')}\[2, 1, .* it is Bools, .* or Floats that are added"
    )
    refused(message, call={"attention_mask": seen})


def test_transformers_plugin_refuses_bad_masks():
    square = torch.ones(2, 1, hf_models.LENGTH, hf_models.LENGTH, dtype=torch.bool)
    refused("does not take head_mask", call={"head_mask": torch.ones(2, 4)})
    refused("`w` of the config's texts has no value", frisket_mask="causal & q - k < w")
    refused("`v` is in frisket_params", frisket_mask="causal & q - k < w", frisket_params={"w": 3, "v": 2})
    refused("names 'chunked_attention'", frisket_mask={"chunked_attention": "causal"})
    refused("str\\(it\\)", frisket_mask=fk.mask("causal"))
    refused("leave out one of them", frisket_mask="causal", call={"attention_mask": square})
    refused("a line `weight = ...`, which it does not read", frisket_mask="mask = causal\nweight = relu2")
    refused("without config.frisket_weight", frisket_divide="count")
    refused("give an axis its length there, or 1", ShapeError, call={"attention_mask": square[..., :7]})
    refused("`start` is a name of the plug-in's own", frisket_mask="causal & k >= start[b]",
            call={"attention_mask": hf_models.padded(left=3), "frisket_params": {"start": [0, 0]}})  # fmt: skip
    refused("position_ids that begin at 0", call={"cu_seq_lens_q": torch.tensor([0, 7, 24])})


def test_keys_that_a_sliding_cache_has_dropped_are_not_missed():
    _, ours = hf_models.pair("mistral")
    ids = hf_models.tokens()
    for text, fits in (("causal & q - k < 5", True), ("causal & (q - k < 5 | k < 2)", False)):
        ours.config.frisket_mask = text
        with torch.no_grad():
            cache, whole = DynamicCache(config=ours.config), DynamicCache()
            ours(ids[:, :20], past_key_values=cache)
            ours(ids[:, :20], past_key_values=whole)
            want = ours(ids[:, 20:21], past_key_values=whole).logits
            if fits:
                torch.testing.assert_close(ours(ids[:, 20:21], past_key_values=cache).logits, want)
            else:
                with pytest.raises(ParameterError, match="has dropped"):
                    ours(ids[:, 20:21], past_key_values=cache)


def test_missing_mask_is_causal_where_the_module_is():
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    module = torch.nn.Module()
    for causal, text in ((True, "causal"), (False, "full")):
        module.is_causal = causal
        want = fk.attention(q, k, v, text).transpose(1, 2)
        torch.testing.assert_close(attention(module, q, k, v, None)[0], want)
        torch.testing.assert_close(attention(torch.nn.Module(), q, k, v, None, is_causal=causal)[0], want)
