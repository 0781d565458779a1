"""Tiles, warps and stages of the Triton kernels: the one module that chooses them.

Three things decide: what fits into registers and shared memory (head size, dtype, architecture, the score mod), which
share of a tile is visible, and how few queries there are. Under a window of W keys, a row of BQ queries in tiles of BK
keys visits ceil((BQ + W - 1) / BK) * BK keys a query. So this share of its work is useful:

    W                128    192    256    512   1024   4096
    128 x 128        50 %   50 %   67 %   80 %   89 %   97 %
    128 x  64        50 %   60 %   67 %   80 %   89 %   97 %
     64 x  64        67 %   75 %   80 %   89 %   94 %   98 %

    where the window does not begin with a tile, it is W / (W + BQ + BK - 2) in the mean:
    128 x 128        34 %   43 %   50 %   67 %   80 %   94 %
    128 x  64        40 %   50 %   57 %   73 %   84 %   96 %
     64 x  64        50 %   60 %   67 %   80 %   89 %   97 %

Larger tiles read less for each product: 128 x 128 does twice the work of 64 x 64 for each byte of shared memory. So
there are three classes of windows. `short` is up to 192 keys, where small tiles win by a quarter. `medium` is up to
768, where narrower tiles win by a tenth, and `long` beyond; masks without a window are `long`. Masks for whose rows
there is no formula are `medium` at most: documents have two borders, and kernels that read their spans from a table
have fewer registers left. The class depends on the mask alone, not on the lengths of a call or the contents of its
tables: a change inside a class does not recompile.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from frisket.dsl.errors import FrisketError
from frisket.dsl.ir import Expr, build, names_of, uses, walk
from frisket.grammar.memo import memo
from frisket.lowering.architectures import GPUS, H100, Architecture, Products, architecture_of, gpu_of, name_of
from frisket.lowering.dtypes import HALVES
from frisket.lowering.kernels.expr import LEVELS, POSITION, levels
from frisket.lowering.kernels.triton.backward import DELTA
from frisket.lowering.kernels.triton.captured import NAMES, square
from frisket.lowering.kernels.triton.module import padded
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.kernels.units import ALONG, GATHERED, by_distance
from frisket.lowering.plan import Geometry, LoopPlan, Problem, score_class
from frisket.runtime.backends.base import RECORDS, Block
from frisket.runtime.calls.options import AS_CHOSEN, Tuning
from frisket.runtime.masks.layout import make_layout
from frisket.runtime.masks.mask import Mask
from frisket.runtime.plans.device import CallPlan

from . import tuned

Window = Literal["short", "medium", "long"]
Reads = Literal["axis", "distance", "each"]
SHORT, MEDIUM = 192, 768  # the most keys of a short and of a medium window
ROW, LENGTH = 128, 4096  # the tile (128 x 128) and the tokens of the layout that says how many keys a query sees

Tile = tuple[int, int, int, int, int]  # block_q, block_k, warps, stages, 1 where arrays are read by tensor descriptors
Rows = dict[str, dict[str, list[int]]]  # of TABLE for one kernel


def _loaded(name: str) -> Any:
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


# The tiles of 16-bit arrays: architecture -> kernel -> window -> padded head size -> tile. In place of a window:
# "curved" for a long window with a score mod whose derivative is not 1. "each" and "each medium" for long and medium
# windows with a table that has an entry for every position, where these were searched. `python benchmarks/gpu_model.py
# tiles` writes the file: the tiles of the least predicted time among those that spill nothing, and those that
# `benchmarks/gpu.py tune` found faster on an H100 (MEASURED in benchmarks/gpu_sim/search.py). An architecture with "by
# pointers" behind its name holds the tiles of calls without tensor descriptors.
TABLE: dict[str, dict[str, Rows]] = _loaded("tiles.json")
# Tiles of one version of Triton, with which other versions spill, for arrays read by tensor descriptors, without a
# score mod or table at every position. They spill 24 bytes at most, outside the loops. On an H100 gradients take 11 %
# less time with those of 128 under a causal mask, 6 % with documents, and 4 % under a window of 128 keys.
OF_TRITON: dict[tuple[str, str], dict[tuple[str, Window, int], Tile]] = {
    ("3.6", "sm_90"): {
        ("dkv", w, dim): tile
        for w in ("long", "medium", "short")
        for dim, tile in ((128, (64, 64, 4, 2, 1)), (256, (32, 128, 8, 2, 1)))
    }
}
# Tiles of dk and of dv where one kernel of both has too few registers for a tile of more than 16 queries, by
# architecture and padded head size. By the model of benchmarks/gpu_sim both take 0.4 of its time together.
APART: dict[tuple[str, int], tuple[Tile, Tile]] = {("sm_90", 256): ((32, 128, 8, 2, 0), (64, 128, 8, 2, 1))}
# Tiles chosen by hand, by padded head size. Products of float32 have no warp groups and take twice the registers, and
# those of a GPU without tensor cores ("fma") spill in the same tiles.
# Larger heads in 16 bits are by architecture. On an H100 tiles of 512 ran, at 155 TFLOP/s forward and 101 for gradients
# (causal, 8,192 tokens). Those here are the fastest by the model of benchmarks/gpu_sim, which gave the forward 0.9 of
# what was measured. Triton 3.6 has wider tiles, with which other versions spill. The other rows are tiles that fit.
BY_HAND: dict[str, dict[str, dict[str, Any]]] = _loaded("tiles_by_hand.json")
SINGLE = BY_HAND["float32"]
BY_HAND_SHARED = 101_376  # bytes of shared memory that these tiles fit
HEADS_AT_A_TIME = 32  # key heads whose keys are read at the same time
LONGEST_BY_HEAD = 1 << 20  # tokens: beyond, rows of 16 are more than the second axis of a grid counts
ENDS_LATE = 0.05  # of the time of a launch
# Keys of a tile for few queries, by padded head size. They wait for memory, not for products: narrow tiles leave room
# for three stages, and spill nothing.
KEYS_OF_FEW = {64: 64, 128: 64, 256: 32}
# Keys of a tile of stored keys, of many queries and of few. Scales, page numbers and converted keys take registers:
# with more keys the compiler spills.
STORED, STORED_OF_FEW = 32, {64: 32, 128: 64, 256: 32}
# of many queries, where STORED keys spill
STORED_NARROW = {("sm_80", 128): 16, ("sm_89", 128): 16, ("gfx942", 256): 16}
# Tiles of many queries over a cache: block_q, block_k and warps by padded head size and bytes of a key's numbers. Also
# the stages of keys in pages or with scales, and of others. Of those that the model of benchmarks/gpu_sim tried they
# take the least time. Descriptors cannot read such keys, and by pointers two stages wait for every copy. The number
# of a page is loaded before its keys, so that five stages have in flight what three have without pages.
CACHED: dict[str, dict[tuple[int, int], tuple[int, int, int]]] = {
    "sm_90": {(64, 1): (64, 64, 4), (64, 2): (64, 64, 4), (128, 1): (64, 64, 4), (128, 2): (128, 64, 8)}
}
STORED_STAGES, CACHED_STAGES = 5, 3
# Keys of 8 bits in a tile for up to 32 rows, in pages for 17 to 32; three stages need this much shared memory. By the
# model of benchmarks/gpu_sim a loop over 128 keys keeps the memory busy, where two warps convert each key, and one over
# 64 does not. On an H100 one query of 8 heads over keys of int8 takes 0.88 of the time that it takes with 64 keys.
WIDE_OF_FEW, WIDE_SHARED = 128, 131_072
# Tiles of few queries over a latent of more than 256 numbers, whose first numbers are the values: rows, keys, warps and
# stages. A step of multi-head latent attention has 16 to 128 heads for one key head. In tiles of 16 rows two programs
# share a processor and hide each other's waits, and so they are faster for up to 32 rows. More rows take warp groups,
# and the latent is read once for 64 of them, but not one of 8 bits, whose conversion takes the registers. By the model
# of benchmarks/gpu_sim 128 heads would take two thirds of the time with 32 keys, where the compiler spills.
LATENT: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "wgmma": ((16, 32, 4, 2), (64, 16, 8, 3)),
    "mma": ((16, 32, 4, 2),),
}
# Sides of tiles in kernels of captured gradients, where tiles of 64 x 64 spill and these do not, or hardly.
CAPTURED_SIDES = {(name, dim): 32 for name in ("sm_80", "sm_89") for dim in (128, 256)} | {("gfx942", 128): 32}


def window_of(keys: float) -> Window:
    """The class of a mask by the number of keys that a query sees."""
    return "short" if keys <= SHORT else "medium" if keys <= MEDIUM else "long"


@dataclass(frozen=True)
class ProgramTraits:
    """The facts of a mask, a score mod and a KV format that the tiles of a call depend on."""

    keys: float = math.inf  # that a query sees
    curved: bool = False  # the derivative of the score mod is not 1
    reads: Reads = "axis"  # an answer of `reads_of`
    stored: bool = False  # keys and values have scales or pages, as in a cache
    paged: bool = False  # keys and values have pages
    unwritten: bool = False  # keys which no query sees may hold anything


def default_target(
    g: Geometry,
    dtype: str,
    traits: ProgramTraits = ProgramTraits(),
    *,
    arch: str = H100.name,
    descriptors: bool = True,
    limit: int = 0,
) -> Target:
    """The target of the forward, which holds those of the backward and of few queries, on a GPU of this `arch`.

    Its blocks have `limit` bytes of shared memory, or those of `arch`. Without `descriptors` arrays are read by
    pointers.

    >>> g = Geometry(1, 8, 8, 4096, 4096, 128, 128, 0.1)
    >>> t = default_target(g, "bfloat16", ProgramTraits(keys=128))
    >>> [t.block_q, t.block_k, t.num_warps, t.num_stages] == TABLE["sm_90"]["forward"]["short"]["128"][:4]
    True
    """
    curved, reads, stored, gpu = traits.curved, traits.reads, traits.stored, architecture_of(arch)
    half = dtype in HALVES and gpu.products != "fma"  # there they take the registers of float32
    whole = max(padded(g.head_dim), padded(g.v_dim))
    dim, large = max(64, min(256, whole)), whole > 256
    window = window_of(traits.keys)
    if reads == "distance" and window == "long":  # the table's addresses and entries take registers as well as the keys
        window = "medium"
    limit = limit or gpu.shared
    name = listed = gpu.tiles
    family = "gfx942" if gpu.vendor == "amd" else listed  # whose tiles are chosen by hand
    table = TABLE[name]
    if not descriptors and f"{name} by pointers" in TABLE:
        name = f"{name} by pointers"
        table = TABLE[name]
    cached = CACHED.get(arch, {}).get((dim, 1 if g.kv_dtype else 2))
    if not half:
        by_hand = BY_HAND.get(gpu.products, SINGLE)
        tiles = {n: by_hand[n][str(max(dim, min(whole, 512)))] for n in SINGLE}
    elif large:
        described = reads != "each" and g.head_dim == g.v_dim == whole
        names = (f"{name}, Triton {triton_version()}", name) if described else (f"{name} by pointers", name)
        size = str(min(whole, 1024))
        tiles = dict(next(BY_HAND[n][size] for n in (*names, family, "others") if size in BY_HAND.get(n, {})))
    else:
        tiles = {n: _carried(n, table[n], window, dim, curved, reads, gpu) for n in SINGLE}
        if reads != "each" and (arch, dim) in APART:
            tiles["dkv"], tiles["dv"] = APART[arch, dim]
        if descriptors and reads == "axis" and not curved:
            measured = OF_TRITON.get((triton_version(), arch), {})
            tiles |= {n: measured[n, window, dim] for n in tiles if (n, window, dim) in measured}
    many = (stored or traits.unwritten) and window != "short" and reads != "each" and half and cached
    if many:
        tiles["forward"] = (*many, STORED_STAGES if stored else CACHED_STAGES, 0)
    fits = min(GPUS[listed].shared, BY_HAND_SHARED if large or not half else 1 << 20)
    if limit < fits:
        entry = 4 if dtype not in HALVES or (dtype == "bfloat16" and not gpu.bfloat16) else 2
        tiles = {n: _fitted(n, tile, limit, max(dim, whole), entry, gpu.products) for n, tile in tiles.items()}
    shortened = {n: _shortened(tile, g, n) for n, tile in tiles.items()}
    forward, dq, dkv, *dv = (
        Target("triton", block_q, block_k, warps, stages, descriptors=bool(described) and descriptors and not stored)
        for block_q, block_k, warps, stages, described in shortened.values()
    )
    plain = tiles["forward"]
    if curved and half and not large:  # a score mod costs few queries little
        plain = _carried("forward", table["forward"], window, dim, False, reads, gpu)
    keys_of_few = min(plain[1], (STORED_OF_FEW if stored else KEYS_OF_FEW)[dim], 32 if reads == "each" else 64)
    wide = g.kv_dtype and half and dim == 128 and gpu.vendor == "nvidia"
    if wide and 16 * traits.paged < g.q_len * g.heads // g.kv_heads <= 32 and limit >= WIDE_SHARED:
        keys_of_few = WIDE_OF_FEW
    stages = 3 if forward.descriptors and gpu.products == "wgmma" and dim < 256 else min(forward.num_stages, 3)
    latent = LATENT.get(gpu.products, ())[: 1 if g.kv_dtype else 2] if half and large else ()
    few = replace(forward, descriptors=False, block_k=keys_of_few, num_stages=stages, latent=latent)
    if stored and not many:
        most = STORED_NARROW.get((family, dim), STORED)
        forward = replace(forward, block_k=min(forward.block_k, most))
    side = 16 if large else CAPTURED_SIDES.get((family, dim), 64)
    parts: dict[str, Any] = {"dq": dq, "dkv": dkv, "dv": dv[0] if dv else None, "decode": few}
    chosen = replace(forward, words=gpu.words, square=side, **parts).everywhere(limit=limit)
    return on_amd(chosen, gpu) if gpu.vendor == "amd" else chosen


def on_amd(target: Target, gpu: Architecture) -> Target:
    """The target with AMD's text and options. Wavefronts with fewer than 32 of a program's rows multiply 16 at a time:
    in products of 32 rows two of them would compute the same ones."""
    parts: dict[str, Any] = {n: of_amd(n, x, gpu) for n in ("dq", "dkv", "dv", "decode") if (x := getattr(target, n))}
    return of_amd("forward", replace(target, **parts), gpu)


def of_amd(kernel: str, tile: Target, gpu: Architecture) -> Target:
    """The part of a target that a kernel has on AMD's GPUs."""
    narrow = (tile.block_k if kernel in ("dkv", "dv") else tile.block_q) < 32 * tile.num_warps
    return replace(tile, arch=gpu.name, mfma=16 if narrow and gpu.products == "mfma" else 0)


@memo(1)
def triton_version() -> str:
    """The first two numbers of the version of the Triton that is installed, "" without one."""
    try:
        return ".".join(version("triton").split(".")[:2])
    except PackageNotFoundError:
        return ""


def _carried(kernel: str, rows: Rows, window: Window, dim: int, curved: bool, reads: Reads, gpu: Architecture) -> Tile:
    """The tile of a kernel, from its `rows` of the table."""
    row: str = "curved" if curved and window == "long" else window
    searched = {"long": "each", "medium": "each medium"}.get(row, "")
    if reads == "each" and not curved and searched in rows:
        row, reads = searched, "axis"
    block_q, block_k, warps, stages, described = rows[row][str(dim)]
    owned, walked = (block_k, block_q) if kernel == "dkv" else (block_q, block_k)
    if curved and window != "long" and kernel == "dkv":  # a derivative for every score, in registers
        walked = min(walked, 32)
    if reads == "each":  # Triton stages such a table through shared memory too
        walked, stages = min(walked, 32), min(stages, 2)
        if kernel == "dkv" and gpu.products != "wgmma":
            owned, warps = min(owned, 64), 4 if gpu.vendor == "amd" else warps
    if reads == "distance" and kernel == "dkv" and gpu.products != "wgmma":
        walked = min(walked, 32)
    return (walked, owned, warps, stages, described) if kernel == "dkv" else (owned, walked, warps, stages, described)


def _fitted(kernel: str, tile: Tile, limit: float, dim: int = 1, entry: int = 1, products: Products = "wgmma") -> Tile:
    """The tile, made smaller until `shared` is within the limit: fewer stages, then fewer positions along the axis that
    is walked, then along the other. A limit below 1 is a share of what the tile takes."""
    block_q, block_k, warps, stages, described = tile
    swapped = kernel in ("dkv", "dv")
    owned, walked = (block_k, block_q) if swapped else (block_q, block_k)
    limit *= shared(kernel, dim, owned, walked, stages, entry, products) if limit < 1 else 1
    while shared(kernel, dim, owned, walked, stages, entry, products) > limit and max(owned, walked) > 16:
        if stages > 2:
            stages -= 1
        elif walked > 16 and (stages > 1 or walked >= owned):
            walked //= 2
        else:
            owned //= 2
    return (walked, owned, warps, stages, described) if swapped else (owned, walked, warps, stages, described)


def shared(
    kernel: str, dim: int, owned: int, walked: int, stages: int, entry: int = 2, products: Products = "wgmma"
) -> int:
    """Bytes of shared memory that arrays of `entry` bytes a number take. They hold the program's own tile of one array
    in the forward and of two in the backward, and the walked tiles of two arrays for each stage. With one stage all of
    them use the same bytes. Kernels of mma.sync have the tile that they multiply in registers, so one stage fewer is in
    shared memory. Their gradients also hold a tile of scores and, for each query that is walked, lse and delta."""
    arrays = 1 if kernel == "forward" else 2
    if products == "mma":
        ahead = max(1, stages - 1)
        statistics = 16 * ahead * walked if kernel in ("dkv", "dv") else 0
        scores = 0 if kernel == "forward" else entry * owned * walked
        return entry * dim * (arrays * owned + 2 * ahead * walked) + scores + statistics
    return entry * dim * max(owned, walked) if stages == 1 else entry * dim * (owned * arrays + 2 * stages * walked)


def _shortened(tile: Tile, g: Geometry, kernel: str) -> Tile:
    """The tile of a call, halved along the program's own axis while the call has at most half of its positions."""
    block_q, block_k, warps, stages, described = tile
    swapped = kernel in ("dkv", "dv")
    side, length = (block_k, g.kv_len) if swapped else (block_q, g.q_len)
    while side > 16 and side >= 2 * length:
        side, warps = side // 2, max(4, warps // 2)
    return (block_q, side, warps, stages, described) if swapped else (side, block_k, warps, stages, described)


def smaller(target: Target, kernel: str, share: float) -> Target | None:
    """The target with the next smaller tile of a kernel that takes more than a GPU has: `share` is the GPU's part of
    it. None where no tile is smaller."""
    part, squares = kernel.removeprefix("attention_"), kernel in NAMES
    if not squares and part not in ("forward", "decode", *SINGLE, "dv"):
        return None
    tile = getattr(target, part, None) or target
    numbers = tile.block_q, tile.block_k, tile.num_warps, tile.num_stages, 0
    block_q, block_k, _, stages, _ = less = _fitted(part, numbers, share)
    if less == numbers or (tile.backend == "gluon" and block_k < 32):
        return None
    # a step of decoding would take more stages where the limit allows them
    shrunk = replace(tile, block_q=block_q, block_k=block_k, num_stages=stages)
    parts: dict[str, Any] = {part: replace(shrunk, limit=1)}
    return shrunk if squares or part == "forward" else replace(target, **parts)


def of_kernel(name: str, target: Target) -> Target:
    """The part of a target that a kernel of this name is launched with."""
    parts = {"attention_delta": DELTA, "attention_combine": replace(target, num_warps=2)}
    parts |= {f"attention_{n}": getattr(target, n) for n in ("dq", "dkv", "dv")} | dict.fromkeys(NAMES, square(target))
    part = parts.get(name.removesuffix("_sums")) or target
    return replace(part, num_warps=2) if name.endswith("_sums") else part


def of_tile(tile: tuple[int, int], g: Geometry, dtype: str, arch: str) -> Target:
    """The target of a tile that the user gives, for every kernel."""
    wide = dtype in HALVES and tile[0] >= 128 and max(g.head_dim, g.v_dim) > 64
    gpu = architecture_of(arch)
    chosen = Target("triton", *tile, num_warps=8 if wide else 4, words=gpu.words)
    return on_amd(chosen, gpu) if gpu.vendor == "amd" else chosen


# -- of a call ------------------------------------------------------------------------------------


def target(
    plan: CallPlan | None,
    g: Geometry,
    dtype: str,
    tile: tuple[int, int] | None = None,
    tuning: Tuning = AS_CHOSEN,
    device: Any = None,
    arch: str | None = None,
) -> Target:
    """The target of a call with `plan` on `device`, or for `arch`; without a plan, the target of a long window. `tile`
    is a tile that the user gives for every kernel, `tuning` the other options that users give."""
    limit, for_arch = 0 if arch else getattr(_gpu(device), "shared_memory_per_block_optin", 0), arch is not None
    count = architecture_of(arch).processors or H100.processors if arch else processors(device)
    arch = arch or architecture(device)
    if tuning.invariant:
        return tuning.applied(with_precision(invariant_target(g, dtype, tile, arch, limit), dtype, arch))
    if tile is not None:
        user_target = replace(of_tile(tile, g, dtype, arch), limit=limit, fixed=True)
        return tuning.applied(with_precision(user_target, dtype, arch))
    traits, growing = traits_of(plan, g)
    default = default_target(g, dtype, traits, arch=arch, limit=limit)
    measured = None if for_arch or tuning != AS_CHOSEN else tuned.tiles_of(kind_of(traits, growing, g, dtype, device))
    default = default if measured is None else measured.applied(default)
    return tuning.applied(with_precision(ordered(default, g, count) if growing else default, dtype, arch))


def invariant_target(g: Geometry, dtype: str, tile: Block | None, arch: str, limit: int = 0) -> Target:
    """The target of `invariant` calls: the forward's tile of long sequences, or the caller's, whatever the lengths and
    the mask are. Heads are not packed, and no row has parts."""
    long = replace(g, batch=1, q_len=LENGTH, kv_len=LENGTH, origin=(0, 0, 0, 0), sizes=None)
    chosen = (
        of_tile(tile, g, dtype, arch)
        if tile
        else default_target(long, dtype, arch=arch, descriptors=False, limit=limit)
    )
    return replace(chosen, splits=1, order="forward", decode=None, invariant=True, limit=limit, fixed=tile is not None)


def traits_of(plan: CallPlan | None, g: Geometry) -> tuple[ProgramTraits, bool]:
    """The facts of a call that its tiles depend on, and whether rows of tiles grow."""
    mask, score = (None, None) if plan is None else (plan.simplified.mask, plan.simplified.score)
    keys, closed = math.inf, True
    if plan is not None and mask is not None:
        keys, closed = keys_seen(mask, tuple(sorted(plan.scalars.items())))
    growing = mask is not None and grows(mask, keys)
    keys = keys if closed else min(keys, MEDIUM)
    curved = score_class(score) == "general"
    program = None if plan is None else plan.host_program
    kv_format = None if program is None else program.stored
    stored, paged = bool(g.kv_dtype) or kv_format is not None, kv_format is not None and kv_format.page > 0
    unwritten = program is not None and program.unwritten
    return ProgramTraits(keys, curved, reads_of(mask, score), stored, paged, unwritten), growing


def kind_of(traits: ProgramTraits, growing: bool, g: Geometry, dtype: str, device: Any) -> tuned.Key:
    """The kind of call whose measured tiles a call takes."""
    if not (name := tuned.device_name(device)):
        return (("device", ""),)
    facts = {"device": name, **tuned.versions(), "dtype": dtype, "head_dim": g.head_dim, "v_dim": g.v_dim}
    facts |= {"window": window_of(traits.keys), "grows": growing, "curved": traits.curved, "reads": traits.reads}
    facts |= {"stored": traits.stored, "paged": traits.paged, "unwritten": traits.unwritten, "kv_dtype": g.kv_dtype}
    facts |= {"q_len": tuned.up_to(g.q_len), "kv_len": tuned.up_to(g.kv_len), "group": g.heads // g.kv_heads}
    return tuple(facts.items())


def grows(mask: Expr, keys: float) -> bool:
    """Whether rows of tiles grow: the mask is of positions alone, and queries see `keys`, most of those before them."""
    return keys > LENGTH / 2 and _of_positions(mask)


def ordered(target: Target, g: Geometry, count: int) -> Target:
    """The target of a mask whose rows grow with their number, as a causal one's do, on a GPU of `count` processors.
    Heads start one after another, for their rows share keys in L2; but the last head's longest row may end long behind
    all others. Where that is ENDS_LATE of a launch's time, the longest rows of all heads start first. Neighbouring rows
    of such a mask see almost the same keys, so on an H100 that costs nothing at 8,192 tokens."""
    rows, slots = -(-g.q_len // target.block_q), count * (2 if target.num_warps == 4 else 1)
    late = 2 * slots - rows > ENDS_LATE * g.batch * g.heads * rows
    few = g.heads > 1 and g.kv_heads <= HEADS_AT_A_TIME and max(g.q_len, g.kv_len) < LONGEST_BY_HEAD
    return target.everywhere(order="longest-of-all-first") if late and few else target


def with_precision(target: Target, dtype: str, arch: str) -> Target:
    """A target with the tanh of `with_tanh` for 16-bit inputs, and for float32 the products that
    `torch.set_float32_matmul_precision` asks for: exact for "highest", the default, in TF32 for "high" and "medium".
    AMD's GPUs have no TF32. A `Tuning` takes precedence."""
    torch = sys.modules.get("torch")
    if dtype in HALVES:
        return with_tanh(target, arch)
    if torch is None or torch.version.hip or torch.get_float32_matmul_precision() == "highest":
        return target
    return target.everywhere(precision="tf32")


def with_tanh(target: Target, arch: str) -> Target:
    """A target with the tanh instruction of NVIDIA's GPUs, for 16-bit inputs. Its relative error is at most 2**-11,
    where rounding an input to float16 costs 2**-12 and to bfloat16 2**-9. `Tuning.tanh` takes precedence."""
    return target.everywhere(tanh="approximate") if architecture_of(arch).vendor == "nvidia" else target


@memo(group="expressions")
def keys_seen(mask: Expr, scalars: tuple[tuple[str, Any], ...]) -> tuple[float, bool]:
    """(keys that a query sees in the middle of a long sequence, whether formulas give the tiles of a row). Keys are
    counted to half a tile, by the conjuncts of a mask that read positions alone, so there are no more where other
    conjuncts hide keys too. Without formulas, the tiles of a row come from a table."""
    terms = mask.args if mask.op == "and" else (mask,)
    positional = [e for e in terms if _of_positions(e)]
    if not positional:
        return math.inf, False
    seen = Mask(build("and", *positional) if len(positional) > 1 else positional[0])
    known = {n: x for n, x in scalars if n in names_of(seen.expr)}
    half = LENGTH // 2
    try:
        middle = Problem(half, LENGTH, origin=(0, 0, half, 0), sizes=(1, 1, LENGTH, LENGTH))
        layout = make_layout(seen.bind(**known), middle, (ROW, ROW), exact=False)
    except FrisketError:  # a mask that is not defined there, or has no bound values
        return math.inf, False
    bounds = layout.spans.bounds
    lo, full_lo, full_hi, hi = (bounds[..., i].sum() for i in range(4))
    keys = float((hi - lo + full_hi - full_lo) / 2 * ROW / (bounds.shape[0] * bounds.shape[1]))
    return keys, len(positional) == len(terms) and layout.analysis.bounds is not None


def _of_positions(e: Expr) -> bool:
    return not uses(e) & {"b", "h"} and not any(n.op in ("lookup", "segment", "extent") for n in walk(e))


def reads_of(*roots: Expr | None) -> Reads:
    """The way tables are read. "each": an index depends on the query and the key. "distance": it depends on their
    distance alone. "axis": it depends on at most one of the two."""
    exprs = [by_distance(e, LEVELS) for e in roots if e is not None]
    ops = {n.op for n, at in levels(*exprs, when={**LEVELS, **ALONG}).items() if at == POSITION}
    return "each" if "lookup" in ops else "distance" if GATHERED in ops else "axis"


def architecture(device: Any = None) -> str:
    """The architecture of a torch device, of the first GPU where none is named, and an H100's where there is none."""
    gpu = _gpu(device)
    if gpu is None:
        return H100.name
    return name_of(str(getattr(gpu, "gcnArchName", "")), f"{gpu.major}.{gpu.minor}")


def shared_memory(device: Any = None) -> int:
    """Bytes of shared memory that a block may have on a torch device; 0 where there is no GPU."""
    return int(getattr(_gpu(device), "shared_memory_per_block_optin", 0))


def processors(device: Any = None) -> int:
    """Streaming multiprocessors, or compute units; those of an H100 where there is no GPU."""
    gpu = _gpu(device)
    return H100.processors if gpu is None else int(gpu.multi_processor_count)


def _gpu(device: Any) -> Any:
    """The properties of a GPU by torch, of the current one where none is named; None where there is none."""
    if not find_spec("torch"):
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    index = device.index if getattr(device, "type", "cpu") == "cuda" else None
    return _properties(torch.cuda.current_device() if index is None else index)


@memo(group="once")
def _properties(index: int) -> Any:
    import torch

    return torch.cuda.get_device_properties(index)


# -- of a call of JAX -----------------------------------------------------------------------------

# These kernels replace Mosaic GPU's from SHORTEST queries on. Either a query sees at most WINDOW keys (a window of 1024
# and half a tile) or there are at most KEYS keys.
SHORTEST, WINDOW, KEYS = 1024, 1088, 8192
TF32 = ("tensorfloat32", "high", "bfloat16", "bfloat16_3x")


def jax_target(
    plan: LoopPlan, g: Geometry, dtype: str, tile: Block | None = None, narrow: bool = False, invariant: bool = False
) -> Target:
    """The target of a call for the GPU of `jax_gpu`; `narrow` says that rows see a few hundred keys at most."""
    gpu = jax_gpu()
    if invariant:
        return _precise(invariant_target(g, dtype, tile, gpu.arch.name, gpu.shared), dtype, gpu.arch.name)
    if tile is not None:
        return _precise(of_tile(tile, g, dtype, gpu.arch.name), dtype, gpu.arch.name)
    keys, curved, reads = _keys_of(plan, narrow), plan.score_class == "general", reads_of(plan.mask, plan.score)
    stored, paged = g.kv_dtype != "" or plan.value_scale is not None or plan.pages is not None, plan.pages is not None
    traits = ProgramTraits(keys, curved, reads, stored, paged, plan.unwritten)
    # jax-triton passes no descriptors
    chosen = default_target(g, dtype, traits, arch=gpu.arch.name, descriptors=False, limit=gpu.shared)
    return _precise(chosen, dtype, gpu.arch.name)


def _keys_of(plan: LoopPlan, narrow: bool) -> float:
    """The keys that a query sees: as many as in a medium window where rows are narrow or no formula gives them."""
    if plan.mask is None:
        return math.inf
    keys, _ = keys_seen(plan.mask, tuple((s.name, s.value) for s in plan.slots if s.value is not None))
    return min(keys, MEDIUM) if narrow or plan.bounds is None else keys


def pays(plan: LoopPlan, g: Geometry, dtype: str, narrow: bool) -> bool:
    """Whether the forward is faster than Mosaic GPU's on Hopper at head size 64. On an H100 Mosaic's takes 1.12 to 1.16
    times as long under a window of 1024 keys. Under a causal mask it takes 1.09 times at 2,048 tokens, 1.01 times at
    8,192, and less time from 16,384 on. By the model of benchmarks/gpu_sim shorter windows and documents of 512 tokens
    gain more, because a program of Mosaic's takes thousands of cycles besides its tiles. At head size 128 Mosaic's is
    faster. Score mods, dropout, and calls without a mask have not been measured."""
    few = _keys_of(plan, narrow) <= WINDOW or (plan.mask is not None and g.kv_len <= KEYS)
    short = few and g.q_len >= SHORTEST
    plain = plan.score is None and plan.keep_mask is None and not interpreted()
    return short and plain and max(padded(g.head_dim), padded(g.v_dim)) <= 64


def _precise(target: Target, dtype: str, arch: str) -> Target:
    """Products of float32 exact, or in TF32 where `jax_default_matmul_precision` asks for no more than that; tanh of
    16-bit inputs exact where it is "highest"."""
    import jax

    precision = str(getattr(jax.config, "jax_default_matmul_precision"))  # noqa: B009 - mypy knows it not
    if dtype in HALVES:
        return target if precision == "highest" else with_tanh(target, arch)
    return target.everywhere(precision="tf32") if precision in TF32 else target


def interpreted() -> bool:
    return RECORDS["triton"].interpreted


class Gpu(NamedTuple):
    """A GPU as tiles are chosen for it."""

    arch: Architecture
    processors: int  # streaming multiprocessors or compute units
    shared: int  # bytes of shared memory that a block may have; 0: not known


NOWHERE = Gpu(H100, H100.processors, 0)  # where there is no GPU


def jax_gpu() -> Gpu:
    """The GPU of the current mesh where JAX lowers for an abstract device, else the first one, else an H100."""
    import jax

    abstract: Any = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    named = abstract is not None and abstract.platform in ("gpu", "cuda", "rocm", None)
    arch = gpu_of(abstract.device_kind) if named else None  # abstract devices have nothing but a name
    return _first_of_jax() if arch is None else Gpu(arch, abstract.num_cores or H100.processors, 0)


@memo(group="once")
def _first_of_jax() -> Gpu:
    import jax

    try:
        device: Any = jax.devices("gpu")[0]
    except RuntimeError:
        return NOWHERE
    arch = architecture_of(name_of(str(device.compute_capability), str(device.compute_capability)))
    cores = getattr(device, "core_count", NOWHERE.processors)
    return Gpu(arch, int(cores), int(getattr(device, "shared_memory_per_block_optin", 0)))
