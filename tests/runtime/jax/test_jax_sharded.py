"""Calls inside `jax.shard_map`, in a process with four CPU devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BEGINNING = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
import sys
sys.path.insert(0, {tests!r})
sys.path.insert(0, {tests!r} + "/runtime/jax")
from test_jax_transforms import LEARNED, SINKS, VALUES, close, loss_of, ours, plain, qkv, causal
from frisket.dsl.sugar import b, h, k, q, score

mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
args = qkv(batch=2)

def results(attend):
    return jax.jit(jax.value_and_grad(loss_of(attend), (0, 1, 2, 3, 4)))(*args, VALUES, SINKS)

wanted = results(plain)
"""
SPLIT = """
def by_batch(q, k, v, values, sinks):
    return ours(origin=(0, 0, 0, 0))(q, k, v, values, sinks)

def by_head(q, k, v, values, sinks):
    first = jax.lax.axis_index("y") * q.shape[2]
    values = {{**values, "x": jax.lax.dynamic_slice_in_dim(values["x"], first, q.shape[2])}}
    return ours()(q, k, v, values, sinks)

def everywhere(fn, spec, lse, heads):
    return jax.shard_map(fn, mesh=mesh, in_specs=(spec, spec, spec, P(), heads), out_specs=(spec, lse))

for name, fn, spec, lse, heads in [
    ("batch", by_batch, P("x"), P("x"), P()),
    ("heads", by_head, P("x", None, "y"), P("x", "y"), P("y")),
]:
    close(results(everywhere(fn, spec, lse, heads)), wanted)
    print(name)

# a mask that knows its head, told where its heads begin
by_position = causal & (q - k < 9 + 7 * h)

def told(q, k, v):
    first = jax.lax.axis_index("y") * q.shape[2]
    return ours(by_position, None, spans_of_all=True)(q, k, v, origin=(0, first, 0, 0))[0]

whole = ours(by_position, None)(*args)[0]
close(jax.shard_map(told, mesh=mesh, in_specs=P("x", None, "y"), out_specs=P("x", None, "y"))(*args), whole)
print("head origin")
"""
SHARDED = """
# queries sharded, keys whole
def rows(q, k, v, values, sinks):
    return ours(spans_of_all=True)(q, k, v, values, sinks, origin=(0, 0, jax.lax.axis_index("x") * q.shape[1], 0))

spec = P(None, "x")
sharded = jax.shard_map(rows, mesh=mesh, in_specs=(spec, P(), P(), P(), P()), out_specs=(spec, P(None, None, "x")))
close(results(sharded), wanted)
print("rows")

import os
os.environ["FRISKET_BACKEND"] = "library"
import frisket as fk

def public(q, k, v):
    where = [dict(origin=(0, 0, at, 0), sizes=(2, 4, 72, 72)) for at in (0, q.shape[1])]
    calls = [lambda at=at: fk.attention(q, k, v, "causal", **at) for at in where]
    return jax.lax.switch(jax.lax.axis_index("x"), calls)

sharded = jax.shard_map(public, mesh=mesh, in_specs=(spec, P(), P()), out_specs=spec)
grads = [jax.jit(jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2)))(*args)
         for f in (sharded, lambda *a: fk.attention(*a, "causal"))]
close(*grads)
print("public")

# heads sharded, and every branch slices whole sinks: their gradients are summed outside of the branches
whole = fk.compile("causal & (k + h) % 5 != 0")

def sliced(q, k, v, sinks):
    sinks, n = jax.lax.pcast(sinks, "y", to="varying"), q.shape[2]
    calls = [lambda at=at: whole(q, k, v, sinks=sinks[at : at + n], origin=(0, at, 0, 0), sizes=(2, 4, 72, 72))
             for at in (0, n)]
    return jax.lax.switch(jax.lax.axis_index("y"), calls)

spec = P(None, None, "y")
sharded = jax.shard_map(sliced, mesh=mesh, in_specs=(spec, spec, spec, P()), out_specs=spec)
grads = [jax.jit(jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2, 3)))(*args, SINKS)
         for f in (sharded, lambda *a: whole(*a[:3], sinks=a[3]))]
close(*grads)
print("sinks")
"""


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        pytest.param(SPLIT, ["batch", "heads", "head origin"], marks=pytest.mark.exhaustive),
        (SHARDED, ["rows", "public", "sinks"]),
    ],
    ids=["batch and heads", "queries"],
)
def test_batch_heads_and_queries_sharded(script, wanted):
    tests = str(Path(__file__).parents[2])
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    env = {**os.environ, "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-c", (BEGINNING + script).format(tests=tests)],
        env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.splitlines() == wanted, done.stderr[-3000:]
