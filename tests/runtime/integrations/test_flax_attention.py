"""`attention_fn` inside flax's own layers, beside flax's own dot_product_attention: results and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from support.jax.dense import dense as dense_attention

import frisket as fk
from frisket.integrations.flax import attention_fn

rng = np.random.default_rng(11)
LEAD, LENGTH, HEADS, DIM = (2, 3), 12, 4, 8
FULL = (*LEAD, HEADS, LENGTH, LENGTH)


def drawn(*shape):
    return jnp.asarray(rng.standard_normal(shape).astype(np.float32))


Q, K, V = (drawn(*LEAD, LENGTH, HEADS, DIM) for _ in range(3))
REAL = np.arange(LENGTH) < rng.integers(6, LENGTH, LEAD)[..., None]


@jax.jit
def masks_of_flax(tokens, real):
    """float32, as flax makes them."""
    causal, padded = nnx.make_causal_mask(tokens), nnx.make_attention_mask(tokens, real)
    return causal, padded, nnx.combine_masks(causal, padded)


CAUSAL, PADDED, COMBINED = masks_of_flax(np.ones((*LEAD, LENGTH), np.float32), REAL)


def some(*shape):
    """A mask in which everybody sees the first key."""
    seen = rng.random(shape) < 0.6
    seen[..., 0] = True
    return jnp.asarray(seen)


# What the function is made of, what the call brings, and the same for flax.
CASES = {
    "text": ({"mask": "causal & window(w)", "w": 5}, {}, lambda q, k: (q >= k) & (q - k < 5)),
    "lambda": ({"mask": lambda q, k: (q >= k) & (q - k < 5)}, {}, lambda q, k: (q >= k) & (q - k < 5)),
    "is_causal": ({"mask": "k != 3"}, {"is_causal": True}, lambda q, k: (q >= k) & (k != 3)),
    "text in the call": ({"mask": "causal"}, {"mask": "window(4)"}, lambda q, k: (q >= k) & (q - k < 4)),
    "make_causal_mask": ({}, {"mask": CAUSAL}, CAUSAL),
    "combine_masks": ({}, {"mask": COMBINED}, np.asarray(CAUSAL) * np.asarray(PADDED)),
    "both": ({"mask": "window(5)"}, {"mask": jnp.asarray((np.asarray(PADDED) > 0) | (np.asarray(CAUSAL) > 0))}, None),
    "of heads": ({}, {"mask": some(*FULL)}, None),
    "a plane": ({}, {"mask": some(LENGTH, LENGTH)}, None),
    "of one batch axis": ({"mask": "causal"}, {"mask": some(2, 1, 1, 1, LENGTH)}, None),
    "of the other": ({}, {"mask": some(1, 3, 4, LENGTH, LENGTH)}, None),
}
USUAL = ("text",)


def dense(case):
    _, call, wanted = CASES[case]
    q, k = np.arange(LENGTH)[:, None], np.arange(LENGTH)
    if wanted is None:
        wanted = call["mask"].astype(bool)
        wanted &= {"both": abs(q - k) < 5, "of one batch axis": q >= k}.get(case, True)
    return jnp.asarray(np.broadcast_to(wanted(q, k) if callable(wanted) else wanted, FULL))


def with_gradients(attend, **how):
    def loss(q, k, v, bias):
        out = attend(q, k, v, bias=bias, **how)
        return jnp.sin(out).sum(), out

    bias = jnp.asarray(np.random.default_rng(1).standard_normal((HEADS, LENGTH, LENGTH)), jnp.float32)
    (_, out), found = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(Q, K, V, bias)
    return out, *found


@pytest.mark.parametrize("case", [pytest.param(n, marks=() if n in USUAL else pytest.mark.exhaustive) for n in CASES])
def test_masks_as_flax_reads_them(case):
    made, call, _ = CASES[case]
    found = with_gradients(attention_fn(**made), **call)
    for x, y in zip(found, with_gradients(linen.dot_product_attention, mask=dense(case)), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_layers_of_both_kinds(kind):
    """One set of weights, flax's function and ours: outputs, and gradients of all weights."""
    x, how = drawn(2, LENGTH, 32), {"mask": "causal & window(w)", "w": 5}
    seen = (CAUSAL[0, :2] > 0) & (np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH)) < 5)
    ours = attention_fn(**how)

    def nnx_layer(fn, **more):
        made = nnx.MultiHeadAttention(4, 32, num_kv_heads=2, decode=False, rngs=nnx.Rngs(0), **fn, **more)
        return nnx.jit(nnx.value_and_grad(lambda m, mask: jnp.square(m(x, mask=mask)).sum())), made

    def linen_layer(fn):
        made = linen.MultiHeadDotProductAttention(num_heads=4, **fn)
        weights = linen.MultiHeadDotProductAttention(num_heads=4).init(jax.random.key(0), x)
        return jax.jit(jax.value_and_grad(lambda w, mask: jnp.square(made.apply(w, x, mask=mask)).sum())), weights

    layer = {"nnx": nnx_layer, "linen": linen_layer}[kind]
    (step, weights), (theirs, same) = layer({"attention_fn": ours}), layer({})
    found, wanted = step(weights, None), theirs(same, seen)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=2e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_flax_decode_steps_equal_the_whole_sequence(kind):
    """Token by token under text that knows positions, a key hidden by flax's own mask, is all at once."""
    x = drawn(2, 9, 16)
    hidden = jnp.ones((2, 1, 1, 9)).at[0, 0, 0, 1].set(0)
    ours = attention_fn("causal & window(w)", "score - slope[h] * (q - k)", w=4, slope=np.arange(4) / 4)
    if kind == "nnx":
        layer = nnx.MultiHeadAttention(4, 16, attention_fn=ours, rngs=nnx.Rngs(0))
        whole = layer(x, mask=hidden, decode=False)
        layer.init_cache(x.shape)
        step = nnx.jit(lambda layer, x: layer(x, mask=hidden, decode=True))
        found = [step(layer, x[:, i : i + 1]) for i in range(9)]
    else:
        layer = linen.MultiHeadDotProductAttention(num_heads=4, attention_fn=ours)
        weights = layer.init(jax.random.key(0), x)
        whole = layer.apply(weights, x, mask=hidden)
        stepping = layer.clone(decode=True)
        variables = {**weights, "cache": stepping.init(jax.random.key(0), x)["cache"]}
        step, found = jax.jit(lambda v, x: stepping.apply(v, x, mask=hidden, mutable="cache")), []
        for i in range(9):
            out, kept = step(variables, x[:, i : i + 1])
            variables |= kept
            found.append(out)
    np.testing.assert_allclose(jnp.concatenate(found, 1), whole, atol=2e-6)
    assert np.abs(whole - layer_without(kind, layer, x, hidden)).max() > 1e-3  # the window and the slopes tell


def layer_without(kind, layer, x, hidden):
    mask = nnx.combine_masks(CAUSAL[0, :2, :, :9, :9], hidden)
    if kind == "nnx":
        layer.attention_fn = nnx.dot_product_attention
        return layer(x, mask=mask, decode=False)
    plain = layer.clone(attention_fn=linen.dot_product_attention)
    return plain.apply(plain.init(jax.random.key(0), x), x, mask=mask)


def test_flax_functions_weigh_pairs_in_whole_and_in_steps():
    decay = np.float32([0.5, 0.7, 0.8, 0.9])
    attend = attention_fn(
        "causal", weight="retention(decay)", divide="max(abs(total), 1)", decay=decay, backend="dense"
    )
    distance = np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH))
    weights = np.einsum("...qhd,...khd->...hqk", Q, K) / DIM**0.5 * decay[:, None, None] ** np.maximum(distance, 0)
    weights = np.where(distance >= 0, weights, 0)
    weights = weights / np.maximum(np.abs(weights.sum(-1, keepdims=True)), 1)
    wanted = np.einsum("...hqk,...khd->...qhd", weights, V)
    np.testing.assert_allclose(attend(Q, K, V), wanted, atol=1e-5)
    step = attend(Q[:, :, 6:7], K, V, mask=jnp.ones((LENGTH,)).at[7:].set(0))  # from the place of key 6
    np.testing.assert_allclose(step, wanted[:, :, 6:7], atol=1e-5)
    with pytest.raises(fk.ParameterError, match="sinks are logits of a softmax"):
        attend(Q, K, V, mask={"sinks": jnp.zeros(4)})


@pytest.mark.exhaustive
def test_flax_single_query_with_decode_off_is_at_position_0():
    q, seen = Q[:, :, :1], jnp.ones((LENGTH,)).at[7:].set(0)
    step = attention_fn("k > q - 3")(q, K, V, mask=seen)  # from the place of key 6
    np.testing.assert_allclose(
        step, linen.dot_product_attention(q, K, V, mask=(seen > 0) & (jnp.arange(12) > 3)), atol=2e-6
    )
    other = attention_fn("k > q + 3", decode=False)(q, K, V, mask=seen)  # from place 0
    np.testing.assert_allclose(other, step, atol=2e-6)


def test_dropout_is_frisket_s_own():
    key, attend = jax.random.key(3), attention_fn("causal")
    how = {"dropout_rate": 0.3, "dropout_rng": key}
    found = jax.jit(lambda q: attend(q, K, V, **how))(Q)
    seed = int(jax.random.randint(key, (), 0, 2**31 - 1))
    flat = (np.asarray(x, np.float64).reshape(6, LENGTH, HEADS, DIM) for x in (Q, K, V))
    wanted = fk.reference(*flat, "causal", dropout=0.3, seed=seed, layout="bshd")
    np.testing.assert_allclose(found.reshape(wanted.shape), wanted, atol=2e-6)
    np.testing.assert_array_equal(attend(Q, K, V, deterministic=True, **how), attend(Q, K, V))


@pytest.mark.exhaustive
def test_dropout_of_layers():
    x = drawn(2, LENGTH, 32)
    layer = nnx.MultiHeadAttention(
        4, 32, dropout_rate=0.5, decode=False, attention_fn=attention_fn("causal"), rngs=nnx.Rngs(0)
    )
    step = nnx.jit(lambda layer: layer(x, deterministic=False))
    one, two = step(layer), step(layer)  # another key at every step
    assert np.abs(one - two).max() > 1e-2
    plain = linen.MultiHeadDotProductAttention(
        4, dropout_rate=0.5, deterministic=False, attention_fn=layer.attention_fn
    )
    weights = plain.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    found = [plain.apply(weights, x, rngs={"dropout": jax.random.key(n)}) for n in (1, 1, 2)]
    np.testing.assert_array_equal(found[0], found[1])
    assert np.abs(found[0] - found[2]).max() > 1e-2


@pytest.mark.exhaustive
def test_values_at_every_call():
    """Documents, learned slopes and sinks as values of names: traced, with gradients, one compilation."""
    attend, traces = attention_fn("causal & same(doc)", "score + slope[h] * (k - q)"), []
    x = drawn(2, LENGTH, 32)
    layer = nnx.MultiHeadAttention(4, 32, decode=False, attention_fn=attend, rngs=nnx.Rngs(0))

    @nnx.jit
    def loss(layer, doc, slope, sinks):
        traces.append(1)
        return jnp.square(layer(x, mask={"doc": doc, "slope": slope, "sinks": sinks})).sum()

    given = jnp.arange(4) / 4.0, jnp.ones(4)
    first = loss(layer, jnp.arange(LENGTH) // 5, *given)
    assert abs(first - loss(layer, jnp.zeros(LENGTH, int), *given)) > 1e-3
    assert len(traces) == 1
    gradients = nnx.grad(loss, argnums=(2, 3))(layer, jnp.arange(LENGTH) // 5, *given)
    q, k, v = (p(x) for p in (layer.query, layer.key, layer.value))

    def by_hand(slope, sinks):
        i = np.arange(LENGTH)
        seen = (i[:, None] >= i) & (i[:, None] // 5 == i // 5)
        out, _ = dense_attention(q, k, v, seen, lambda s: s + slope[:, None, None] * (i - i[:, None]), sinks)
        return jnp.square(layer.out(out)).sum()

    np.testing.assert_allclose(first, by_hand(*given), rtol=1e-5)
    for a, b in zip(gradients, jax.grad(by_hand, (0, 1))(*given), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_vmap_and_batch_axes():
    attend = attention_fn("causal & same(doc)")
    doc = jnp.asarray(rng.integers(0, 2, (2, LENGTH)).cumsum(1))
    found = jax.vmap(lambda q, k, v, doc: attend(q, k, v, mask={"doc": doc}))(Q, K, V, doc)
    for i in range(2):
        seen = (doc[i][:, None] == doc[i]) & jnp.tri(LENGTH, dtype=bool)
        for j in range(3):  # no batch axis at all
            alone = attend(Q[i, j], K[i, j], V[i, j], mask={"doc": doc[i]})
            wanted = linen.dot_product_attention(Q[i, j], K[i, j], V[i, j], mask=seen)
            np.testing.assert_allclose(alone, wanted, atol=2e-6)
            np.testing.assert_allclose(found[i, j], wanted, atol=2e-6)


@pytest.mark.exhaustive
def test_dtypes_as_flax_promotes_them():
    attend, half = attention_fn(), Q.astype(jnp.bfloat16)
    assert attend(half, K, V).dtype == linen.dot_product_attention(half, K, V).dtype == jnp.float32
    found = attend(Q, K, V, dtype=jnp.bfloat16)
    assert found.dtype == linen.dot_product_attention(Q, K, V, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(float), linen.dot_product_attention(Q, K, V), atol=0.03)


@pytest.mark.exhaustive
def test_a_query_that_sees_nothing():
    seen = jnp.ones((LENGTH, LENGTH)).at[4].set(0)
    found = attention_fn()(Q, K, V, mask=seen)
    assert not np.asarray(found[:, :, 4]).any()
    np.testing.assert_allclose(linen.dot_product_attention(Q, K, V, mask=seen)[:, :, 4], V.mean(2), atol=1e-6)


def test_equal_functions_are_equal():
    def made(w):
        return attention_fn("causal & window(w)", w=w)

    assert made(4) == made(4)
    assert attention_fn("causal") == attention_fn(lambda q, k: q >= k)
    assert hash(made(4)) == hash(made(4))
    assert made(4) != made(5)
    layers = [nnx.MultiHeadAttention(2, 8, attention_fn=made(4), keep_rngs=False, rngs=nnx.Rngs(0)) for _ in range(2)]
    assert nnx.graphdef(layers[0]) == nnx.graphdef(layers[1])


def test_flax_attention_fn_refuses_bad_input():
    attend = attention_fn("causal & same(doc)")
    with pytest.raises(fk.ParameterError, match=r'`doc` has no value; .* layer\(x, mask=\{"doc": ...\}\)'):
        attend(Q, K, V)
    with pytest.raises(fk.ParameterError, match=r'`doc` is traced .* layer\(x, mask=\{"doc": doc\}\)'):
        jax.jit(lambda doc: attention_fn("same(doc)", doc=doc)(Q, K, V))(jnp.zeros(LENGTH, int))
    with pytest.raises(fk.ParameterError, match="`t` is traced"):
        jax.jit(lambda t: attention_fn(lambda q, k: t[q] == t[k])(Q, K, V))(jnp.zeros(LENGTH, int))
    plain = attention_fn()
    with pytest.raises(fk.ShapeError, match=r"the mask is \[3, 12, 12\] for .* = \[2, 3, 4, 12, 12\]"):
        plain(Q, K, V, mask=jnp.ones((3, LENGTH, LENGTH)))
    with pytest.raises(fk.ShapeError, match=r"the bias is \[1, 2, 3, 4, 12, 12\]"):
        plain(Q, K, V, bias=jnp.ones((1, *FULL)))
    with pytest.raises(fk.ShapeError, match="with the same batch axes"):
        plain(Q[0], K, V)
    with pytest.raises(fk.ParameterError, match=r"sow_weights=True .* never made"):
        nnx.MultiHeadAttention(4, 32, decode=False, attention_fn=plain, rngs=nnx.Rngs(0))(
            jnp.ones((1, 4, 32)), sow_weights=True
        )
    layer = linen.MultiHeadDotProductAttention(
        4,
        attention_fn=plain,
        qk_attn_weights_einsum_cls=lambda: jnp.einsum,
        attn_weights_value_einsum_cls=lambda: jnp.einsum,
    )
    with pytest.raises(fk.ParameterError, match="qk_attn_weights_einsum is for flax's own"):
        layer.init(jax.random.key(0), jnp.ones((1, 4, 32)))
    with pytest.raises(fk.ParameterError, match="dropout draws from a key"):
        plain(Q, K, V, dropout_rate=0.1)
    with pytest.raises(fk.ParameterError, match="`flax_mask` is the name of what a layer passes"):
        attention_fn("flax_mask[q] == 0")(Q, K, V)
    with pytest.raises(fk.ParameterError, match="`dic` is given"):
        attend(Q, K, V, mask={"doc": jnp.zeros(LENGTH, int), "dic": 3})
