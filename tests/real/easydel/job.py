"""Tiny random models of EasyDeL by `attn_mechanism="frisket"`, against its vanilla attention; ejkernel and eformer."""

# ruff: noqa: E402 (JAX is initialized before EasyDeL is imported)

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
from ejkernel.kernels._xla.attention._xla_impl_fwd import attention as ejkernel  # without checks of types
from ejkernel.types import MaskInfo
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import frisket
import frisket.operations as operations
import frisket.sharding as sharding
from frisket.integrations import easydel as integration
from frisket.runtime.sharding.partition import FIELDS

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
LENGTH, PROMPT = 20, 12
TOKENS = jnp.asarray(rng.integers(1, 64, (2, LENGTH)), jnp.int32)
WHOLE = jnp.ones((2, LENGTH), jnp.int32)
PADDED = WHOLE.at[1, :7].set(0)


def config(name, mechanism, devices=(1, 1, 1, 1, 1), **changes):
    """On so many devices along dp, fsdp, ep, tp and sp."""
    made = getattr(ed, f"{name}Config")(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=64, max_position_embeddings=64, attn_mechanism=mechanism, attn_dtype=jnp.float32,
        attn_softmax_dtype=jnp.float32, gradient_checkpointing="", use_scan_mlp=False, **{**MODELS[name], **changes},
    )  # fmt: skip
    made.set_model_mesh(mesh(*devices))
    return made


def model(name, mechanism, *devices, **changes):
    return getattr(ed, f"{name}ForCausalLM")(
        config=config(name, mechanism, *devices, **changes), dtype=jnp.float32, param_dtype=jnp.float32,
        precision="highest", rngs=nnx.Rngs(0),
    )  # fmt: skip


def mesh(*sizes):
    devices = np.asarray(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return jax.sharding.Mesh(devices, ("dp", "fsdp", "ep", "tp", "sp"), axis_types=(AxisType.Auto,) * 5)


def training(net):
    """Logits of whole and padded rows, and the gradient of a loss over both."""
    graph, weights, rest = nnx.split(net, nnx.Param, ...)

    def loss(weights, tokens, visible):
        logits = nnx.merge(graph, weights, rest)(input_ids=tokens, attention_mask=visible).logits
        return jnp.square(jnp.where(visible[..., None] > 0, logits, 0)).mean(), logits

    step = jax.jit(jax.grad(loss, has_aux=True))
    with net.mesh:
        return [step(weights, TOKENS, visible) for visible in (WHOLE, PADDED)]


def same_training(ours, vanilla):
    for (gradient, logits), (wanted_gradient, wanted), visible in zip(ours, vanilla, (WHOLE, PADDED), strict=True):
        np.testing.assert_allclose(logits[visible > 0], wanted[visible > 0], atol=2e-6)
        for x, y in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted_gradient), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_vanilla_attention(name):
    same_training(training(model(name, "frisket")), training(model(name, "vanilla")))


def test_logits_and_gradients_are_equal_over_four_devices():
    one, four = training(model("Llama", "vanilla")), training(model("Llama", "frisket", (1, 2, 1, 2, 1)))
    same_training(four, one)


def decoding(net, visible):
    """Logits of a prompt's last token and of each token behind it, one by one, by EasyDeL's own steps."""
    graph, weights = nnx.split(net)

    @jax.jit
    def step(weights, tokens, inputs):
        net = nnx.merge(graph, weights)
        out = net._call_generation_model_step(net, tokens, inputs)
        return out.logits[:, -1], net.update_inputs_for_generation(out, inputs)

    with net.mesh:
        inputs = net.prepare_inputs_for_generation(
            TOKENS[:, :PROMPT], max_length=LENGTH, pad_token_id=0, attention_mask=visible[:, :PROMPT]
        )
        logits, inputs = step(weights, TOKENS[:, :PROMPT], dict(inputs))
        rows = [logits]
        for i in range(PROMPT, LENGTH):
            logits, inputs = step(weights, TOKENS[:, i : i + 1], inputs)
            rows.append(logits)
    return np.stack(rows, 1)


@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_decoding_equal_vanilla_attention(name):
    """A window shorter than the cache hides every key of a step in EasyDeL 0.3.0, and so does padding in its Gemma2:
    vanilla attention then gives the mean of the values, frisket 0."""
    window = {"sliding_window": LENGTH} if "sliding_window" in MODELS[name] else {}
    visible = WHOLE if name == "Gemma2" else PADDED
    ours, vanilla = (decoding(model(name, mechanism, **window), visible) for mechanism in ("frisket", "vanilla"))
    np.testing.assert_allclose(ours, vanilla, atol=2e-6)
    if name in ("Llama", "Mistral"):  # of Gemma2 in EasyDeL 0.3.0 decoding is not its own whole forward
        net, places = model(name, "frisket", **window), jnp.maximum(visible.cumsum(1) - 1, 0)
        with net.mesh:
            whole = nnx.jit(lambda net: net(input_ids=TOKENS, attention_mask=visible, position_ids=places).logits)(net)
        np.testing.assert_allclose(ours, whole[:, PROMPT - 1 :], atol=2e-6)


def test_easydel_makes_our_operator_by_its_name():
    """A model that ran EasyDeL's own attention would pass everything above."""
    performers = [layer.self_attn.attention_performer for layer in model("Llama", "frisket").model.layers]
    for performer in performers:
        assert type(performer.impl) is OperationRegistry.get("frisket")
        assert performer.impl.get_instance_requirements().name == "frisket"
    with pytest.raises(frisket.ParameterError, match="cum_seqlens_q and cum_seqlens_k are not read here"):
        performers[0].impl(Q, K, V, cum_seqlens_q=jnp.array([0, 4, 24]))
    with pytest.raises(frisket.ParameterError, match="there is no operation 'frisked'"):
        integration.register("other", operator="frisked")


# -- operators against ejkernel -----------------------------------------------------------------------


def arrays(q_len=24, kv_len=24, heads=4, kv_heads=2, dim=8):
    shapes = (q_len, heads), (kv_len, kv_heads), (kv_len, kv_heads)
    return [jnp.asarray(rng.standard_normal((2, *shape, dim)), jnp.float32) for shape in shapes]


Q, K, V = arrays()
LENGTHS = {"equal": (24, 24), "fewer queries": (9, 24), "fewer keys": (24, 9), "one query": (1, 24)}
HIDING = {
    "nothing": {},
    "causal": {"causal": True},
    "window": {"sliding_window": 5},
    "window to the left": {"sliding_window": (5, 0)},
    "window to the right": {"sliding_window": (0, 5)},
    "causal window": {"causal": True, "sliding_window": (6, 2)},
}
SINKS = [(1,), (2,), (3,), (4,), (7,), (1, 3), (2, 3), (4, 3)]
AXES = [(2, 1, 24, 24), (2, 2, 24, 24), (2, 4, 24, 24), (2, 24, 24), (2, 24)]
DTYPES = ["int8", "int32", "uint8"]


def array(shape, dtype="float32"):
    """Bools and integers show the first key to all."""
    if dtype == "float32":
        return jnp.asarray(rng.standard_normal(shape), dtype)
    return jnp.asarray(rng.random(shape) < 0.6).at[..., 0].set(True).astype(dtype)


CALLS = {  # name: (q_len, kv_len), heads of queries and keys, keywords
    **{f"{h}, {n}": (lengths, (4, 2), hiding) for h, hiding in HIDING.items() for n, lengths in LENGTHS.items()},
    **{f"sinks {list(x)}": ((24, 24), (4, 2), {"causal": True, "softmax_aux": array(x)}) for x in SINKS},
    **{f"mask {list(x)}": ((24, 24), (4, 2), {"attention_mask": array(x, "bool")}) for x in AXES},
    **{f"mask of {x}": ((24, 24), (4, 2), {"attention_mask": array(AXES[0], x)}) for x in DTYPES},
    **{f"bias of {n} heads": ((24, 24), (4, 2), {"bias": array((2, n, 24, 24))}) for n in (1, 2, 4)},
    "bias by function": ((24, 24), (4, 2), {"init_bias": lambda: jnp.ones((2, 1, 24, 24)).at[..., 3].set(-2.0)}),
    **{f"heads {n}": ((24, 24), n, {"causal": True}) for n in [(1, 1), (4, 4), (4, 1), (6, 3)]},
    "softcap": ((24, 24), (4, 2), {"causal": True, "logits_soft_cap": 0.7}),
    "softcap and bias": ((24, 24), (4, 2), {"logits_soft_cap": 0.7, "bias": array((2, 4, 24, 24))}),
    "softcap, window and sinks": (
        (24, 24), (4, 2), {"logits_soft_cap": 2.0, "sliding_window": (6, 0), "softmax_aux": array((4,))},
    ),
    "scale": ((24, 24), (4, 2), {"softmax_scale": 0.11}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls_mean_what_they_mean_to_ejkernel(name):
    (q_len, kv_len), (heads, kv_heads), call = CALLS[name]
    q, k, v = arrays(q_len, kv_len, heads, kv_heads)
    wanted, _ = ejkernel(q, k, v, dtype=jnp.float32, **call)
    ours = {("mask" if n == "attention_mask" else n): x for n, x in call.items()}
    out = operations.AttentionRegistry.create("frisket-xla")(q, k, v, align="start", **ours).attention_outputs
    # a query that sees no key: ejkernel gives the mean of all values, frisket 0
    at, key = np.arange(q_len)[:, None], np.arange(kv_len)
    window = call.get("sliding_window", 99)
    left, right = window if isinstance(window, tuple) else (window, window)
    seen = ((at - key <= left) & (key - at <= (0 if call.get("causal") else right))).any(1)
    np.testing.assert_allclose(out[:, seen], np.asarray(wanted)[:, seen], atol=2e-6)
    assert not np.asarray(out[:, ~seen]).any()


def test_segment_ids_of_a_mask_info_hide_what_ejkernel_hides():
    ids = jnp.asarray(np.sort(rng.integers(-1, 3, (2, 24)), 1), jnp.int32)
    performer = model("Llama", "frisket").model.layers[0].self_attn.attention_performer.impl
    out = performer(Q, K, V, mask_info=MaskInfo.from_segments(ids), causal=True).attention_outputs
    wanted, _ = ejkernel(
        Q, K, V, dtype=jnp.float32, attention_mask=MaskInfo.from_segments(ids).attention_mask, causal=True
    )
    np.testing.assert_allclose(out[ids >= 0], wanted[ids >= 0], atol=2e-6)


# -- axes against eformer -----------------------------------------------------------------------------

PAXES = {
    "default": {},
    "other names": {"data_parallel_axis": "x", "tensor_parallel_axis": "y"},
    "decode axes": {"decode_batch_axis": ("dp", "sp"), "decode_head_axis": None, "decode_key_sequence_axis": "fsdp"},
    "no axes": {"batch_axis": None, "head_axis": None, "kv_head_axis": None, "decode_kv_head_axis": "tp"},
    "heads over two": {"head_axis": ("tp", "ep"), "attention_dim_axis": "sp", "decode_attention_dim_axis": "ep"},
}
FORMS = [n for n in dir(theirs) if isinstance(getattr(theirs, n), type) and hasattr(getattr(theirs, n), "axes")]
MODES = ["MODE_TRAIN", "MODE_PREFILL", "MODE_DECODE", "MODE_INSERT"]


def test_named_forms_of_eformer_are_here():
    assert {"AttnQSharding", "ExpertTensorParallel"} <= {*FORMS}
    for name in FORMS:
        if name != "DynamicShardingAxes":
            ours, wanted = getattr(sharding, name), getattr(theirs, name)
            assert (ours.axes, ours.mode) == (wanted.axes, wanted.mode), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PAXES)
def test_axes_resolve_as_in_eformer(name, mode):
    ours, wanted = sharding.PartitionAxis(**PAXES[name]), PartitionAxis(**PAXES[name])
    for axis in FIELDS:
        found = ours.resolve_spec([axis, None], getattr(sharding, mode))
        assert found == wanted.resolve_spec([axis, None], getattr(theirs, mode)), axis
    assert sharding.PartitionManager(wanted).paxis == ours


SHAPES = [(4, 8, 4, 8), (4, 1, 4, 8), (2, 8, 2, 8), (3, 8, 4, 8), (4, 7, 3, 8)]
SPLIT = {  # of axes that the mesh has: see docs/sharding.md
    "default": {},
    "decode axes": {"decode_batch_axis": "dp", "decode_head_axis": None, "decode_kv_head_axis": "ep"},
    "no axes": {"batch_axis": None, "head_axis": None, "decode_kv_head_axis": "tp"},
    "heads over two": {"head_axis": ("tp", "ep"), "kv_head_axis": ("tp", "ep"), "sequence_parallel_axis": None},
    "nothing": dict.fromkeys(("batch_axis", "head_axis", "kv_head_axis", "sequence_parallel_axis")),
    "lengths": {"query_sequence_axis": "tp", "key_sequence_axis": "tp", "head_axis": None, "kv_head_axis": None},
}
ARRAYS = [("BATCH", "QUERY_LENGTH", "HEAD", "HEAD_DIM"), ("BATCH", "KV_LENGTH", "KV_HEAD", "KV_HEAD_DIM")]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SPLIT)
def test_arrays_are_split_as_by_eformer(name, shape):
    """An array that was split otherwise before stays so where nothing splits it."""
    managers = (
        sharding.PartitionManager(sharding.PartitionAxis(**SPLIT[name])),
        PartitionManager(PartitionAxis(**SPLIT[name])),
    )
    with mesh(1, 2, 1, 2, 1) as here:
        start = jax.device_put(jnp.zeros(shape), jax.NamedSharding(here, P(None, None, None, ("fsdp", "tp"))))
        for names in ARRAYS:
            axes = [getattr(sharding, n) for n in names]
            ours, wanted = (jax.jit(lambda x, m=m: m.shard(x, axes, 1))(start).sharding for m in managers)  # noqa: B023
            assert ours.is_equivalent_to(wanted, 4), (names, ours, wanted)


def test_an_axis_for_two_dimensions_is_refused_by_both():
    axes, start = {"query_sequence_axis": "tp"}, jnp.zeros((4, 8, 4, 8))
    with mesh(1, 2, 1, 2, 1):
        with pytest.raises(frisket.ParameterError, match="mesh axis 'tp' would split two dimensions"):
            sharding.PartitionManager(sharding.PartitionAxis(**axes)).shard(start, sharding.AttnQSharding)
        with pytest.raises(Exception, match="duplicate entries for `tp`"):  # JAX has no public name of it
            PartitionManager(PartitionAxis(**axes)).shard(start, theirs.AttnQSharding)


# -- configs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_metadata_reads_a_real_config(name):
    real = config(name, "frisket")
    metadata = operations.AttentionMetadata.from_config(real, softmax_scale=0.25)
    wanted = OperationMetadata.from_config(real)
    assert metadata.mesh == wanted.mesh
    assert metadata.runtime_dtype == wanted.runtime_dtype
    rules = wanted.get_shardings(theirs.MODE_TRAIN)
    fields = ("query", "key", "value", "bias", "mask", "output")
    assert metadata.get_shardings(sharding.MODE_TRAIN) == tuple(getattr(rules, n) for n in fields)
    op = operations.AttentionRegistry.create("frisket", metadata.replace(blocksize_q=None, blocksize_k=None))
    assert op(Q, K, V, causal=True).attention_outputs.shape == Q.shape
