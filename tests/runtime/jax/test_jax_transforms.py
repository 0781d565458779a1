"""JAX's transforms of a call: gradients under jit, vmap, shard_map, checkpoint and export, beside plain autodiff of
dense attention."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attention_cases import causal
from support.jax.dense import dense

import frisket as fk
from frisket.dsl import ir
from frisket.dsl.ir import lookup
from frisket.dsl.sugar import b, h, k, q, score
from frisket.dsl.types import FLOAT
from frisket.lowering.analysis.layout import analyse
from frisket.lowering.analysis.table import Table
from frisket.lowering.analysis.tiles import Scope
from frisket.lowering.plan import Geometry, Problem, ProgramFacts, make_plan
from frisket.lowering.simplify import ProgramExprs
from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.calls.options import Options
from frisket.runtime.jax import op as jax_op
from frisket.runtime.jax.derivatives import LSE, OUT

S, D = 72, 8
TILE = 32, 16
LEARNED = score * ir.param("c", FLOAT) + lookup("x", (h, q - k), FLOAT)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def qkv(seed=0, batch=1, heads=4, kv_heads=2):
    return [normal(seed + i, batch, S, n, D) for i, n in enumerate((heads, kv_heads, kv_heads))]


def ours(mask=causal, mod=LEARNED, tables=None, origin=(0, 0, 0, 0), spans_of_all=False):
    """A function of (q, k, v, values) for the executor, `values` the parameters by their names. `spans_of_all`: every
    tile is looked at, wherever the call begins."""
    tables = {} if tables is None else tables
    made = make_plan(ProgramExprs(mask, mod), facts=ProgramFacts(limits=dict.fromkeys("qkhb", 2.0**10)))

    def call(q, k, v, values=None, sinks=None, origin=origin):
        (batch, q_len, heads, dim), kv_len = q.shape, k.shape[1]
        shape = Geometry(
            batch, heads, k.shape[2], q_len, kv_len, dim, v.shape[3], dim**-0.5, origin, (8, 8, 512, 512)
        )  # fmt: skip
        looked_at = ir.lit(True) & (h >= 0) if spans_of_all else mask
        problem = Problem(q_len, kv_len, batch, heads)
        scope = Scope(problem.named_sizes, {n: Table(t) for n, t in tables.items()})
        found = analyse(looked_at, problem, TILE, scope)
        given = {**tables, **(values or {})}
        slots = {s.name: given[s.source] if s.source else s.value for s in made.slots}
        used = {t.name: given[t.source] for t in made.tables}
        source = SimpleNamespace(rows=lambda block: found.spans)
        numbers, shapes = {"slots": slots, "tables": used}, {n: x.shape for n, x in used.items()}
        job, learned, fixed = jax_op._divided(made, source, shape, numbers, shapes, "xla", Options(tile=TILE))
        arrays = {"q": q, "k": k, "v": v} | ({} if sinks is None else {"sinks": sinks})
        return jax_op._run(job, arrays | learned, fixed, None)[:2]

    return call


@usual_promotion()
def plain(q, k, v, values, sinks=None, seen=None):
    """The same in jnp, for JAX to differentiate: causal, or `seen` [.., q, k]."""
    at = jnp.arange(q.shape[1])
    gap = at[:, None] - at

    def score(s):
        return s * values["c"] + values["x"][:, jnp.clip(gap, 0, values["x"].shape[1] - 1)]

    return dense(q, k, v, gap >= 0 if seen is None else seen, score, sinks)


VALUES = {"c": jnp.asarray(np.float32(1.3)), "x": normal(9, 4, 50)}
SINKS = normal(8, 4)


def loss_of(attend):
    def loss(*args):
        out, lse = attend(*args)
        return jnp.einsum("...d,d->", out, jnp.sin(jnp.arange(D)).astype(out.dtype)) + (lse * 0.1).sum().astype(
            out.dtype
        )

    return loss


def close(got, want, tolerance=1e-4):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), got, want)


def results(attend, *args, wrt=(0, 1, 2, 3, 4)):
    return jax.jit(jax.value_and_grad(loss_of(attend), wrt))(*args)


@pytest.mark.exhaustive
def test_gradients_of_everything():
    args = *qkv(batch=2), VALUES, SINKS
    want = results(plain, *args)
    close(results(ours(), *args), want)
    close(jax.grad(loss_of(ours()), 3)(*args), want[1][3])  # without jit around it


def test_jax_grad_computes_requested_gradients_alone(monkeypatch):
    from frisket.lowering.xla import backward as xla_backward

    asked, run = [], xla_backward.backward

    def watched(*args, grad_names, **options):
        asked.append(grad_names)
        return run(*args, grad_names=grad_names, **options)

    monkeypatch.setattr(xla_backward, "backward", watched)
    args = *qkv(), VALUES, SINKS
    for wrt in ((1,), (3, 4), (4,)):
        jax.jit(jax.grad(loss_of(ours()), wrt)).lower(*args)
    assert asked == [{"k"}, {"s0", "t0"}]


def test_gradients_have_the_primals_dtypes():
    values = {"c": jnp.bfloat16(1.3), "x": VALUES["x"].astype(jnp.bfloat16)}
    args = [x.astype(jnp.bfloat16) for x in qkv()], values, SINKS
    got = jax.eval_shape(jax.grad(lambda a, x, s: loss_of(ours())(*a, x, s), (0, 1, 2)), *args)
    assert {x.dtype for x in jax.tree.leaves(got[:2])} == {jnp.dtype(jnp.bfloat16)}
    assert got[2].dtype == jnp.float32


def stacked(n, make):
    return jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *(make(i) for i in range(n)))


SLOW = [pytest.param(x, marks=pytest.mark.slow) for x in [(0, 0, 0, None), (0, None, None, None), (0, 0, 0, 0)]]


@pytest.mark.parametrize("axes", [(None, None, None, 0), *SLOW])
def test_jax_vmap_of_gradients_equals_dense(axes):
    args = [stacked(3, lambda i: tuple(qkv(10 * i, batch=2)))[j] for j in range(3)]
    args.append(stacked(3, lambda i: {"c": np.float32(1.3 + i), "x": normal(i, 4, 50)}))
    args = [x if a == 0 else jax.tree.map(lambda y: jnp.asarray(np.asarray(y)[1]), x) for x, a in zip(args, axes)]

    def per_example(attend):
        return jax.jit(jax.vmap(jax.value_and_grad(loss_of(attend), (0, 1, 2, 3)), axes))

    close(per_example(ours())(*args), per_example(plain)(*args))


def test_vmap_in_vmap_and_its_gradient():
    """Beside one another in the batch: the gradients of q, k and v alone."""
    args = [stacked(2, lambda i: stacked(3, lambda j: qkv(i + 7 * j)[n])) for n in range(3)]  # noqa: B023

    def both(attend):
        return jax.vmap(jax.vmap(attend, (0, 0, 0, None)), (0, 0, 0, None))

    close(*(results(both(attend), *args, VALUES, wrt=(0, 2)) for attend in (ours(), plain)))


@pytest.mark.exhaustive
def test_vmap_over_heads_makes_one_call_of_more_heads():
    """In place: an axis beside the heads needs no turning."""
    q, k, v = qkv(heads=6, kv_heads=3)
    apart = q.reshape(1, S, 3, 2, D), k[:, :, :, None], v[:, :, :, None]  # three groups of two, each with its key head
    attend = ours(causal, None)
    one = jax.vmap(lambda q, k, v: attend(q, k, v)[0], 2, 2)

    def whole(q, k, v):
        return attend(q.reshape(1, S, 6, D), k[:, :, :, 0], v[:, :, :, 0])[0].reshape(1, S, 3, 2, D)

    assert "transpose" not in str(jax.make_jaxpr(one)(*apart))
    close(*(jax.jit(jax.value_and_grad(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 1, 2)))(*apart) for f in (one, whole)))


def test_vmap_over_query_heads_shares_the_keys():
    q, k, v = qkv(heads=4, kv_heads=1)
    found = jax.vmap(lambda q: ours(causal, None)(q, k, v)[0], 2, 2)
    close(found(q[:, :, :, None])[:, :, :, 0], ours(causal, None)(q, k, v)[0])
    assert "broadcast" not in str(jax.make_jaxpr(found)(q[:, :, :, None]))


@pytest.mark.parametrize(
    "axis", [0, pytest.param(2, marks=pytest.mark.exhaustive), pytest.param(3, marks=pytest.mark.exhaustive)]
)
def test_vmap_over_no_instances(axis):
    q, k, v = (jnp.asarray(np.moveaxis(np.zeros((0, 2, 8, heads, D), np.float32), 0, axis)) for heads in (4, 2, 2))

    def found(q, k, v):
        return jax.vmap(lambda *x: fk.attention(*x, "causal", return_lse=True), axis)(q, k, v)

    assert [x.shape for x in found(q, k, v)] == [(0, 2, 8, 4, D), (0, 2, 4, 8)]
    assert jax.jit(jax.grad(lambda k: found(q, k, v)[0].sum()))(k).shape == k.shape


@pytest.mark.exhaustive
@pytest.mark.parametrize("mask", [causal & (q - k < 9 + 5 * h), causal])
def test_vmap_over_heads_of_what_a_mask_tells_apart(mask):
    """Each instance is head 0: they go in turn, or, where nothing is told apart, in the batch."""
    args = qkv(heads=3, kv_heads=3)
    attend = ours(mask, None)
    found = jax.vmap(lambda *x: attend(*(y[:, :, None] for y in x))[0][:, :, 0], 2, 2)
    want = jnp.stack([attend(*(x[:, :, i : i + 1] for x in args))[0][:, :, 0] for i in range(3)], 2)
    close(found(*args), want)
    close(
        jax.grad(lambda *x: (found(*x) ** 2).sum(), (0, 1, 2))(*args),
        jax.grad(lambda *x: sum((attend(*(y[:, :, i : i + 1] for y in x))[0] ** 2).sum() for i in range(3)), (0, 1, 2))(
            *args
        ),
    )


@pytest.mark.exhaustive
def test_checkpoint_keeps_what_it_is_told_to():
    """With out and lse kept, the forward runs once."""
    args, keep = (*qkv(), VALUES, SINKS), jax.checkpoint_policies.save_only_these_names(OUT, LSE)
    for policy, times in ((None, 2), (keep, 1)):
        gradient = jax.grad(jax.checkpoint(loss_of(ours()), policy=policy), (0, 3))
        assert str(jax.make_jaxpr(gradient)(*args)).count("frisket_forward[") == times
    close(jax.jit(gradient)(*args), results(plain, *args, wrt=(0, 3))[1])


@pytest.mark.slow
def test_vmap_of_a_mask_that_knows_its_batch_entry():
    mask = causal & (q - k < 9 + 5 * b)
    args = [stacked(3, lambda i: qkv(i, batch=2)[n]) for n in range(3)]  # noqa: B023
    attend = ours(mask, None)
    want = [attend(*(x[i] for x in args))[0] for i in range(3)]
    close(jax.vmap(attend)(*args)[0], jnp.stack(want))


@pytest.mark.exhaustive
def test_checkpoint_donation_and_export():
    args = *qkv(), VALUES, SINKS
    grad = jax.grad(jax.checkpoint(loss_of(ours())))
    step = jax.jit(lambda q, *rest: q - grad(q, *rest), donate_argnums=0)
    given, want = jnp.array(args[0]), args[0] - results(plain, *args)[1][0]
    again = jax.export.deserialize(jax.export.export(step)(*args).serialize())
    close(step(given, *args[1:]), want)
    assert given.is_deleted()
    close(again.call(*args), want)


@pytest.mark.slow
def test_gradient_of_an_export_equals_dense():
    args = *qkv(), VALUES, SINKS
    exported = jax.export.export(jax.jit(loss_of(ours())))(*args)
    again = jax.export.deserialize(exported.serialize(vjp_order=1))
    close(jax.value_and_grad(again.call, (0, 3))(*args), results(plain, *args, wrt=(0, 3)))


def test_second_gradients_of_all_inputs_equal_dense_attention():
    """Of q, k, v, a table, a number and sinks; test_derivatives_jax.py has every mask."""
    args = *qkv(), VALUES, SINKS

    def second(attend):
        first = jax.grad(loss_of(attend), (0, 3, 4))
        return jax.jit(lambda *a: (jax.jvp(first, a, a)[1], jax.jvp(attend, a, a)[1]))(*args)

    got, want = second(ours()), second(plain)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * float(jnp.abs(y).max()))


def test_a_stopped_gradient_asks_for_nothing_of_attention():
    args = *qkv(), VALUES, SINKS
    loss = loss_of(ours())
    x, along = jax.linearize(lambda x: x * jax.lax.stop_gradient(loss(*args)), 2.0)
    np.testing.assert_allclose(2 * along(1.0), x)
    with pytest.raises(NotImplementedError, match="frisket_forward"):
        jax.linear_transpose(lambda x: loss(x, *args[1:]), args[0])(1.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["library", "native"])
def test_gradients_of_numpy_arrays(backend):
    """`jax.grad` hands numpy's arrays on as they are."""
    x = np.random.default_rng(0).standard_normal((1, 16, 2, 8)).astype("f")
    att = fk.compile("causal", backend=backend)
    found, wanted = (
        jax.grad(lambda *x: att(*x).sum(), (0, 1, 2))(*[kind(x)] * 3) for kind in (np.asarray, jnp.asarray)
    )
    for mine, same in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(mine, same)
