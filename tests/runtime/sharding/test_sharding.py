"""Semantic axes, modes and the specs they become, against the page that names them."""

import pickle
from collections.abc import Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import frisket as fk
from frisket import sharding as s
from frisket.runtime.sharding.partition import fitting

SEMANTIC = (
    "BATCH LENGTH QUERY_LENGTH KV_LENGTH HEAD KV_HEAD HEAD_DIM KV_HEAD_DIM EMBED MLP_INTERMEDIATE VOCAB EXPERT "
    "EXPERT_GATE BIAS_HEAD_SEQ BIAS_KV_SEQ DATA_PARALLEL FULLY_SHARDED_DATA_PARALLEL TENSOR_PARALLEL "
    "SEQUENCE_PARALLEL EXPERT_PARALLEL"
).split()
VALUES = {
    **{name: f"__{name}__" for name in SEMANTIC},
    "MODE_TRAIN": "__train__", "MODE_PREFILL": "__prefill__", "MODE_DECODE": "__autoregressive__",
    "MODE_INSERT": "__insert__", "GENERATION_MODES": {"__autoregressive__", "__insert__"}, "EMPTY": "_",
    "DEFAULT_MASK_VALUE": -2.381976426469702e38,
}  # fmt: skip
FORMS = {  # name: axes, with the short names of the page, and the mode
    "HiddenStateSharding": ("BATCH QUERY_LENGTH EMBED", 1),
    "AttnQSharding": ("BATCH QUERY_LENGTH HEAD HEAD_DIM", 1),
    "AttnKVSharding": ("BATCH KV_LENGTH KV_HEAD KV_HEAD_DIM", 1),
    "RowWise": ("TP FSDP,SP", s.MODE_TRAIN),
    "ColumnWise": ("FSDP,SP TP", s.MODE_TRAIN),
    "SRowWise": ("TP", s.MODE_TRAIN),
    "SColumnWise": ("FSDP,SP", s.MODE_TRAIN),
    "Replicated": ("EMPTY", s.MODE_TRAIN),
    "ExpertColumnWise": ("EP FSDP TP", s.MODE_TRAIN),
    "ExpertRowWise": ("EP TP FSDP", s.MODE_TRAIN),
    "ExpertRowWiseAlt": ("EP TP FSDP,SP", s.MODE_TRAIN),
    "ExpertColumnWiseAlt": ("EP FSDP,SP TP", s.MODE_TRAIN),
    "ExpertTensorParallel": ("TP EMPTY EMPTY", s.MODE_TRAIN),
    "UnifiedExpertColumnWise": ("FSDP,SP,EP EMPTY TP", s.MODE_TRAIN),
    "UnifiedExpertRowWise": ("FSDP,SP,EP TP EMPTY", s.MODE_TRAIN),
    "ExpertActivations": ("DP SP EP TP", s.MODE_TRAIN),
    "ExpertActivationsAlt": ("DP SP TP,FSDP", s.MODE_TRAIN),
}
SPECS = {  # on a mesh of dp 2, fsdp 2, tp 2, sp 2, ep 1, and a shape that they all divide
    "HiddenStateSharding": P(("fsdp", "dp"), "sp", "tp"),
    "AttnQSharding": P(("fsdp", "dp"), "sp", "tp", None),
    "AttnKVSharding": P(("fsdp", "dp"), "sp", "tp", None),
    "RowWise": P("tp", ("fsdp", "sp")),
    "ColumnWise": P(("fsdp", "sp"), "tp"),
    "SRowWise": P("tp"),
    "SColumnWise": P(("fsdp", "sp")),
    "Replicated": P(None),
    "ExpertColumnWise": P("ep", "fsdp", "tp"),
    "ExpertRowWise": P("ep", "tp", "fsdp"),
    "ExpertRowWiseAlt": P("ep", "tp", ("fsdp", "sp")),
    "ExpertColumnWiseAlt": P("ep", ("fsdp", "sp"), "tp"),
    "ExpertTensorParallel": P("tp", None, None),
    "UnifiedExpertColumnWise": P(("fsdp", "sp", "ep"), None, "tp"),
    "UnifiedExpertRowWise": P(("fsdp", "sp", "ep"), "tp", None),
    "ExpertActivations": P("dp", "sp", "ep", "tp"),
    "ExpertActivationsAlt": P("dp", "sp", ("tp", "fsdp")),
}


def mesh(**sizes):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


MESH = mesh(dp=2, fsdp=2, tp=2, sp=2, ep=1)


@pytest.mark.parametrize("name", VALUES)
def test_sharding_constants_have_their_values(name):
    assert getattr(s, name) == VALUES[name]


def test_empty_sentinel_is_one_object():
    assert s.EMPTY_VAL is s.NOT_GIVEN is pickle.loads(pickle.dumps(s.EMPTY_VAL))
    assert isinstance(s.EMPTY_VAL, s.EMPTY_VAL)
    assert not isinstance(None, s.EMPTY_VAL)


def test_sharding_names_exist():
    assert all(hasattr(s, name) for name in s.__all__)
    assert {*VALUES, *FORMS, "EMPTY_VAL", "DynamicShardingAxes", "PartitionAxis", "PartitionManager"} <= {*s.__all__}


@pytest.mark.parametrize("name", FORMS)
def test_sharding_forms_resolve_to_their_specs(name):
    text, mode = FORMS[name]
    axes = [[getattr(s, a) for a in one.split(",")] for one in text.split()]
    form = getattr(s, name)
    assert form.axes == [one[0] if len(one) == 1 else one for one in axes]
    assert form.mode == mode
    assert isinstance(form, s.DynamicShardingAxes)
    manager = s.PartitionManager(s.PartitionAxis(), MESH)
    assert manager.resolve(form, shape=(8,) * len(axes)) == SPECS[name]


@pytest.mark.parametrize("name", FORMS)
def test_forms_are_classes(name):
    """As eformer has them, and values as before."""
    form, manager = getattr(s, name), s.PartitionManager(s.PartitionAxis(), MESH)
    axes, mode = form
    assert (axes, mode) == (form[0], form[1]) == form == form() == s.DynamicShardingAxes(axes, mode)
    assert len(form) == 2 == len(form())
    other = form([s.BATCH, s.EMBED], s.MODE_DECODE)
    assert isinstance(other, form)
    assert isinstance(other, s.DynamicShardingAxes)
    assert (other.axes, other.mode) == ([s.BATCH, s.EMBED], s.MODE_DECODE) != form
    assert form(mode=s.MODE_DECODE).axes == axes
    assert pickle.loads(pickle.dumps(other)) == other
    assert pickle.loads(pickle.dumps(form)) is form
    assert manager.resolve(form(), shape=(8,) * len(axes)) == SPECS[name]
    assert len({form, form}) == 1


def test_forms_of_ones_own():
    class Logits(s.DynamicShardingAxes):
        axes = [s.BATCH, s.LENGTH, s.VOCAB]  # noqa: RUF012
        mode = 1

    class Small(s.HiddenStateSharding):
        axes = [s.EMBED]  # noqa: RUF012

    assert (Logits.axes, Logits.mode, Logits(mode=0).mode) == ([s.BATCH, s.LENGTH, s.VOCAB], 1, 0)
    assert (Small.axes, Small.mode) == ([s.EMBED], s.HiddenStateSharding.mode)
    assert isinstance(Small, s.HiddenStateSharding)
    assert not isinstance(Small, s.RowWise)
    assert not isinstance(s.DynamicShardingAxes, s.DynamicShardingAxes)
    manager = s.PartitionManager(s.PartitionAxis(), MESH)
    assert manager.resolve(Logits, shape=(8, 8, 8)) == P(("fsdp", "dp"), "sp", "tp")
    with pytest.raises(fk.ParameterError, match="give axes and mode"):
        s.DynamicShardingAxes([s.BATCH])


def test_names_of_types():
    """The nine of `common_types`."""
    assert (s.Array, s.PRNGKey, s.Mesh) == (jax.Array, jax.Array, jax.sharding.Mesh)
    assert isinstance(jnp.dtype("bfloat16"), s.DType)
    assert s.AxisType == tuple[str, ...] | str | Any | None
    assert (s.AxisNames, s.AxisIdxes, s.Shape) == (tuple[str, ...], tuple[int, ...], Sequence[int])
    assert get_args(s.RUNTIME_MODE_TYPES) == (s.MODE_DECODE, s.MODE_PREFILL, s.MODE_TRAIN, s.MODE_INSERT)


@pytest.mark.parametrize("name", ["HiddenStateSharding", "AttnQSharding"])
def test_sharding_mode_follows_the_length(name):
    form, manager = getattr(s, name), s.PartitionManager(s.PartitionAxis(), MESH)
    rest = (8,) * (len(form.axes) - 2)
    decode = manager.resolve(dynamic_axes=form, shape=(8, 1, *rest))
    assert decode == P(("fsdp", "dp"), None, *SPECS[name][2:])
    assert decode == manager.resolve(form.axes, s.MODE_DECODE, shape=(8, 1, *rest))
    assert manager.resolve(form, shape=(8, 2, *rest)) == SPECS[name]


@pytest.mark.parametrize("mode", [s.MODE_TRAIN, s.MODE_PREFILL, s.MODE_DECODE, s.MODE_INSERT])
def test_generation_has_axes_of_its_own(mode):
    paxis = s.PartitionAxis(decode_batch_axis=("dp", "fsdp", "sp"), decode_key_sequence_axis=None, kv_head_axis=None)
    spec = paxis.resolve_spec([s.BATCH, s.QUERY_LENGTH, s.KV_LENGTH, s.HEAD, s.KV_HEAD, s.EMBED], mode)
    if mode in s.GENERATION_MODES:  # None there leaves the axis of training
        assert spec == P(("dp", "fsdp", "sp"), "sp", "sp", "tp", None, "tp")
    else:
        assert spec == P(("fsdp", "dp"), "sp", "sp", "tp", None, "tp")


def test_defaults_follow_the_names_of_the_mesh():
    paxis = s.PartitionAxis(data_parallel_axis="x", fully_sharded_data_parallel_axis="y", tensor_parallel_axis="z")
    assert paxis.batch_axis == paxis.decode_batch_axis == ("y", "x")
    assert (paxis.head_axis, paxis.vocab_axis, paxis.sequence_axis, paxis.expert_gate_axis) == ("z", "z", "sp", None)
    assert paxis == s.PartitionAxis("x", "y", "z")
    assert hash(paxis) == hash(s.PartitionAxis("x", "y", "z"))
    assert paxis.resolve_axis([s.DATA_PARALLEL, [s.TP, s.EP], None], s.MODE_TRAIN) == ["x", ("z", "ep"), None]


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 6, 4, 16), P(("fsdp", "dp"), "sp", "tp", None)),
        ((2, 6, 4, 16), P("fsdp", "sp", "tp", None)),  # the second of two axes does not divide
        ((3, 6, 3, 16), P(None, "sp", None, None)),
        ((8, 5, 1, 16), P(("fsdp", "dp"), None, None, None)),
    ],
)
def test_axes_that_do_not_divide_are_not_split(shape, spec):
    manager = s.PartitionManager(s.PartitionAxis(), MESH)
    assert manager.resolve(s.AttnQSharding.axes, s.MODE_TRAIN, shape=shape) == spec


def test_axes_a_mesh_has_not_and_axes_that_are_taken():
    manager = s.PartitionManager(s.PartitionAxis(hidden_state_axis=("tp", "sp")), mesh(fsdp=4, tp=2))
    assert manager.resolve(s.HiddenStateSharding, shape=(8, 16, 64)) == P("fsdp", None, "tp")


def test_an_axis_that_would_split_two_dimensions_is_an_error():
    both = s.PartitionManager(s.PartitionAxis(hidden_state_axis=("sp", "tp")), MESH)
    says = r"'sp' would split two dimensions of \[8, 16, 64\]: P.*\n  give one of them other axes"
    with pytest.raises(fk.ParameterError, match=says):
        both.resolve(s.HiddenStateSharding, shape=(8, 16, 64))
    assert both.resolve(s.HiddenStateSharding, shape=(8, 1, 64)) == P(("fsdp", "dp"), None, ("sp", "tp"))
    assert both.resolve(s.HiddenStateSharding.axes, s.MODE_TRAIN) == P(("fsdp", "dp"), "sp", ("sp", "tp"))
    one = s.PartitionManager(both.paxis, mesh(sp=1, tp=2))  # an axis of one device splits nothing
    assert one.resolve(s.HiddenStateSharding, shape=(8, 16, 64)) == P(None, "sp", "tp")


def test_a_spec_that_splits_nothing_leaves_the_array():
    """It asked for a copy on every device."""
    here = jax.make_mesh((1,), ("tp",), axis_types=(AxisType.Auto,))
    manager, x = s.PartitionManager(mesh=here), jnp.ones((3, 4))
    assert manager.shard(x, s.Replicated.axes * 2, s.MODE_TRAIN) is x
    assert manager.shard(x, [s.BATCH, s.EMPTY], s.MODE_TRAIN) is x  # the mesh has none of its axes
    assert "sharding_constraint" not in str(jax.make_jaxpr(lambda x: manager.shard(x, [None, None], s.MODE_TRAIN))(x))
    assert manager.shard(x, [None, s.HEAD], s.MODE_TRAIN).sharding.spec == P(None, "tp")


class Foreign:
    """A PartitionAxis of another library, as eformer's is: the same fields, another class."""

    def __init__(self, axis):
        vars(self).update(vars(axis))


def test_partition_axes_of_other_classes_are_read():
    axis = s.PartitionAxis(head_axis=("tp", "sp"), decode_batch_axis="dp")
    assert s.PartitionManager(Foreign(axis)).paxis == axis
    lacking = Foreign(axis)
    del lacking.vocab_axis
    with pytest.raises(fk.ParameterError, match="it is a PartitionAxis, or has its fields: it has no 'vocab_axis'"):
        s.PartitionManager(lacking)


@pytest.mark.parametrize(
    ("axes", "size", "found"),
    [(("a", "b"), 6, ("a", "b")), (("a", "b"), 2, "a"), (("a", "b"), 3, "b"), (("b", "a"), 4, "a"),
     ("a", 5, None), (None, 4, None), ("c", 4, None), (("a", "a"), 4, "a"), (("a", "b"), None, ("a", "b"))],
)  # fmt: skip
def test_fitting_axes_divide_the_size(axes, size, found):
    assert fitting({"a": 2, "b": 3}, axes, size) == found


def test_current_mesh_is_that_of_the_context():
    one = jax.make_mesh((1,), ("tp",), axis_types=(AxisType.Auto,))
    assert s.current_mesh() is None
    manager, x = s.PartitionManager(), np.ones((2, 3, 4, 8), np.float32)
    with jax.set_mesh(one):
        assert s.current_mesh() == one
        assert manager.resolve(s.AttnQSharding, shape=x.shape) == P(None, None, "tp", None)
        assert manager.shard(x, s.AttnQSharding).sharding.spec == P(None, None, "tp", None)
        assert jax.jit(lambda x: manager.shard(x, s.AttnQSharding) + s.current_mesh().size)(x).shape == x.shape
    with one:
        assert s.current_mesh() == one
        assert jax.jit(lambda x: manager.shard(x, s.AttnQSharding))(x).shape == x.shape


def test_current_partition_manager_is_the_innermost():
    outer, inner = s.PartitionManager(), s.PartitionManager(s.PartitionAxis(head_axis=None))
    assert s.current_partition_manager() is None
    with outer:
        with inner, inner:
            assert s.current_partition_manager() is inner
        assert s.current_partition_manager() is outer
    assert s.current_partition_manager() is None


ONE = s.PartitionManager(mesh=jax.make_mesh((1,), ("dp",)))
BAD = {
    "no semantic axis": (lambda: s.PartitionManager().resolve(["__HEADS__"], s.MODE_TRAIN), "no semantic axis '__HEA"),
    "no mode": (lambda: s.PartitionAxis().resolve_axis([s.BATCH], "train"), "no runtime mode 'train'; modes are '__tr"),
    "no axes": (lambda: s.PartitionManager().resolve(mode=s.MODE_TRAIN), "give axes and mode, or dynamic_axes"),
    "no shape": (lambda: s.PartitionManager().resolve(s.AttnQSharding), r"mode 1 depends .* shape=x\.shape"),
    "no dimension": (lambda: s.PartitionManager().resolve([s.BATCH], 3, shape=(4,)), "mode 3 is no dimension"),
    "rank": (lambda: s.PartitionManager().resolve(s.AttnQSharding, shape=(4, 4)), "4 axes, .* of 2 dimensions"),
    "too many": (lambda: ONE.place(np.ones(3), P("dp", None)), r"a spec of more axes than the array has, \[3\]: P"),
    "too many to fit": (lambda: s.PartitionManager.fit([None, "dp"], (4,), ONE.mesh), "a spec of more axes"),
    "a number": (lambda: s.PartitionAxis(head_axis=3), "head_axis is 3; it is the name of a mesh axis"),
    "no mesh": (lambda: s.PartitionManager().shard(np.ones(3), [s.BATCH], s.MODE_TRAIN), "there is no mesh to split"),
    "not an axis": (lambda: s.PartitionManager("tp"), "paxis is 'tp'; it is a PartitionAxis"),
}


@pytest.mark.parametrize("name", BAD)
def test_sharding_refuses_bad_input(name):
    wrong, says = BAD[name]
    with pytest.raises(fk.FrisketError, match=says):
        wrong()
