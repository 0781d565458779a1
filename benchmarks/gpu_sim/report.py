"""Tables of the model as rows of benchmarks/results: validation, figures beside flex_attention, sensitivities."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from frisket.lowering.plan import Geometry

from . import flex as flex_kernels
from . import full
from . import ours as our_kernels
from .full import Case
from .loops import figures
from .machine import GPUS
from .ours import Ours, Tile
from .published import ROWS, case, name
from .sass import counted
from .schedule import SCHEDULES, launched, longest_of_a_head, packed, rows_of
from .serving import Heads, Step, divided, flex_timed, timed

Row = dict[str, Any]
MODEL, PAIR = "TFLOP/s, full model", "frisket / flex"
# direction, mask, head size, length: what the ratio of the full model is to be at least
FIGURES = {
    ("forward", "causal", 128, 8192): 1.10, ("forward", "causal", 64, 8192): 1.20,
    ("backward", "causal", 128, 8192): 1.05, ("backward", "causal", 64, 8192): 1.25,
    ("forward", "window 128", 128, 32768): 1.3, ("forward", "window 128", 64, 32768): 1.3,
    ("forward", "documents", 128, 32768): 1.3, ("forward", "documents", 64, 32768): 1.3,
}  # fmt: skip
KERNELS = {"forward": ("forward",), "backward": ("dq", "dkv")}
BORDERS = (("causal", 64), ("causal", 128), ("documents", 64), ("documents", 128))
CLASSES = (
    "causal", "window 128", "prefix", "documents", "documents, both sides", "documents, any order", "residue",
    "dilation by 4", "dilation by 5", "product",
)  # fmt: skip
SOFTCAP, MASK_COST, MASK = 0.85, 3.0, "instructions an element"


def validation() -> Iterator[tuple[str, Row]]:
    """flex_attention by the full model, beside what was published of it."""
    for direction, mask, dim, length, published, source in ROWS:
        found = full.rate("flex", direction, case(mask, dim, length, source))
        yield name(direction, mask, dim, length), {
            "figures": {"TFLOP/s": {"model": round(found, 1), "published": published}},
            "ratios": {"model / published": [round(found / published, 3)]},
            "notes": {"source": source},
        }  # fmt: skip


def steady(which: str, direction: str, one: Case) -> float:
    """TFLOP/s of the full tiles' loops alone, at the nominal clock."""
    useful = 4 if direction == "forward" else 10
    rates = zip(KERNELS[direction], _steady(which, direction, one), strict=True)
    return useful / sum(our_kernels.FLOPS[kernel] / rate for kernel, rate in rates)


def _steady(which: str, direction: str, one: Case) -> Iterator[float]:
    """TFLOP/s of each kernel's loop over full tiles."""
    gpu = GPUS[one.arch]
    for i, kernel in enumerate(KERNELS[direction]):
        if which == "ours":
            x = Ours(kernel, one.mask, one.dim, one.dtype, one.group, one.arch)
            tile = our_kernels.chosen(x)
            made = our_kernels.compiled(x, tile)
            loops = made.sass.products
        else:
            tile = flex_kernels.tiles(direction, one.dim, one.dtype, one.arch)[i]
            made = flex_kernels.compiled(flex_kernels.Flex(direction, one.mask, one.dim, one.dtype, one.arch))
            loops = made.sass.products[2 * i : 2 * i + 2]
        _, number = full.loop_numbers(made, loops)
        flops = our_kernels.FLOPS[kernel] * one.dim
        yield figures(made)[number].rate(gpu, tile.block_q * tile.block_k, flops)


def predicted() -> Iterator[tuple[str, Row]]:
    """Our kernels with the tiles that frisket chooses, beside flex_attention's with torch's."""
    for (direction, mask, dim, length), goal in FIGURES.items():
        one = Case(mask, dim, length)
        ours, flex = (full.rate(which, direction, one) for which in ("ours", "flex"))
        quantities = {MODEL: {"frisket": round(ours, 1), "flex": round(flex, 1)}}
        if mask == "causal":
            alone = {"frisket": steady("ours", direction, one), "flex": steady("flex", direction, one)}
            quantities["TFLOP/s, steady loop"] = {n: round(x, 1) for n, x in alone.items()}
        yield name(direction, mask, dim, length), {
            "figures": quantities, "ratios": {PAIR: [round(ours / flex, 3)]},
            "goals": {"at least": {"ratios": {PAIR: goal}}}, "notes": {"tiles": tiles_of(direction, one)},
        }  # fmt: skip
    plain, capped = (full.rate("ours", "forward", Case(mask)) for mask in ("causal", "softcap"))
    yield (
        "forward softcap, 8k, D128",
        {
            "figures": {MODEL: {"softcap": round(capped, 1), "none": round(plain, 1)}},
            "ratios": {"softcap / none": [round(capped / plain, 3)]},
            "goals": {"at least": {"ratios": {"softcap / none": SOFTCAP}}},
        },
    )
    for mask, dim in BORDERS:
        costs = {"frisket": mask_cost("ours", mask, dim), "flex": mask_cost("flex", mask, dim)}
        yield (
            f"mask of a partial tile, {mask}, D{dim}",
            {
                "figures": {MASK: {n: round(x, 2) for n, x in costs.items()}},
                "goals": {"at most": {MASK: {"frisket": MASK_COST}}},
            },
        )


def masks() -> Iterator[tuple[str, Row]]:
    """What the mask of a partial tile takes, for each class of masks: `documents` are declared or known to stand
    together, `any order` are not, and nothing is known of `product`."""
    for mask in CLASSES:
        found = {
            f"{which}, D{dim}": round(mask_cost(name, mask, dim), 2)
            for dim in (64, 128) for which, name in (("frisket", "ours"), ("flex", "flex"))
        }  # fmt: skip
        yield mask, {"figures": {MASK: found}}


def jax() -> Iterator[tuple[str, Row]]:
    """Triton's forward as JAX calls it: arrays are read by pointers, and two query heads share a key head, as in the
    figures of `mosaic`."""
    from frisket.runtime.backends.triton.tiles import jax_target

    for direction, mask, dim, length in FIGURES:
        if direction == "forward":
            plan, _ = our_kernels.planned(Ours(direction, mask, dim, group=2))
            own = jax_target(plan, Geometry(1, 16, 8, length, length, dim, dim, 1.0), "bfloat16")
            tile = Tile(own.block_q, own.block_k, own.num_warps, own.num_stages)
            one = Case(mask, dim, length, group=2)
            rate = 4 * dim * one.pairs / full.ours_time(direction, one, tile).seconds / 1e12
            yield name(direction, mask, dim, length), {
                "figures": {MODEL: {"triton": round(rate, 1)}}, "notes": {"tiles": str(tile)}
            }  # fmt: skip


def tiles_of(direction: str, one: Case) -> str:
    """The tiles that frisket chooses, by kernel."""
    return ", ".join(
        f"{k} {our_kernels.chosen(Ours(k, one.mask, one.dim, one.dtype, one.group, one.arch))}"
        for k in KERNELS[direction]
    )


def mask_cost(which: str, mask: str, dim: int) -> float:
    """Instructions of a thread for a pair that a partial tile of the forward has beyond those of a full one."""
    if which == "ours":
        x = Ours("forward", mask, dim)
        tile = our_kernels.chosen(x)
        made = our_kernels.compiled(x, tile)
    else:
        (tile,) = flex_kernels.tiles("forward", dim, "bfloat16", "sm_90")
        made = flex_kernels.compiled(flex_kernels.Flex("forward", mask, dim))
    loops = made.sass.products
    border, rest = (counted(made.sass.body(loops[n])) for n in full.loop_numbers(made, loops))
    more = border.total() - border["matrix"] - rest.total() + rest["matrix"]
    return more * made.warps * 32 / (tile.block_q * tile.block_k)


# -- serving ----------------------------------------------------------------------------------------------

STORES = {
    "bf16": ("", 0), "bf16, pages of 16": ("", 16), "int8": ("int8", 0), "int8, pages of 16": ("int8", 16),
    "fp8": ("float8_e4m3fn", 0), "fp8, pages of 16": ("float8_e4m3fn", 16),
}  # fmt: skip
QUERIES, SEQUENCES, LENGTHS = (1, 4, 16), (1, 8, 32), {"8k": 8192, "32k": 32768, "128k": 131072}
PLANNED = "speed-up over one call, planners included"
RATE, WAITED, OF_RATE = "share of the memory rate, %", "us, launches included", 85


def serving() -> Iterator[tuple[str, Row]]:
    """Steps of decoding and of a tree of drafts, beside flex_attention's decoding where it takes such keys."""
    for store, (kv_dtype, page) in STORES.items():
        for queries in QUERIES:
            for batch in SEQUENCES:
                rows: dict[str, dict[str, float]] = {RATE: {}, WAITED: {}}
                for tokens, length in LENGTHS.items():
                    step = Step(queries, (length,) * batch, kv_dtype, page)
                    found = {tokens: timed(step)}
                    if store == "bf16":
                        found[f"flex, {tokens}"] = flex_timed(step)
                    rows[RATE] |= {n: round(100 * x.share, 1) for n, x in found.items()}
                    rows[WAITED] |= {n: round(1e6 * x.seconds, 1) for n, x in found.items()}
                yield f"{store}, {queries} x {batch}", {
                    "figures": rows, "goals": {"at least": {RATE: dict.fromkeys(LENGTHS, OF_RATE)}},
                }  # fmt: skip


SHARED, OWN, SPEED_UP = {"8k": 8192, "32k": 32768}, 1024, "speed-up over one call"
# launches of a cascade besides those of its two steps, the merge; and planners of either, that of the tokens behind the
# prefix, which itself is planned once (tests/runtime/caches/children/cascade_launched.py)
SMALL, PLANNERS = 1, (1, 1)


def cascade() -> Iterator[tuple[str, Row]]:
    """Steps of sequences with a common prefix and 1,024 tokens of their own: one call, and the prefix read once."""
    for store, kv_dtype in (("bf16", ""), ("int8", "int8")):
        for batch in (8, 32):
            rows: dict[str, dict[str, float]] = {WAITED: {}, SPEED_UP: {}, PLANNED: {}}
            for tokens, length in SHARED.items():
                one = timed(Step(1, (length + OWN,) * batch, kv_dtype, 64)).seconds
                parts = Step(batch, (length,), kv_dtype, 64), Step(1, (OWN,) * batch, kv_dtype, 64)
                two = sum(timed(x).seconds for x in parts) + SMALL * full.SECONDS_A_LAUNCH
                planned = [x + n * full.SECONDS_A_LAUNCH for x, n in zip((one, two), PLANNERS, strict=True)]
                rows[WAITED] |= {tokens: round(1e6 * one, 1), f"cascade, {tokens}": round(1e6 * two, 1)}
                rows[SPEED_UP][tokens], rows[PLANNED][tokens] = (round(a / b, 2) for a, b in ((one, two), planned))
            goals = {} if kv_dtype else {"goals": {"at least": {PLANNED: {"8k": 1.5}}}}
            yield f"{store}, pages of 64, {batch} sequences", {"figures": rows, **goals}


LATENT, LATENT_HEADS, LATENT_QUERIES = (576, 512), (16, 128), (1, 4)
READ = "bytes read / bytes of keys"


def latent() -> Iterator[tuple[str, Row]]:
    """Steps of multi-head latent attention, compared with kernels that read keys and values apart."""
    for heads in LATENT_HEADS:
        for queries in LATENT_QUERIES:
            for batch in SEQUENCES:
                rows: dict[str, dict[str, float]] = {RATE: {}, WAITED: {}, READ: {}}
                for tokens, length in LENGTHS.items():
                    for kind, shared in (("", True), ("apart, ", False)):
                        step = Step(queries, (length,) * batch, key_heads=1, heads=Heads(heads, *LATENT, True, shared))
                        x = timed(step)
                        rows[RATE][kind + tokens] = round(100 * x.share, 1)
                        rows[WAITED][kind + tokens] = round(1e6 * x.seconds, 1)
                        rows[READ][kind + tokens] = round(x.read, 2)
                yield f"{heads} heads, {queries} x {batch}", {"figures": rows}


PROMPTS, TENSOR, CHUNKED = (64, 256, 320, 512, 2048), (64, 320, 2048), (1, 4, 8)  # queries, and sequences
PREFILL_RATE, FETCHED, AGAIN = "TFLOP/s of visible pairs", "bytes of HBM / keys and values", 1.05


def prefill() -> Iterator[tuple[str, Row]]:
    """Parts of prompts over long caches, beside a program of the forward for every tile of queries and head."""
    kinds = [(store, kv_dtype, page, 8, PROMPTS) for store, (kv_dtype, page) in STORES.items() if "fp8" not in store]
    kinds.append(("bf16, one key head", "", 0, 1, TENSOR))  # of eight, on each of eight GPUs
    for store, kv_dtype, page, heads, prompts in kinds:
        for queries in prompts:
            for batch in CHUNKED:
                rows: dict[str, dict[str, float]] = {PREFILL_RATE: {}, WAITED: {}, FETCHED: {}}
                for tokens, length in LENGTHS.items():
                    step = Step(queries, (length,) * batch, kv_dtype, page, key_heads=heads)
                    x, plain = timed(step), timed(step, divided(step, whole=True))
                    rows[PREFILL_RATE] |= {tokens: round(x.rate), f"undivided, {tokens}": round(plain.rate)}
                    rows[WAITED][tokens] = round(1e6 * x.seconds, 1)
                    rows[FETCHED][tokens] = round(x.fetched, 2)
                yield f"{store}, {queries} x {batch}", {
                    "figures": rows, "goals": {"at most": {FETCHED: dict.fromkeys(LENGTHS, AGAIN)}},
                }  # fmt: skip


# -- schedules --------------------------------------------------------------------------------------------

GLOBAL = "abs(q - k) <= 256 | k < 64 | q < 64"  # a window, and tokens that see all and are seen by all
SCHEDULED = {
    "causal, 2k": Case(length=2048), "causal, 8k": Case(), "documents, 32k": Case("documents", length=32768),
    "window 128, 32k": Case("window 128", length=32768), "64 global tokens, 32k": Case(GLOBAL, length=32768),
    "64 global tokens, 128k, 8 heads": Case(GLOBAL, length=131072, heads=8),
}  # fmt: skip
PACKED = {
    "causal, 2k": Case(length=2048), "causal, 8k": Case(), "window 128, 8k": Case("window 128", length=8192)
}  # fmt: skip
BEFORE, ALONE = "time of heads one after another / time", "time of one head in a tile / time of a group in a tile"


def schedules() -> Iterator[tuple[str, Row]]:
    """What other orders of programs, persistent grids and parts of long rows would save of each kernel."""
    for label, one in SCHEDULED.items():
        for kernel in our_kernels.KERNELS:
            rows = rows_of(kernel, one)
            today = longest_of_a_head(rows)
            found = {n: round(today / f(rows), 3) for n, f in SCHEDULES.items() if f is not longest_of_a_head}
            found["as launched"] = round(today / launched(kernel, one), 3)
            yield f"{kernel}, {label}", {"figures": {BEFORE: found}}
    for label, one in PACKED.items():
        for kernel in ("forward", "dq"):  # dkv walks the heads of a group already
            cells = {f"{n} heads": round(packed(kernel, replace(one, group=n)), 3) for n in (4, 8)}
            yield f"{kernel}, {label}, packed", {"figures": {ALONE: cells}}


# -- sensitivities ----------------------------------------------------------------------------------------

LIMITS = ("name", "arch", "registers", "shared_bytes", "reserved", "warps", "l2_bytes", "matrix_queue")


def sensitivity() -> Iterator[tuple[str, Row]]:
    """What a fifth more and less of each constant changes: flex_attention's forward, causal, 8k, D128, in percent."""
    gpu = GPUS["sm_90"]
    plain = full.rate("flex", "forward", Case(), gpu)
    for field in fields(gpu):
        if field.name in LIMITS:
            continue
        row: dict[str, float] = {}
        for sign, factor in (("+20 %", 1.2), ("-20 %", 0.8)):
            value = getattr(gpu, field.name) * factor
            other = replace(gpu, **{field.name: round(value) if field.name == "processors" else value})
            change = 100 * (full.rate("flex", "forward", Case(), other) / plain - 1)
            row[f"forward D128, {sign}"] = round(change, 1)
        yield field.name, {"figures": {"change of TFLOP/s, %": row}}
