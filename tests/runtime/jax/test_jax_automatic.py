"""Automatic sharding, in a process with eight CPU devices: batches and heads stay where they are."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import frisket as fk

kind, backend, names = sys.argv[1], sys.argv[2] or None, sys.argv[3].split(";")
BATCH, LENGTH, DIM = 4, 64, 8
mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType[kind],) * 2)
COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
at = jnp.arange(LENGTH)
DOC = jnp.stack([at // n for n in (7, 10, 20, 33)])
BIAS = jnp.linspace(0.1, 0.4, 4)
ways = {"batch": P("x"), "heads": P(None, None, "y"), "both": P("x", None, "y")}
calls = {  # mask, score mod, values, options, what collectives the gradient needs
    "plain": ("causal", None, {}, {}, set()),
    "head": ("causal & (q - k < 9 + 7 * h)", None, {}, {}, set()),
    "batch entry": ("causal & (q - k < 9 + 7 * b)", None, {}, {}, set()),
    "documents": ("causal & doc[b, q] == doc[b, k]", None, {"doc": DOC}, {}, set()),
    "host documents": ("causal & doc[b, q] == doc[b, k]", None, {"doc": np.asarray(DOC)}, {}, set()),
    "dropout": ("causal", None, {}, {"dropout": 0.3, "seed": 3}, set()),
    "sinks": ("causal", None, {}, {"sinks": BIAS}, set()),  # one number for each head, summed and put together
    "bias": ("causal", "score + bias[h] * (k - q)", {"bias": BIAS}, {}, {"all-reduce"}),
    "origin": ("causal & (q - k < 9 + 7 * b)", None, {}, {
        "origin": (1, 2, np.arange(4), 0), "sizes": (9, 9, 99, 99)}, set()),
}


def arrays(heads=4, kv_heads=2, batch=BATCH):
    draw = np.random.default_rng(0).standard_normal
    return [jnp.asarray(draw((batch, LENGTH, n, DIM)), jnp.float32) for n in (heads, kv_heads, kv_heads)]


def compiled(function, *args):
    return jax.jit(function).lower(*args).compile()


def collectives(program):
    return set(re.findall(COLLECTIVES, program.as_text()))


def close(found, want):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found, want)


for name in names:
    name, way = name.split(":")
    mask, score, values, options, needed = calls[name]
    learned = {n: x for n, x in values.items() if n == "bias"} | {n: x for n, x in options.items() if n == "sinks"}
    fixed = {n: x for n, x in {**values, **options}.items() if n not in learned}

    def attend(q, k, v, learned):
        return fk.attention(q, k, v, mask, score, backend=backend, return_lse=True, **learned, **fixed)

    def loss(*args):
        out, lse = attend(*args)
        return jnp.einsum("...d,d->", out, jnp.sin(jnp.arange(DIM))) + jnp.sin(lse).sum()

    gradient = jax.grad(loss, (0, 1, 2, 3))
    q, k, v = arrays()
    want = jax.jit(lambda *x: (attend(*x), gradient(*x)))(q, k, v, learned)
    split = [jax.device_put(x, NamedSharding(mesh, ways[way])) for x in (q, k, v)]
    with jax.set_mesh(mesh):
        forward, backward = (compiled(f, *split, learned) for f in (attend, gradient))
        close((forward(*split, learned), backward(*split, learned)), want)
        assert collectives(forward) == set(), name
        found = collectives(backward)
        assert found == needed or (name == "sinks" and found <= {"all-reduce", "all-gather"}), (name, way, found)
        out = forward(*split, learned)[0]
        assert tuple(out.sharding.spec)[: len(ways[way])] == tuple(ways[way]), out.sharding
    print(name, way)
"""

MORE = """
# groups that share keys stay whole: four ways for four groups, the rest is gathered
every = jax.make_mesh((8,), ("z",), axis_types=(AxisType[kind],))
for heads, kv_heads, free in [(8, 8, True), (16, 8, True), (8, 4, False), (8, 1, False)]:
    whole = arrays(heads, kv_heads, 2)
    spec = lambda x: P(None, None, "z") if x.shape[2] % 8 == 0 else P()
    split = [jax.device_put(x, NamedSharding(every, spec(x))) for x in whole]
    attend = lambda q, k, v: fk.attention(q, k, v, "causal & (q - k < 5 + h)", backend=backend)
    program = compiled(attend, *split)
    close(program(*split), jax.jit(attend)(*whole))
    assert (collectives(program) == set()) == free, (heads, kv_heads)
print("groups")

# mapped calls are split along the mapped axis too
docs = jnp.stack([at // 5, at // 9])
attend = jax.vmap(lambda q, k, v, doc: fk.attention(q, k, v, "causal & same(doc)", backend=backend, doc=doc))
whole = [jnp.stack([x, 2 * x]) for x in arrays()]
split = [jax.device_put(x, NamedSharding(mesh, P("y", "x"))) for x in whole]
program = compiled(attend, *split, docs)
close(program(*split, docs), jax.jit(attend)(*whole, docs))
assert collectives(program) == set()
print("vmap")

# outside of jax.jit, arrays of several devices are compiled for once
split = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in arrays()]
att, compiled = fk.compile("causal", backend=backend), []
listen = lambda event, _, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
jax.monitoring.register_event_duration_secs_listener(listen)
for turn in range(2):
    compiled.clear()
    close(att(*split), att(*arrays()))
    assert bool(compiled) == (turn == 0), compiled
print("eager")

# without JAX's address a module still says which mask it is, and of which values
def text(**values):
    attend = jax.jit(lambda *a: fk.attention(*a, "causal & window(w) & same(doc)", backend=backend, **values))
    return re.sub('backend_config = "[0-9]+"', "", attend.lower(*split_four).as_text())

split_four = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in arrays()]
texts = [text(w=w, doc=np.arange(LENGTH) // n) for w in (9, 20) for n in (5, 9)]
assert len(set(texts)) == 4 and texts[0] == text(w=9, doc=np.arange(LENGTH) // 5)
print("named")

# of a mesh that has no devices nothing is known, and nothing is asked
nowhere = jax.sharding.AbstractMesh((4, 2), ("x", "y"))
shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(nowhere, P("x"))) for x in arrays()]
with jax.sharding.use_abstract_mesh(nowhere):
    module = jax.export.export(jax.jit(lambda *a: fk.attention(*a, "causal")), platforms=["cpu"])(*shapes)
assert module.nr_devices == 8
print("abstract")

# and an export of what is split goes to as many devices
split = [jax.device_put(x, NamedSharding(mesh, P("x", None, "y"))) for x in arrays()]
module = jax.export.export(jax.jit(lambda *a: fk.attention(*a, "causal")))(*split)
close(jax.export.deserialize(module.serialize()).call(*split), fk.attention(*arrays(), "causal"))
print("export")
"""

EXPLICIT = """
# tables that are traced and split: spans are planned from whole ones, gradients are split as the tables are
att = fk.compile("causal & same_by_batch(doc)", "score + bias[h] * (k - q)")
loss = lambda q, k, v, doc, bias: jnp.sin(att(q, k, v, doc=doc, bias=bias)).sum()
gradient = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 4)))
specs = *[P("x", None, "y")] * 3, P("x"), P("y")
whole = *arrays(), DOC, BIAS
split = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(whole, specs)]
with jax.set_mesh(mesh):
    found = gradient(*split)
    assert jax.typeof(found[1][3]) == jax.typeof(split[4])
close(found, gradient(*whole))
print("split tables")
"""

MAPPED = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import frisket as fk

backend, names = sys.argv[1] or None, sys.argv[2].split(";")
mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
draw = np.random.default_rng(0).standard_normal
q, k, v = (jnp.asarray(draw((4, 2, 16, n, 8)), jnp.float32) for n in (4, 2, 2))
bias = jnp.asarray(draw((4, 4)), jnp.float32)
calls = {  # mask, score mod, options, the name of the mapped value, and its entries
    "documents": ("causal & same(doc)", None, {}, "doc", jnp.arange(64).reshape(4, 16) // 5),
    "offsets": ("causal_document(off)", None, {}, "off", jnp.asarray([[0, n, 9, 16] for n in (1, 3, 5, 8)])),
    "sorted": ("param doc: sorted int[_]\\ncausal & same(doc)", None, {}, "doc", jnp.arange(64).reshape(4, 16) // 5),
    "window": ("causal & window(w)", None, {}, "w", jnp.asarray([1, 3, 5, 9])),
    "bias": ("causal", "score + bias[h]", {}, "bias", bias),
    "sinks": ("causal", None, {}, "sinks", bias),
    "seed": ("causal", None, {"dropout": 0.5}, "seed", jnp.arange(4)),
    "origin": ("causal & q + k > h", None, {}, "origin", jnp.arange(4)),
}


def close(found, want):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found, want)


for name in names:
    mask, score, options, value, entries = calls[name]
    att = fk.compile(mask, score, backend=backend, **options)

    def loss(q, k, v, x):
        def one(q, k, v, x):
            return att(q, k, v, return_lse=True, **{value: (0, 0, x, 0) if value == "origin" else x})

        out = jax.vmap(one)(q, k, v, x)
        return (out[0] ** 2).sum(), out

    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P("x", *spec)))

    learned = (0, 1, 2, 3) if value in ("bias", "sinks") else (0, 1, 2)
    run = jax.jit(jax.value_and_grad(loss, learned, has_aux=True))
    want = run(q, k, v, entries)
    heads = None, None, "y", None
    (_, out), grads = found = run(put(q, *heads), put(k, *heads), put(v, *heads), put(entries))
    close(found, want)
    assert [x.sharding.spec for x in out] == [P("x", *heads), P("x", None, "y", None)], out
    assert [x.sharding.spec for x in grads[:3]] == [P("x", *heads)] * 3, grads
    eager = jax.vmap(lambda q, x: att(q, q, q, **{value: (0, 0, x, 0) if value == "origin" else x}))
    close(eager(put(q), put(entries)), eager(q, entries))
    close(jax.jit(jax.vmap(eager))(*(put(x.reshape(2, 2, *x.shape[1:])) for x in (q, entries))),
          eager(q, entries).reshape(2, 2, *q.shape[1:]))
    print(name)
"""


def run(script, *arguments, devices=8):
    env = {k: x for k, x in os.environ.items() if k != "FRISKET_BACKEND"}
    flags = f"{env.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    env |= {"XLA_FLAGS": flags, "NPROC": "16", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


CALLS = (
    "plain", "head", "batch entry", "documents", "host documents", "dropout", "sinks", "bias", "origin",
)  # fmt: skip
FEW = ["head:both", "bias:both"]
ALL = ["plain:batch", "plain:heads", *(f"{name}:both" for name in CALLS)]


def test_batches_and_heads_are_not_gathered():
    assert run(SCRIPT, "Auto", "xla", ";".join(FEW)) == [name.replace(":", " ") for name in FEW]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "backend", "names"), [
    ("Auto", "", ALL), ("Auto", "xla", [*FEW, "origin:both"]), ("Explicit", "", [*FEW, "sinks:both"]),
])  # fmt: skip
def test_automatic_sharding_keeps_batches_and_heads_local(kind, backend, names):
    more = MORE if kind == "Auto" else EXPLICIT
    told = ["groups", "vmap", "eager", "named", "abstract", "export"] if kind == "Auto" else ["split tables"]
    assert run(SCRIPT + more, kind, backend, ";".join(names)) == [n.replace(":", " ") for n in names] + told


@pytest.mark.exhaustive
@pytest.mark.parametrize(("backend", "names"), [
    ("xla", "documents;offsets"), ("xla", "sorted;window;bias"), ("xla", "sinks;seed;origin"), ("", "documents;sinks"),
])  # fmt: skip
def test_mapped_values_on_explicit_meshes_stay_split(backend, names):
    assert run(MAPPED, backend, names, devices=4) == names.split(";")
