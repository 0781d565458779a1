"""A traced `origin`: chunks of a loop, shards that know their place by `axis_index`, batch entries by vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import frisket as fk
from frisket.dsl.errors import ParameterError, ShapeError

rng = np.random.default_rng(0)
Q, K, V = (jnp.asarray(rng.standard_normal((2, 24, heads, 8)), "float32") for heads in (4, 2, 2))
CHUNK = 8
TABLES = {
    "causal & window(5)": (None, {}),
    "causal & same(doc)": (None, {"doc": np.arange(24) // 5}),
    "causal & k >= n[b, h]": ("score + bias[q, k]", {"n": np.arange(8).reshape(2, 4), "bias": np.eye(24) + 0.5}),
    "q >= k & origin_q > k": (None, {"origin_q": 9}),
}


def chunked(att, q, k, v, **values):
    """The attention of all queries, a chunk after another."""

    def step(start, part):
        return start + CHUNK, att(part, k, v, origin=(0, 0, start, 0), **values)

    parts = jnp.moveaxis(q.reshape(q.shape[0], -1, CHUNK, *q.shape[2:]), 1, 0)
    return jnp.moveaxis(lax.scan(step, 0, parts)[1], 0, 1).reshape(q.shape)


def close(found, want):
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", TABLES)
def test_chunks_of_a_scan_are_the_whole_attention(mask):
    score, values = TABLES[mask]
    att = fk.compile(mask, score, backend="xla")
    close(chunked(att, Q, K, V, **values), att(Q, K, V, **values))


def test_gradients_of_chunks_equal_those_of_the_whole():
    att = fk.compile("causal", backend="xla", dropout=0.25)
    ours, want = (
        jax.jit(jax.grad(lambda *qkv, run=run: (run(*qkv, seed=3) ** 2).sum(), (0, 1, 2)))(Q, K, V)
        for run in (lambda *a, **how: chunked(att, *a, **how), att)
    )
    for found, right in zip(ours, want, strict=True):
        close(found, right)


PLACES = {
    "a vector": (lambda x: (0, 0, x, 0), np.array([3, 9]), (slice(None), slice(None))),
    "an array": (lambda x: x, np.array([0, 0, 9, 2]), (slice(None), slice(None))),
    "of a batch entry": (lambda x: (x, 0, 0, 0), np.int32(1), (slice(1, 2), slice(None))),
    "of heads": (lambda x: (0, x, 0, 0), np.int32(2), (slice(None), slice(2, 4))),
}


@pytest.mark.parametrize("place", PLACES)
def test_traced_coordinates_of_an_origin_are_positions(place):
    origin, x, (batch, heads) = PLACES[place]
    att = fk.compile("causal & k >= n[b, h]", backend="xla", n=np.arange(8).reshape(2, 4))
    arrays = Q[batch, :CHUNK, heads], K[batch, :, :1], V[batch, :, :1]
    how = {"sizes": (2, 4, 48, 48)}
    close(jax.jit(lambda x: att(*arrays, origin=origin(x), **how))(x), att(*arrays, origin=origin(x), **how))


@pytest.mark.exhaustive
def test_shards_of_queries_know_their_place_by_the_axis_index():
    mesh = jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(AxisType.Auto,))
    rows, whole = PartitionSpec(None, "x"), PartitionSpec()
    att = fk.compile("causal", backend="xla")
    q, length = jnp.tile(Q, (1, len(jax.devices()), 1, 1)), Q.shape[1]
    k, v = (jnp.tile(x, (1, len(jax.devices()), 1, 1)) for x in (K, V))
    run = jax.shard_map(
        lambda q, k, v: att(q, k, v, origin=(0, 0, lax.axis_index("x") * length, 0)),
        mesh=mesh, in_specs=(rows, whole, whole), out_specs=rows,
    )  # fmt: skip
    close(run(q, k, v), att(q, k, v))


def test_traced_origins_that_have_no_meaning_are_errors():
    att = fk.compile("causal", backend="xla")

    def call(att, x, of=lambda x: (0, 0, x, 0), **how):
        return jax.jit(lambda x: att(Q[:, :CHUNK], K, V, origin=of(x), **how))(x)

    for wrong in (1.5, True, np.zeros(3, int)):
        with pytest.raises(ShapeError, match=r"it is \(b, h, q, k\), integers"):
            call(att, wrong)
    with pytest.raises(ShapeError, match=r"it is \(b, h, q, k\)"):
        call(att, 1, lambda x: (0, 0, x))
    with pytest.raises(ParameterError, match="the plan has its origin"):
        call(att, 1, plan=att.plan(CHUNK, 24, batch=2, heads=4))
    ends = fk.compile("k >= KV_LEN - 3", backend="xla")
    with pytest.raises(ParameterError, match="give the lengths of the whole problem: sizes="):
        call(ends, 1)
    close(call(ends, 1, sizes=(2, 4, 24, 24)), ends(Q[:, :CHUNK], K, V, sizes=(2, 4, 24, 24)))
    with pytest.raises(ParameterError, match="give it to a call"):
        jax.jit(lambda x: att.plan(8, 8, origin=(0, 0, x, 0)))(1)
    with pytest.raises(ShapeError, match="this takes one that is known"):
        jax.jit(lambda x: fk.reference(Q, K, V, "causal", origin=(0, 0, x, 0)))(1)
