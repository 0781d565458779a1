"""The native kernels as users of JAX call them, beside the library tier, the interpreter and torch."""

import os
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import attention_cases as cases

import frisket as fk
from frisket.lowering.plan import Target
from frisket.runtime.backends.cpp import jax as native_jax
from frisket.runtime.machine import cpp_build as native_build

pytestmark = pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason())

draw = np.random.default_rng(2)


def normal(*shape):
    return jnp.asarray(draw.standard_normal(shape).astype(np.float32))


MASK, SCORE = "causal & window(w) & same(doc)", "score * c + bias[h, k] + far[doc[q]]"
DOC = np.arange(150) // 37
Q, K, V = (normal(2, 150, heads, 16) for heads in (4, 2, 2))
BIAS, SINKS, FAR = normal(4, 150), normal(4), normal(15)
VALUES = {"w": 60, "doc": DOC, "c": jnp.float32(0.7), "bias": BIAS, "far": FAR}


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
    close(found, jax.jit(lambda: run(compiled("xla")))(), tolerance)
    return found


def test_native_jax_results_equal_xla_and_the_reference():
    options = {"sinks": SINKS, "return_lse": True, "return_max": True}
    eager = both(lambda att: att(Q, K, V, **options, **VALUES))
    same(jax.jit(lambda *qkv: compiled("cpp")(*qkv, **options, **VALUES))(Q, K, V), eager)
    want = fk.reference(*map(np.asarray, (Q, K, V)), MASK, SCORE, layout="bshd", **options, **VALUES)
    for x, exact in zip(eager, want, strict=True):
        np.testing.assert_allclose(x, exact, atol=2e-5, rtol=2e-5)


@pytest.mark.exhaustive
def test_dropout_draws_what_other_tiers_draw():
    run = {name: fk.compile(MASK, SCORE, backend=name, dropout=0.3) for name in ("cpp", "xla")}
    found = {name: jax.jit(lambda seed, att=att: att(Q, K, V, seed=seed, **VALUES))(9) for name, att in run.items()}
    close(found["cpp"], found["xla"])


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_native_jax_half_precision_is_near_xla(dtype):
    q, k, v = (x.astype(dtype) for x in (Q, K, V))
    found, want = (compiled(name)(q, k, v, return_lse=True, **VALUES) for name in ("cpp", "xla"))
    assert found[0].dtype == dtype
    outs = (np.asarray(x[0]).astype("float32") for x in (found, want))
    np.testing.assert_allclose(*outs, atol=2e-2, rtol=1e-2)
    close(found[1], want[1])


@pytest.mark.exhaustive
def test_native_jax_float64_equals_dense():
    with jax.enable_x64(True):
        q, k, v, bias, far = (jnp.asarray(np.asarray(x, np.float64)) for x in (Q, K, V, BIAS, FAR))
        values = VALUES | {"bias": bias, "far": far, "c": jnp.float64(0.7)}
        found = jax.jit(lambda q: compiled("cpp")(q, k, v, **values))(q)
        close(found, compiled("dense")(q, k, v, **values), 1e-13)


@pytest.mark.exhaustive
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


def one_by_one(run, *mapped):
    run = jax.jit(run)
    found = [run(*(jax.tree.map(lambda x, i=i: x[i], m) for m in mapped)) for i in range(2)]
    return jax.tree.map(lambda *x: np.stack(x), *found)


def test_native_jax_public_vmap_equals_single_calls():
    att = compiled("cpp")
    docs = np.stack([np.arange(150) // n for n in (10, 37)])
    many = np.stack([Q, np.asarray(Q) * -2])

    def by_document(q, doc):
        return att(q, K, V, **VALUES | {"doc": doc})

    same(jax.jit(jax.vmap(by_document))(many, docs), one_by_one(by_document, many, docs))

    def alike(q, k, v):  # a longer batch
        return att(q, k, v, **VALUES)

    arrays = many, many[..., :2, :], many[..., 2:, :]
    close(jax.jit(jax.vmap(alike))(*arrays), one_by_one(alike, *arrays))

    def nested(q):
        return att(q, K[:1], V[:1], **VALUES)

    each = many[..., None, :, :, :]
    close(jax.jit(jax.vmap(jax.vmap(nested)))(each), np.stack([one_by_one(nested, x) for x in each]))


# -- gradients --------------------------------------------------------------------------------------

LEARNED = {"q": Q, "k": K, "v": V, "c": jnp.float32(0.7), "bias": BIAS, "far": FAR, "sinks": SINKS}


@jax.jit
def number(out, lse):
    """A number that all of out and lse go into."""
    mean = jnp.einsum("...d,d->...", jnp.sin(out), jnp.arange(out.shape[-1]).astype(out.dtype)).sum() / out.size
    return mean.astype(lse.dtype) + jnp.cos(jnp.where(lse == -jnp.inf, 0, lse)).sum()


def loss(att, learned, wrapped=lambda f: f, **changes):
    given = {"w": 60, "doc": DOC, "return_lse": True} | changes

    @wrapped
    def rows(learned):
        others = {n: x for n, x in learned.items() if n not in "qkv"}
        return att(learned["q"], learned["k"], learned["v"], **others, **given)

    return number(*rows(learned))


def gradients(att, learned=LEARNED, **changes):
    return jax.jit(jax.value_and_grad(lambda learned: loss(att, learned, **changes)))(learned)


def test_gradients_to_everything():
    """The table that points to `far` is the host's, and sums of gradients are folded where JAX traces."""
    found = both(gradients, 1e-4)
    att = compiled("cpp")
    arrays = {n: LEARNED[n] for n in ("q", "k", "v", "sinks")}  # sums of others are eager in test_native_jax.py
    eager = jax.value_and_grad(lambda learned: loss(att, LEARNED | learned))(arrays)
    same(eager, (found[0], {n: found[1][n] for n in arrays}))
    same(gradients(att, wrapped=jax.checkpoint), found)
    some = jax.jit(jax.grad(lambda k: loss(att, LEARNED | {"k": k})))(K)
    same(some, found[1]["k"])


@pytest.mark.exhaustive
def test_gradients_under_dropout():
    run = [fk.compile(MASK, SCORE, backend=name, dropout=0.3) for name in ("cpp", "xla")]
    close(*(gradients(att, seed=jnp.int32(4)) for att in run), 1e-4)


@pytest.mark.exhaustive
def test_gradients_of_float64():
    from jax.test_util import check_grads

    att = compiled("cpp")
    with jax.enable_x64(True):
        short = {n: np.asarray(x, np.float64)[:1, :20] if x.ndim == 4 else x for n, x in LEARNED.items()}
        learned = {n: jnp.asarray(np.asarray(x, np.float64)) for n, x in short.items()}
        check_grads(lambda x: loss(att, jax.tree.map(jnp.asarray, x), w=9), (learned,), order=1, modes=("rev",))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.exhaustive)])
def test_gradients_in_half_precision(dtype):
    learned = LEARNED | {n: LEARNED[n].astype(dtype) for n in "qkv"}
    found, want = (gradients(compiled(name), learned)[1] for name in ("cpp", "xla"))
    for name, x in want.items():
        assert found[name].dtype == x.dtype
        native, library = (np.asarray(x).astype("float32") for x in (found[name], x))
        np.testing.assert_allclose(native, library, atol=2e-2 * np.abs(library).max())


def test_gradients_of_every_example():
    docs = np.stack([np.arange(150) // n for n in (10, 37)])
    many = {n: np.stack([x, np.asarray(x) / 2]) for n, x in LEARNED.items()}

    def of_example(learned, doc):
        return gradients(compiled("cpp"), learned, doc=doc)

    close(jax.jit(jax.vmap(of_example))(many, docs), one_by_one(of_example, many, docs))


@pytest.mark.exhaustive
def test_gradients_of_a_table_under_a_mask_in_64_bits():
    """Where the mask of traced tables needs 64 bits, and the index of the learned table does not."""

    @partial(jax.jit, static_argnums=0)
    def gradient(name, n):
        call = fk.compile("causal & k < n[b] + 1", "score + t[h, q - k]", backend=name)
        return jax.grad(lambda t: (call(Q, K, V, n=n, t=t) ** 2).sum())(np.ones((4, 9), np.float32))

    far, near = (np.array([70, n], np.int32) for n in (2**31 - 1, 150))
    close(gradient("cpp", far), gradient("xla", near), 1e-4)


def test_gradients_have_the_bits_of_torch():
    torch = pytest.importorskip("torch")
    att = compiled("cpp")
    q, k, v = (torch.from_numpy(np.array(x)).transpose(1, 2).requires_grad_() for x in (Q, K, V))
    bias, sinks = (torch.from_numpy(np.array(x)).requires_grad_() for x in (BIAS, SINKS))
    threads = torch.get_num_threads()
    torch.set_num_threads(int(os.environ["NPROC"]))  # as many as XLA has: sums are cut by their number
    far = np.array(FAR)
    att(q, k, v, c=0.7, bias=bias, far=far, sinks=sinks, w=60, doc=DOC).square().sum().backward()
    torch.set_num_threads(threads)

    def squares(q, k, v, bias):
        return (att(q, k, v, c=0.7, bias=bias, far=far, sinks=SINKS, w=60, doc=DOC) ** 2).sum()

    found = jax.jit(jax.grad(squares, argnums=(0, 1, 2, 3)))(Q, K, V, BIAS)
    for x, mine in zip((q, k, v), found, strict=False):
        np.testing.assert_array_equal(mine, x.grad.transpose(1, 2).numpy())
    np.testing.assert_allclose(found[3], bias.grad.numpy(), atol=1e-5)  # folded by each framework


def test_exported_modules_run_where_the_kernel_is_registered():
    att, shape = compiled("cpp"), jax.ShapeDtypeStruct(Q.shape, Q.dtype)
    call = jax.jit(lambda q: att(q, K, V, **VALUES))
    with pytest.raises(ValueError, match="Cannot serialize code with custom calls whose targets"):
        jax.export.export(call)(shape)
    names = set(re.findall(r"frisket_(?:forward|backward)_[0-9a-f]+", call.lower(Q).as_text()))
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
    module = jax.export.export(call, disabled_checks=allowed)(shape).serialize()
    same(jax.export.deserialize(module).call(Q), call(Q))


@pytest.mark.exhaustive
def test_native_kernels_give_jax_the_bits_of_torch():
    """One kernel for both frameworks: [batch, length, heads, dim] and [batch, heads, length, dim] are strides."""
    torch = pytest.importorskip("torch")
    att = compiled("cpp")
    q, k, v = (torch.from_numpy(np.array(x)).transpose(1, 2) for x in (Q, K, V))
    values = {"w": 60, "doc": DOC, "c": 0.7, "bias": np.array(BIAS), "far": np.array(FAR)}
    found = att(q, k, v, return_lse=True, **values)
    out, lse = att(Q, K, V, return_lse=True, **values)
    np.testing.assert_array_equal(out, found[0].transpose(1, 2).numpy())
    np.testing.assert_array_equal(lse, found[1].numpy())


# the others natively in tests/lowering/kernels/cpp
MARKS = dict.fromkeys(("crop", "origin-by-batch", "masked-nan"), pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(n, d, marks=MARKS.get(n, pytest.mark.slow) if d == "float32" else pytest.mark.slow)
        for n in cases.CASES
        for d in ("float32", "bfloat16", "float16", "float64")
    ],
)
def test_native_jax_cases_equal_the_reference(name, dtype):
    case = cases.CASES[name].but(dtype=dtype)
    with jax.enable_x64(dtype == "float64"):
        made = cases.plan(case)
        fields = {"spans": cases.spans(case), "tables": made.table_values(case.tables)}
        inputs = cases.kernel_inputs(case, Target("cpp", *case.block), made, **fields)
        out, lse, *_ = native_jax.forward(inputs, *cases.arrays(case))
        cases.check(case, out, lse)
