"""Arrays of a call of JAX: numpy's beside them, arrays without a batch axis, keys of jax.random as seeds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import frisket as fk
from frisket.dsl.errors import ParameterError, ShapeError
from frisket.operations import AttentionRegistry

rng = np.random.default_rng(0)
Q, K, V = (rng.standard_normal((2, 16, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
QKV = Q, K, V
JAX = [jnp.asarray(x) for x in QKV]
ATT = fk.compile("causal", backend="xla")
KEYS = [jax.random.key(7), jax.random.PRNGKey(7)]


def equal(found, want, **how):
    assert isinstance(found, jax.Array)
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(want, np.float32), **how)


@pytest.mark.parametrize("numpy", ["q", "k", "qk", "kv", "qkv"])
def test_numpy_arrays_are_those_of_jax_beside_others(numpy):
    arrays = [x if n in numpy else y for n, x, y in zip("qkv", QKV, JAX)]
    equal(ATT(*arrays), ATT(*JAX))
    equal(ATT(*(x.astype(float) if n in numpy else x for n, x in zip("qkv", arrays))), ATT(*JAX))
    equal(fk.attention(*arrays, "causal", backend="xla"), ATT(*JAX))
    if numpy != "qkv":
        equal(fk.attention(*arrays, "causal", backend="dense"), ATT(*JAX), rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(fk.reference(*arrays, "causal"), fk.reference(*JAX, "causal"))


def test_arrays_of_numpy_alone_say_what_to_give():
    for backend in (None, "library", "dense"):
        with pytest.raises(ShapeError, match=r"jax\.numpy\.asarray"):
            fk.compile("causal", backend=backend)(*QKV)
    with pytest.raises(ShapeError, match="different frameworks"):
        ATT(Q, K, __import__("torch").tensor(V))


def test_tables_of_jax_make_numpy_arrays_their_own():
    att = fk.compile("causal", "score + w[h]", backend="xla")
    bias, sinks = jnp.ones(4), jnp.zeros(4)
    gradient = jax.grad(lambda bias, sinks, q: (att(q, K, V, w=bias, sinks=sinks) ** 2).sum(), (0, 1))
    for found, want in zip(gradient(bias, sinks, Q), gradient(bias, sinks, JAX[0]), strict=True):
        equal(found, want)
    captured = fk.compile("causal", lambda score, b, h, q, k: score + bias[h], backend="xla")
    equal(captured(*QKV), att(*JAX, w=bias))


def test_a_gradient_by_one_array_takes_numpy_for_the_others():
    for i, x in enumerate(JAX):

        def at(x, rest, i=i):
            return (ATT(*rest[:i], x, *rest[i + 1 :]) ** 2).sum()

        equal(jax.grad(at)(x, QKV), jax.grad(at)(x, JAX))


def test_numpy_scales_and_pages_are_taken_beside_jax_arrays():
    eight, scale = [(10 * x).astype(np.int8) for x in (K, V)], np.full((2, 16, 2), 0.1, np.float32)
    pages = np.array([[1], [0]], np.int32)
    given = {"k_scale": scale, "v_scale": scale, "pages": pages}
    as_jax = {n: jnp.asarray(x) for n, x in given.items()}
    equal(ATT(JAX[0], *eight, **given), ATT(JAX[0], *map(jnp.asarray, eight), **as_jax))


def test_numpy_arrays_go_where_the_others_are_committed():
    where = jax.devices()[-1]
    assert ATT(Q, *(jax.device_put(x, where) for x in JAX[1:])).devices() == {where}


def test_operators_and_merges_take_numpy_arrays_beside_jax_ones():
    op = AttentionRegistry.create("frisket-xla")
    equal(op(Q, *JAX[1:], causal=True).attention_outputs, ATT(*JAX))
    (out, lse), other = (fk.attention(*JAX, mask, backend="xla", return_lse=True) for mask in ("k < 5", "k >= 5"))
    want = fk.merge((out, lse), other)
    for found, right in zip(fk.merge((np.asarray(out), lse), other), want, strict=True):
        equal(found, right)
    bare = fk.merge(*((out[0], lse[0]) for out, lse in ((out, lse), other)))
    for found, right in zip(bare, want, strict=True):
        equal(found, right[0])
    with pytest.raises(ShapeError, match=r"\[batch, length, heads, head_dim\]"):
        op(*(x[0] for x in JAX), causal=True)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_arrays_without_a_batch_axis_are_one_batch_entry(layout):
    one = [x[:1] if layout == "bshd" else x[:1].swapaxes(1, 2) for x in JAX]
    bare = [x[0] for x in one]
    how = {"layout": layout, "return_lse": True, "return_max": True}
    for arrays in (bare, [np.asarray(bare[0]), *bare[1:]], [bare[0], *one[1:]]):
        for found, want in zip(ATT(*arrays, **how), ATT(*one, **how), strict=True):
            equal(found, want[0])
    numpy = [np.asarray(x) for x in bare]
    np.testing.assert_allclose(fk.reference(*numpy, "causal", layout=layout), ATT(*bare, layout=layout), atol=1e-5)
    assert ATT.check(*bare, layout=layout).good
    assert ATT(bare[0], *one[1:], layout=layout).shape == bare[0].shape


def test_transforms_of_arrays_without_a_batch_axis_are_right():
    one, bare = [x[:1] for x in JAX], [x[0] for x in JAX]
    equal(jax.vmap(ATT)(*JAX), ATT(*JAX), atol=1e-6)
    equal(jax.jit(ATT)(*bare), ATT(*one)[0], atol=1e-6)
    loss = jax.grad(lambda *qkv: (ATT(*qkv) ** 2).sum(), (0, 1, 2))
    for found, want in zip(loss(*bare), loss(*one), strict=True):
        equal(found, want[0])
    assert ATT(bare[0][:0], *bare[1:], return_lse=True)[1].shape == (4, 0)


@pytest.mark.exhaustive
def test_orders_and_stored_keys_take_arrays_without_a_batch_axis():
    one, bare = [x[:1] for x in JAX], [x[0] for x in JAX]
    ordered = fk.compile("causal & k % 4 == 0", backend="xla", reorder="auto")
    equal(ordered(*bare), ordered(*one)[0])
    eight, scale = [(10 * x).astype(np.int8) for x in bare[1:]], jnp.full((16, 2), 0.1)
    want = ATT(one[0], *(x[None] for x in eight), k_scale=scale[None], v_scale=scale[None])
    equal(ATT(bare[0], *eight, k_scale=scale, v_scale=scale), want[0])


def test_torch_tensors_without_a_batch_axis_are_refused_in_words():
    torch = pytest.importorskip("torch")
    with pytest.raises(ShapeError, match=r"q\[None\] has one batch entry, q\[:, None\] one head"):
        fk.compile("causal")(*torch.zeros(3, 2, 8, 4))


def test_a_key_of_jax_random_is_a_seed():
    att, seed = fk.compile("causal", backend="xla", dropout=0.5), jax.random.randint(KEYS[0], (), 0, 2**31 - 1)
    want = att(*JAX, seed=seed)
    for key in KEYS:
        equal(att(*JAX, seed=key), want)
    equal(jax.jit(jax.vmap(lambda key: att(*JAX, seed=key)))(KEYS[0][None])[0], want, atol=1e-6)
    with pytest.raises(ParameterError, match="one integer, 0 <= seed < 2\\*\\*31, or one key"):
        att(*JAX, seed=jax.random.split(KEYS[0]))


@pytest.mark.exhaustive
def test_checks_references_and_operators_take_the_same_keys():
    att = fk.compile("causal", backend="xla", dropout=0.5)
    want = att(*JAX, seed=KEYS[0])
    assert att.check(*JAX, seed=KEYS[0]).good
    np.testing.assert_allclose(fk.reference(*JAX, "causal", dropout=0.5, seed=KEYS[0]), want, atol=1e-5)
    op = AttentionRegistry.create("frisket-xla")
    drawn = op(*JAX, causal=True, dropout_prob=0.5, dropout_rng=KEYS[0], deterministic=False).attention_outputs
    equal(drawn, want)
