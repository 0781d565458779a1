"""Tiny random models of MaxText, their attention replaced by the program of docs/training.md.

Logits, gradients, decoded tokens and placement are compared with the same model under MaxText's own attention.
"""

import os

os.environ |= {
    "DECOUPLE_GCLOUD": "TRUE",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
}

from pathlib import Path

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
import pytest
from jax.sharding import Mesh
from maxtext.common.common_types import MODEL_MODE_AUTOREGRESSIVE, MODEL_MODE_PREFILL, MODEL_MODE_TRAIN
from maxtext.configs import pyconfig
from maxtext.layers.attention_op import AttentionOp
from maxtext.models import models
from maxtext.utils import maxtext_utils

import frisket as fk

PAGE = (Path(__file__).parents[3] / "docs/training.md").read_text(encoding="utf-8")
PROGRAM = next(code.split("```")[0] for code in PAGE.split("```python\n") if "AttentionOp.apply_attention =" in code)
BASE = str(Path(maxtext.__file__).parent / "configs/base.yml")
LENGTH, PROMPT, VOCAB = 64, 32, 64
SIZES = {
    "base_emb_dim": 64, "base_num_query_heads": 4, "base_num_kv_heads": 2, "base_mlp_dim": 64, "head_dim": 16,
    "base_num_decoder_layers": 2, "vocab_size": VOCAB, "max_target_length": LENGTH, "per_device_batch_size": 0.5,
    "max_prefill_predict_length": PROMPT, "dtype": "float32", "weight_dtype": "float32", "matmul_precision": "highest",
    "attention": "dot_product", "enable_dropout": False, "scan_layers": False, "log_config": False,
    "enable_checkpointing": False, "override_model_config": True, "skip_jax_distributed_system": True,
    "hardware": "cpu", "run_name": "job",
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "megablox": False, "sparse_matmul": False}
MODELS = {
    "llama": {"model_name": "default"},
    "soft cap": {"model_name": "default", "attn_logits_soft_cap": 5.0, "scan_layers": True},
    "gemma2": {"model_name": "gemma2-2b", "sliding_window_size": 16},
    "gpt-oss": {"model_name": "gpt-oss-20b", "sliding_window_size": 16, "base_moe_mlp_dim": 64, **EXPERTS},
    "llama4": {
        "model_name": "llama4-17b-16e", "chunk_attn_window_size": 16, "use_multimodal": False,
        "nope_layer_interval": 2, "inhomogeneous_layer_cycle_interval": 2, **EXPERTS,
    },
}  # fmt: skip
KINDS = {  # of attention that the model has
    "gemma2": ["global", "local_sliding"], "gpt-oss": ["global", "local_sliding"], "llama4": ["chunk", "global"],
}  # fmt: skip
TOKENS = jax.random.randint(jax.random.key(0), (2, LENGTH), 0, VOCAB)
SEGMENTS = jnp.where(jnp.arange(LENGTH) < 40, 1, 2)[None].repeat(2, 0)  # two documents in a row
POSITIONS = jnp.where(SEGMENTS == 1, jnp.arange(LENGTH), jnp.arange(LENGTH) - 40)
RNGS = {name: jax.random.key(i) for i, name in enumerate(("params", "aqt", "dropout"))}


def made(name, mode=MODEL_MODE_TRAIN, devices=1, **more):
    """(a model, its mesh)."""
    config = pyconfig.initialize(["", BASE], **{**SIZES, **MODELS[name], **more})
    mesh = Mesh(maxtext_utils.create_device_mesh(config, jax.devices()[:devices]), config.mesh_axes)
    return models.transformer_as_linen(config, mesh, quant=None, model_mode=mode), mesh


def weights_of(model, mesh, tokens=TOKENS, mode=MODEL_MODE_TRAIN):
    with jax.set_mesh(mesh):
        init = jax.jit(lambda: model.init(RNGS, tokens, POSITIONS[:, : tokens.shape[1]], SEGMENTS[:, : tokens.shape[1]],
                                          enable_dropout=False, model_mode=mode))  # fmt: skip
        return jax.tree.map_with_path(lambda path, x: jnp.sin(jnp.arange(4.0)) if sinks_at(path) else x, init())


def sinks_at(path):
    """Whether a weight is a layer's sinks, which MaxText initializes to zero."""
    return "sinks" in jax.tree_util.keystr(path)


def logits(model, weights):
    return model.apply(weights, TOKENS, POSITIONS, SEGMENTS, enable_dropout=False, rngs=RNGS)


@pytest.fixture
def frisket(monkeypatch):
    """A function that replaces MaxText's attention; it returns a list that gets the (kind, mode) of each call."""

    original = AttentionOp.apply_attention
    monkeypatch.setattr(AttentionOp, "apply_attention", original)  # put back after the test

    def replace(with_decode=False):
        AttentionOp.apply_attention = original
        names, calls = {}, []
        exec(PROGRAM, names)
        page = AttentionOp.apply_attention

        def counted(op, *args, **kwargs):
            calls.append((op.attention_type.value, kwargs["model_mode"]))
            if with_decode and kwargs["model_mode"] == MODEL_MODE_AUTOREGRESSIVE:
                return decode(**{n: kwargs[n] for n in ("query", "key", "value", "decoder_segment_ids")})
            return page(op, *args, **kwargs)

        AttentionOp.apply_attention = counted
        return calls

    return replace


def decode(query, key, value, decoder_segment_ids):
    """A step over one of the two caches, which MaxText merges: a normalized output whose sum of weights is exp(lse)."""
    att = fk.compile("active[b, k] == 1", scale=1.0)
    out, lse = att(query, key, value, active=decoder_segment_ids, return_lse=True)
    lse = lse.swapaxes(1, 2)[..., None]
    return out, lse, jnp.ones_like(lse)


def close(found, wanted, tolerance=1e-6):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * float(jnp.abs(y).max()))


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_maxtexts(name, frisket):
    model, mesh = made(name)
    weights = weights_of(model, mesh)
    with jax.set_mesh(mesh):
        wanted = jax.jit(lambda w: logits(model, w))(weights)
        calls = frisket()
        found = jax.jit(lambda w: logits(model, w))(weights)
    assert {*calls} == {(kind, MODEL_MODE_TRAIN) for kind in KINDS.get(name, ["global"])}
    close(found, wanted)


@pytest.mark.parametrize("name", ["soft cap", "gpt-oss"])
def test_gradients_equal_maxtexts(name, frisket):
    model, mesh = made(name)
    weights = weights_of(model, mesh)

    def loss(w):
        scores = jax.nn.log_softmax(logits(model, w)[:, :-1])
        return -jnp.take_along_axis(scores, TOKENS[:, 1:, None], -1).mean()

    with jax.set_mesh(mesh):
        wanted = jax.jit(jax.value_and_grad(lambda w: loss(w)))(weights)
        frisket()
        found = jax.jit(jax.value_and_grad(lambda w: loss(w)))(weights)
    sinks = [x for path, x in jax.tree.leaves_with_path(found[1]) if sinks_at(path)]
    assert len(sinks) == (2 if name == "gpt-oss" else 0)
    assert all(jnp.abs(x).max() > 0 for x in sinks)
    close(found, wanted, 1e-5)


def test_decoding_equals_maxtexts(frisket):
    """A prompt, then a token at a time, from the same caches."""
    (prefill, mesh), (step, _) = made("llama", MODEL_MODE_PREFILL), made("llama", MODEL_MODE_AUTOREGRESSIVE)
    weights = weights_of(prefill, mesh, TOKENS[:, :PROMPT], MODEL_MODE_PREFILL)["params"]

    def run():
        def apply(model, mode, state, tokens, positions, segments):
            return model.apply(
                state, tokens, positions, segments, enable_dropout=False, model_mode=mode, rngs=RNGS, mutable=["cache"]
            )

        one = jax.jit(lambda state, token, at: apply(step, MODEL_MODE_AUTOREGRESSIVE, state, token, at, None))
        start = jax.jit(lambda w: apply(prefill, MODEL_MODE_PREFILL, {"params": w}, TOKENS[:, :PROMPT],
                                        jnp.arange(PROMPT)[None].repeat(2, 0), jnp.ones((2, PROMPT), int)))  # fmt: skip
        out, state = start(weights)
        outs = [out[:, -1]]
        for i in range(4):
            at = jnp.full((2, 1), PROMPT + i)
            out, state = one({"params": weights, **state}, TOKENS[:, PROMPT + i, None], at)
            outs.append(out[:, 0])
        return jnp.stack(outs)

    with jax.set_mesh(mesh):
        wanted = run()
        for with_decode in (False, True):
            calls = frisket(with_decode)
            close(run(), wanted)
            assert {*calls} == {("global", MODEL_MODE_PREFILL), ("global", MODEL_MODE_AUTOREGRESSIVE)}
    assert float(jnp.abs(wanted[1] - wanted[2]).max()) > 0.1


def test_logits_over_four_devices_equal_those_of_one(frisket):
    model, one = made("gemma2")
    weights = weights_of(model, one)
    with jax.set_mesh(one):
        wanted = jax.jit(lambda w: logits(model, w))(weights)
    split = {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
    model, mesh = made("gemma2", devices=4, **split)
    frisket()
    with jax.set_mesh(mesh):
        found = jax.jit(lambda w: logits(model, w))(jax.device_get(weights))
    assert len(found.sharding.device_set) == 4
    close(found, wanted)


def test_scale_of_a_call_names_its_place():
    q = jnp.ones((1, 8, 2, 16))
    with pytest.raises(fk.ParameterError, match=r"`scale=` belongs to `frisket\.compile`"):
        fk.compile("causal")(q, q, q, scale=1.0)


def test_masks_that_frisket_does_not_read_are_refused(frisket):
    model, mesh = made("llama")
    weights = weights_of(model, mesh)
    frisket()
    replaced = AttentionOp.apply_attention

    for name in ("indexer_mask", "record_max_logits"):
        AttentionOp.apply_attention = lambda op, name=name, **kwargs: replaced(op, **{**kwargs, name: True})
        with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match=name):
            logits(model, weights)
