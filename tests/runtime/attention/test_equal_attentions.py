"""Attentions compare by program and options, so that equal ones share a trace of JAX and a graph definition of nnx."""

import copy
import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import frisket as fk
from frisket.operations import AttentionMetadata, AttentionRegistry

nnx = pytest.importorskip("flax.nnx")
from frisket.integrations.flax import Attention, attention_fn  # noqa: E402

Q = jnp.ones((1, 6, 2, 8))
DOC = [0, 0, 1, 1, 1, 2]

# pairs of makers, and whether what they make is equal
PARAMETER, OTHER = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
TABLE = torch.tensor(DOC)
PAIRS = {
    "text": (lambda: fk.compile("causal & window(4)", "softcap(5)"), None, True),
    "another text": (lambda: fk.compile("causal"), lambda: fk.compile("window(4)"), False),
    "function": (lambda: fk.compile(lambda q, k: q >= k), lambda: fk.compile("causal"), True),
    "table": (lambda: fk.compile("same(doc)", doc=np.array(DOC)), lambda: fk.compile("same(doc)", doc=DOC), True),
    "jax table": (lambda: fk.compile("same(doc)", doc=jnp.array(DOC)), None, True),
    "other entries": (lambda: fk.compile("same(doc)", doc=DOC), lambda: fk.compile("same(doc)", doc=[0] * 6), False),
    "scale": (lambda: fk.compile("causal", scale=0.5), lambda: fk.compile("causal"), False),
    "backend": (lambda: fk.compile("causal", backend="xla"), lambda: fk.compile("causal"), False),
    "dropout": (lambda: fk.compile("causal", dropout=0.5), lambda: fk.compile("causal"), False),
    "sinks": (lambda: fk.compile(sinks=np.ones(2, "f4")), lambda: fk.compile(sinks=jnp.ones(2)), True),
    "other sinks": (lambda: fk.compile(sinks=np.ones(2)), lambda: fk.compile(sinks=np.zeros(2)), False),
    "no sinks": (lambda: fk.compile(sinks=np.ones(2)), lambda: fk.compile(), False),
    "torch sinks": (lambda: fk.compile(sinks=PARAMETER), None, True),
    "other torch sinks": (lambda: fk.compile(sinks=PARAMETER), lambda: fk.compile(sinks=OTHER), False),
    "learned": (lambda: fk.compile(None, "score + t[h]", t=PARAMETER), None, True),
    "equal learned": (
        lambda: fk.compile(None, "score + t[h]", t=PARAMETER), lambda: fk.compile(None, "score + t[h]", t=OTHER), False,
    ),
    "captured": (lambda: fk.compile(lambda q, k: TABLE[q] == TABLE[k]), None, True),
    "equal captured": (
        lambda: fk.compile(captures(torch.tensor(DOC))), lambda: fk.compile(captures(torch.tensor(DOC))), False,
    ),
    "positions": (lambda: fk.compile("causal").at(q="q + 1"), None, True),
    "other positions": (lambda: fk.compile("causal").at(q="q + 1"), lambda: fk.compile("causal"), False),
    "order": (lambda: fk.compile("causal", reorder="auto"), None, True),
    "found order": (lambda: fk.compile(DILATED, reorder=fk.reorder(DILATED, 64, 64)), None, True),
    "no order": (lambda: fk.compile("causal", reorder="auto"), lambda: fk.compile("causal"), False),
    "operator": (lambda: AttentionRegistry.create("frisket"), None, True),
    "other operator": (lambda: AttentionRegistry.create("frisket"), lambda: AttentionRegistry.create("ring"), False),
    "metadata": (lambda: AttentionRegistry.create("frisket", AttentionMetadata(softmax_scale=0.5)), None, True),
    "other metadata": (
        lambda: AttentionRegistry.create("frisket", AttentionMetadata(softmax_scale=0.5)),
        lambda: AttentionRegistry.create("frisket"), False,
    ),
    "attention_fn": (lambda: attention_fn("causal"), None, True),
}  # fmt: skip
DILATED = "causal & dilated(16, 4)"


def captures(table):
    return lambda q, k: table[q] == table[k]


@pytest.mark.parametrize("name", PAIRS)
def test_equality_of_attentions_is_that_of_programs(name):
    make, other, equal = PAIRS[name]
    a, b = make(), (other or make)()
    assert (a == b, b == a, a != b) == (equal, equal, not equal)
    assert not equal or hash(a) == hash(b)
    assert len({a, b, "causal"}) == 3 - equal


@pytest.mark.parametrize("name", ["text", "table", "jax table", "sinks", "order", "found order", "metadata"])
def test_copies_of_attentions_are_equal(name):
    one = PAIRS[name][0]()
    assert copy.deepcopy(one) == one == copy.copy(one)
    assert pickle.loads(pickle.dumps(one)) == one


def test_arrays_of_sinks_are_copied():
    """Another number in the caller's array would change an attention that a dict or a trace has by its hash."""
    sinks = np.zeros(2)
    att, same = fk.compile(sinks=sinks), fk.compile(sinks=np.zeros(2))
    before = hash(att)
    sinks[:] = 5.0
    assert att == same
    assert hash(att) == before
    np.testing.assert_array_equal(att(Q, Q, Q), same(Q, Q, Q))


def test_equal_attentions_share_a_trace():
    traces = []

    @partial(jax.jit, static_argnums=1)
    def call(q, att):
        traces.append(att)
        return att(q, q, q)

    for _ in range(3):
        call(Q, fk.compile("causal & same(doc)", "softcap(5)", doc=np.array(DOC)))
    assert len(traces) == 1
    other = call(Q, fk.compile("causal & same(doc)", "softcap(5)", doc=np.zeros(6, int)))
    assert len(traces) == 2
    assert other.shape == Q.shape


@pytest.mark.parametrize("how", ["attention", "operator"])
def test_trees_of_a_model_and_its_copy_are_alike(how):
    """An average of weights maps over a model and its deepcopy, whose static fields must be equal."""

    @partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["att"])
    class Layer:
        def __init__(self, w, att):
            self.w, self.att = w, att

    make = PAIRS["table" if how == "attention" else "metadata"][0]
    one = Layer(jnp.ones(2), make())
    both = jax.tree.map(lambda a, b: a + b, one, copy.deepcopy(one))
    np.testing.assert_array_equal(both.w, 2)


def test_equal_layers_of_flax_share_a_trace():
    make, traces = lambda: Attention(16, heads=2, mask="causal & same(doc)", rngs=nnx.Rngs(0)), []

    @nnx.jit
    def run(layer, x):
        traces.append(layer)
        return layer(x, doc=jnp.array(DOC))

    for _ in range(2):
        run(make(), jnp.ones((1, 6, 16)))
    assert len(traces) == 1
    one = make()
    copies = nnx.clone(one), copy.deepcopy(one), make()
    assert all(nnx.split(x)[0] == nnx.split(one)[0] for x in copies)
    mean = jax.tree.map(lambda a, b: 0.5 * a + 0.5 * b, nnx.state(one), nnx.state(copies[1]))
    assert jax.tree.structure(mean) == jax.tree.structure(nnx.state(one))


def test_variables_of_flax_are_no_part_of_equality():
    """They are leaves of the module; a trace of JAX that would read them raises an error."""

    class Layer(nnx.Module):
        def __init__(self, value):
            self.bias = nnx.Param(jnp.full(2, value))
            self.att = fk.compile("causal", lambda score, h: score + self.bias[h])

    one, other = Layer(0.0), Layer(1.0)
    assert one.att == other.att
    assert nnx.clone(one).att == one.att
    assert hash(one.att) == hash(other.att)


def test_arrays_that_are_read_again_are_part_of_equality():
    class Layer:
        def __init__(self):
            self.doc = jnp.array(DOC)
            self.att = fk.compile(lambda q, k: self.doc[q] == self.doc[k])

    one, other = Layer(), Layer()
    assert one.att != other.att  # another array in one of them makes them differ
    assert one.att == one.att.now()
