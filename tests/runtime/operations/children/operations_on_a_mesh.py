"""Operators on eight CPU devices: `python operations_on_a_mesh.py [all]` prints a line for every check that holds."""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import frisket as fk
from frisket import modeling as m
from frisket import sharding as s
from frisket.operations import AttentionMetadata, AttentionRegistry

rng = np.random.default_rng(0)
LENGTH = 64


def arrays(q_len=LENGTH, batch=4, heads=4, kv_heads=2):
    shapes = (batch, q_len, heads, 8), (batch, LENGTH, kv_heads, 8), (batch, LENGTH, kv_heads, 8)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def close(found, wanted, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=tolerance)


def sharded_as(x, mesh, spec):
    assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim), (x.sharding, spec)


def gathers(fn, *args):
    """What of [..., LENGTH, heads, dim] is gathered in the compiled program."""
    text = jax.jit(fn).lower(*args).compile().as_text()
    return [line for line in text.splitlines() if " all-gather(" in line]


ALL = "all" in sys.argv
MESHES = {  # dims of dp, fsdp, tp, sp: specs of q in training and in decoding
    (2, 2, 2, 1): (P(("fsdp", "dp"), None, "tp", None), P(("fsdp", "dp"), None, "tp", None)),
    (1, 2, 2, 2): (P("fsdp", "sp", "tp", None), P("fsdp", None, "tp", None)),
    (1, -1, 1, 1): (P(("fsdp",), None, None, None), P(("fsdp",), None, None, None)),
    (1, 1, 4, 2): (P(None, "sp", "tp", None), P(None, None, "tp", None)),
}
USUAL = (1, 2, 2, 2)


def modes():
    for dims, (training, decoding) in MESHES.items() if ALL else [(USUAL, MESHES[USUAL])]:
        mesh = m.create_mesh(dims)
        batch = mesh.shape["dp"] * mesh.shape["fsdp"]
        op = AttentionRegistry.create("frisket-xla", AttentionMetadata(mesh=mesh))
        lengths = {s.MODE_TRAIN: LENGTH, s.MODE_PREFILL: LENGTH, s.MODE_DECODE: 1, s.MODE_INSERT: 5}
        for mode, q_len in lengths.items():
            if dims != USUAL and mode in (s.MODE_PREFILL, s.MODE_INSERT):  # split as training and decoding are
                continue
            if not ALL and mode in (s.MODE_PREFILL, s.MODE_INSERT):
                continue
            q, k, v = arrays(q_len, max(batch, 2))
            place = {"origin": (0, 0, LENGTH - q_len, 0), "sizes": (len(q), 4, LENGTH, LENGTH)}
            how = {"w": 20, "slope": np.float32([1, 2, 3, 4]), **place}
            wanted = fk.reference(q, k, v, "causal & window(w)", "score - slope[h] * (q - k)", layout="bshd", **how)
            spec = decoding if mode in s.GENERATION_MODES else training
            query, key = op.metadata.get_shardings(mode)[:2]
            manager = op.metadata.partition_manager
            # what the mode says, placed by hand, then given to the operator
            args = [manager.place(jnp.asarray(x), p) for x, p in zip((q, k, v), (query, key, key), strict=True)]
            sharded_as(args[0], mesh, spec if q_len % mesh.shape["sp"] == 0 else P(spec[0], None, *spec[2:]))

            def run(q, k, v, op=op, how=how):
                return op(q, k, v, "causal & window(w)", score="score - slope[h] * (q - k)", **how).attention_outputs

            found = jax.jit(run)(*args)
            close(found, wanted)
            if mode != s.MODE_INSERT:  # five queries, whose mode nothing tells
                sharded_as(found, mesh, spec)
            if mesh.shape["sp"] == 1 and mode == s.MODE_TRAIN:
                assert not gathers(run, *args)  # batches and heads stay where they are


def gradients():
    mesh, (q, k, v) = m.create_mesh((2, 2, 2, 1)), map(jnp.asarray, arrays())
    op, one = (AttentionRegistry.create("frisket-xla", AttentionMetadata(mesh=x)) for x in (mesh, None))

    def loss(op):
        return jax.jit(jax.grad(lambda *a: (op(*a, "causal", bias=BIAS).attention_outputs ** 2).sum(), (0, 1, 2)))

    close(loss(op)(q, k, v), loss(one)(q, k, v), 1e-4)


BIAS = rng.standard_normal((1, 4, LENGTH, LENGTH)).astype(np.float32)


def rings():
    mesh, (q, k, v) = m.create_mesh((1, 2, 2, 2)), map(jnp.asarray, arrays())
    segments = np.sort(rng.integers(0, 3, (4, LENGTH)), 1).astype(np.int32)
    one = AttentionRegistry.create("frisket-xla", AttentionMetadata(mesh=None))

    def loss(op, **more):
        def run(q, k, v, segments):
            out = op(
                q, k, v, "window(w) | sinks(2)", w=20, causal=True, segment_ids=segments, logits_soft_cap=20.0,
                softmax_aux=jnp.ones(4), **more,
            ).attention_outputs  # fmt: skip
            return (out**2).mean(), out

        return jax.jit(jax.value_and_grad(run, (0, 1, 2), has_aux=True) if ALL else lambda *a: (run(*a), ()))

    wanted = loss(one)(q, k, v, segments)
    texts = {}
    for scan in (True, False) if ALL else (True,):
        op = AttentionRegistry.create("ring", AttentionMetadata(mesh=mesh, scan_ring_attention=scan))
        found = loss(op)(q, k, v, segments)
        close(found, wanted, 1e-4)
        sharded_as(found[0][1], mesh, P("fsdp", "sp", "tp", None))
        texts[scan] = str(jax.make_jaxpr(loss(op))(q, k, v, segments))
    assert "ppermute" in texts[True]
    if not ALL:
        return
    assert "ppermute" not in texts[False]
    assert "all_gather" in texts[False]

    other = jax.make_mesh((4, 2), ("seq", "tp"), axis_types=(AxisType.Auto,) * 2)
    paxis = s.PartitionAxis(sequence_parallel_axis="seq")
    metadata = AttentionMetadata(mesh=other, sequence_axis_name="seq", partition_axis=paxis)
    op = AttentionRegistry.create("ring", metadata)
    close(loss(op)(q, k, v, segments), wanted, 1e-4)

    # dealt once for all layers, by a mask that shows more
    deal = fk.parallel.deal("causal", LENGTH, ranks=4, tile=8)
    dealt = loss(op, deal=deal)(*(deal.permute(x, 1) for x in (q, k, v)), segments)
    close(jax.tree.map(lambda x: deal.unpermute(x, 1) if x.ndim else x, dealt), wanted, 1e-4)
    close(op(q, k, v).attention_outputs, fk.reference(*map(np.asarray, (q, k, v)), layout="bshd"))


def managers():
    mesh = m.create_mesh((2, 2, 2, 1))
    manager, x = s.PartitionManager(s.PartitionAxis(), mesh), np.ones((8, 6, 4, 8), np.float32)
    sharded_as(manager.shard(x, s.AttnQSharding), mesh, P(("fsdp", "dp"), None, "tp", None))
    sharded_as(manager.shard(x[:2], s.AttnQSharding), mesh, P("fsdp", None, "tp", None))
    sharded_as(manager.shard(x[:3, :, :3], s.AttnQSharding), mesh, P(None, None, None, None))
    inside = jax.jit(lambda x: manager.shard(2 * x, [s.EMPTY, s.EMPTY, s.EMPTY, s.HEAD_DIM], s.MODE_TRAIN))(x)
    assert isinstance(inside.sharding, jax.sharding.SingleDeviceSharding)  # a spec that splits nothing, as in eformer
    explicit = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    manager = s.PartitionManager(s.PartitionAxis())
    with jax.set_mesh(explicit):
        found = jax.jit(lambda x: manager.shard(x, s.AttnQSharding))(x)
        sharded_as(found, explicit, P("fsdp", None, "tp", None))
    ranks = m.get_ranks_and_size(mesh)
    assert (ranks["mp_node_size"], ranks["dp_node_size"]) == (1, 1)
    for dims, says in {(3, -1, 1, 1): "3 × n", (2, 2, 1, 1): "4"}.items():
        with pytest.raises(fk.ParameterError, match=f"{says} devices, and there are 8"):
            m.create_mesh(dims)


def explicit():
    """Under `jax.set_mesh`, of arrays that nobody has split yet: the operator does."""
    q, k, v = map(jnp.asarray, arrays())
    free, fixed = AxisType.Auto, AxisType.Explicit
    for axes, name, spec, kinds in (
        (("fsdp", "tp"), "frisket", P("fsdp", None, "tp", None), (fixed, fixed)),
        (("sp", "tp"), "ring", P(None, "sp", "tp", None), (fixed, fixed)),
        (("fsdp", "tp"), "frisket-xla", P("fsdp", None, "tp", None), (free, fixed)),
        (("sp", "tp"), "ring", P(None, "sp", "tp", None), (fixed, free)),
    ):
        mesh = jax.make_mesh((4, 2), axes, axis_types=kinds)
        op = AttentionRegistry.create(name, AttentionMetadata(mesh=mesh))

        def loss(attend):
            def run(q, k, v):
                out = attend(q, k, v)
                return (out**2).mean(), out

            return jax.jit(jax.value_and_grad(run, (0, 1, 2), has_aux=True))

        wanted = loss(lambda *a: fk.attention(*a, "causal"))(q, k, v)
        with jax.set_mesh(mesh):
            found = loss(lambda *a, op=op: op(*a, "causal").attention_outputs)(q, k, v)
            close(found, wanted, 1e-4)
            sharded_as(found[0][1], mesh, spec)
            close(loss(lambda *a: fk.attention(*a, "causal"))(q, k, v), wanted, 1e-4)


def inside_shard_map():
    """Axes that `jax.shard_map` has split already are no more to split, the others are; values and gradients."""
    q, k, v = map(jnp.asarray, arrays())
    wanted = jax.grad(lambda *a: (fk.attention(*a, "causal") ** 2).sum(), (0, 1, 2))(q, k, v)
    whole, part = (P("fsdp", None, "tp"), {"fsdp", "tp"}), (P("fsdp"), {"fsdp"})
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 4), ("fsdp", "tp"), axis_types=(kind,) * 2)
        args = [jnp.repeat(x, 4 // n, 2) for x, n in ((q, 4), (k, 2), (v, 2))]
        for given, (spec, split) in ((mesh, whole), (None, whole), (mesh, part)):

            def attend(q, k, v, given=given):
                op = AttentionRegistry.create("frisket-xla", AttentionMetadata(mesh=given))
                return s.PartitionManager(mesh=given).shard(op(q, k, v, causal=True).attention_outputs, s.AttnQSharding)

            placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in args]
            with jax.set_mesh(mesh):
                run = jax.shard_map(attend, in_specs=spec, out_specs=spec, axis_names=split)
                found = jax.jit(jax.grad(lambda *a, run=run: (run(*a) ** 2).sum(), (0, 1, 2)))(*placed)
            close((found[0], *(np.asarray(x).reshape(4, LENGTH, 2, 2, 8).sum(3) for x in found[1:])), wanted, 1e-4)


def linen_cache():
    """Each device writes the positions that it owns, in the collection of a linen module."""
    mesh = m.create_mesh(USUAL)

    class Layer(m.BaseJAXAttentionModule):
        def __call__(self, key, value):
            return self._concatenate_to_cache(key, value, key, None)

    for few in (False, True):
        config = SimpleNamespace(use_sharded_kv_caching=True, quantize_kv_cache=few, jax_mesh=lambda: mesh)
        key, value = (jnp.asarray(x) for x in arrays()[1:])
        state = Layer(config).init(jax.random.key(0), key, value)
        step = jax.jit(lambda state, *new, config=config: Layer(config).apply(state, *new, mutable="cache"))
        for at in (slice(0, 40), slice(40, 41), slice(41, 42)):
            found, state = step(state, key[:, at], value[:, at])
        for n, x in (("key", key), ("value", value)):
            sharded_as(state["cache"][f"cached_{n}"], mesh, P("fsdp", "sp", "tp", None))
            close(found[n == "value"][:, :42], x[:, :42], 0.02 if few else 0)
        close(found[2], np.broadcast_to(np.arange(LENGTH) < 42, (4, 1, 1, LENGTH)), 0)


def partial_fit():
    """Six heads over four devices of an axis of two and one of three: the axis that divides is kept."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    q, k, v = arrays(batch=2, heads=6, kv_heads=6)
    spec = NamedSharding(mesh, P(("a", "b"), None, None, None))
    args = [jax.device_put(np.repeat(x, 4, 0), spec) for x in (q, k, v)]
    close(jax.jit(lambda *a: fk.attention(*a, "causal"))(*args)[::4], fk.reference(q, k, v, "causal", layout="bshd"))


if __name__ == "__main__":
    for check in (
        managers,
        modes,
        rings,
        explicit,
        inside_shard_map,
        *((gradients, partial_fit, linen_cache) if ALL else ()),
    ):
        check()
        print(check.__name__.replace("_", " "))
