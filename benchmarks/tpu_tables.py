"""Tables for Pallas TPU kernels, and the tiles that kernels visit, beside splash attention and others that run here:
`python benchmarks/tpu_tables.py [tables] [visits] [v5e] [v5p] [v6e]`.

`tables` is from the words of a mask to all that kernels read of it, forward and backward: here spans and walks of rows
and of columns, there `process_mask` and `process_mask_dkv`, for tiles of the same size. Both are timed in this process,
turn about, by the processor's time; nothing is remembered from one time to the next. `visits` are counted: ours by
kernels that run in Pallas' interpreter and note every visit, those of peers in the tables and bounds of loops that
their kernels are given. A TPU's name is for the bundles of its kernels (`tpu_bundles.py`).
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tpu_bundles
from cases import labels, offsets
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as splash_info
from store import keep, shown

import frisket as fk
from frisket.lowering.kernels.pallas_tpu.walk import walk
from frisket.lowering.plan import Cotangents, ForwardResults, Geometry, KernelInputs, Target
from frisket.runtime.backends.pallas_tpu import jax as pallas_tpu
from frisket.runtime.bench.race import processor_seconds, raced
from frisket.runtime.machine import modules

BLOCK = (512, 512)
LENGTHS = {2**14: 3, 2**16: 1}  # and how often they are timed: splash attention takes most of a minute
LONGEST = 2**20
Params = dict[str, Any]


class Mask(NamedTuple):
    """One mask: words with values by name, and as splash attention and flex_attention take it."""

    text: str
    params: Callable[[int], Params]
    splash: Callable[[int], Any]
    flex: Callable[[Params], Any]


def documents(n: int) -> Params:
    """The document of each token, about 512 tokens each."""
    return {"doc": labels(offsets(n, n // 512))}


def pairs(text: str, params: Params, n: int) -> Any:
    """One bool for every pair: where splash attention has no class for a mask, it leaves out tiles only so."""
    return splash.NumpyMask(fk.mask(text, **params).dense(n, n)[0, 0])


def _documents_of(params: Params) -> Any:
    import torch

    doc = torch.from_numpy(params["doc"])
    return lambda b, h, q, k: (q >= k) & (doc[q] == doc[k])


MASKS = {
    "causal": Mask("causal", lambda n: {}, lambda n: splash.CausalMask((n, n)), lambda p: lambda b, h, q, k: q >= k),
    "window": Mask(
        "causal & window(1024)", lambda n: {}, lambda n: splash.LocalMask((n, n), (1023, 0), 0),
        lambda p: lambda b, h, q, k: (q >= k) & (q - k < 1024),
    ),
    "documents": Mask(
        "causal & same(doc)", documents, lambda n: pairs("causal & same(doc)", documents(n), n), _documents_of
    ),
    "prefix": Mask(
        "prefix_lm(1024)", lambda n: {}, lambda n: pairs("prefix_lm(1024)", {}, n),
        lambda p: lambda b, h, q, k: (q >= k) | (k < 1024),
    ),
    "chunked": Mask(
        "chunked_causal(1024)", lambda n: {}, lambda n: splash.ChunkedCausalMask((n, n), 1024),
        lambda p: lambda b, h, q, k: (q >= k) & (q // 1024 == k // 1024),
    ),
}  # fmt: skip


# -- tables -----------------------------------------------------------------------------------------


def laid_out(text: str, params: Params, n: int, block: tuple[int, int] = BLOCK) -> tuple[Any, Any]:
    """The walks of the forward and dq, and of dk and dv."""
    layout = fk.mask(text, **params).layout(n, n, block=block)
    return walk(layout.spans, layout.columns), walk(layout.transposed.spans, layout.rows)


def processed(mask: Any) -> tuple[Any, Any]:
    splash_info._process_mask.cache_clear()
    heads = splash.MultiHeadMask([mask])
    return splash_info.process_mask(heads, BLOCK), splash_info.process_mask_dkv(heads, BLOCK)


def tables() -> dict[str, Any]:
    """Milliseconds of both at 16k and 64k, and ours at 1M, where splash attention would take hours."""
    found: dict[str, Any] = {}
    for name, mask in MASKS.items():
        rows = {}
        for n, rounds in LENGTHS.items():
            if name in ("documents", "prefix") and n > 2**14:
                continue  # bools of all pairs: 4 GiB
            calls = {
                "frisket": partial(laid_out, mask.text, mask.params(n), n),
                "splash": partial(processed, mask.splash(n)),
            }
            rows[f"{n:,} tokens"] = raced(calls, rounds, clock=processor_seconds)
        longest = partial(laid_out, mask.text, mask.params(LONGEST), LONGEST)
        times = [1e3 * processor_seconds(longest) for _ in range(9)]
        middle = {"frisket": statistics.median(times), "frisket, first": times[0]}
        rows[f"{LONGEST:,} tokens"] = {"figures": {"ms": middle}}
        found[name] = {"rows": rows}
        print(shown(name, found[name]), flush=True)
    return found


# -- visits -----------------------------------------------------------------------------------------

TOKENS, TILE = 4096, 128


def ours(mask: Mask) -> dict[str, int]:
    """Visits of each of our kernels, noted as they run, and the tiles that have a visible pair."""
    params, seen = mask.params(TOKENS), Counter[str]()
    line = "    def visit(partial):\n"

    def noting(source: str) -> Params:
        assert source.count(line) == 1
        kernel = next(x for x in ("dkv", "dq", "forward") if f"def attention_{x}(" in source)
        note = f"        jax.debug.callback(seen, {kernel!r})\n"
        return modules.load_source(source.replace(line, line + note), seen=lambda kernel: seen.update([kernel]))

    plan = fk.compile(mask.text, **params).plan(TOKENS, TOKENS, 1, 1)
    made, block = plan.work((TILE, TILE)), (TILE, TILE)
    g = Geometry(1, 1, 1, TOKENS, TOKENS, 16, 16, 0.25)
    x, target = jnp.ones((1, TOKENS, 1, 16)), Target("pallas-tpu", *block)
    inputs = KernelInputs(made.plan, plan, g, target, made.slots, {n: jnp.asarray(t) for n, t in made.tables.items()})
    known, pallas_tpu.load_source = pallas_tpu.load_source, noting
    try:
        pallas_tpu._kernel.memo.clear()
        pallas_tpu._gradient_kernel.memo.clear()
        out, lse, _ = pallas_tpu.forward(inputs, x, x, x)
        given = ForwardResults(out, lse), Cotangents(out)
        found = pallas_tpu.backward(inputs, x, x, x, *given, grad_names=frozenset("qkv"))
        jax.block_until_ready(found)
        jax.effects_barrier()
    finally:
        pallas_tpu.load_source = known
        pallas_tpu._kernel.memo.clear()
        pallas_tpu._gradient_kernel.memo.clear()
    return {"visible": int((plan.work(block).layout.kinds() > 0).sum()), **seen}


def of_splash(mask: Any) -> dict[str, Any]:
    """Tiles that are computed, and steps of the grid: every row has as many as the longest."""
    heads, found = splash.MultiHeadMask([mask]), {}
    tables = {"forward, dq": splash_info.process_mask, "dkv": splash_info.process_mask_dkv}
    for kernel, process in tables.items():
        info, _ = process(heads, (TILE, TILE))
        found[kernel] = {"computed": int((np.asarray(info.block_mask) > 0).sum()), "steps": int(info.block_mask.size)}
    fused, _ = splash_info.process_mask_dkv(heads, (TILE, TILE), shrink_grid=False)
    found["dq, dk and dv in one"] = {
        "computed": int((np.asarray(fused.block_mask) > 0).sum()), "steps": int(fused.block_mask.size)
    }  # fmt: skip
    return found


def of_flex(function: Any) -> dict[str, int]:
    """Tiles in the lists of flex_attention's BlockMask: those of rows, for dq, and of columns."""
    from torch.nn.attention.flex_attention import create_block_mask

    lists = create_block_mask(function, None, None, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=TILE)
    return {
        "dq": int(lists.kv_num_blocks.sum() + lists.full_kv_num_blocks.sum()),
        "dkv": int(lists.q_num_blocks.sum() + lists.full_q_num_blocks.sum()),
    }


def of_pallas_gpu() -> dict[str, int]:
    """jax.experimental.pallas.ops.gpu.attention: its loops end or begin at the diagonal, and segments are looked at
    element by element; a mask that is not causal takes every tile."""
    rows = np.arange(TOKENS // TILE)
    return {"causal": int((rows + 1).sum()), "not causal": len(rows) ** 2}


def visits() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, mask in MASKS.items():
        visited, splash_ = ours(mask), of_splash(mask.splash(TOKENS))
        figures = {
            "tiles with a visible pair": {"all": visited.pop("visible")},
            "tiles computed": {f"frisket, {kernel}": n for kernel, n in visited.items()}
            | {f"splash, {kernel}": x["computed"] for kernel, x in splash_.items()}
            | {f"flex_attention, {kernel}": n for kernel, n in of_flex(mask.flex(mask.params(TOKENS))).items()},
            "steps of the grid": {f"splash, {kernel}": x["steps"] for kernel, x in splash_.items()},
        }
        found[name] = {"figures": figures}
        print(shown(name, found[name]), flush=True)
    found["pallas.ops.gpu.attention"] = {"figures": {"tiles computed": of_pallas_gpu()}}
    return found


# -- bundles ----------------------------------------------------------------------------------------

SIZES = {8192: "8k", 32768: "32k"}  # tokens; kernels are compiled for the first
HEADS, DIM = 8, 128
SPARSE = np.random.default_rng(16).random((16, 16)) < 0.25


class Compared(NamedTuple):
    """A mask whose bundles are compared, in the tiles that both take in every kernel but our backward, whose default
    tiles are 512 x 512."""

    text: str
    params: Callable[[int], Params]
    splash: Callable[[int], Any]
    segments: bool = False
    lengths: tuple[int, ...] = tuple(SIZES)
    block: tuple[int, int] = (512, 1024)


COMPARED = {
    "causal": Compared("causal", lambda n: {}, lambda n: splash.CausalMask((n, n))),
    "window": Compared("causal & window(1024)", lambda n: {}, lambda n: splash.LocalMask((n, n), (1023, 0), 0)),
    "documents": Compared("causal & same(doc)", documents, lambda n: splash.CausalMask((n, n)), segments=True),
    "random blocks of 512": Compared(
        "sees[q // 512, k // 512]", lambda n: {"sees": SPARSE},
        lambda n: splash.NumpyMask(np.kron(SPARSE, np.ones((512, 512), bool))), lengths=(8192,), block=(512, 512),
    ),
}  # fmt: skip
AT_MOST = {"frisket / splash": 1.02}
PARTS = ("a step", "a full tile", "a tile at a border", "a row")
ENTRIES = {"forward": "attention_forward", "dq": "attention_dq", "dkv": "attention_dkv"}


def our_schedules(tpu: str, mask: Compared, n: int) -> dict[str, tpu_bundles.Schedule]:
    attend = fk.compile(mask.text, backend="pallas-tpu", tile=mask.block, **mask.params(n))

    def gradients(*qkv: Any) -> Any:
        return jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2))(*qkv)

    def shapes(where: Any) -> Any:
        return [jax.ShapeDtypeStruct((1, n, HEADS, DIM), jnp.bfloat16, sharding=where)] * 3

    found = tpu_bundles.schedules(tpu, gradients, shapes)
    return {kernel: found[entry] for kernel, entry in ENTRIES.items()}


def splash_schedules(tpu: str, mask: Compared, n: int) -> dict[str, tpu_bundles.Schedule]:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    bq, bk = mask.block
    sizes = kernels.BlockSizes(
        block_q=bq, block_kv=bk, block_kv_compute=bk, block_q_dkv=bq, block_kv_dkv=bk, block_kv_dkv_compute=bk,
        block_q_dq=bq, block_kv_dq=bk,
    )  # fmt: skip
    heads = splash.MultiHeadMask([mask.splash(n)] * HEADS)
    attend = kernels.make_splash_mha(heads, block_sizes=sizes, head_shards=1, q_seq_shards=1)

    def gradients(q: Any, k: Any, v: Any, *ids: Any) -> Any:
        return jax.grad(lambda *x: attend(*x, *ids).astype(jnp.float32).sum(), argnums=(0, 1, 2))(q, k, v)

    def shapes(where: Any) -> Any:
        ids = jax.ShapeDtypeStruct((n,), jnp.int32, sharding=where)
        qkv = [jax.ShapeDtypeStruct((HEADS, n, DIM), jnp.bfloat16, sharding=where)] * 3
        return [*qkv, kernels.SegmentIds(ids, ids)] if mask.segments else qkv

    found = tpu_bundles.schedules(tpu, gradients, shapes)
    marks = {"forward": "fwd", "dq": "dq", "dkv": "dkv"}
    return {kernel: next(s for name, s in found.items() if mark in name) for kernel, mark in marks.items()}


def our_total(mask: Compared, n: int, kernel: str, schedule: tpu_bundles.Schedule) -> int:
    """Bundles of a head: of visited tiles, full ones and those at a border, and of rows."""
    block = mask.block if kernel == "forward" else tuple(min(side, 512) for side in mask.block)
    kinds = fk.mask(mask.text, **mask.params(n)).layout(n, n, block=block).kinds()[0, 0]
    kinds = kinds.T if kernel == "dkv" else kinds
    full, border = int((kinds == 2).sum()), int((kinds == 1).sum())
    steps = int(np.maximum((kinds > 0).sum(1), 1).sum())  # a row that sees nothing has a step
    return schedule.total(steps, len(kinds), (full, border))


def splash_total(mask: Compared, n: int, kernel: str, schedule: tpu_bundles.Schedule) -> int:
    """Bundles of a head of splash attention: every row has as many steps as the longest, every tile has the mask."""
    process = splash_info.process_mask_dkv if kernel == "dkv" else splash_info.process_mask
    info, _ = process(splash.MultiHeadMask([mask.splash(n)]), mask.block)
    rows = n // mask.block[kernel == "dkv"]
    steps = info.block_mask if info.block_mask is not None else np.ones((n // mask.block[0], n // mask.block[1]))
    return schedule.total(int(steps.size), rows, [int((np.asarray(steps) > 0).sum())])


def bundles(tpu: str) -> dict[str, Any]:
    """Bundles of a head, and of the parts of a kernel. A backward is dq, dk and dv."""
    found: dict[str, Any] = {}
    for name, mask in COMPARED.items():
        sides = {
            "frisket": (our_schedules(tpu, mask, mask.lengths[0]), our_total),
            "splash": (splash_schedules(tpu, mask, mask.lengths[0]), splash_total),
        }
        rows: dict[str, Any] = {}
        for n in mask.lengths:
            totals = {who: {k: total(mask, n, k, s) for k, s in of.items()} for who, (of, total) in sides.items()}
            both = {
                "forward": {who: of["forward"] / 1e3 for who, of in totals.items()},
                "backward": {who: (of["dq"] + of["dkv"]) / 1e3 for who, of in totals.items()},
            }
            for kernel, of in both.items():
                ratios = {"frisket / splash": [of["frisket"] / of["splash"]]}
                rows[f"{n:,} tokens, {kernel}"] = {
                    "figures": {"thousands of bundles": of}, "ratios": ratios, "goals": {"at most": {"ratios": AT_MOST}}
                }  # fmt: skip
        for kernel in ENTRIES:
            for what in PARTS:
                of = {who: _one(schedules[kernel], what) for who, (schedules, _) in sides.items()}
                rows[f"{kernel}, {what}"] = {"figures": {"bundles": of}}
        found[name] = {"rows": rows}
        print(shown(name, found[name]), flush=True)
    return found


def _one(schedule: tpu_bundles.Schedule, what: str) -> int:
    """Bundles of a part; a kernel with one kind of tile takes it for all."""
    parts = (schedule.step, schedule.tiles[0], schedule.tiles[-1], schedule.row)
    return dict(zip(PARTS, parts, strict=True))[what]


if __name__ == "__main__":
    for part in sys.argv[1:] or ["tables", "visits"]:
        settings = {"tables": {"block": BLOCK, "rounds": None}, "visits": {"tokens": TOKENS, "tile": TILE, "rounds": 1}}
        settings |= {
            tpu: {"head size": DIM, "heads": HEADS, "dtype": "bfloat16", "libtpu": version("libtpu"), "rounds": 1}
            for tpu in tpu_bundles.TPUS if part == tpu
        }  # fmt: skip
        run = {"tables": tables, "visits": visits} | {tpu: partial(bundles, tpu) for tpu in tpu_bundles.TPUS}
        keep("tpu-tables", part, run[part](), settings[part])
