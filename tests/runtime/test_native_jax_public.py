"""The native kernels as users of JAX call them, beside the library tier, the interpreter and torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import attention_cases as cases

import frisket as fk
from frisket.lowering.plan import Target
from frisket.runtime import native_build, native_jax

pytestmark = pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason())

draw = np.random.default_rng(2)
MASK, SCORE = "causal & window(w) & same(doc)", "score * c + bias[h, k]"
DOC = np.arange(150) // 37
Q, K, V = (jnp.asarray(draw.standard_normal((2, 150, heads, 32)), jnp.float32) for heads in (4, 2, 2))
BIAS = jnp.asarray(draw.standard_normal((4, 150)), jnp.float32)
SINKS = jnp.asarray(draw.standard_normal(4), jnp.float32)
VALUES = {"w": 60, "doc": DOC, "c": jnp.float32(0.7), "bias": BIAS}


def compiled(backend, **options):
    return fk.compile(MASK, SCORE, backend=backend, **options)


def close(found, want, tolerance=2e-5):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance)


def same(found, want):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y)


def both(run, tolerance=2e-5):
    """`run(att)` on both tiers."""
    found = run(compiled("cpp"))
    close(found, run(compiled("xla")), tolerance)
    return found


def test_results():
    asked = {"return_lse": True, "return_max": True}
    eager = both(lambda att: att(Q, K, V, sinks=SINKS, **asked, **VALUES))
    same(jax.jit(lambda *qkv: compiled("cpp")(*qkv, sinks=SINKS, **asked, **VALUES))(Q, K, V), eager)
    compiled("cpp").check(Q, K, V, **VALUES)


def test_dropout_draws_what_other_tiers_draw():
    run = {name: fk.compile(MASK, SCORE, backend=name, dropout=0.3) for name in ("cpp", "xla")}
    found = {name: jax.jit(lambda seed, att=att: att(Q, K, V, seed=seed, **VALUES))(9) for name, att in run.items()}
    close(found["cpp"], found["xla"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype):
    q, k, v = (x.astype(dtype) for x in (Q, K, V))
    assert compiled("cpp")(q, k, v, **VALUES).dtype == dtype
    compiled("cpp").check(q, k, v, **VALUES)


def test_float64():
    with jax.enable_x64(True):
        q, k, v, bias = (jnp.asarray(np.asarray(x, np.float64)) for x in (Q, K, V, BIAS))
        values = VALUES | {"bias": bias, "c": jnp.float64(0.7)}
        found = jax.jit(lambda q: compiled("cpp")(q, k, v, **values))(q)
        close(found, compiled("dense")(q, k, v, **values), 1e-13)


def test_documents_that_change_every_step_compile_nothing():
    att = compiled("cpp")
    traces = []

    @jax.jit
    def step(doc, w, q):
        traces.append(1)
        return att(q, K, V, **VALUES | {"doc": doc, "w": w})

    for n in (10, 37, 80):
        doc = np.arange(150) // n
        close(step(jnp.asarray(doc), 20 + n, Q), compiled("xla")(Q, K, V, **VALUES | {"doc": doc, "w": 20 + n}))
    assert len(traces) == 1


def test_vmap():
    docs = jnp.stack([jnp.asarray(np.arange(150) // n) for n in (10, 37, 80)])
    many = jnp.stack([Q, 2 * Q, -Q])
    both(lambda att: jax.vmap(lambda q, doc: att(q, K, V, **VALUES | {"doc": doc}))(many, docs))
    both(lambda att: jax.vmap(lambda q, k, v: att(q, k, v, **VALUES))(many, many[..., :2, :], many[..., 2:, :]))
    nested = many.reshape(3, 2, 1, 150, 4, 32)
    both(lambda att: jax.vmap(jax.vmap(lambda q: att(q, K[:1], V[:1], **VALUES)))(nested))


def test_exported_modules_run_where_the_kernel_is_registered():
    att, shape = compiled("cpp"), jax.ShapeDtypeStruct(Q.shape, Q.dtype)
    call = jax.jit(lambda q: att(q, K, V, **VALUES))
    with pytest.raises(ValueError, match="Cannot serialize code with custom calls whose targets"):
        jax.export.export(call)(shape)
    names = {f"frisket_forward_{key}" for key in native_jax._registered}
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
    module = jax.export.export(call, disabled_checks=allowed)(shape).serialize()
    same(jax.export.deserialize(module).call(Q), call(Q))


def test_the_bits_of_torch():
    """One kernel for both frameworks: [batch, length, heads, dim] and [batch, heads, length, dim] are strides."""
    torch = pytest.importorskip("torch")
    att = compiled("cpp")
    q, k, v = (torch.from_numpy(np.array(x)).transpose(1, 2) for x in (Q, K, V))
    values = {"w": 60, "doc": DOC, "c": 0.7, "bias": np.array(BIAS)}
    found = att(q, k, v, return_lse=True, **values)
    out, lse = att(Q, K, V, return_lse=True, **values)
    np.testing.assert_array_equal(out, found[0].transpose(1, 2).numpy())
    np.testing.assert_array_equal(lse, found[1].numpy())


DEFAULT = ("causal", "gqa", "empty-rows", "decode", "crop", "origin-by-batch", "masked-nan", "nested")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(n, d, marks=() if n in DEFAULT and d == "float32" else pytest.mark.slow)
        for n in cases.CASES
        for d in ("float32", "bfloat16", "float16", "float64")
    ],
)
def test_every_case(name, dtype):
    case = cases.CASES[name].but(dtype=dtype)
    with jax.enable_x64(dtype == "float64"):
        made = cases.plan(case)
        out, lse, _ = native_jax.forward(
            made, cases.spans(case), cases.geometry(case), *cases.arrays(case), cases.slots(case, made),
            made.table_values(case.tables), Target("cpp", *case.block),
        )  # fmt: skip
        cases.check(case, out, lse)
