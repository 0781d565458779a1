"""Nothing is traced or compiled again where only values change, and what is compiled is found again by others."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import frisket as fk
from frisket.runtime.machine import cpp_build as native_build

draw = np.random.default_rng(0)
Q, K, V = (jnp.asarray(draw.standard_normal((1, 200, heads, 64)).astype(jnp.bfloat16)) for heads in (4, 2, 2))
SMALL = [jnp.asarray(draw.standard_normal((1, 200, heads, 16)).astype(np.float32)) for heads in (4, 2, 2)]
AT = np.arange(200)
NATIVE = pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason() or "")
SCORE = "score * c + bias[h] * (k - q)"


@pytest.fixture
def compiled(monkeypatch):
    """One entry for each compilation of XLA's."""
    found, on = [], [True]
    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: found.append(event) if on and event.endswith("backend_compile_duration") else None
    )
    yield found
    on.clear()


def values(n):
    """Values of a mask and score mod, of equal shapes."""
    numbers = np.float32(1 + n), np.full(4, 0.1 * n, np.float32)
    return {"w": 20 + 7 * n, "doc": AT // (30 + n)} | dict(zip(("c", "bias"), map(jnp.asarray, numbers)))


@pytest.mark.exhaustive
@NATIVE
def test_calls_outside_of_jit_compile_once(compiled):
    for n in range(4):
        fk.attention(*SMALL, "causal & window(w) & same(doc)", SCORE, **values(n))
        if n == 1:  # by now all copies are made
            compiled.clear()
    assert compiled == []


@pytest.mark.exhaustive
@NATIVE
def test_gradients_outside_of_jit_compile_once(compiled):
    for n in range(4):
        call = lambda *x, n=n: fk.attention(*x, "causal & window(w) & same(doc)", SCORE, **values(n)).sum()  # noqa: E731
        jax.grad(call)(*SMALL)
        if n == 1:
            compiled.clear()
    assert compiled == []


def test_a_plan_serves_attentions_of_several_tiles():
    tiles = (128, 128), (64, 32), None
    several = [fk.compile("causal", tile=tile) for tile in tiles]
    plan = several[0].plan(200, 200, 1, 4)
    made = [jax.make_jaxpr(lambda q, att=att: att(q, K, V, plan=plan))(Q) for att in several]
    tasks = [e.params["task"] for m in made for e in m.eqns if "task" in e.params]
    assert [task.call.tile for task in tasks] == list(tiles)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["xla", pytest.param(None, marks=pytest.mark.exhaustive)])
def test_a_jitted_caller_is_traced_once(backend, compiled):
    traces = []

    @jax.jit
    def step(q, values):
        traces.append(1)
        mask, options = "causal & window(w) & same(doc)", {"backend": backend, **values}
        return jax.value_and_grad(lambda q: fk.attention(q, *SMALL[1:], mask, SCORE, **options).sum())(q)

    for n in range(3):
        step(SMALL[0], jax.tree.map(jnp.asarray, values(n)))
    assert len(traces) == step._cache_size() == 1


def test_kernels_in_a_module_hold_no_paths(monkeypatch):
    """Else the persistent cache would miss whenever a caller's file is edited or moved."""
    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
    call = jax.jit(lambda *args: fk.attention(*args, "causal & window(50)"))
    for platform in ("tpu", "cuda"):
        text = call.trace(Q, K, V).lower(lowering_platforms=(platform,)).as_text()
        assert "custom_call" in text
        assert os.path.basename(__file__) not in text


SCRIPT = """
import sys, hashlib, jax, jax.numpy as jnp, numpy as np, frisket as fk
found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event))
q, k, v = (jnp.zeros((1, 200, heads, 64), "bfloat16") for heads in (4, 2, 2))
doc = np.arange(200) // 70
attend = lambda *args: fk.attention(*args, "causal & same(doc)", doc=doc).astype("float32")
step = jax.jit(jax.grad(lambda *args: attend(*args).sum(), (0, 1, 2)))
for platform in ("cpu", "tpu", "cuda"):
    text = step.trace(q, k, v).lower(lowering_platforms=(platform,)).as_text()
    print(hashlib.sha256(text.encode()).hexdigest())
found.clear()
step(q, k, v)
print("hit" if "/jax/compilation_cache/cache_hits" in found else "miss")
"""


@pytest.mark.exhaustive
def test_second_process_finds_the_compiled_program(tmp_path):
    runs = []
    for seed in ("1", "2"):
        env = {k: x for k, x in os.environ.items() if k != "FRISKET_BACKEND"}
        env |= {
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1", "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu",
        }  # fmt: skip
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        runs.append(done.stdout.split())
    assert runs[0][:3] == runs[1][:3]
    assert [run[3] for run in runs] == ["miss", "hit"]
