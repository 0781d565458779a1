"""Second and third derivatives of attention on JAX arrays, and tangents, compared with differences of float64 and with
dense attention."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import masks, mods
from jax.extend.core import jaxprs_in_params
from jax.test_util import check_grads
from support.tiers import default_only, thinned

import frisket as fk
from frisket.dsl.errors import BackwardError
from frisket.lowering.xla import differentiable as form
from frisket.runtime.jax import differentiable

LENGTH, DIM = 32, 3
MASKS = list(masks(LENGTH))
SCORES = list(mods(LENGTH))


@pytest.fixture(autouse=True)
def exact():
    with warnings.catch_warnings(), jax.enable_x64(True):
        warnings.simplefilter("ignore")
        yield


def drawn(q_len=LENGTH, kv_len=None, batch=1, heads=2, kv_heads=None, dim=DIM):
    draws = np.random.default_rng(0)
    shapes = ((q_len, heads), *2 * ((kv_len or q_len, kv_heads or heads),))
    return [jnp.asarray(draws.standard_normal((batch, *shape, dim))) for shape in shapes]


def normal(*shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def finite(out, lse):
    return out, jnp.where(jnp.isinf(lse), 0, lse)


def check(att, arrays, order=2, **learned):
    """Check all derivatives by the arrays and by `learned`, among them sinks."""

    @jax.jit
    def call(arrays, learned):
        return finite(*att(*arrays, return_lse=True, **learned))

    check_grads(call, (arrays, learned), order, modes=("fwd", "rev"))


@pytest.mark.parametrize("name", thinned(MASKS, 20))
def test_masks_pass_check_grads(name):
    case = masks(LENGTH)[name]
    att = fk.compile(case.mask, backend="xla", tile=(16, 16))
    check(att, drawn(case.q_len, case.kv_len, case.batch, max(case.heads, 2)))


@pytest.mark.parametrize("name", thinned(SCORES, 9))
def test_score_mods_pass_check_grads(name):
    case = mods(LENGTH)[name]
    floats = {n: jnp.asarray(x, jnp.float64) for n, x in case.params.items() if np.ndim(x) and x.dtype.kind == "f"}
    rest = {n: x for n, x in case.params.items() if n not in floats}
    att = fk.compile("causal & window(20)", case.text, backend="xla", tile=(16, 16), **rest)
    check(att, drawn(case.q_len, case.kv_len, case.batch, case.heads), **floats)


@pytest.mark.parametrize("backend", ["xla", pytest.param("cpp", marks=pytest.mark.exhaustive)])
def test_sinks_groups_and_dropout_pass_check_grads(backend):
    doc = np.repeat([0, 1, 2], [5, 20, 7]).astype(np.int32)
    mask, score = "causal & same(doc) & (h % 2 == 0 | q - k < 9)", "score + sin(score) * slope[h] + c"
    att = fk.compile(mask, score, dropout=0.3, backend=backend, doc=doc)
    learned = {"sinks": normal(4), "slope": normal(4, seed=2), "c": normal(seed=3)}
    check(partial(att, seed=3), drawn(heads=4, kv_heads=2), **learned)


PART = "(q >= k & (b + h) % 2 == 0) | (q - k < 3 & k % 3 != q % 3)", "score * slope[h] + near[b, k] * sin(0.1 * q)"
PLACE = {"origin": (1, 2, np.array([13, 4]), 5), "sizes": (3, 6, 40, 40)}


def test_parts_of_a_problem_pass_check_grads():
    """Batch entries, heads, queries and keys that do not begin at 0; queries of each batch entry elsewhere."""
    att = fk.compile(*PART, backend="xla", tile=(16, 16))
    check(partial(att, **PLACE), drawn(19, 23, 2, heads=4, kv_heads=2), 1, slope=normal(6), near=normal(3, 40))


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["xla", "cpp"])
def test_orders_and_third_derivatives_pass_check_grads(backend):
    order = fk.reorder("causal & k % 4 == q % 4", LENGTH, block=(16, 16))
    check(fk.compile("causal & k % 4 == q % 4", backend=backend, reorder=order), drawn())
    check(fk.compile("causal & q - k != 3", "softcap(2)", backend=backend), drawn(18), order=3)


def dense(q, k, v):
    """Causal attention to the last 7 keys, its scores capped at 2, written with all pairs."""
    at = jnp.arange(q.shape[1])
    hidden = (at[:, None] < at) | (at[:, None] - at >= 7)
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    s = 2 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) * DIM**-0.5 / 2)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(hidden, -jnp.inf, s)), v)


def tangent(f, x, along):
    return jax.jvp(f, (x,), (along,))[1]


def of_gradient(f):
    """A number that depends on the gradient of `f`."""
    return lambda x: jnp.square(jax.grad(f)(x)).sum()


def layers(f):
    """Two calls of `f`, one after the other, in a scan."""
    return lambda x: jax.lax.scan(lambda total, c: (total + f(c * x), None), 0.0, jnp.asarray([1.0, 0.5]))[0]


TRANSFORMS = {
    "jvp": lambda f, x: tangent(f, x, x),
    "jit(jvp)": lambda f, x: jax.jit(lambda x: tangent(f, x, x))(x),
    "jvp(jit)": lambda f, x: tangent(jax.jit(f), x, x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "hessian": lambda f, x: jax.hessian(f)(x),
    "jacrev(jacrev)": lambda f, x: jax.jacrev(jax.jacrev(f))(x),
    "grad(grad)": lambda f, x: jax.grad(of_gradient(f))(x),
    "grad(grad(jit))": lambda f, x: jax.grad(of_gradient(jax.jit(f)))(x),
    "jvp(grad)": lambda f, x: tangent(jax.grad(f), x, x),
    "grad(jvp)": lambda f, x: jax.grad(lambda y: tangent(f, y, x))(x),
    "jvp(jvp)": lambda f, x: tangent(lambda y: tangent(f, y, x), x, x),
    "grad(jvp(jvp))": lambda f, x: jax.grad(lambda z: tangent(lambda y: tangent(f, y, x), z, x))(x),
    "vmap(jvp)": lambda f, x: jax.vmap(lambda y: tangent(f, y, x))(jnp.stack([x, 2 * x])),
    "vmap(grad(grad))": lambda f, x: jax.vmap(jax.grad(of_gradient(f)))(jnp.stack([x, -x])),
    "grad(vmap(jvp))": lambda f, x: jax.grad(lambda y: jax.vmap(lambda c: tangent(f, c * y, x))(jnp.ones(2)).sum())(x),
    "grad(vmap(grad))": lambda f, x: jax.grad(lambda y: jax.vmap(of_gradient(f))(jnp.stack([y, -y])).sum())(x),
    "linear_transpose(vmap)": lambda f, x: jax.linear_transpose(
        lambda t: jax.vmap(lambda c: jax.linearize(f, x)[1](c * t))(jnp.arange(3.0)), x
    )(jnp.arange(3.0)),
    "grad(checkpoint)": lambda f, x: jax.grad(of_gradient(jax.checkpoint(f)))(x),
    "jvp(grad(checkpoint))": lambda f, x: tangent(jax.grad(jax.checkpoint(f)), x, x),
    "jvp(scan)": lambda f, x: tangent(layers(f), x, x),
    "jvp(grad(scan))": lambda f, x: tangent(jax.grad(layers(f)), x, x),
    "grad(grad(scan(checkpoint)))": lambda f, x: jax.grad(of_gradient(layers(jax.checkpoint(f))))(x),
}
ATT = fk.compile("causal & window(7)", "softcap(2)", backend="xla", tile=(16, 16))
OFTEN = "jvp", "hessian", "grad(grad)", "grad(jvp)", "vmap(jvp)", "linear_transpose(vmap)", "jvp(grad(scan))"


@pytest.mark.parametrize("which", default_only(range(3), 1))
@pytest.mark.parametrize("name", default_only(TRANSFORMS, *OFTEN))
def test_jax_transforms_of_transforms_equal_dense_attention(name, which):
    arrays = drawn(20, heads=4, kv_heads=2)

    def of(attention):
        def loss(x):
            return jnp.square(attention(*arrays[:which], x, *arrays[which + 1 :])).sum()

        return loss

    got, want = (TRANSFORMS[name](of(f), arrays[which]) for f in (ATT, dense))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-8), got, want)


def test_a_tangent_that_instances_share_transposes_to_a_sum():
    """Gradients of a table and of sinks too, which instances of q share."""
    q, k, v = drawn(20)
    att = fk.compile("causal", "score + bias[q - k]", backend="xla")
    primals = {"q": q, "bias": normal(20), "sinks": normal(2)}
    _, along = jax.linearize(lambda x: att(x["q"], k, v, bias=x["bias"], sinks=x["sinks"]), primals)
    weights = normal(3, *q.shape)

    def three(t):
        return jax.vmap(lambda c: along({**t, "q": c * t["q"]}))(jnp.arange(3.0))

    (got,) = jax.linear_transpose(three, primals)(weights)
    for name in primals:
        some = jax.tree.map(jnp.zeros_like, primals) | {name: normal(*primals[name].shape, seed=4)}
        np.testing.assert_allclose((got[name] * some[name]).sum(), (three(some) * weights).sum(), rtol=1e-9)


def test_jax_tangents_of_a_table_and_of_sinks_are_differences():
    q, k, v = drawn(20)
    att = fk.compile("causal", "score + bias[q - k]", backend="xla")
    both = normal(20), normal(2)

    def call(bias, sinks):
        return att(q, k, v, bias=bias, sinks=sinks)

    got, step = jax.jvp(call, both, both)[1], 1e-6
    ahead, behind = (call(*(x * (1 + c) for x in both)) for c in (step, -step))
    np.testing.assert_allclose(got, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", default_only(["float32", "bfloat16", "float16"], "bfloat16"))
def test_jax_derivatives_of_narrow_dtypes_are_near_float64(dtype):
    exact = drawn(40, heads=4, kv_heads=2, dim=16)
    narrow = [x.astype(dtype) for x in exact]

    def loss(*arrays):
        return jnp.square(ATT(*arrays).astype(jnp.float32 if arrays[0].dtype.itemsize < 8 else jnp.float64)).sum()

    def of_gradients(*arrays):
        return sum(jnp.square(g.astype(jnp.float64)).sum() for g in jax.grad(loss, (0, 1, 2))(*arrays))

    second = jax.grad(of_gradients, (0, 1, 2))
    for got, want in zip(second(*narrow), second(*(x.astype(jnp.float64) for x in narrow)), strict=True):
        assert got.dtype == dtype
        steps = 16 if dtype == "float32" else 4  # sums of float32; those of 16 bits are rounded once
        error = jnp.abs(got.astype(jnp.float64) - want).max()
        assert error <= steps * float(jnp.finfo(dtype).eps) * jnp.abs(want).max()


def test_jax_rows_without_keys_and_hidden_inf_have_zeros():
    """A row that sees no key, and log(score), whose slope at a hidden score of 0 is infinite; a hidden key is NaN."""
    q, k, v = drawn(12)
    k = k.at[:, 3].set(0.0).at[:, 11].set(jnp.nan)
    att = fk.compile("q - k > 2 & k != 3", "log(abs(score))", backend="xla", tile=(16, 16))

    def loss(*arrays):
        return jnp.square(att(*arrays)).sum()

    assert (jax.grad(loss)(q, k, v)[:, :3] == 0).all()
    for grad in jax.grad(lambda *x: jnp.square(jax.grad(loss)(*x)).sum(), (0, 1, 2))(q, k, v):
        assert jnp.isfinite(grad).all()
    assert jnp.isfinite(tangent(lambda q: att(q, k, v), q, q)).all()


@pytest.mark.parametrize("weights", [{}, {"weight": "relu2", "divide": "count"}, {"weight": "sigmoid(score)"}], ids=str)
@pytest.mark.parametrize("hidden", [jnp.nan, jnp.inf])
def test_jax_derivatives_of_calls_whose_hidden_keys_are_anything(weights, hidden):
    """Keys that no query of a row of tiles sees, and the cotangent of a row that sees none."""
    q, k, v = drawn(20)
    t = jnp.cos(q)
    att = fk.compile("causal & k < 13 & q >= 2", backend="xla", tile=(16, 16), **weights)

    def derivatives(value):
        k2, v2 = (x.at[:, 13:].set(value) for x in (k, v))

        def firsts(q, k, v, dout):
            return jax.vjp(att, q, k, v)[1](dout)

        def loss(q):
            return jnp.sin(att(q, k2, v2) * t).sum()

        operands = q, k2, v2, t.at[:, :2].set(value)
        seconds = jax.grad(lambda *x: sum((g * g).sum() for g in firsts(*x)), (0, 1, 2, 3))(*operands)
        return *firsts(*operands), *seconds, tangent(loss, q, t), tangent(jax.grad(loss), q, t)

    for got, want in zip(derivatives(hidden), derivatives(0.0), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mask", ["causal & (k < w)", "causal & same(doc)"])
def test_traced_spans_have_derivatives(mask):
    """Under jit the window and the documents are numbers of the device: rows stand beside all keys."""
    arrays, att = drawn(40), fk.compile(mask, "score * c", backend="xla", tile=(16, 16))
    values = {"w": jnp.int32(9)} if "w" in mask else {"doc": jnp.arange(40, dtype=jnp.int32) // 13}

    def second(values, *arrays):
        return tangent(jax.grad(lambda q: jnp.square(att(q, *arrays[1:], **values, c=1.5)).sum()), arrays[0], arrays[1])

    got = jax.jit(second)(values, *arrays)
    np.testing.assert_allclose(got, second(jax.tree.map(np.asarray, values), *arrays), rtol=1e-7, atol=1e-9)


def equations(jaxpr):
    for e in jaxpr.eqns:
        yield e
        for inner in jaxprs_in_params(e.params):
            yield from equations(inner)


def test_second_derivatives_keep_one_row_of_tiles():
    """The largest array of scores is of one row of tiles, not of all pairs, also among what a scan saves."""
    n, block = 512, 64
    arrays = drawn(n, heads=1, dim=8)
    att = fk.compile("causal", backend="xla", tile=(block, block))
    second = jax.grad(of_gradient(lambda q: jnp.square(att(q, *arrays[1:])).sum()))
    made = jax.make_jaxpr(second)(arrays[0]).jaxpr
    largest = max(int(np.prod(x.aval.shape)) for e in equations(made) for x in e.outvars)
    assert block * n <= largest < n * n // 4


def test_rows_of_few_keys_stand_beside_few_keys():
    """A window of 64 of 2,048 keys: no row has more than two tiles of keys beside it."""
    n, widths = 2048, []
    att = fk.compile("causal & window(64)", backend="xla", tile=(64, 64))
    x = jax.ShapeDtypeStruct((1, n, 1, 8), jnp.float32)
    with pytest.MonkeyPatch.context() as patch:
        groups = form.row_groups
        patch.setattr(form, "row_groups", lambda *a: (widths.append(g.tiles.shape[1]) or g for g in groups(*a)))
        jax.jit(lambda q: tangent(lambda q: att(q, q, q), q, q)).lower(x)
    assert set(widths) == {1, 2}


def test_jax_warning_of_derivatives_comes_once(monkeypatch):
    monkeypatch.setattr("frisket.runtime.machine.caller.SAID", set())
    x = jnp.ones((1, 8, 1, 4), jnp.float32)

    def attend(q):
        return fk.attention(q, q, q, "causal").sum()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        jax.grad(attend)(x)
        assert not seen
        for _ in range(2):
            tangent(attend, x, x)
            jax.hessian(attend)(x)
    assert [str(w.message) for w in seen] == [differentiable.WARNING]


FIRST = {
    "grad": (jax.grad, 1), "value_and_grad": (jax.value_and_grad, 1), "vmap": (lambda f: jax.vmap(jax.grad(f)), 1),
    "checkpoint": (lambda f: jax.grad(jax.checkpoint(f)), 2), "scan": (lambda f: jax.grad(layers(f)), 1),
    "jit": (lambda f: jax.grad(jax.jit(f)), 1), "grad of vmap": (lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum()), 1),
    "names": (lambda f: jax.grad(jax.checkpoint(
        f, policy=jax.checkpoint_policies.save_only_these_names("frisket out", "frisket lse"))), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", FIRST)
def test_jax_first_gradients_launch_no_more_kernels(name):
    """One backward, and one forward, or two under jax.checkpoint; no tangents, which are transposed."""
    transform, forwards = FIRST[name]
    q, k, v = drawn(20)
    x = jnp.stack([q, q]) if "vmap" in name else q
    jaxpr = jax.make_jaxpr(transform(lambda q: jnp.square(ATT(q, k, v)).sum()))(x)
    launched = [str(e.primitive) for e in equations(jaxpr.jaxpr) if str(e.primitive).startswith("frisket")]
    assert sorted(launched) == ["frisket_backward", *["frisket_forward"] * forwards]


def test_attention_over_devices_refuses_what_it_has_not():
    """`lse` of a backward there is of the keys of all devices, and no derivative of one device's keys."""
    mesh, deal = jax.make_mesh((1,), ("sp",)), fk.parallel.deal("causal", 128, ranks=1)
    att, x = fk.compile("causal"), jnp.ones((1, 128, 1, 8), jnp.float32)

    def loss(q):
        return fk.parallel.attend(att, q, x, x, deal=deal, mesh=mesh).sum()

    assert jax.eval_shape(jax.grad(loss), x).shape == x.shape
    with pytest.raises(BackwardError, match="forward mode of attention over several devices is asked for"):
        jax.jit(lambda x: tangent(loss, x, x)).lower(x)
    with pytest.raises(BackwardError, match="a derivative of a gradient of attention over several devices"):
        jax.eval_shape(jax.grad(of_gradient(loss)), x)
