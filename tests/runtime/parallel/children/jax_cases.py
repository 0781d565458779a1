"""Context parallel attention of JAX on eight devices against the reference; run by test_jax_parallel.py as a process.

`python jax_cases.py causal window` prints a line for every case that holds."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).parents[3]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec
from runtime.parallel.children import hlo

import frisket as fk
from frisket.lowering import dense
from frisket.lowering.plan import RATE, SEED, survives
from frisket.lowering.simplify import ProgramExprs

P = PartitionSpec
rng = np.random.default_rng(5)
LENGTH, TILE = 300, 16
DOC = np.repeat(np.arange(60, dtype=np.int32), rng.integers(3, 40, 60))[:LENGTH]
OFFSETS = np.concatenate([[0], np.cumsum(rng.integers(5, 90, 20))]).astype(np.int32)
OFFSETS = np.append(OFFSETS[OFFSETS < LENGTH], LENGTH).astype(np.int32)


@dataclass(frozen=True)
class Case:
    mask: str | None
    score: str | None = None
    params: dict = field(default_factory=dict)  # of the call, as arrays of JAX
    known: dict = field(default_factory=dict)  # compiled in
    dealt: str | None = None  # the mask of the deal, if it is another one
    variant: str = "ring"
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    length: int = LENGTH
    mesh: tuple[int, int, int] = (1, 8, 1)  # dp, sp, tp
    split: dict = field(default_factory=dict)
    dropout: float = 0.0
    sinks: bool = False
    dtype: str = "float32"
    backend: str | None = None
    by_mesh: bool = False
    weight: str | None = None
    divide: str | None = None
    remat: bool = False


def table(*shape):
    return rng.standard_normal(shape).astype(np.float32)


GAMMA = (1 - 2.0 ** (-2.0 - np.arange(4))).astype(np.float32)
BY_BATCH = np.stack([DOC, np.sort(rng.integers(0, 4, LENGTH)).astype(np.int32)])
CASES = {
    "causal": Case("causal", heads=4, kv_heads=2),
    "window": Case("causal & window(40)"),
    "even": Case("causal & window(40)", length=256),
    "documents": Case("causal & same(doc)", params={"doc": DOC}),
    "full": Case(None),
    "prefix": Case("prefix_lm(70)", known={}),
    "streaming": Case("streaming(4, 30)"),
    "block diffusion": Case("block_causal(32) & window(90)"),
    "dilated": Case("dilated(60, 3)"),
    "chunks": Case("chunked_causal(50)"),
    "offsets": Case("document(off)", params={"off": OFFSETS}),
    "prefix documents": Case("prefix_document(off, len)", params={"off": OFFSETS},
                             known={"len": rng.integers(1, 5, 40).astype(np.int32)}),
    "documents by batch": Case("same_by_batch(doc)", params={"doc": BY_BATCH}, batch=2),
    "sparse": Case("q % 7 == k % 7 | k < 3", dealt="full"),
    "rows without keys": Case("causal & window(20) & (q // 25) % 2 == 0"),
    "biases": Case("causal & window(60)", "score + slope[h] * (k - q) + column[h, k] + row[q] + c",
                   {"slope": table(2), "column": table(2, LENGTH), "row": table(LENGTH), "c": np.float32(0.3)}),
    "plane": Case("causal & window(60)", "softcap(5) + bias[h, q, k]", {"bias": table(2, LENGTH, LENGTH)}),
    "distances": Case("window(40)", "score + bias[h, q - k + 40]", {"bias": table(2, 81)}),
    "split tables": Case("causal & same(doc)", "score + column[h, k] + bias[q, k]",
                         {"doc": DOC, "column": table(2, LENGTH), "bias": table(LENGTH, LENGTH)},
                         split={"doc": 0, "column": 1, "bias": 0}),
    "dropout and sinks": Case("causal & window(60)", dropout=0.3, sinks=True),
    "mesh": Case("causal & q - k < 20 * (h + 1) + 7 * b", "score + slope[h] * (k - q)", {"slope": table(4)}, batch=2,
                 heads=4, kv_heads=2, mesh=(2, 2, 2), dropout=0.2, sinks=True),
    "split heads": Case("causal & same(doc)", "score + slope[h] * (k - q)", {"slope": table(4), "doc": DOC}, heads=4,
                        kv_heads=2, mesh=(2, 2, 2), batch=2, split={"slope": 0, "doc": 0}, by_mesh=True,
                        dropout=0.1, sinks=True),
    "gathered": Case("causal & window(40)", variant="all-gather", kv_heads=2),
    "gathered documents": Case("causal & same(doc)", "score + column[h, k] + bias[q, k]",
                               {"doc": DOC, "column": table(2, LENGTH), "bias": table(LENGTH, LENGTH)},
                               variant="all-gather", split={"doc": 0, "column": (1,)}, dropout=0.2, sinks=True,
                               remat=True),
    "short": Case("causal", length=20),
    "native": Case("causal", heads=4, kv_heads=2, backend="cpp"),
    "native with a score mod": Case("causal", "score * 1.5", heads=4, kv_heads=2, backend="cpp"),
    "native gathered": Case("causal & window(40)", variant="all-gather", kv_heads=2, backend="cpp"),
    "bfloat16": Case("causal & window(60)", dtype="bfloat16"),
    "weighted": Case("causal", weight="score * gamma[h] ** (q - k)", divide="max(abs(total), c + row[q])",
                     params={"gamma": GAMMA[:2], "row": np.abs(table(LENGTH)), "c": np.float32(0.3)}),
    "weighted documents": Case("causal & same(doc)", weight="sigmoid(score + column[h, k])", divide="total",
                               params={"doc": DOC, "column": table(2, LENGTH)}, split={"doc": 0, "column": 1}),
    "weighted mesh": Case("causal & q - k < 20 * (h + 1) + 7 * b", weight="relu(score + slope[h]) ** 2",
                          divide="count + float(b) + float(q * h) / float(Q_LEN)", params={"slope": table(4)}, batch=2,
                          heads=4, kv_heads=2, mesh=(2, 2, 2), dropout=0.2, remat=True),
    "weighted gathered": Case("causal & window(20) & (q // 25) % 2 == 0", variant="all-gather", kv_heads=2,
                              weight="score", dtype="float16", divide="total - 3", remat=True),
    "weighted float16": Case("causal & window(60)", weight="exp(score + 11)", divide="total", dtype="float16"),
}  # fmt: skip
SEEDED = 1234


def arrays(case):
    draw = np.random.default_rng(3)

    def one(heads):
        return jnp.asarray(draw.standard_normal((case.batch, case.length, heads, 16)), case.dtype)

    dout, dlse = one(case.heads), jnp.asarray(draw.standard_normal((case.batch, case.heads, case.length)), "float32")
    sinks = jnp.asarray(draw.standard_normal(case.heads), "float32") if case.sinks else None
    return (one(case.heads), one(case.kv_heads), one(case.kv_heads)), dout, dlse, sinks


def split_axes(case, deal, name, x):
    """(x as the call's global array has it, its PartitionSpec) of a table."""
    own, spec = case.split.get(name, ()), []
    own = (own,) if isinstance(own, int) else own
    for i, c in enumerate({"doc": "q", "column": "hk", "bias": "qk", "slope": "h"}[name] if own else ""):
        spec.append({"q": "sp", "k": "sp", "h": "tp"}[c] if i in own else None)
        if i in own and c in "qk":
            x = deal.permute(x, i)
    return x, P(*spec)


def attention(case):
    """(a function of arrays, of what is learned and of sinks, the deal)"""
    mask = case.mask or "full"
    params = {n: x for n, x in {**case.params, **case.known}.items() if n in fk.mask(mask).unbound}
    dealt = case.dealt or mask
    deal = fk.parallel.deal(
        dealt, case.length, case.mesh[1], tile=TILE, batch=case.batch, heads=case.heads,
        **{n: x for n, x in params.items() if n in fk.mask(dealt).unbound},
    )  # fmt: skip
    weights = {"weight": case.weight, "divide": case.divide}
    att = fk.compile(case.mask, case.score, dropout=case.dropout, backend=case.backend, **weights, **case.known)
    asks = case.weight is None  # for lse
    mesh = jax.make_mesh(case.mesh, ("dp", "sp", "tp"), axis_types=(AxisType.Auto,) * 3)
    wide = max(case.mesh[0], case.mesh[2]) > 1
    more = {"batch_axis": "dp", "head_axis": "tp"} if wide else {}
    spec, rows = P("dp", "sp", "tp"), P("dp", "tp", "sp")

    def given(q, k, v, tables, sinks):
        """The same by `mesh=`, with all arrays in dealt order."""
        dealt = {n: split_axes(case, deal, n, x)[0] for n, x in tables.items()}
        out, lse = fk.parallel.attend(
            att, *(deal.permute(x, 1) for x in (q, k, v)), deal=deal, variant=case.variant, split=case.split,
            return_lse=asks, sinks=sinks, seed=SEEDED if case.dropout else None, mesh=mesh, **more, **dealt,
        )  # fmt: skip
        return deal.unpermute(out, 1), deal.unpermute(lse, 2)

    if case.by_mesh:
        return given, deal, att

    def run(q, k, v, tables, sinks):
        dealt = {n: split_axes(case, deal, n, x) for n, x in tables.items()}

        def local(q, k, v, tables, sinks):
            how = dict(deal=deal, variant=case.variant, split=case.split, return_lse=asks, sinks=sinks, **more)
            return fk.parallel.attend(att, q, k, v, seed=SEEDED if case.dropout else None, **how, **tables)

        specs = {n: s for n, (_, s) in dealt.items()}
        results = (spec, rows) if asks else spec
        call = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3 + (specs, P()), out_specs=results)
        found = call(*(deal.permute(x, 1) for x in (q, k, v)), {n: x for n, (x, _) in dealt.items()}, sinks)
        if not asks:
            return deal.unpermute(found, 1), jnp.zeros(())
        out, lse = found
        return deal.unpermute(out, 1), deal.unpermute(lse, 2)

    return run, deal, att


def wanted(case, att, qkv, dout, dlse, sinks):
    """[out, lse, dq, dk, dv, dsinks, then those of tables by name], of the reference."""
    turned = [np.asarray(x, np.float64).swapaxes(1, 2) for x in (*qkv, dout)]
    program = att.program.bind(case.params)
    exprs = ProgramExprs(*(None if p is None else dense_form(p, program) for p in program.every_part))
    options = {
        "scale": 16**-0.5, "tables": program.tables, "params": {**program.scalars, SEED: SEEDED, RATE: case.dropout},
        "sinks": None if sinks is None else np.asarray(sinks, np.float64),
    }  # fmt: skip
    options |= {"keep_mask": survives(), "rate": case.dropout} if case.dropout else {}
    out, lse = dense.attention(*turned[:3], dense.DenseCall(exprs, **options))
    found = dense.gradients(
        *turned[:3],
        dense.DenseCall(exprs, **options),
        turned[3],
        np.where(np.isneginf(lse), 0, dlse) if case.weight is None else np.zeros_like(lse),
    )
    backs = [found[n].swapaxes(1, 2) for n in ("dq", "dk", "dv")]
    made = {"out": out.swapaxes(1, 2), "lse": lse, **dict(zip(("dq", "dk", "dv"), backs))}
    if sinks is not None:
        made["sinks"] = found["dsinks"]
    return made | {n: np.asarray(x) for n, x in {**found["dtables"], **found["dscalars"]}.items() if n in case.params}


def dense_form(part, what):
    from frisket.lowering.analysis.layout import bind

    return bind(part.expr, what.tables)


def close(name, have, want, bound):
    have, want = np.asarray(have, np.float64), np.asarray(want)
    assert have.shape == want.shape, (name, have.shape, want.shape)
    same = np.isneginf(have) & np.isneginf(want)
    error = np.abs(np.where(same, 0, have - want)).max() / max(1.0, np.abs(want[~same]).max(initial=0))
    assert error <= bound, f"{name} differs by {error}"


def check(name, case):
    qkv, dout, dlse, sinks = arrays(case)
    run, deal, att = attention(case)
    assert deal.ranks * deal.shard >= case.length
    learned = {n: jnp.asarray(x) for n, x in case.params.items() if np.asarray(x).dtype.kind == "f"}
    fixed = {n: jnp.asarray(x) for n, x in case.params.items() if n not in learned}

    def whole(q, k, v, learned, sinks):
        out, lse = run(q, k, v, {**fixed, **learned}, sinks)
        total = (out * dout).sum() + (jnp.where(lse == -jnp.inf, 0, lse) * dlse).sum()
        return total, (out, lse)

    loss = jax.checkpoint(whole) if case.remat else whole
    grads, (out, lse) = jax.jit(jax.grad(loss, (0, 1, 2, 3, 4), has_aux=True))(*qkv, learned, sinks)
    found = {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads[:3])), **grads[3]}
    found |= {} if sinks is None else {"sinks": grads[4]}
    found |= {} if case.weight is None else {"lse": None}
    want = wanted(case, att, qkv, dout, dlse, sinks)
    assert found.keys() == want.keys(), (found.keys(), want.keys())
    for part, x in found.items():
        if x is not None:  # weighted rows have no lse
            close(f"{name}: {part}", x, want[part], {"float32": 1e-5, "float16": 2e-3}.get(case.dtype, 2e-2))


def bytes_sent(name, case):
    """What each program sends is what the deal says, to the byte, and nothing else is sent."""
    qkv, dout, *_ = arrays(case)
    _, deal, att = attention(case)
    mesh = jax.make_mesh((8,), ("sp",), axis_types=(AxisType.Auto,))
    spec = P(None, "sp")

    def local(q, k, v):
        return fk.parallel.attend(att, q, k, v, deal=deal, variant=case.variant, **case.params)

    run = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    dealt = [jax.device_put(deal.permute(x, 1), jax.NamedSharding(mesh, spec)) for x in (*qkv, dout)]
    forward = jax.jit(lambda *a: jax.vjp(run, *a)).lower(*dealt[:3]).compile()
    _, back = forward(*dealt[:3])
    backward = jax.jit(lambda back, d: back(d)).lower(back, dealt[3]).compile()
    sizes = case.kv_heads, 16, 16, qkv[1].dtype.itemsize, case.variant
    for program, kind in ((forward, False), (backward, True)):
        have = hlo.sent(program.as_text(), 8)
        want = deal.bytes(*sizes, backward=kind, padded=True)
        assert (have == want).all(), (name, kind, have.sum(), want.sum())
    kinds = [kind for kind, *_ in hlo.collectives(backward.as_text())]
    steps = len(fk.parallel.steps(deal)) - 1
    assert kinds.count("collective-permute") == (4 * steps if case.variant == "ring" else 0), kinds
    assert case.variant == "ring" or sorted(kinds) == ["all-gather"] * 2 + ["reduce-scatter"] * 2, kinds


def large(name, case):
    """The weights of a row sum to 1 in the backward, over the keys of all devices, however large scores are."""
    for size in (1e5, 1e9 if case.backend is None else 1e8):  # native kernels count in units of log 2: to some 1e9
        (q, k, v), dout, _, sinks = arrays(case)
        run, *_ = attention(case)

        def step(q, k, v, run=run, sinks=sinks, tables=case.params):
            return run(q, k, v, tables, sinks)

        grown = [x * np.sqrt(size) for x in (q, k)]
        (_, lse), back = jax.vjp(jax.jit(step), *grown, v)
        dq, dk, dv = back((dout, jnp.zeros_like(lse)))
        assert all(bool(jnp.isfinite(x).all()) for x in (dq, dk, dv)), (name, size)
        have, want = (x.reshape(*x.shape[:2], case.kv_heads, -1, 16).sum((1, 3)) for x in (dv, dout))
        close(name, have, want, 1e-4)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        kind, _, of = name.rpartition(": ")
        try:
            {"bytes": bytes_sent, "large": large}.get(kind, check)(name, CASES[of])
            print(name, flush=True)
        except Exception:
            traceback.print_exc()
