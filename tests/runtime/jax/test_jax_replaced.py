"""Captured JAX arrays and flax variables that are replaced after the attention was made."""

import copy
import pickle

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import frisket as fk  # noqa: E402
from frisket.dsl.errors import ParameterError  # noqa: E402
from frisket.runtime.calls.options import CallArgs  # noqa: E402

jnp = jax.numpy
S = 8
X = jax.random.normal(jax.random.key(0), (1, S, 2, 4))


def drawn(seed=1):
    return jax.random.normal(jax.random.key(seed), (2, S))


def dense(bias, doc):
    return fk.attention(X, X, X, "causal & same(doc)", "score + bias[h, q - k]", backend="xla", doc=doc, bias=bias)


def close(x, y):
    return np.allclose(x, y, atol=1e-5)


class Layer:
    def __init__(self):
        self.bias, self.doc = jnp.zeros((2, S)), jnp.arange(S) // 4
        self.att = fk.compile(
            lambda q, k: (q >= k) & (self.doc[q] == self.doc[k]),
            lambda score, h, q, k: score + self.bias[h, q - k],
            backend="xla",
        )

    def __call__(self, bias=None, doc=None):
        self.bias, self.doc = self.bias if bias is None else bias, self.doc if doc is None else doc
        return self.att(X, X, X)


def test_replaced_arrays_are_read_by_the_next_jax_call():
    layer = Layer()
    for bias, doc in ((None, None), (drawn(), None), (None, jnp.arange(S) // 2), (drawn(2), jnp.arange(S) // 3)):
        assert close(layer(bias, doc), dense(layer.bias, layer.doc))
    copied = copy.deepcopy(layer)
    assert close(copied(drawn(3)), dense(drawn(3), layer.doc))
    assert close(layer(), dense(drawn(2), layer.doc))


def test_attributes_that_a_transform_traces_get_gradients():
    layer, bias, doc = Layer(), drawn(), jnp.arange(S) // 2
    assert close(jax.jit(layer)(bias, doc), dense(bias, doc))
    grad = jax.grad(lambda b: layer(b, doc).sum())(bias)
    expected = jax.grad(lambda b: dense(b, doc).sum())(bias)
    assert close(grad, expected)
    assert np.any(expected)
    assert close(layer(bias, doc), dense(bias, doc))


@pytest.fixture(scope="module")
def model():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self):
            self.bias, self.doc = nnx.Param(jnp.zeros((2, S))), nnx.Variable(jnp.arange(S) // 4)
            self.att = fk.compile(
                lambda q, k: (q >= k) & (self.doc[q] == self.doc[k]),
                lambda score, h, q, k: score + self.bias[h, q - k],
                backend="xla",
            )

        def __call__(self, **params):
            return self.att(X, X, X, **params)

    return Model()


def test_flax_variables_are_read_by_the_next_call(model):
    nnx = pytest.importorskip("flax.nnx")

    assert close(model(), dense(model.bias[...], model.doc[...]))
    model.bias.set_value(drawn())
    assert close(model(), dense(drawn(), model.doc[...]))
    model.doc = nnx.Variable(jnp.arange(S) // 2)
    assert close(model(), dense(drawn(), jnp.arange(S) // 2))
    nnx.update(model, nnx.state({"bias": nnx.Param(drawn(2))}))
    assert close(model(), dense(drawn(2), jnp.arange(S) // 2))
    assert model.att.check(X, X, X).good


def test_flax_variables_of_another_trace_are_refused(model):
    nnx = pytest.importorskip("flax.nnx")

    message = r"is a flax variable of another trace: .*\n  give the array to the call: .*self.doc\[...\]\)"
    with pytest.raises(ParameterError, match=message):
        jax.jit(lambda: model().sum())()
    for transform in (nnx.jit, nnx.grad):
        with pytest.raises(ParameterError, match=COPIED):
            transform(lambda m: m().sum())(model)
    given = nnx.grad(lambda m: m(bias=m.bias[...], doc=m.doc[...]).sum())(model)
    expected = jax.grad(lambda b: dense(b, model.doc[...]).sum())(model.bias[...])
    assert close(given["bias"][...], expected)


COPIED = r"`self.(doc|bias)` is read from the module that was copied, not from its copy.*\n  give the array to the call"


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "clone", "merge", "map"])
def test_copies_of_a_flax_module_do_not_read_the_first_one(model, way):
    nnx = pytest.importorskip("flax.nnx")

    ways = {
        "deepcopy": copy.deepcopy,
        "clone": nnx.clone,
        "merge": lambda m: nnx.merge(*nnx.split(m)),
        "map": lambda m: jax.tree.map(lambda x: x, m),
    }
    copied = ways.get(way, nnx.clone)(model)
    copied.att = pickle.loads(pickle.dumps(model.att)) if way == "pickle" else copied.att
    with pytest.raises(ParameterError, match=COPIED):
        copied()
    assert copied.att.call(CallArgs(X, X, X, params={"bias": copied.bias[...], "doc": copied.doc[...]}))


def test_masks_of_a_flax_module_are_copied_with_it():
    nnx = pytest.importorskip("flax.nnx")

    class Masked(nnx.Module):
        def __init__(self):
            self.doc = nnx.Variable(jnp.arange(S) // 4)
            self.mask = fk.mask(lambda q, k: self.doc[q] == self.doc[k])

    masked = Masked()
    for copied in (nnx.clone(masked), copy.deepcopy(masked)):
        for mask in (copied.mask, copied.mask & "causal"):
            with pytest.raises(ParameterError, match=COPIED):
                fk.compile(mask, backend="xla")(X, X, X)
    assert masked.mask.now() is masked.mask


def test_a_flax_module_keeps_its_attention_through_jit():
    nnx = pytest.importorskip("flax.nnx")

    class Given(nnx.Module):
        def __init__(self):
            self.bias = nnx.Param(jnp.zeros((2, S)))
            self.att = fk.compile("causal", lambda score, h, q, k: score + self.bias[h, q - k], backend="xla")

        def __call__(self):
            return self.att(X, X, X, bias=self.bias[...])

    @nnx.jit
    def step(model):
        grads = nnx.grad(lambda m: m().sum())(model)
        model.bias.set_value(model.bias[...] - grads["bias"][...])

    model = Given()
    att, paths = model.att, [path for path, _ in nnx.to_flat_state(nnx.state(model))]
    step(model)
    assert model.att is att
    assert np.any(model.bias[...])
    assert att.now() is not att, "it reads the bias of after the step"
    assert paths == [("bias",)]
    average = jax.tree.map(lambda a, b: (a + b) / 2, nnx.clone(model), model)
    assert close(average.bias[...], model.bias[...])


def test_flax_layers_made_in_a_trace_read_their_variables(model):
    nnx = pytest.importorskip("flax.nnx")

    make = type(model)
    assert close(nnx.jit(lambda: make()())(), dense(jnp.zeros((2, S)), jnp.arange(S) // 4))
