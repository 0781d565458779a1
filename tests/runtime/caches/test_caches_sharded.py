"""A cache split over devices, in a process with eight of the CPU: against the reference, and what it sends."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

START = """
import sys
sys.path[:0] = [{tests!r}, {tests!r} + "/runtime/caches"]
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType
import frisket as fk
import test_caches_jax as cases
from frisket.caches.jax import ShardedKVCache
from frisket.runtime.modeling.layers import init_cache
from runtime.caches import llama_jax
def auto(names, *shape):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape), devices=jax.devices()[:np.prod(shape)])
"""
CASES = """
mask, score, params, sinks = cases.PROBLEMS["tables"]
sinks = np.float32([0.5, 1, -1, 2])
att = fk.compile(mask + " & (h + b) % 2 * 4 <= q - k + 4", score, sinks=sinks)
given = {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in params.items()}
wanted = cases.wanted(str(att.mask), score, params, sinks)

explicit = jax.make_mesh((2, 2, 2), ("dp", "sp", "tp"))
kinds = AxisType.Auto, AxisType.Explicit, AxisType.Auto
mixed = jax.make_mesh((2, 2, 2), ("dp", "sp", "tp"), axis_types=kinds)
for how in (
    {"mesh": auto(("dp", "sp", "tp"), 2, 2, 2), "batch_axis": "dp", "head_axis": "tp"},
    {"mesh": mixed, "batch_axis": "dp", "head_axis": "tp"},
    {"mesh": explicit, "head_axis": "tp", "dtype": "int8"},
):
    sizes = cases.B, 64, cases.G, cases.D, cases.V
    cache = ShardedKVCache.create(*sizes, **how)
    if "dtype" in how:
        wanted = cases.wanted(str(att.mask), score, params, sinks, "int8")
    found, cache = cases.driven(cache, att, cases.COUNTS, **given)
    cases.close(found, wanted, sinks)
    shard = cache.k.addressable_shards[0].data.shape
    print("split", shard == (cases.B // (2 if "batch_axis" in how else 1), 32, cases.G // 2, cases.D))

# what is sent: by an append nothing, by a step one maximum of lse, and sums of lse and out
mesh = auto(("sp",), 8)
cache = ShardedKVCache.create(1, 1 << 15, 2, 64, mesh=mesh)
q, k = jnp.zeros((1, 1, 4, 64)), jnp.zeros((1, 1, 2, 64))
att = fk.compile("causal")
try:
    cache.attend(att, q, tree=[-1])
except fk.ParameterError as error:
    print(error)
append = jax.jit(ShardedKVCache.append, donate_argnums=0).lower(cache, k, k).compile()
step = jax.jit(lambda c, q, k, v: c.attention(att, q, k, v)[::-1], donate_argnums=0).lower(cache, q, k, k).compile()
for name, compiled in (("append", append), ("step", step)):
    memory = compiled.memory_analysis()
    print(name, "in place", memory.alias_size_in_bytes >= 2 * cache.k.nbytes // 8,
          memory.temp_size_in_bytes < cache.k.nbytes // 8 // 2)
    print("HLO", compiled.as_text())
"""
MODEL = """
new, mesh = 256, auto(("sp",), 4)
whole = jax.NamedSharding(mesh, jax.P())  # on all devices from the start: layers are alike
w = jax.device_put(llama_jax.weights(), whole)
caches = [init_cache(2, 272, llama_jax.KV_HEADS, llama_jax.DIM, mesh=mesh) for _ in w["layers"]]
first = jnp.asarray(np.random.default_rng(5).integers(0, llama_jax.VOCAB, (2, 9)), device=whole)
tokens, logits, caches, traced = llama_jax.generated(w, fk.compile("causal"), caches, first, new)
assert traced == [(2, 9), (2, 1)]
n = tokens.shape[1] - 1
positions = jnp.broadcast_to(jnp.arange(n), (2, n))
dense = llama_jax.forward(w, tokens[:, :-1], positions, llama_jax.attend_densely(np.tri(n, dtype=bool)))
np.testing.assert_allclose(logits, dense, atol=2e-4)
for bad, what in (
    ({"axis": "tp"}, "there is no such axis; the axes are sp: 4"),
    ({"batch_axis": "sp"}, "a mesh axis splits one thing"),
    ({"batch_axis": ("sp",), "axis": ()}, "a KVCache holds them on one device"),
    ({"batch_axis": ("sp", "dp")}, "batch 4 over the mesh axis ('sp', 'dp'): there is no such axis"),
    ({"head_axis": ("sp",)}, "kv_heads 1 over the mesh axis ('sp',): its 4 devices do not divide 1"),
):
    try:
        ShardedKVCache.create(4, 16, 1, 1, mesh=mesh, **bad)
    except fk.ShapeError as error:
        assert what in str(error), error
        print("refused")
"""

# EasyDeL's layout P(("dp", "fsdp"), "sp", "tp", None) on meshes of several shapes, by arrays and sharding-in-types
LAYOUTS = """
att, names = fk.compile("causal & window(9)"), ("dp", "fsdp", "sp", "tp")
q, k, v = (np.random.default_rng(0).standard_normal((8, 20, h, 16)).astype(np.float32) for h in (4, 2, 2))
wanted = fk.reference(q, k, v, "causal & window(9)", layout="bshd")
easydel = {"axis": "sp", "batch_axis": ("dp", "fsdp"), "head_axis": "tp"}
for mesh, how, dtype in (
    (auto(names, 2, 2, 1, 2), easydel, "int8"),
    (auto(names, 1, 2, 2, 2), easydel, "float32"),
    (jax.make_mesh((1, 2, 2, 2), names), easydel, "int8"),
    (auto(("x", "y", "z"), 2, 2, 2), {"axis": ("x", "y"), "batch_axis": ("z",)}, "float32"),
    (auto(("sp",), 4), {}, "int8"),
):
    cache = init_cache(8, 64, 2, 16, dtype=dtype, mesh=mesh, **how)
    if how is easydel:
        layout = jax.NamedSharding(mesh, jax.P(("dp", "fsdp"), "sp", "tp", None))
        assert cache.k.sharding.is_equivalent_to(layout, 4), cache.k.sharding
    step = jax.jit(lambda c, q, k, v: c.attention(att, q, k, v)[::-1], donate_argnums=0)
    for i in range(4):
        given = [jnp.asarray(x[:, i : i + 1]) for x in (q, k, v)]
        cache, out = step(cache, *given)
        np.testing.assert_allclose(out, wanted[:, i : i + 1], atol=3e-6 if dtype == "float32" else 0.05)
    cache, _ = step(cache.truncate(1), *given)
    eager = init_cache(8, 64, 2, 16, dtype=dtype, mesh=mesh, **how).append(*given[1:])
    step(eager, *given)
    print("compiled", step._cache_size())
    print("HLO", step.lower(cache, *given).compile().as_text())
"""


def printed(script):
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    start = START.replace("{tests!r}", repr(str(Path(__file__).resolve().parents[2])))
    run = subprocess.run([sys.executable, "-c", start + script], env=env, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


@pytest.mark.exhaustive
def test_a_cache_over_devices():
    said = printed(CASES)
    assert said.count("split True") == 3
    assert "drafts of a tree are not for several devices" in said
    assert said.count("in place True True") == 2
    append, step = said.split("HLO")[1:]
    sends = re.compile(r" = (.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
    assert not sends.findall(append)
    found = sends.findall(step)
    assert {kind for _, kind in found} == {"all-reduce"}
    shapes = [[int(n) for n in shape.split(",")] for all_ in found for shape in re.findall(r"f32\[([\d,]+)\]", all_[0])]
    # one maximum, one sum of lse [1, 4, 1], one sum of out [1, 1, 4, 64]
    assert sorted(shapes) == [[1, 1, 4, 64], [1, 4, 1], [1, 4, 1]]


@pytest.mark.exhaustive
def test_a_model_over_devices():
    assert printed(MODEL).count("refused") == 5


@pytest.mark.exhaustive
def test_layouts_of_several_axes():
    """A step compiles once, and sends nothing but sums and maxima."""
    said = printed(LAYOUTS)
    assert re.findall(r"^compiled (\d+)", said, re.M) == ["1"] * 5
    sends = re.findall(r"\b(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", said)
    assert {*sends} == {"all-reduce"}
