"""Tables shorter than the positions, read where a condition says that they have an entry."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import frisket as fk
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import BOOL, Expr, build, conj, disj, extent, lit, lookup, substitute, walk
from frisket.dsl.sugar import k, q, where
from frisket.flex import create_block_mask, flex_attention

T, REST, B = 5, 9, 2
RNG = np.random.default_rng(0)
TEXT, IMAGE, BIAS = (
    RNG.random((B, T)) > 0.4,
    RNG.random((B, REST)) > 0.3,
    RNG.standard_normal((B, T)).astype(np.float32),
)
WHOLE = np.concatenate([TEXT, IMAGE], 1)[:, None, None].repeat(T + REST, 2)
MASKS = {
    "both sides": "k < T & tm[b, k] | k >= T & im[b, k - T]",
    "literals": "k < 5 & tm[b, k] | k >= 5 & im[b, k - 5]",
    "if": "tm[b, k] if k < T else im[b, k - T]",
    "if not": "im[b, k - T] if k >= T else tm[b, k]",
    "where": "where(k < T, tm[b, k], im[b, k - T])",
    "turned": "where(~(T > k), im[b, k - T], tm[b, k])",
    "or": "(k >= T | tm[b, k]) & (k < T | im[b, k - T])",
    "compared": "(int(tm[b, k]) == 1) if k < T else im[b, k - T]",
    "nested": "(tm[b, k] if k < 3 else tm[b, k] & true) if k < T else im[b, k - T]",
}
SCORES = {
    "if": "score + ft[b, k] if k < T else score",
    "inner if": "score + (ft[b, k] if k < T else 0.0)",
    "where": "where(k < T, score + ft[b, k], score)",
    "hidden by the score": "where(k < T, score, -inf) + ft[b, k]",
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_guard_reads_of_short_tables(name):
    values = {n: x for n, x in {"tm": TEXT, "im": IMAGE, "T": T}.items() if n in MASKS[name].replace("true", "")}
    mask = fk.mask(MASKS[name], **values)
    mask.layout(T + REST, T + REST, batch=B)
    np.testing.assert_array_equal(mask.dense(T + REST, T + REST, batch=B), WHOLE)


@pytest.mark.parametrize("name", SCORES)
def test_scores_guard_reads_of_short_tables(name):
    x = RNG.standard_normal((B, T + REST, 1, 4)).astype(np.float32)
    bias = np.concatenate([BIAS, np.zeros((B, REST), np.float32)], 1)
    if name == "hidden by the score":
        bias[:, T:] = -np.inf
    s = np.einsum("bqhd,bkhd->bhqk", x, x) / 2 + bias[:, None, None]
    p = np.exp(s - s.max(-1, keepdims=True))
    want = np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), x)
    for array in (torch.from_numpy, jnp.asarray):
        layout = "bshd"
        found = fk.attention(array(x), array(x), array(x), None, SCORES[name], ft=BIAS, T=T, layout=layout)
        np.testing.assert_allclose(np.asarray(found), want, atol=2e-6)


def test_functions_guard_reads_of_short_tables():
    tm, im = torch.from_numpy(TEXT), torch.from_numpy(IMAGE)
    jtm, jim = jnp.asarray(TEXT), jnp.asarray(IMAGE)
    for f in (
        lambda b, h, q, k: torch.where(k < T, tm[b, k], im[b, k - T]),
        lambda b, h, q, k: jnp.where(k < T, jtm[b, k], jim[b, k - T]),
        lambda b, h, q, k: (k < T) & TEXT[b, k] | (k >= T) & IMAGE[b, k - T],
    ):
        mask = fk.mask(f)
        mask.layout(T + REST, T + REST, batch=B)
        np.testing.assert_array_equal(mask.dense(T + REST, T + REST, batch=B), WHOLE)


def test_flex_guards_reads_of_short_tables():
    tm, im, ft = map(torch.from_numpy, (TEXT, IMAGE, BIAS))
    n = T + REST
    held = create_block_mask(lambda b, h, i, j: torch.where(j < T, tm[b, j], im[b, j - T]), B, None, n, n, device="cpu")
    x = torch.randn(B, 1, n, 4)
    found = flex_attention(x, x, x, lambda s, b, h, i, j: s + torch.where(j < T, ft[b, j], 0.0), held)
    s = x @ x.mT / 2 + torch.nn.functional.pad(ft, (0, REST))[:, None, None]
    want = s.masked_fill(~torch.from_numpy(WHOLE), -torch.inf).softmax(-1) @ x
    torch.testing.assert_close(found, want)
    with pytest.raises(IndexError, match=r"`tm` has 5 entries|reads `tm` at"):
        create_block_mask(lambda b, h, i, j: torch.where(j <= T, tm[b, j], im[b, j - T]), B, None, n, n, device="cpu")


REFUSED = {
    "one entry too far": "tm[b, k] if k <= T else im[b, k - T]",
    "the other branch": "tm[b, k] if k >= T else im[b, k]",
    "guarded in one place of two": "k < T & tm[b, k] | q > 3 & tm[b, k]",
    "guarded by the table itself": "tm[b, k] & (tm[b, k] | k < T)",
    "by a read that leaves its table": "tm[b, k] | im[b, k - T] & tm[b, k]",
    "or in place of and": "k < T | tm[b, k]",
}


@pytest.mark.parametrize("name", REFUSED)
def test_reads_that_no_condition_guards_are_refused(name):
    used = {n: x for n, x in {"tm": np.ones((B, T), bool), "im": IMAGE, "T": T}.items() if n in REFUSED[name]}
    with pytest.raises(fk.ParameterError, match=r"table `tm` has 5 entries on axis 1 and is read at `k` = 0\.\.13"):
        fk.mask(REFUSED[name], **used).layout(T + REST, T + REST, batch=B)


def test_a_score_is_no_guard():
    x = np.zeros((B, T + REST, 1, 4), np.float32)
    with pytest.raises(fk.ParameterError, match="table `ft` has 5 entries"):
        fk.attention(*[jnp.asarray(x)] * 3, None, "where(score > 0.0, score + ft[b, k], score)", ft=BIAS)


@pytest.mark.parametrize("array", [torch.from_numpy, jnp.asarray])
def test_tables_on_devices_are_guarded_by_positions(array):
    n = T + REST
    plan = fk.compile("tm[b, k] if k < T else im[b, k - T]", T=T).plan(
        n, n, B, tm=array(TEXT), im=array(IMAGE), flat=True
    )
    plan.work((16, 16))
    one = array(np.arange(n) % 3)
    with pytest.raises(fk.ParameterError, match="table `ft` has 5 entries"):
        fk.compile("causal", "score + ft[b, k] if k <= T else score", T=T).plan(n, n, B, ft=array(BIAS), flat=True)
    with pytest.raises(fk.ParameterError, match="table `x` has 5 entries"):  # on the diagonal the other guard is sure
        fk.compile("same(doc) & x[q] == x[k]").plan(n, n, doc=one, x=array(np.zeros(T, int)), flat=True)
    att = fk.compile("causal", "score + x[k] if flag[k] else score")  # what `flag` holds is not known: not checked
    att.plan(n, n, flag=array(np.zeros(n, bool)), x=array(np.zeros(T, np.float32)), flat=True)


def test_symbolic_exports_take_guarded_tables():
    (s,) = jax.export.symbolic_shape("s")
    q = jax.ShapeDtypeStruct((1, s, 1, 4), jnp.float32)
    ft = BIAS[0]

    def call(text):
        return jax.jit(lambda x: fk.attention(x, x, x, "causal", text, ft=ft, T=T))

    found = jax.export.export(call("score + ft[k] if k < T else score"))(q)
    x = RNG.standard_normal((1, 9, 1, 4)).astype(np.float32)
    np.testing.assert_allclose(found.call(x), call("score + ft[k] if k < T else score")(x), atol=1e-6)
    with pytest.raises(fk.ParameterError, match="`ft` has 5 entries on axis 0 and is read at `k`"):
        jax.export.export(call("score + ft[k] if k <= T else score"))(q)


def random_mask(rng: random.Random, depth: int = 3) -> Expr:
    """A condition with reads of `t`, shorter than the positions, with and without guards."""
    if depth == 0 or rng.random() < 0.1:
        read = rng.choice([lookup("t", (k,), BOOL), lookup("u", (q,), BOOL), lookup("u", (q - k,), BOOL)])
        n = rng.choice([3, 5, 6, 7])
        return rng.choice([read, read, k < n, k >= n, q >= k, q < n, build("not", read)])
    x, y, z = (random_mask(rng, depth - 1) for _ in range(3))
    guard = rng.choice([k < 6, k < 5, q < 8, x])
    return rng.choice([x & y, x | y, where(guard, y, z), guard & y, disj(build("not", guard), y), build("xor", x, y)])


def patched(e: Expr, entry: bool) -> Expr:
    """The Expr whose reads outside tables give `entry`."""
    changed = {}
    for n in walk(e):
        if n.op == "lookup" and all(a.op == "var" for a in n.args):
            within = conj(*(conj(i >= 0, i < extent(n.name, a)) for a, i in enumerate(n.args)))
            changed[n] = disj(conj(within, n), conj(build("not", within), lit(entry)))
    return substitute(e, changed)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_guarded_reads_outside_never_decide_a_visible_pair(seed):
    """Where the check of a random mask passes, visible pairs stay visible whatever lies behind the table; where it
    refuses, the read of some visible pair is outside."""
    rng = random.Random(seed)
    e, n = random_mask(rng), 9
    tables = {
        "t": np.array([rng.random() < 0.7 for _ in range(6)]),
        "u": np.array([rng.random() < 0.7 for _ in range(7)]),
    }
    tables = {name: x for name, x in tables.items() if any(y.op == "lookup" and y.name == name for y in walk(e))}
    mask = fk.Mask(e, tables)
    env = dict(zip("qk", np.ogrid[:n, :n], strict=True))
    seen = np.broadcast_to(evaluate(e, env, tables), (n, n))
    try:
        mask.layout(n, n)
    except fk.ParameterError as error:
        name, at = ("t", "k") if "`t`" in str(error) else ("u", "q")
        assert (seen & (env[at] >= len(tables[name]))).any()
        return
    for entry in (False, True):
        found = np.broadcast_to(evaluate(patched(e, entry), env, tables), (n, n))
        assert found[seen].all()
