"""Tiny random models of EasyDeL under `attn_mechanism="frisket"` against EasyDeL's own, and parts of it against ours."""

import os

os.environ["ENABLE_DISTRIBUTED_INIT"] = "0"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax

jax.devices()  # EasyDeL sets a flag that XLA no longer knows; flags are read once, here

import easydel as ed
import jax.numpy as jnp
import numpy as np
import pytest
from easydel.operations import OperationMetadata, OperationRegistry
from eformer import common_types as theirs
from eformer.escale import PartitionAxis, PartitionManager
from ejkernel.kernels._xla.attention import attention as ejkernel
from ejkernel.types import MaskInfo
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import frisket
import frisket.operations as operations
import frisket.sharding as sharding
from frisket.integrations import easydel as integration

integration.register()
rng = np.random.default_rng(0)

# -- models -----------------------------------------------------------------------------------------

MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": 6},
    "Qwen2": {},
    "Gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "GptOss": {"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1},
}
DEVICES = (1, 2, 1, 2, 1)  # along dp, fsdp, ep, tp, sp
LENGTH, PROMPT = 20, 12
TOKENS = jnp.asarray(rng.integers(1, 64, (2, LENGTH)), jnp.int32)
WHOLE = jnp.ones((2, LENGTH), jnp.int32)
PADDED = WHOLE.at[1, :7].set(0)


def model(name, mechanism):
    config = getattr(ed, f"{name}Config")(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=64, max_position_embeddings=64, attn_mechanism=mechanism, attn_dtype=jnp.float32,
        attn_softmax_dtype=jnp.float32, sharding_axis_dims=DEVICES, gradient_checkpointing="", use_scan_mlp=False,
        **MODELS[name],
    )  # fmt: skip
    return getattr(ed, f"{name}ForCausalLM")(
        config=config, dtype=jnp.float32, param_dtype=jnp.float32, precision="highest", rngs=nnx.Rngs(0)
    )


def training(net):
    """Logits of whole and padded rows, and the gradient of a loss over both."""
    graph, weights, rest = nnx.split(net, nnx.Param, ...)

    def loss(weights, tokens, visible):
        logits = nnx.merge(graph, weights, rest)(input_ids=tokens, attention_mask=visible).logits
        return jnp.square(jnp.where(visible[..., None] > 0, logits, 0)).mean(), logits

    step = jax.jit(jax.grad(loss, has_aux=True))
    with net.mesh:
        return [step(weights, TOKENS, visible) for visible in (WHOLE, PADDED)]


def decoding(net):
    """Logits of a prompt's last token and of each token behind it, one by one, by EasyDeL's own steps."""
    graph, weights = nnx.split(net)

    @jax.jit
    def step(weights, tokens, inputs):
        net = nnx.merge(graph, weights)
        out = net._call_generation_model_step(net, tokens, inputs)
        return out.logits[:, -1], net.update_inputs_for_generation(out, inputs)

    with net.mesh:
        inputs = net.prepare_inputs_for_generation(
            TOKENS[:, :PROMPT], max_length=LENGTH, pad_token_id=0, attention_mask=PADDED[:, :PROMPT]
        )
        logits, inputs = step(weights, TOKENS[:, :PROMPT], dict(inputs))
        rows = [logits]
        for i in range(PROMPT, LENGTH):
            logits, inputs = step(weights, TOKENS[:, i : i + 1], inputs)
            rows.append(logits)
    return np.stack(rows, 1)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_vanilla_attention(name):
    ours, vanilla = training(model(name, "frisket")), training(model(name, "vanilla"))
    for (gradient, logits), (wanted_gradient, wanted), visible in zip(ours, vanilla, (WHOLE, PADDED), strict=True):
        np.testing.assert_allclose(logits[visible > 0], wanted[visible > 0], atol=2e-6)
        for x, y in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted_gradient), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_decoding_equal_vanilla_attention(name):
    np.testing.assert_allclose(decoding(model(name, "frisket")), decoding(model(name, "vanilla")), atol=2e-6)
