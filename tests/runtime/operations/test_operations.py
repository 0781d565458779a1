"""Operators by name, their dispatch and metadata, and what their calls mean, against the interpreter."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import frisket as fk
from frisket import operations as ops
from frisket import sharding as s
from frisket.modeling import create_mesh
from frisket.operations import AttentionMetadata, AttentionRegistry, BaseOperation, OperationRegistry

rng = np.random.default_rng(3)


def arrays(q_len=48, kv_len=48, heads=4, kv_heads=2, dim=8, batch=2):
    shapes = (q_len, heads), (kv_len, kv_heads), (kv_len, kv_heads)
    return [rng.standard_normal((batch, *shape, dim)).astype(np.float32) for shape in shapes]


Q, K, V = arrays()


def close(found, wanted):
    np.testing.assert_allclose(np.asarray(found.attention_outputs), wanted, atol=2e-5)


# -- dispatch ---------------------------------------------------------------------------------------

FORWARDS = ["tpu", "gpu", "cuda", "rocm", "cpu", "tt"]
FALLBACK = {
    "cuda": ["gpu", "native"],
    "rocm": ["gpu", "native"],
    **{n: ["native"] for n in ("tpu", "gpu", "cpu", "tt")},
}


def operation(*written):
    """One that says which implementation ran."""
    methods = {f"forward_{n}": lambda self, x, n=n: (n, x) for n in {"native", *written}}
    return type("Says", (BaseOperation,), methods)


@pytest.mark.parametrize("platform", FORWARDS)
def test_an_implementation_runs_on_its_platform(platform):
    metadata = AttentionMetadata(backend=platform)
    assert operation(*FORWARDS)(metadata)(1) == (platform, 1)
    order = [platform, *FALLBACK[platform]]
    for i in range(len(order)):  # the first i are not written
        assert operation(*order[i:])(metadata)(1) == (order[i], 1)


@pytest.mark.parametrize("name", ["tpu", "cpu", "cuda", "rocm", "other"])
def test_operation_runs_the_forward_of_the_platform(name, monkeypatch):
    seen = "gpu" if name in ("cuda", "rocm") else name
    monkeypatch.setattr(jax, "default_backend", lambda: seen)
    monkeypatch.setattr("frisket.runtime.operations.base.platform_of", lambda x: name)
    made = operation(*FORWARDS)()
    assert made.current_backend() == seen
    assert made(x=1) == ("native" if name == "other" else name, 1)


def test_only_forward_native_is_to_be_written():
    with pytest.raises(TypeError, match="forward_native"):
        BaseOperation()
    made = operation()
    assert (made.get_impl_name(), made().get_impl_metadata(), made()(2)) == ("Says", None, ("native", 2))


# -- registries -------------------------------------------------------------------------------------


@pytest.fixture
def registries(monkeypatch):
    for registry in (OperationRegistry, AttentionRegistry):
        monkeypatch.setattr(registry, "_known", dict(registry._known))


@pytest.mark.usefixtures("registries")
def test_operations_register_by_name():
    @AttentionRegistry.register
    class Mine(ops.AttentionImpl):
        @classmethod
        def get_impl_name(cls):
            return "mine", "my_own"

        def forward_native(self, q):
            return q

    class Other(BaseOperation):
        def forward_native(self, x):
            return x

    assert OperationRegistry.register(Other) is Other
    metadata = AttentionMetadata()
    for name in ("mine", "my_own"):
        assert AttentionRegistry.get(name) is OperationRegistry.get(name) is Mine
        assert AttentionRegistry.create(name, metadata).get_impl_metadata() is metadata
    assert AttentionRegistry.list_implementations()[-2:] == ["mine", "my_own"]
    assert "Other" in OperationRegistry.list_implementations()
    assert "Other" not in AttentionRegistry.list_implementations()
    assert OperationRegistry.create("Other")(3) == 3
    with pytest.raises(fk.ParameterError, match="no subclass of BaseOperation"):
        AttentionRegistry.register(dict)


def test_operation_names_and_aliases_exist():
    names = AttentionRegistry.list_implementations()
    backends = "xla cpp triton pallas-tpu pallas-mosaic-gpu".split()
    assert {"frisket", "dense", "ring", *(f"frisket-{b}" for b in backends)} <= {*names}
    assert all(issubclass(AttentionRegistry.get(n), ops.AttentionImpl) for n in names)
    for alias, name in {"sdpa": "frisket", "flash_attn2": "frisket", "blocksparse": "frisket",
                        "vanilla": "frisket-xla", "splash": "frisket-pallas-tpu"}.items():  # fmt: skip
        assert AttentionRegistry.get(alias) is AttentionRegistry.get(name)
    with pytest.raises(ValueError, match=r"no operation 'rnig'; did you mean 'ring'\?\n  there are frisket, ") as found:
        AttentionRegistry.get("rnig")
    assert isinstance(found.value, fk.FrisketError)


# -- metadata ---------------------------------------------------------------------------------------

FIELDS = (
    "runtime_dtype runtime_softmax_dtype sequence_axis_name mesh platform backend partition_axis partition_manager "
    "base_config scan_ring_attention softmax_scale dropout_prob blocksize_q blocksize_k blocksize_b"
).split()
GIVEN = {
    "runtime_dtype": jnp.dtype("bfloat16"), "runtime_softmax_dtype": jnp.dtype("float64"), "sequence_axis_name": "x",
    "mesh": create_mesh((1, 1), ("x", "y")), "platform": ops.Platform.TRITON, "backend": ops.Backend.ROCM,
    "partition_axis": s.PartitionAxis(head_axis=("x", "y")), "scan_ring_attention": False, "softmax_scale": 0.25,
    "dropout_prob": 0.5, "blocksize_q": 32, "blocksize_k": 64, "blocksize_b": 2,
}  # fmt: skip
PICKED = {"attn_dtype": "runtime_dtype", "attn_softmax_dtype": "runtime_softmax_dtype"}


def same(found, wanted):
    for name in FIELDS:
        if name != "base_config":
            assert getattr(found, name) == getattr(wanted, name), name


def test_attention_metadata_has_its_fields_and_defaults():
    plain = AttentionMetadata()
    assert [*plain.to_dict()] == FIELDS
    assert (plain.sequence_axis_name, plain.scan_ring_attention, plain.dropout_prob) == ("sp", True, 0.0)
    assert plain.partition_manager.paxis == plain.partition_axis == s.PartitionAxis()
    assert plain.mesh is plain.softmax_scale is plain.backend is plain.platform is plain.tile is None
    with jax.set_mesh(GIVEN["mesh"]):
        assert AttentionMetadata().mesh == AttentionMetadata().partition_manager.mesh == GIVEN["mesh"]


@pytest.mark.parametrize("name", GIVEN)
def test_a_field_is_taken_from_the_config_where_it_is_not_given(name):
    pickup = next((p for p, n in PICKED.items() if n == name), name)
    config = SimpleNamespace(**{pickup: GIVEN[name], **({"blocksize_q": 1, "blocksize_k": 1} | {pickup: GIVEN[name]})})
    assert getattr(AttentionMetadata(base_config=config), name) == GIVEN[name]
    other = {"blocksize_q": 8, "blocksize_k": 8, "softmax_scale": 1.0, "mesh": create_mesh()}.get(name)
    if other is not None:
        both = dict.fromkeys(("blocksize_q", "blocksize_k"), 8) if "blocksize" in name else {name: other}
        assert getattr(AttentionMetadata(base_config=config, **both), name) == other


def test_attention_metadata_reads_a_config():
    config = SimpleNamespace(
        attn_dtype="float16", softmax_scale=3.0, dropout_prob=0.9, partition_axis={"head_axis": "x"}
    )
    found = AttentionMetadata.from_config(config, 0.125, dropout_prob=0.25)
    assert (found.runtime_dtype, found.softmax_scale, found.dropout_prob) == (jnp.float16, 0.125, 0.25)
    assert found.partition_axis == s.PartitionAxis(head_axis="x")
    assert AttentionMetadata.from_config(config, None).dropout_prob == 0


def test_set_attrs_carefully():
    made = AttentionMetadata(base_config=SimpleNamespace(here=1))
    made.set_attrs_carefully("a", 5)
    made.set_attrs_carefully("b", 5, "here")
    made.set_attrs_carefully("c", 5, "here", use_base_config=False)
    made.set_attrs_carefully("b", 6)
    made.set_attrs_carefully(attr_name="d", default=7)
    made.set_attrs_carefully(attr="e", default=8, pickup_name="here")
    assert (made.a, made.b, made.c, made.d, made.e) == (5, 1, 5, 7, 1)
    with pytest.raises(fk.ParameterError, match="give a name and a default"):
        made.set_attrs_carefully("f")


def test_operation_metadata_is_attention_metadata():
    from frisket.operations import OperationMetadata

    assert OperationMetadata is AttentionMetadata


def test_metadata_goes_through_dicts_and_json():
    full = AttentionMetadata(**GIVEN, base_config=SimpleNamespace(anything=object()))
    same(AttentionMetadata.from_dict(full.to_dict()), full)
    assert AttentionMetadata.from_dict(full.to_dict()).base_config is full.base_config
    text = full.to_json()
    assert json.loads(text)["runtime_dtype"] == "bfloat16"
    same(AttentionMetadata.from_json(text), full)
    same(AttentionMetadata.from_json(AttentionMetadata().to_json()), AttentionMetadata())
    pretty = full.to_json(indent=2, sort_keys=True)
    assert pretty.splitlines()[1].startswith('  "backend"')
    same(AttentionMetadata.from_json(pretty), full)
    changed = full.replace(softmax_scale=2.0)
    assert (changed.softmax_scale, full.softmax_scale, changed.backend) == (2.0, 0.25, full.backend)


def test_partition_manager_follows_mesh_and_axes():
    """Operators ask the metadata for the mesh and its manager to split: there is one answer."""
    one, other = create_mesh((1, 1), ("x", "y")), create_mesh((1, 1), ("tp", "dp"))
    axes, by_head = s.PartitionAxis(head_axis="dp"), s.PartitionAxis(head_axis="x")
    mine, theirs = s.PartitionManager(axes, other), s.PartitionManager(by_head, one)
    metadata = AttentionMetadata(mesh=one)

    def fields(x):
        assert (x.partition_manager.mesh, x.partition_manager.paxis) == (x.mesh, x.partition_axis)
        return x.mesh, x.partition_axis

    assert fields(metadata) == (one, s.PartitionAxis())
    assert fields(metadata.replace(mesh=other)) == (other, s.PartitionAxis())
    assert fields(metadata.replace(partition_axis=by_head)) == (one, by_head)
    assert fields(metadata.replace(partition_manager=mine)) == (other, axes)
    assert fields(AttentionMetadata(partition_manager=mine)) == (other, axes)
    assert fields(AttentionMetadata(partition_manager=mine, mesh=one)) == (one, axes)
    config = SimpleNamespace(partition_manager=mine, partition_axis=axes)
    assert fields(AttentionMetadata(base_config=config)) == (other, axes)
    assert fields(AttentionMetadata(base_config=config, partition_axis=by_head, mesh=one)) == (one, by_head)
    assert fields(AttentionMetadata(base_config=config, partition_manager=theirs)) == (one, by_head)
    with pytest.raises(fk.ParameterError, match="give one of them"):
        AttentionMetadata(partition_manager=mine, partition_axis=by_head)


def test_partition_managers_of_other_classes_are_read():
    """As eformer has them: no mesh, and a PartitionAxis of its own class."""
    axis, mesh = s.PartitionAxis(head_axis="x"), create_mesh((1, 1), ("x", "y"))
    foreign = SimpleNamespace(**vars(axis))
    manager = SimpleNamespace(paxis=foreign)
    for settings in (
        {"partition_axis": foreign}, {"partition_manager": manager},
        {"partition_axis": foreign, "partition_manager": manager},
        {"base_config": SimpleNamespace(partition_axis=foreign, partition_manager=manager)},
    ):  # fmt: skip
        metadata = AttentionMetadata(mesh=mesh, **settings)
        assert metadata.partition_manager == s.PartitionManager(axis, mesh)
        assert metadata.partition_axis == axis
        assert AttentionMetadata.from_json(metadata.to_json()) == metadata
    with pytest.raises(fk.ParameterError, match="paxis is 3; it is a PartitionAxis, or has its fields"):
        AttentionMetadata(partition_manager=3)


def test_numbers_of_libraries_go_through_json():
    given = {"softmax_scale": jnp.float32(0.5), "dropout_prob": np.float32(0.25), "blocksize_q": np.int64(32)}
    found = AttentionMetadata.from_json(AttentionMetadata(**given, blocksize_k=64).to_json())
    assert (found.softmax_scale, found.dropout_prob, found.tile) == (0.5, 0.25, (32, 64))
    with pytest.raises(fk.ParameterError, match="no AttentionMetadata"):
        AttentionMetadata.from_json('{"softmax_scale": 0.5')


@pytest.mark.parametrize("bthd", [True, False])
@pytest.mark.parametrize("mni", [True, False])
@pytest.mark.parametrize("mode", [s.MODE_TRAIN, s.MODE_PREFILL, s.MODE_DECODE, s.MODE_INSERT])
def test_metadata_gives_the_sharding_of_each_mode(mode, bthd, mni):
    paxis = s.PartitionAxis(kv_head_axis="ep", bias_head_sequence_axis="tp", bias_key_sequence_axis="sp",
                            decode_key_sequence_axis="fsdp", batch_axis="dp")  # fmt: skip
    found = AttentionMetadata(partition_axis=paxis).get_shardings(mode, bthd, mni)
    length, keys = "sp", "fsdp" if mode in s.GENERATION_MODES else "sp"

    def four(length, heads):
        return P("dp", length, heads, None) if bthd else P("dp", heads, length, None)

    query, key = four(length, "tp"), four(keys, "tp" if mni else "ep")
    assert found == (query, key, key, P("dp", "tp", length, "sp"), P("dp", None, length, "sp"), query)


def test_attention_output_is_a_pytree_and_serializes():
    made = ops.AttentionOutput(attention_outputs=jnp.asarray(Q, "bfloat16"))
    doubled = jax.jit(lambda x: jax.tree.map(lambda y: 2 * y, x))(made)
    assert doubled.attention_weights is None
    np.testing.assert_array_equal(doubled.attention_outputs, 2 * made.attention_outputs)
    for back in (made.from_dict(made.to_dict()), made.from_json(made.to_json())):
        assert back.attention_weights is None
        assert back.attention_outputs.dtype == jnp.bfloat16
        np.testing.assert_array_equal(back.attention_outputs, made.attention_outputs)
    assert made.replace(attention_weights=Q).attention_weights is Q


# -- helpers ----------------------------------------------------------------------------------------


def test_operation_mode_and_repeated_heads_follow_shapes():
    op = AttentionRegistry.create("frisket")
    assert op.get_mode(jnp.ones((2, 1, 4, 8))) == op.get_mode(jnp.ones((2, 4, 1, 8)), BTHD=False) == s.MODE_DECODE
    assert op.get_mode(jnp.ones((2, 4, 1, 8))) == op.get_mode(jnp.ones((2, 1, 4, 8)), BTHD=False) == s.MODE_TRAIN
    k, v = op.repeat_kv_heads(jnp.asarray(K), jnp.asarray(V), 2)
    np.testing.assert_array_equal(k, K[:, :, [0, 0, 1, 1]])
    np.testing.assert_array_equal(v, V[:, :, [0, 0, 1, 1]])


def test_stable_sharding_drops_axes_that_do_not_divide():
    mesh = jax.sharding.AbstractMesh((2, 2, 2), ("dp", "sp", "tp"))
    stable = AttentionRegistry.create("frisket", AttentionMetadata(mesh=mesh)).create_stable_sharding
    spec, other = P("dp", "sp", "tp", None), P("tp", "dp", None, None)
    assert stable(spec) == spec
    assert stable(spec, [0, 2]) == P("dp", None, "tp", None)
    assert stable(spec, [0, 1], clone_ps=other) == P("tp", "dp", None, None)
    assert stable(spec, [0, 1], tensor=np.ones((4, 3, 2, 1))) == P("dp", None, None, None)
    assert stable(spec, tensor=np.ones((3, 4, 2, 1))) == P(None, "sp", "tp", None)
    assert stable(spec, [0], dep=None) is stable(None, [0]) is None


# -- calls ------------------------------------------------------------------------------------------

RUN_HERE = ["frisket", "frisket-xla", "frisket-cpp", "frisket-pallas-tpu", "dense", "ring"]
TEXT, MOD = "causal & window(w) | sinks(2)", "score + slope[h] * (k - q)"
VALUES = {"w": 17, "slope": np.array([0.1, 0.2, 0.3, 0.4], np.float32)}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", RUN_HERE)
def test_operators_give_the_attention_of_the_reference(name):
    if fk.backends().get(name.removeprefix("frisket-"), ""):
        pytest.skip(fk.backends()[name.removeprefix("frisket-")])
    op = AttentionRegistry.create(name, AttentionMetadata(softmax_scale=0.3))
    found = op(
        jnp.asarray(Q), jnp.asarray(K), jnp.asarray(V), TEXT, score=MOD, softmax_aux=np.zeros(4, np.float32), **VALUES
    )
    wanted = fk.reference(Q, K, V, TEXT, MOD, scale=0.3, sinks=np.zeros(4), layout="bshd", **VALUES)
    close(found, wanted)
    assert found.attention_weights is None


KEEP = rng.random((2, 1, 48, 48)) < 0.7
OF_KEY_HEADS = rng.random((2, 2, 48, 48)) < 0.7
BIAS = rng.standard_normal((1, 4, 48, 48)).astype(np.float32)
SEGMENTS = np.sort(rng.integers(-1, 3, (2, 48)), 1).astype(np.int32)
PLACES = np.stack([rng.permutation(48), np.arange(48) // 2]).astype(np.int32)
CAP = "30.0 * tanh(score / 30.0)"
CASES = {  # keywords: the same as texts
    "causal": ({"causal": True}, "q >= k", None, {}),
    "window": ({"sliding_window": 7}, "abs(q - k) <= 7", None, {}),
    "two-sided": ({"sliding_window": (9, 2)}, "q - k <= 9 & k - q <= 2", None, {}),
    "all": (
        {"mask": "window(w)", "w": 30, "causal": True, "sliding_window": (20, 0)}, "causal & q - k <= 20", None, {},
    ),
    "function": ({"mask": lambda q, k: (q - k) % 3 != 1, "causal": True}, "causal & (q - k) % 3 != 1", None, {}),
    "array mask": ({"mask": KEEP, "causal": True}, "causal & t[b, 0, q, k]", None, {"t": KEEP}),
    "array of three axes": ({"mask": KEEP[:, 0]}, "t[b, q, k]", None, {"t": KEEP[:, 0]}),
    "padding": ({"mask": KEEP[:, 0, 0]}, "t[b, k]", None, {"t": KEEP[:, 0, 0]}),
    "mask of key heads": ({"mask": OF_KEY_HEADS}, "t[b, h // 2, q, k]", None, {"t": OF_KEY_HEADS}),
    "mask of integers": ({"mask": KEEP.astype(np.int32)}, "t[b, 0, q, k]", None, {"t": KEEP}),
    "padding of bytes": ({"mask": KEEP[:, 0, 0].astype(np.uint8)}, "t[b, k]", None, {"t": KEEP[:, 0, 0]}),
    "bias of key heads": ({"bias": BIAS[:, :2]}, None, "score + t[0, h // 2, q, k]", {"t": BIAS[:, :2]}),
    "bias": ({"bias": BIAS}, None, "score + t[0, h, q, k]", {"t": BIAS}),
    "init bias": ({"init_bias": lambda: BIAS}, None, "score + t[0, h, q, k]", {"t": BIAS}),
    "init bias beside a mask": ({"init_bias": lambda: BIAS, "mask": "causal"}, "causal", None, {}),
    "cap, then bias": ({"logits_soft_cap": 30, "bias": BIAS}, None, f"{CAP} + t[0, h, q, k]", {"t": BIAS}),
    "score, then cap": (
        {"score": "2.0 * score", "logits_soft_cap": 30.0}, None, CAP.replace("score", "(2.0 * score)"), {},
    ),
    "segments": ({"segment_ids": SEGMENTS}, "t[b, q] == t[b, k] & t[b, q] >= 0", None, {"t": SEGMENTS}),
    "two segments": (
        {"segment_ids": (SEGMENTS, SEGMENTS[:1])}, "t[b, q] == t[0, k] & t[b, q] >= 0", None, {"t": SEGMENTS},
    ),
    "positions of keys alone": ({"positions": PLACES, "mask": "k < 20"}, "t[b, k] < 20", None, {"t": PLACES}),
    "positions that nothing reads": ({"positions": PLACES, "bias": BIAS}, None, "score + t[0, h, q, k]", {"t": BIAS}),
    "positions": (
        {"positions": PLACES, "mask": "window(w)", "w": 9, "score": "score - 0.1 * (q - k)", "causal": True},
        "0 <= t[b, q] - t[b, k] & t[b, q] - t[b, k] < 9", "score - 0.1 * (t[b, q] - t[b, k])", {"t": PLACES},
    ),
}  # fmt: skip


def each(case, jit):
    """Eagerly all; traced a few, the others exhaustive."""
    marks = pytest.mark.exhaustive if jit and case != "padding" else ()
    return pytest.param(case, jit, marks=marks, id=f"{case} {'jit' if jit else 'eager'}")


@pytest.mark.parametrize(("case", "jit"), [each(case, jit) for case in CASES for jit in (False, True)])
def test_operation_keywords_equal_masks_and_scores(case, jit):
    given, mask, score, tables = CASES[case]
    op = AttentionRegistry.create("frisket-xla" if jit else "dense")  # what is put together is the same
    traced = {n: x for n, x in given.items() if jit and (isinstance(x, np.ndarray | int) and not isinstance(x, bool))}
    traced = {n: x for n, x in traced.items() if n not in ("sliding_window", "logits_soft_cap")}
    fixed = {n: x for n, x in given.items() if n not in traced}
    run = jax.jit(lambda q, k, v, traced: op(q, k, v, **fixed, **traced)) if jit else lambda *a: op(*a[:3], **given)
    close(run(*map(jnp.asarray, (Q, K, V)), traced), fk.reference(Q, K, V, mask, score, layout="bshd", **tables))


def test_operations_weigh_pairs_by_the_positions_given():
    gamma, weight = np.float32([0.6, 0.7, 0.8, 0.9]), "retention(gamma)"
    how = {"weight": weight, "divide": "max(abs(total), 1 + q % 2)", "causal": True, "gamma": gamma}
    found = AttentionRegistry.create("dense")(*map(jnp.asarray, (Q, K, V)), positions=PLACES, **how)
    wanted = fk.reference(
        Q, K, V, "t[b, q] >= t[b, k]", weight="score * gamma[h] ** (t[b, q] - t[b, k])",
        divide="max(abs(total), 1 + t[b, q] % 2)", gamma=gamma, t=PLACES, layout="bshd",
    )  # fmt: skip
    close(found, wanted)
    with pytest.raises(fk.ParameterError, match="sinks are logits of a softmax"):
        AttentionRegistry.create("dense")(*map(jnp.asarray, (Q, K, V)), weight="relu2", softmax_aux=jnp.zeros(4))


@pytest.mark.parametrize("q_len", [1, 5])
def test_operations_align_the_last_query_with_the_last_key(q_len):
    q, k, v = arrays(q_len, 40)
    op = AttentionRegistry.create("dense")
    wanted = fk.reference(
        q, k, v, "causal & sliding(9, 0)", layout="bshd", origin=(0, 0, 40 - q_len, 0), sizes=(2, 4, 40, 40)
    )
    close(op(q, k, v, causal=True, sliding_window=(9, 0)), wanted)
    close(op(q, k, v, "sliding(9, 0)", causal=True, origin=(0, 0, 40 - q_len, 0), sizes=(2, 4, 40, 40)), wanted)
    at = np.arange(40 - q_len, 40, dtype=np.int32), np.arange(40, dtype=np.int32)
    close(op(q, k, v, "sliding(9, 0)", causal=True, positions=at), wanted)


@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 40), (40, 5), (12, 9)])
def test_align_places_the_first_or_the_last_positions(q_len, kv_len):
    q, k, v = arrays(q_len, kv_len)
    op, ends = AttentionRegistry.create("dense"), {"start": 0, "end": kv_len - q_len}
    for align, ahead in ends.items():
        at = "q" if ahead == 0 else f"(q + {ahead})"
        wanted = fk.reference(q, k, v, f"k <= {at} & {at} - k <= 9", layout="bshd")
        close(op(q, k, v, causal=True, sliding_window=(9, 3), align=align), wanted)


def test_queries_without_keys_by_alignment_are_an_error():
    """48 queries over 16 keys with causal=True gave 32 rows of zeros."""
    q, k, v = arrays(48, 16)
    op = AttentionRegistry.create("dense")
    for number, given in {32: {"causal": True}, 29: {"sliding_window": 3}, 1: {"sliding_window": (-1, 31)}}.items():
        says = f"48 queries and 16 keys: .*, so {number} queries see no key\n  align='start' places"
        with pytest.raises(fk.ParameterError, match=says):
            op(q, k, v, **given)
        zeros = (np.asarray(op(q, k, v, align="end", **given).attention_outputs) == 0).all((0, 2, 3))
        assert zeros.sum() == number
    for given in ({}, {"sliding_window": (3, -1)}, {"sliding_window": (3, 32)}):
        assert not (np.asarray(op(q, k, v, **given).attention_outputs) == 0).all((0, 2, 3)).any()


@pytest.mark.parametrize("shape", [(4,), (2,), (1,), (3,), (5,), (4, 3), (2, 3), (1, 3)], ids=str)
def test_sinks_are_of_heads_of_key_heads_or_of_all(shape):
    sinks = rng.standard_normal(shape).astype(np.float32)
    each = sinks if len(shape) == 2 else sinks[:, None] if len(sinks) in (2, 4) else sinks[None]
    each = np.repeat(each, 4 // len(each), axis=0)
    wanted = fk.reference(Q, K, V, layout="bshd", sinks=np.log(np.exp(each).sum(1)))
    close(AttentionRegistry.create("dense")(Q, K, V, softmax_aux=sinks), wanted)


def test_a_window_is_a_number_or_two():
    q = jnp.ones((1, 8, 2, 8))
    op = AttentionRegistry.create("dense")
    assert op(q, q, q, sliding_window=np.int64(2)).attention_outputs.shape == q.shape
    for window in ("4", (1, 2, 3), 1.5):
        with pytest.raises(fk.ParameterError, match="it is an int, or"):
            op(q, q, q, sliding_window=window)


def test_sinks_of_a_head_are_one():
    op, many = AttentionRegistry.create("dense"), rng.standard_normal((4, 3)).astype(np.float32)
    wanted = fk.reference(Q, K, V, layout="bshd", sinks=np.log(np.exp(many).sum(1)))
    close(op(Q, K, V, softmax_aux=many), wanted)


def test_operations_compute_in_the_runtime_dtype():
    op = AttentionRegistry.create("frisket-xla", AttentionMetadata(runtime_dtype="bfloat16"))
    found = op(Q, K, V, causal=True).attention_outputs
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype("float32"), fk.reference(Q, K, V, "causal", layout="bshd"), atol=0.03)
    assert (
        AttentionRegistry.create("frisket-xla")(*(jnp.asarray(x, "float16") for x in (Q, K, V))).attention_outputs.dtype
        == "float16"
    )


def test_operations_drop_out_only_when_not_deterministic():
    op, key = AttentionRegistry.create("dense", AttentionMetadata(dropout_prob=0.5)), jax.random.key(1)
    exact = fk.reference(Q, K, V, "causal", layout="bshd")
    close(op(Q, K, V, causal=True, dropout_rng=key), exact)
    seed = int(jax.random.randint(key, (), 0, 2**31 - 1))
    wanted = fk.reference(Q, K, V, "causal", layout="bshd", dropout=0.5, seed=seed)
    close(op(Q, K, V, causal=True, deterministic=False, dropout_rng=key), wanted)
    assert np.abs(wanted - exact).max() > 0.1
    close(op(Q, K, V, causal=True, deterministic=False, dropout_prob=0.0), exact)


@pytest.mark.exhaustive
def test_operation_gradients_equal_compiled_attention():
    op = AttentionRegistry.create("frisket-xla")
    full = fk.compile("causal", "softcap(20) + t[0, h, q, k]", backend="xla")

    def loss(attend):
        return jax.grad(lambda q, bias: (attend(q, bias) ** 2).sum(), (0, 1))(jnp.asarray(Q), jnp.asarray(BIAS))

    found = loss(lambda q, bias: op(q, K, V, causal=True, logits_soft_cap=20, bias=bias).attention_outputs)
    for x, y in zip(found, loss(lambda q, bias: full(q, jnp.asarray(K), jnp.asarray(V), t=bias)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_tiles_and_platforms_are_those_of_the_metadata(monkeypatch):
    seen = []
    real = fk.Attention.__call__
    monkeypatch.setattr(
        fk.Attention, "__call__", lambda self, *a, **k: seen.append(self.options) or real(self, *a, **k)
    )
    AttentionRegistry.create("frisket", AttentionMetadata(blocksize_q=32, blocksize_k=16, platform="jax"))(Q, K, V)
    assert (seen[0].tile, seen[0].backend) == ((32, 16), "xla")
    assert AttentionRegistry.create("frisket", AttentionMetadata(platform="triton")).chosen() == "triton"
    pallas = AttentionRegistry.create("frisket", AttentionMetadata(platform="pallas"))
    for platform, backend in {"tpu": "pallas-tpu", "gpu": "pallas-mosaic-gpu"}.items():
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        assert pallas.chosen() == backend
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(fk.BackendError, match="platform 'pallas' is for TPUs and GPUs"):
        pallas.chosen()


@pytest.mark.exhaustive
def test_operations_with_new_segments_do_not_retrace():
    op, count = AttentionRegistry.create("frisket-xla"), []

    @jax.jit
    def step(q, k, v, ids):
        count.append(1)
        return op(q, k, v, "window(9)", segment_ids=ids, causal=True).attention_outputs

    for i in range(2):
        step(Q, K, V, SEGMENTS + i)
    assert len(count) == 1


def test_equal_calls_are_compiled_once():
    from frisket.runtime.attention.entry import _compiled

    before = _compiled.info().entries
    for w in (5, 6):
        AttentionRegistry.create("dense")(Q, K, V, "window(w)", w=w)
    assert _compiled.info().entries <= before + 1


OP = AttentionRegistry.create("frisket-xla")
BAD = {
    "keyword": (lambda: OP(Q, K, V, casual=True), "`casual` is given .* did you mean the keyword `causal`?"),
    "window": (lambda: OP(Q, K, V, sliding_windw=4), "did you mean the keyword `sliding_window`?"),
    "unused": (lambda: OP(Q, K, V, "causal", w=3), "`w`"),
    "name": (lambda: OP(Q, K, V, "t[q] > 0", attention_mask=SEGMENTS), "`attention_mask` is the name of what"),
    "floats": (lambda: OP(Q, K, V, KEEP.astype(np.float32)), "is an array of float32; .*\n  integers are"),
    "additive integers": (lambda: OP(Q, K, V, np.where(KEEP, 0, -9)), "a bias that is added to scores"),
    "align": (lambda: OP(Q, K, V, causal=True, align="left"), "align is 'left'; it is 'end', the last query at"),
    "align and positions": (
        lambda: OP(Q, K, V, causal=True, align="end", positions=PLACES), "'start', .* without positions and origin",
    ),
    "key heads": (
        lambda: OP(Q, K, V, np.ones((2, 3, 48, 48), bool)), r"\[2, 3, 48, 48\] for .*\n  heads may be the 2 ",
    ),
    "additive": (lambda: OP(Q, K, V, np.where(KEEP, 0, -1e9)), "a bias that is added to scores; .* mask=bias == 0"),
    "mask shape": (lambda: OP(Q, K, V, KEEP[..., :7]), r"the attention mask is \[2, 1, 48, 7\] for"),
    "bias rank": (lambda: OP(Q, K, V, bias=BIAS[0, 0, 0]), r"the attention bias is \[48\]"),
    "segments": (lambda: OP(Q, K, V, segment_ids=SEGMENTS[:, 1:]), r"segment_ids of queries are int32\[2, 47\]"),
    "float segments": (lambda: OP(Q, K, V, segment_ids=BIAS[0, 0]), "they are integers"),
    "positions": (lambda: OP(Q, K, V, positions=(PLACES, PLACES[:, 1:])), "positions of keys are"),
    "moved": (lambda: OP(Q, K, V, KEEP, origin=(0, 0, 3, 0)), "give positions instead of origin"),
    "causal": (lambda: OP(Q, K, V, causal=3), "causal is 3"),
    "sinks": (lambda: OP(Q, K, V, softmax_aux=np.ones((3, 2))), r"softmax_aux is \[3, 2\]; it is \[4\] or \[2\]"),
    "no key": (lambda: OP(Q, K, V, deterministic=False, dropout_prob=0.1), "dropout_rng="),
    "metadata": (lambda: AttentionRegistry.create("frisket", {"mesh": None}), "it is an AttentionMetadata"),
    "field": (lambda: AttentionMetadata.from_dict({"meshes": 1}), "has no field 'meshes'; it has runtime_dtype"),
    "no record": (lambda: AttentionMetadata.from_json("[1]"), "this is no AttentionMetadata"),
    "dtype": (lambda: AttentionMetadata(runtime_dtype="int8"), "runtime_dtype is 'int8'; it is a floating dtype"),
    "backend": (lambda: AttentionMetadata(backend="npu"), "backend is 'npu'; it is one of 'tpu'"),
    "platform": (lambda: AttentionMetadata(platform="cuda"), "platform is 'cuda'; it is one of 'jax'"),
    "rate": (lambda: AttentionMetadata(dropout_prob=1), "dropout is 1"),
    "blocks": (lambda: AttentionMetadata(blocksize_q=64), "both of blocksize_q and blocksize_k"),
    "config": (lambda: AttentionMetadata(base_config={"attn_dtype": "float16"}), "base_config is a dict"),
    "softmax": (
        lambda: AttentionRegistry.create("frisket", AttentionMetadata(runtime_softmax_dtype="float64"))(Q, K, V),
        "a softmax in float64",
    ),
    "index": (lambda: OP.create_stable_sharding(P("dp"), [1]), "index 1 is no axis"),
    "ring origin": (
        lambda: AttentionRegistry.create("ring")(Q, K, V, origin=(0, 0, 1, 0)), "takes whole sequences",
    ),
    "ring decode": (lambda: AttentionRegistry.create("ring")(Q[:, :1], K, V), "as many queries as keys, not 1 and 48"),
    "ring deal": (
        lambda: AttentionRegistry.create("ring")(Q, K, V, deal=fk.parallel.deal("causal", 48, ranks=2, tile=16)),
        "it is an fk.parallel.Deal over 1 ranks of 'sp'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_operations_refuse_bad_input(name):
    wrong, says = BAD[name]
    with pytest.raises(fk.FrisketError, match=says):
        wrong()


@pytest.mark.parametrize("what", ["segment_ids", "positions"])
def test_a_list_of_two_rows_is_a_batch_of_two(what):
    """It was read as a pair, of queries and of keys."""
    ids = np.asarray(SEGMENTS)
    want = OP(Q, K, V, causal=True, **{what: ids}).attention_outputs
    np.testing.assert_array_equal(OP(Q, K, V, causal=True, **{what: ids.tolist()}).attention_outputs, want)
    pair = OP(Q, K, V, causal=True, **{what: [ids, ids]}).attention_outputs
    np.testing.assert_array_equal(pair, want)
