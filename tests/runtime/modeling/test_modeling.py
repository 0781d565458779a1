"""What models need around attention, against plain numpy and the page that names it."""

import builtins
import importlib.util
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import frisket as fk
from frisket import modeling as m
from frisket.runtime.machine.modules import pip_install

rng = np.random.default_rng(0)
NAMES = (
    "apply_rotary_pos_emb rotate_half repeat_kv_bnsh repeat_kv_bsnh create_mesh names_in_mesh "
    "get_names_from_partition_spec get_ranks_and_size canonicalize_dtype get_dot_general_by_bits "
    "get_gradient_checkpoint_policy add_start_docstrings"
).split()
WORLDS = {"jax": jnp.asarray, "torch": lambda x: torch.from_numpy(np.asarray(x))}
RUN = {"jax": jax.jit, "torch": lambda f: f}  # of arrays alone


def test_modeling_page_names_exist():
    assert {*NAMES} <= {*m.__all__}
    assert all(callable(getattr(m, name)) for name in m.__all__ if name in NAMES)


def angles(positions, dim, base=10000.0):
    half = np.outer(positions, base ** (-np.arange(0, dim, 2) / dim))
    return np.concatenate((half, half), -1)


def turned(x, angle):
    """Pairs (i, i + dim / 2) as complex numbers, turned: x is [..., length, dim]."""
    half = x.shape[-1] // 2
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle[..., :half])
    return np.concatenate((z.real, z.imag), -1)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("tables", ["plain", "longer", "by batch", "full"])
def test_rotary_embedding_equals_its_formula(world, layout, tables):
    make = WORLDS[world]
    x = rng.standard_normal((2, 3, 5, 8)).astype(np.float32)  # [batch, heads, length, dim]
    positions = {
        "plain": np.arange(5), "longer": np.arange(9), "by batch": np.array([[4, 0, 2, 9, 1], [7, 6, 5, 4, 3]]),
        "full": np.arange(5),
    }[tables]  # fmt: skip

    def turn(x, positions):
        sin, cos = m.rotary_tables(positions, 8)
        if tables == "full":  # as models keep them: an axis for batches, one for heads
            axes = (None, None) if layout == "bhsd" else (None, slice(None), None)
            sin, cos = sin[axes], cos[axes]
        return m.apply_rotary_pos_emb(x, sin, cos, layout)

    angle = angles(positions.reshape(-1), 8).reshape(*positions.shape, 8)
    wanted = turned(x, angle[:, None] if positions.ndim == 2 else angle[:5])
    given = x if layout == "bhsd" else x.swapaxes(1, 2)
    found = np.asarray(RUN[world](turn)(make(np.ascontiguousarray(given)), make(positions)))
    np.testing.assert_allclose(found if layout == "bhsd" else found.swapaxes(1, 2), wanted, atol=1e-5)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_rotary_embedding_takes_a_table_per_head(world, layout):
    make, draw = WORLDS[world], np.random.default_rng(8)
    x, sin, cos = (draw.standard_normal((n, 3, 5, 8)).astype(np.float32) for n in (2, 1, 2))
    given = [a if layout == "bhsd" else np.ascontiguousarray(a.swapaxes(1, 2)) for a in (x, sin, cos)]
    turn = RUN[world](lambda x, sin, cos: m.apply_rotary_pos_emb(x, sin_=sin, cos_=cos, layout=layout))
    found = turn(*map(make, given))
    found = np.asarray(found) if layout == "bhsd" else np.asarray(found).swapaxes(1, 2)
    np.testing.assert_allclose(found, x * cos + np.concatenate((-x[..., 4:], x[..., :4]), -1) * sin, atol=1e-6)
    for wrong in ({"sin": x}, {"sin": x, "cos": x, "sin_": x}):
        with pytest.raises(fk.ParameterError, match="give sin and cos once each"):
            m.apply_rotary_pos_emb(x, **wrong)


@pytest.mark.parametrize("world", WORLDS)
def test_rotary_keeps_the_dtype(world):
    x = np.ones((1, 1, 4, 8), jnp.bfloat16) if world == "jax" else torch.ones(1, 1, 4, 8, dtype=torch.bfloat16)
    turn = RUN[world](lambda x, positions: m.apply_rotary_pos_emb(x, *m.rotary_tables(positions, 8)))
    assert turn(x, WORLDS[world](np.arange(4))).dtype == x.dtype


def test_rotary_turns_scores_by_distance_alone():
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 1, 16)).astype(np.float32)

    @jax.jit
    def product(i, j):
        at = [m.rotary_tables(n[None], 16) for n in (i, j)]
        a, b = (m.apply_rotary_pos_emb(x, *t) for x, t in zip((jnp.asarray(q), jnp.asarray(k)), at, strict=True))
        return (a * b).sum()

    def score(i, j):
        return float(product(i, j))

    assert score(3, 1) == pytest.approx(score(103, 101), abs=1e-4)
    assert score(3, 1) != pytest.approx(score(3, 2), abs=1e-2)


@pytest.mark.parametrize("world", WORLDS)
def test_repeat_kv_repeats_each_head(world):
    x = rng.standard_normal((2, 3, 5, 4)).astype(np.float32)
    make = WORLDS[world]
    run = RUN[world](lambda x: (m.repeat_kv_bnsh(x, 2), m.repeat_kv_bsnh(x, np.int64(2))))
    bnsh, bsnh = map(np.asarray, run(make(x)))
    assert (bnsh.shape, bsnh.shape) == ((2, 6, 5, 4), (2, 3, 10, 4))
    for head in range(6):
        np.testing.assert_array_equal(bnsh[:, head], x[:, head // 2])
    for head in range(10):
        np.testing.assert_array_equal(bsnh[:, :, head], x[:, :, head // 2])


def test_rotate_half_swaps_and_negates():
    x = rng.standard_normal((3, 6)).astype(np.float32)
    wanted = np.concatenate((-x[:, 3:], x[:, :3]), 1)
    np.testing.assert_array_equal(jax.jit(m.rotate_half)(x), wanted)
    np.testing.assert_array_equal(m.rotate_half(torch.from_numpy(x)), wanted)
    odd = np.concatenate((-x[:, 2:5], x[:, :2]), 1)
    np.testing.assert_array_equal(m.rotate_half(jnp.asarray(x[:, :5])), odd)
    np.testing.assert_array_equal(m.rotate_half(torch.from_numpy(x[:, :5])), odd)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_rotary_tables_may_have_one_entry_for_a_head(world, layout):
    make, x, (sin, cos) = WORLDS[world], rng.standard_normal((1, 3, 3, 8)).astype("f"), rng.standard_normal((2, 3, 1))
    axes = (None, None) if layout == "bhsd" else (None, slice(None), None)
    spread = (np.repeat(t, 8, -1)[axes] for t in (sin, cos))
    wanted = m.apply_rotary_pos_emb(make(x), *map(make, spread), layout)
    for short in ((sin, cos), (sin[axes], cos[axes])):
        np.testing.assert_array_equal(m.apply_rotary_pos_emb(make(x), *map(make, short), layout), wanted)


def test_create_mesh_has_the_named_axes():
    mesh = m.create_mesh()
    assert isinstance(mesh, Mesh)
    assert dict(mesh.shape) == {"dp": 1, "fsdp": len(jax.devices()), "tp": 1, "sp": 1}
    assert m.create_mesh((1, -1), ("a", "b"), "cpu").axis_names == ("a", "b")
    assert not m.names_in_mesh("dp")
    assert m.names_in_mesh()
    with jax.set_mesh(mesh):
        assert m.names_in_mesh("dp", "sp")
        assert not m.names_in_mesh("dp", "ep")
    assert m.get_ranks_and_size(mesh) == {
        "mesh": mesh, "mp_node_size": 1, "dp_node_size": 1, "dp_node_rank": 0, "mp_node_rank": 0,
    }  # fmt: skip


def test_ranks_of_many_processes(monkeypatch):
    """8 processes of 4 devices, a model over 16 devices: two groups of four processes."""
    monkeypatch.setattr(jax, "local_device_count", lambda: 4)
    monkeypatch.setattr(jax, "process_count", lambda: 8)
    monkeypatch.setattr(jax, "process_index", lambda: 6)
    mesh = jax.sharding.AbstractMesh((2, 1, 8, 2), ("dp", "fsdp", "tp", "sp"))
    found = m.get_ranks_and_size(mesh)
    assert [found[n] for n in ("mp_node_size", "dp_node_size", "dp_node_rank", "mp_node_rank")] == [4, 2, 1, 2]


def test_names_of_specs():
    nested = {"w": P(("fsdp", "sp"), "tp"), "b": [P("tp"), (P(None), {"c": P("dp")})]}
    assert m.get_names_from_partition_spec(nested) == ["fsdp", "sp", "tp", "dp"]
    assert m.get_names_from_partition_spec(NamedSharding(m.create_mesh(), P("tp", None))) == ["tp"]
    assert m.get_names_from_partition_spec(P()) == []


def test_canonicalize_dtype_promotes_the_given_arrays():
    half, whole, brain = (jnp.asarray(np.ones(1, x)) for x in ("float16", "int32", jnp.bfloat16))
    assert m.canonicalize_dtype(half, None, whole) == jnp.float16
    assert m.canonicalize_dtype(half, brain) == jnp.float32
    assert m.canonicalize_dtype(whole) == jnp.float32
    assert m.canonicalize_dtype(whole, inexact=False) == jnp.int32
    assert m.canonicalize_dtype(whole, dtype=jnp.bfloat16) == jnp.bfloat16


POLICIES = [n for n in dir(jax.checkpoint_policies) if not n.startswith("_")]


@pytest.mark.parametrize("name", POLICIES)
def test_gradient_checkpoint_policies_are_those_of_jax(name):
    assert m.get_gradient_checkpoint_policy(name) is getattr(jax.checkpoint_policies, name)


def test_a_policy_saves_what_it_says():
    def saved(policy):
        f = jax.checkpoint(lambda x: jnp.sin(x @ x).sum(), policy=policy)
        return str(jax.make_jaxpr(jax.grad(f))(np.ones((4, 4), np.float32))).count("dot_general")

    everything, nothing = (m.get_gradient_checkpoint_policy(f"{n}_saveable") for n in ("everything", "nothing"))
    assert saved(nothing) == saved(everything) + 1


def test_start_docstrings_are_prepended():
    @m.add_start_docstrings("One. ", "Two. ")
    def f():
        """Three."""

    @m.add_start_docstrings("One.")
    def g():
        pass

    assert (f.__doc__, g.__doc__) == ("One. Two. Three.", "One.")


DIMENSIONS = (((1,), (0,)), ((), ()))
quantized = pytest.mark.skipif(importlib.util.find_spec("qwix") is None, reason="qwix is not installed")


def rounded(x, axis, bits):
    """The largest magnitude along an axis is the last integer."""
    scale = np.abs(x).max(axis, keepdims=True) / (2 ** (bits - 1) - 1)
    return np.round(x / scale) * scale


FEW = [*(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 4, 7)), 8]


@quantized
@pytest.mark.parametrize("bits", FEW)
@pytest.mark.parametrize("mode", ["train", "serve", pytest.param("convert", marks=pytest.mark.exhaustive)])
def test_quantized_products_equal_rounded_operands(bits, mode):
    a, b = rng.standard_normal((5, 64)).astype(np.float32), rng.standard_normal((64, 7)).astype(np.float32)
    dot = m.get_dot_general_by_bits(bits, mode)["dot_general"]
    wanted = rounded(a, 1, bits) @ rounded(b, 0, bits)
    product = jax.jit(dot, static_argnums=2) if mode != "convert" else dot
    np.testing.assert_allclose(product(jnp.asarray(a), jnp.asarray(b), DIMENSIONS), wanted, rtol=1e-5, atol=1e-4)
    batched = product(jnp.asarray(a[None]), jnp.asarray(b[None]), (((2,), (1,)), ((0,), (0,))))
    np.testing.assert_allclose(np.asarray(batched)[0], wanted, rtol=1e-5, atol=1e-4)
    if mode == "convert":  # keeps what it makes: not under a transformation that nnx does not know of
        return
    products = str(jax.make_jaxpr(lambda a, b: dot(a, b, DIMENSIONS))(a, b))
    assert "i8[5,64]" in products
    assert "preferred_element_type=int32" in products  # the integers themselves are multiplied


@quantized
@pytest.mark.exhaustive
def test_training_with_few_bits():
    a, b = rng.standard_normal((16, 64)).astype(np.float32), rng.standard_normal((64, 8)).astype(np.float32)
    dot = m.get_dot_general_by_bits(8)["dot_general"]

    def gradients(product):
        return jax.grad(lambda a, b: (product(a, b) ** 2).sum(), (0, 1))(jnp.asarray(a), jnp.asarray(b))

    exact, found = gradients(jnp.matmul), gradients(lambda a, b: dot(a, b, DIMENSIONS))
    for x, y in zip(exact, found, strict=True):
        assert 0 < np.linalg.norm(x - y) < 0.03 * np.linalg.norm(x)


@quantized
@pytest.mark.exhaustive
def test_converted_weights_serve():
    from flax import nnx

    model = nnx.Sequential(
        nnx.Linear(64, 32, **m.get_dot_general_by_bits(8, "convert"), rngs=nnx.Rngs(0)),
        nnx.relu,
        nnx.Linear(32, 4, **m.get_dot_general_by_bits(8, "convert"), rngs=nnx.Rngs(1)),
    )
    x = jnp.asarray(rng.standard_normal((3, 64)), "float32")
    wanted = nnx.jit(lambda model, x: model(x))(model, x)
    model.set_attributes(mode="serve")
    for layer in (model.layers[0], model.layers[2]):
        kept = layer.dot_general.rhs[...]
        assert (kept.qvalue.dtype, kept.qvalue.shape) == (jnp.int8, layer.kernel.shape)
        layer.kernel[...] = jnp.zeros_like(layer.kernel[...])  # nobody reads it any more
    np.testing.assert_allclose(nnx.jit(lambda model, x: model(x))(model, x), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(fk.FrisketError, match="no gradients\n  take mode='train'"):
        jax.grad(lambda x: model(x).sum())(x)


def test_layers_of_their_own_product():
    assert m.get_dot_general_by_bits() == {} == m.get_dot_general_by_bits(None, "serve")
    assert "dot_general_cls" not in m.get_dot_general_by_bits()


def test_modes_have_easydels_names():
    names = {n: x for n, x in vars(m.EasyMethod).items() if n.isupper()}
    assert names == {"TRAIN": "train", "SERVE": "serve", "EVAL": "serve", "CONVERT": "convert"}


@quantized
def test_eval_is_the_mode_of_serving():
    made = {mode: m.get_dot_general_by_bits(bits=8, mode=mode)["dot_general"].mode for mode in ("train", "eval")}
    assert made == {"train": "train", "eval": m.EasyMethod.EVAL}


def test_quantized_product_works_in_linen_layers():
    nn = pytest.importorskip("flax.linen")
    pytest.importorskip("qwix")
    given = m.get_dot_general_by_bits(8)
    assert [*given] == ["dot_general"]  # what layers of nnx take, by **
    assert "dot_general_cls" in given
    assert "dot_general" in given
    assert "nothing" not in given
    assert {**given} == dict(given) == {"dot_general": given["dot_general"]}
    assert given["dot_general_cls"]() is given.get("dot_general_cls")() is given["dot_general"]
    x = jnp.asarray(rng.standard_normal((3, 64)).astype(np.float32))
    layer, plain = nn.Dense(4, dot_general_cls=given["dot_general_cls"]), nn.Dense(4)
    weights = {"params": {"kernel": rng.standard_normal((64, 4)).astype(np.float32) / 8, "bias": np.zeros(4, "f")}}
    exact, found = (np.asarray(jax.jit(f.apply)(weights, x)) for f in (plain, layer))
    assert 0 < np.abs(found - exact).max() < 0.05
    for empty in (m.get_dot_general_by_bits(), given):
        with pytest.raises(KeyError, match="nothing"):
            empty["nothing"]
    assert given.get("nothing", 3) == 3


def test_an_unknown_policy_is_a_key_error():
    with pytest.raises(KeyError) as caught:
        m.get_gradient_checkpoint_policy("dot_saveable")
    assert isinstance(caught.value, fk.ParameterError)
    assert str(caught.value).startswith("there is no checkpoint policy 'dot_saveable'; did you mean 'dots_saveable'?\n")


def test_missing_qwix_is_named_in_the_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    monkeypatch.delitem(sys.modules, "frisket.runtime.modeling.quantized", raising=False)
    with pytest.raises(fk.MissingPackageError, match=re.escape(pip_install("quantized"))):
        m.get_dot_general_by_bits(8)


ONES = torch.ones(1, 2, 4, 8)
BAD = {
    "layout": (lambda: m.apply_rotary_pos_emb(ONES, ONES, ONES, "sbhd"), "the axis order is 'sbhd'"),
    "short": (lambda: m.apply_rotary_pos_emb(ONES, *m.rotary_tables(torch.arange(3), 8)), "at least 4 positions"),
    "head": (lambda: m.apply_rotary_pos_emb(ONES, *m.rotary_tables(torch.arange(4), 6)), r"sin is \[4, 6\]"),
    "other layout": (
        lambda: m.apply_rotary_pos_emb(ONES, *(x[None, :, None] for x in m.rotary_tables(torch.arange(4), 8))),
        r"sin is \[1, 4, 1, 8\] for a tensor",
    ),
    "rank": (lambda: m.apply_rotary_pos_emb(ONES[0], ONES, ONES), "it has 4 axes"),
    "odd": (lambda: m.rotary_tables(torch.arange(4), 7), "head_dim is 7"),
    "repeats": (lambda: m.repeat_kv_bnsh(ONES, 0), "n_rep is 0"),
    "repeats of a Bool": (lambda: m.repeat_kv_bnsh(ONES, True), "n_rep is True"),
    "repeats rank": (lambda: m.repeat_kv_bsnh(ONES[0], 2), "4 axes, the heads being axis 2"),
    "two left": (lambda: m.create_mesh((-1, -1), ("a", "b")), "at most one is -1"),
    "names": (lambda: m.create_mesh((1, -1), ("a", "a")), "a name for each, and each once"),
    "too many": (lambda: m.create_mesh((3, 5), ("a", "b")), "make 15 devices, and there are 1"),
    "not even": (lambda: m.create_mesh((3, -1), ("a", "b")), "make 3 × n devices, and there are 1"),
    "spec": (lambda: m.get_names_from_partition_spec([3]), "3 is no partition spec"),
    "dtype": (lambda: m.canonicalize_dtype(dtype=jnp.int32), "dtype is int32; it is a floating one"),
    "no arrays": (lambda: m.canonicalize_dtype(None), "no array to tell the dtype by"),
    "policy": (lambda: m.get_gradient_checkpoint_policy("dot_saveable"), "did you mean 'dots_saveable'"),
    "bits": (lambda: m.get_dot_general_by_bits(9), "bits is 9; there are products of 2 to 8 bits"),
    "mode": (
        lambda: m.get_dot_general_by_bits(8, "test"),
        "mode is 'test'; it is one of 'train', 'serve', 'convert', ",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_modeling_functions_refuse_bad_input(name):
    wrong, says = BAD[name]
    with pytest.raises(fk.FrisketError, match=says) as found:
        wrong()
    assert isinstance(found.value, builtins.ValueError)
