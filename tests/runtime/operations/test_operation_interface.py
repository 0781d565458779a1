"""What code written for EasyDeL's operators says to them: keywords, unset fields, classes that it registers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import frisket as fk
from frisket.operations import (
    AttentionImpl,
    AttentionMetadata,
    AttentionOutput,
    AttentionRegistry,
    Backend,
    BaseOperation,
    OperationRegistry,
)

OPEN = (AttentionMetadata, AttentionOutput)


class Bare(BaseOperation):
    """It has a constructor of its own, which does not call the base's."""

    def __init__(self, gain):
        self.gain = gain

    def forward_native(self, x):
        return self.gain * x


def test_operation_without_metadata_runs_and_hashes():
    class BareAttention(AttentionImpl):
        def __init__(self):
            pass

        def forward_native(self, x):
            return -x

    assert BaseOperation.metadata is AttentionImpl.metadata is None
    assert (Bare(3)(2), Bare(3).get_impl_metadata()) == (6, None)
    one = BareAttention()
    assert (one(2), one.get_impl_metadata(), one == BareAttention(), hash(one) == hash(BareAttention())) == (
        -2, None, True, True,
    )  # fmt: skip


def test_operations_have_the_devices_they_compare_with():
    op = AttentionRegistry.create("frisket", AttentionMetadata(backend="tpu"))
    assert op.EasyDeLBackends is Bare(1).EasyDeLBackends is Backend
    assert op.metadata.backend is op.EasyDeLBackends.TPU


@pytest.mark.parametrize("kind", OPEN)
def test_serialization_takes_easydels_keywords(kind):
    made = kind()
    assert [*kind.from_dict(data=made.to_dict()).to_dict()] == [*made.to_dict()]
    assert [*kind.from_json(json_str=made.to_json()).to_dict()] == [*made.to_dict()]


@pytest.fixture
def registries(monkeypatch):
    for registry in (OperationRegistry, AttentionRegistry):
        monkeypatch.setattr(registry, "_known", dict(registry._known))


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize("registry", [OperationRegistry, AttentionRegistry])
def test_registering_a_name_again_warns_and_replaces(registry):
    def version(number):
        class Numbered(AttentionImpl):
            @classmethod
            def get_impl_name(cls):
                return "numbered", "counted"

            def forward_native(self):
                return number

        return Numbered

    first, second = version(1), version(2)
    assert registry.register(impl_cls=first) is first
    registry.register(first)  # the same class says nothing
    with pytest.warns(UserWarning, match=r"'numbered' was .*Numbered; it is now .*Numbered") as caught:
        assert registry.register(impl_cls=second) is second
    assert len(caught) == 2  # a name each
    assert OperationRegistry.get("counted") is registry.get("numbered") is second
    assert registry.create("counted")() == 2


@pytest.mark.parametrize("field", [f for f in AttentionMetadata().to_dict() if f != "base_config"])
def test_ellipsis_is_an_unset_field(field):
    plain, unset = AttentionMetadata(), AttentionMetadata(**{field: ...})
    assert getattr(unset, field) == getattr(plain, field)
    assert getattr(plain.replace(**{field: ...}), field) == getattr(plain, field)


def test_ellipsis_reads_the_config():
    class Config:
        attn_dtype = "bfloat16"
        blocksize_q = blocksize_k = ...

    made = AttentionMetadata(runtime_dtype=..., base_config=Config())
    assert (made.runtime_dtype, made.tile) == (jnp.bfloat16, None)
    made.window = ...
    made.set_attrs_carefully("window", 5)
    assert made.window == 5
    assert AttentionMetadata(base_config=...).base_config is None


def test_dropout_probability_reads_back_as_written():
    made = AttentionMetadata(dropout_prob=0.1)
    assert made.dropout_prob == AttentionMetadata.from_json(made.to_json()).dropout_prob == 0.1
    assert type(AttentionMetadata(dropout_prob=np.float32(0.5)).dropout_prob) is float
    q = jax.random.normal(jax.random.key(0), (1, 32, 2, 8))
    drawn = {"deterministic": False, "dropout_rng": jax.random.key(1), "causal": True}
    op = AttentionRegistry.create("frisket", made)
    mine, given = op(q, q, q, **drawn), AttentionRegistry.create("frisket")(q, q, q, dropout_prob=0.1, **drawn)
    np.testing.assert_array_equal(mine.attention_outputs, given.attention_outputs)
    with pytest.raises(fk.ParameterError, match="at least 0 and below 1"):
        AttentionMetadata(dropout_prob=1.0)


def test_softmax_dtype_is_none_unless_named():
    assert AttentionMetadata().runtime_softmax_dtype is None
    assert AttentionMetadata.from_json(AttentionMetadata().to_json()).runtime_softmax_dtype is None
    assert AttentionMetadata(runtime_softmax_dtype="float32").runtime_softmax_dtype == jnp.float32
    q = jnp.ones((1, 4, 2, 8), "bfloat16")
    out = AttentionRegistry.create("frisket", AttentionMetadata(runtime_softmax_dtype=None))(q, q, q)
    assert out.attention_outputs.dtype == jnp.bfloat16


def test_stable_sharding_counts_indices_from_the_end():
    stable = AttentionRegistry.create("frisket").create_stable_sharding
    spec, other = P("dp", "sp", "tp", None), P("tp", "dp", None, "sp")
    assert stable(spec, [-2]) == stable(spec, [2]) == P(None, None, "tp", None)
    assert stable(spec, [0, -1], clone_ps=other) == P("tp", None, None, "sp")
    for wrong in (4, -5):
        with pytest.raises(fk.ShapeError, match=f"index {wrong} is no axis"):
            stable(spec, [wrong])
    with pytest.raises(fk.ShapeError, match="index -1 is no axis"):
        stable(spec, [-1], clone_ps=P("tp"))
