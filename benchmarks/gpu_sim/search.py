"""The search for tiles: what compiles without a spill on every Triton, fits, and takes the least time by the model.

A cell of the table is an architecture, a kernel, a class of masks and a head size, for 16-bit numbers. Every candidate
is compiled and played with the Triton at hand, the best of them with more and fewer stages, and the best of all with
the other Triton, too; the tile is chosen whose worse time is the least. For AMD's GPUs the time is the static figure of
`gpu_sim.amd`, and other wavefronts and rows of a product are tried as well. Where the model knows no machine
(Blackwell's tensor memory, heads of 256 without warp groups), candidates are taken in the order of bytes loaded for a
product, then of blocks that fit an SM, and the first is chosen that spills nothing. A tile has to compile without a
spill in every form of the kernel: where a table lists its programs, with eight heads to a key head, and for other GPUs
that take the same tiles, too. Cells whose tiles a GPU chose stay as they are: MEASURED. What was compiled and played is
kept on disk, so that a search that was broken off goes on where it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from frisket.lowering.architectures import ARCHITECTURES as LISTED
from frisket.runtime.backends.triton import tiles as shipped

from . import amd, full, ours
from .compiled import ROOT
from .full import Case
from .machine import GPUS, OTHERS
from .ours import Ours, Tile

TABLE = ROOT / "runtime" / "backends" / "triton" / "tiles.json"
ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942", "gfx950", "gfx1100", "gfx1201")
ALIKE = {"sm_80": ("sm_87",), "sm_89": ("sm_120",)}  # for whose instructions kernels with the same tiles are compiled
POINTERS = " by pointers"  # ends the name of the table for callers who have no tensor descriptors
DESCRIBES = ("sm_90", "sm_100")  # architectures that copy tiles by tensor descriptors
CLASSES = {"long": "causal", "medium": "documents", "short": "window 128", "curved": "softcap",
           "each": "bias of positions", "each medium": "mask of positions"}  # fmt: skip
DIMS = (64, 128, 256)
BEST = 2  # that are compiled with other stages, and by the other Triton
FEWEST, REGISTERS = 64, 216  # of a thread, for accumulators and scores: less is idle, more has not compiled unspilled


@dataclass(frozen=True)
class Cell:
    """One place of the table."""

    arch: str
    kernel: str
    mask: str  # of CLASSES
    dim: int

    @property
    def gpu(self) -> str:
        return self.arch.removesuffix(POINTERS)

    @property
    def modelled(self) -> bool:
        # At 256 their blocks of instructions lie in an order that `full.path`, which goes forward, cannot follow.
        return (self.gpu in GPUS and not (self.dim == 256 and LISTED[self.gpu].products == "mma")) or self.of_amd

    @property
    def of_amd(self) -> bool:
        return LISTED[self.gpu].vendor == "amd"

    @property
    def forms(self) -> tuple[tuple[int, bool, str], ...]:
        """The kernels that take the tile: heads of a key head, whether a table lists the programs, as it may where no
        formula gives the tiles of a row, and for every column of tiles, and the architecture."""
        listed = self.kernel == "dkv" or "medium" in self.mask
        kinds = ((1, False), (8, False), *([(1, True)] * listed))
        return tuple((*x, arch) for arch in (self.gpu, *ALIKE.get(self.gpu, ())) for x in kinds)

    @property
    def reads(self) -> tuple[int, ...]:
        """The ways to read arrays: 0 by pointers, 1 by tensor descriptors."""
        return (1, 0) if self.arch in DESCRIBES else (0,)

    def __str__(self) -> str:
        return f"{self.arch} {self.kernel} {self.mask} D{self.dim}"


# Tiles that an H100 chose, by benchmarks/results/gpu.json: the search leaves them.
MEASURED = {
    Cell("sm_90", "forward", "long", 64): Tile(64, 64, 4, 3),
    Cell("sm_90", "forward", "medium", 128): Tile(64, 64, 4, 3, 1),
    Cell("sm_90", "dq", "long", 64): Tile(64, 64, 4, 2, 1),
    Cell("sm_90", "dq", "short", 64): Tile(64, 32, 4, 3, 1),
    Cell("sm_90", "dkv", "short", 64): Tile(32, 64, 4, 3),
}


def cells(archs: Sequence[str], kernels: Sequence[str], masks: Sequence[str], dims: Sequence[int]) -> Iterator[Cell]:
    """The cells of the table among all that these architectures, kernels, classes and head sizes name.

    ValueError for a class that no architecture has."""
    if unknown := set(masks) - set(CLASSES):
        raise ValueError(f"no class {sorted(unknown)[0]!r}; there are {', '.join(CLASSES)}")
    asked = (Cell(a, k, m, d) for a in archs for k in kernels for m in masks for d in dims)
    known = table()
    yield from (x for x in asked if x.mask in known[x.arch][x.kernel])


def candidates(cell: Cell, long: Tile | None = None) -> list[Tile]:
    """Tiles that fit shared memory, with three and two stages or as many as fit, and whose accumulators and scores
    leave registers for the rest. A score mod's tiles have the warps and the own side of those without, `long`."""
    found = []
    lanes, owns = LISTED[cell.gpu].lanes, (64, 128) if cell.modelled else (32, 64, 128)
    arrays, scores = {"forward": (1, 1), "dq": (1, 2), "dkv": (2, 2)}[cell.kernel]
    for own in (16, 32, 64, 128, 256) if cell.of_amd else owns:
        for walked in (16, 32, 64, 128):
            for warps in (4, 8):
                held = (arrays * own * cell.dim + scores * own * walked) / (warps * lanes)
                few = walked == 16 and cell.dim < 256 and not cell.of_amd
                if not FEWEST <= held <= REGISTERS or walked > own or few:
                    continue
                sides = (walked, own) if cell.kernel == "dkv" else (own, walked)
                for described in cell.reads:
                    staged = (Tile(*sides, warps, n, described) for n in ((2, 1) if cell.of_amd else (3, 2, 1)))
                    found += [t for t in staged if fits(cell, t)][: 2 if cell.modelled else 3]
    if cell.mask == "curved" and long is not None:
        side = 1 if cell.kernel == "dkv" else 0
        like = (long.warps, (long.block_q, long.block_k)[side])
        found = [t for t in found if (t.warps, (t.block_q, t.block_k)[side]) == like]
    return found if cell.modelled else sorted(found, key=lambda t: ranked(cell, t))


def staged(cell: Cell, tile: Tile) -> list[Tile]:
    """The tile with a stage more, or fewer; on AMD's GPUs with other options of the compiler."""
    if cell.of_amd:
        products = (16, 32) if LISTED[cell.gpu].products == "mfma" else ()
        return [*(replace(tile, waves=n) for n in (1, 2, 3, 4)), *(replace(tile, mfma=n) for n in products)]
    others = (replace(tile, stages=n) for n in (4, 3, 2) if n != tile.stages)
    return [t for t in others if fits(cell, t)]


def fits(cell: Cell, tile: Tile) -> bool:
    own, walked = (tile.block_k, tile.block_q) if cell.kernel == "dkv" else (tile.block_q, tile.block_k)
    products = LISTED[cell.gpu].products
    taken = shipped.shared(cell.kernel, cell.dim, own, walked, tile.stages, products=products)
    return taken <= LISTED[cell.gpu].shared


def evaluate(cell: Cell, tile: Tile, whole: bool = True) -> dict[str, float]:
    """Seconds by the model, of its GPUs of that architecture together, and what the kernel takes; no seconds where it
    spills or does not fit, in its first form or in the `whole` of them. Where there is no model, seconds are an order:
    bytes loaded for a product, over the blocks of an SM up to two."""
    found: dict[str, float] = {}
    for group, listed, arch in cell.forms if whole else cell.forms[:1]:
        form = Ours(cell.kernel, CLASSES[cell.mask], cell.dim, group=group, arch=arch, listed=listed)
        made = ours.compiled(form, tile)
        found = found or {"registers": made.registers, "stack": made.stack, "shared": made.shared}
        found |= {"stack": max(found["stack"], made.stack), "shared": max(found["shared"], made.shared)}
        # What asks for more tensor memory than there is compiles to a few instructions without a product.
        empty = made.text and not re.search(LISTED[arch].mma, made.text)
        if made.stack or made.shared > LISTED[arch].shared or empty:
            return found
    if cell.of_amd:
        return {**found, "seconds": amd.seconds_of_a_pair(made, tile.block_q * tile.block_k)}
    if cell.modelled:
        case = Case(CLASSES[cell.mask], cell.dim, arch=cell.gpu)
        gpus = [gpu for gpu in (*GPUS.values(), *OTHERS) if gpu.arch == cell.gpu]
        return {**found, "seconds": sum(full.ours_time(cell.kernel, case, tile, gpu).seconds for gpu in gpus)}
    return {**found, "seconds": ranked(cell, tile)}


def ranked(cell: Cell, tile: Tile) -> float:
    """The order of tiles without a model: bytes for a product first, then blocks that share an SM, then stages."""
    own, walked = (tile.block_k, tile.block_q) if cell.kernel == "dkv" else (tile.block_q, tile.block_k)
    if cell.mask == "short":  # keys that a window of 128 makes a row of tiles visit
        own = own * 128 / (own + walked + 126)
    fit = min(
        2,
        LISTED[cell.gpu].shared // max(1, shipped.shared(cell.kernel, cell.dim, int(own), walked, tile.stages)),
    )
    alone = 1e-2 * (tile.stages == 1 and not cell.of_amd)  # copies that wait for products: as half a side
    return 1 / own + alone + 1e-3 * (2 - fit) + 2e-4 * (128 / walked) + 1e-5 * abs(tile.stages - 3) + 1e-6 * tile.warps


def _evaluated(job: tuple[Cell, Tile, bool]) -> dict[str, Any]:
    try:
        return evaluate(*job)
    except Exception as error:  # a tile that this Triton cannot compile is no candidate
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


def evaluated(
    jobs: Sequence[tuple[Cell, Tile]], processes: int = 2, whole: bool = True
) -> Iterator[tuple[Cell, Tile, dict[str, Any]]]:
    asked = [(*job, whole) for job in jobs]
    if processes < 2 or len(jobs) < 2:
        yield from ((*job, _evaluated(one)) for job, one in zip(jobs, asked, strict=True))
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for job, found in zip(jobs, pool.map(_evaluated, asked), strict=True):
            yield (*job, found)


def table() -> dict[str, Any]:
    return json.loads(TABLE.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def current(cell: Cell, known: dict[str, Any]) -> Tile:
    return Tile(*known[cell.arch][cell.kernel][cell.mask][str(cell.dim)])


def write(known: dict[str, Any]) -> None:
    """The table, a line for each class of masks."""
    lines = ["{"]
    for a, (arch, kernels) in enumerate(known.items()):
        lines.append(f' "{arch}": {{')
        for k, (kernel, masks) in enumerate(kernels.items()):
            lines.append(f'  "{kernel}": {{')
            rows = [f'   "{mask}": {json.dumps(dims)}' for mask, dims in masks.items()]
            lines += [",\n".join(rows), "  }" + ("," if k + 1 < len(kernels) else "")]
        lines.append(" }" + ("," if a + 1 < len(known) else ""))
    TABLE.write_text("\n".join([*lines, "}"]) + "\n", encoding="utf-8")


def best(here: dict[Tile, dict[str, Any]], there: dict[Tile, dict[str, Any]] | None) -> list[Tile]:
    """Tiles without a spill on both, the least of the worse time first."""
    sides = [here] if there is None else [here, there]
    fine = [t for t in here if all("seconds" in side.get(t, {}) for side in sides)]
    return sorted(fine, key=lambda t: (max(side[t]["seconds"] for side in sides), t))
