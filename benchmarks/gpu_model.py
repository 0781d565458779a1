"""Predicts how fast our kernels run on a GPU, without one: nothing here is measured but the figures of `measured`.

    python benchmarks/gpu_model.py loops causal 128 forward --tiles "128,64,8,3;64,64,4,3"
    python benchmarks/gpu_model.py sass kernel.cubin --warps 8 --pairs 8192 --flops 512
    python benchmarks/gpu_model.py measured
    python benchmarks/gpu_model.py figures --python /usr/bin/python3.12
    python benchmarks/gpu_model.py jax
    python benchmarks/gpu_model.py serving
    python benchmarks/gpu_model.py prefill
    python benchmarks/gpu_model.py schedules
    python benchmarks/gpu_model.py units
    python benchmarks/gpu_model.py tiles --write --python /usr/bin/python3.12
    python benchmarks/gpu_model.py mosaic FOLDER

`loops` compiles one of our kernels ahead of time, with each of the tiles (queries, keys, warps, stages), or with the
tile that frisket chooses, and simulates its loops in their steady state. `sass` does so for a cubin, or for the text of
`nvdisasm -c -hex`. `measured`, `validation`, `figures`, `masks`, `jax`, `serving`, `prefill`, `schedules`,
`sensitivity` and `units` write parts of benchmarks/results/gpu-model.json: rates, orders of tiles and steps beside
those of an H100, by the Triton that gpu.json names; flex_attention beside its published figures, our kernels beside
flex_attention's, the instructions of masks, Triton's forward as JAX calls it, steps of serving as shares of the memory
rate, chunked prefill, what other orders of programs would save, how much each constant of the model matters, and how
busy the Gluon forward keeps the units of a Blackwell SM. `mosaic` writes a part for the kernels that
`tests/compiled/pallas_gpu.py --keep=FOLDER` compiled.
`tiles` searches the default tiles, with both Tritons, and writes the table that launches read. `--python` names another
interpreter, which has another Triton and needs no frisket: results are kept by the Triton that compiled the kernels.
The docstring of `gpu_sim/full.py` says how the model works, that of `gpu_sim/simulate.py` what it leaves out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from gpu_sim import full, measured, mosaic, report, search, specialised, units
from gpu_sim.compiled import ROOT, Compiled, disassembled, folder, resources, triton_version
from gpu_sim.loops import LoopFigures, figures
from gpu_sim.machine import GPUS, Gpu
from gpu_sim.ours import APART, KERNELS, Ours, Tile, chosen, compiled
from gpu_sim.sass import parse
from gpu_sim.search import Cell
from store import keep, shown

Found = dict[str, Any]
PARTS = {
    "measured": measured.compared, "validation": report.validation, "figures": report.predicted, "masks": report.masks,
    "jax": report.jax, "serving": report.serving, "prefill": report.prefill, "schedules": report.schedules,
    "sensitivity": report.sensitivity, "units": units.tiles,
}  # fmt: skip


def loops(options: argparse.Namespace) -> None:
    """Print the loops of one of our kernels, for each tile."""
    ours = Ours(options.kernel, options.mask, options.dim, options.dtype, options.group, options.arch)
    tiles = [Tile.read(x) for x in options.tiles.split(";")] if options.tiles else [chosen(ours)]
    print(f"Triton {triton_version()}, {ours}")
    for tile in tiles:
        found = compiled(ours, tile)
        print(f"{tile}: {found.registers} registers, {found.stack} bytes spilled, {found.shared} shared")
        report_loops(found, options.blocks, tile.block_q * tile.block_k, ours.flops, options.counts)


def report_loops(found: Compiled, blocks: int, pairs: int, flops: float, counts: bool) -> None:
    """Print a line and the longest waits of each loop with products, and its instructions by class where asked."""
    gpu = GPUS.get(found.arch)
    if gpu is None:
        print(f"  the model knows {', '.join(GPUS)}, not {found.arch}")
        return
    for x in figures(found, gpu, blocks):
        print("  " + line(x, gpu, pairs, flops, found.warps))
        waits = ", ".join(f"{n} {c:.0f}" for n, c in list(x.waits.items())[:7])
        print(f"      waits: {waits}")
        if counts:
            print("      " + ", ".join(f"{n} {c}" for n, c in x.counts.items()))


def line(x: LoopFigures, gpu: Gpu, pairs: int, flops: float, warps: int) -> str:
    """A loop's figures; those of an element only where the tile's `pairs` are known, a rate where their `flops` are."""
    text = f"loop at {x.start}: {x.instructions} instructions, {x.blocks} blocks, {x.cycles:.0f} cycles (products"
    text += f" {x.matrix:.0f}, issue {x.issue:.0f}), {x.bytes * x.blocks / x.cycles:.1f} bytes a cycle"
    if pairs:
        text += f", {x.an_element(pairs, warps):.2f} instructions an element"
    return text + (f", {x.rate(gpu, pairs, flops):.0f} TFLOP/s" if pairs and flops else "")


def of_file(options: argparse.Namespace) -> None:
    """Print the loops of a cubin's kernels, or the tiles' cycles where warp groups have programs of their own."""
    path, shared = Path(options.file), options.shared
    registers, stack = resources(path) if path.suffix == ".cubin" else (options.registers, 0)
    text = disassembled(path) if path.suffix == ".cubin" else path.read_text()
    for kernel in parse(text):
        found = Compiled(
            kernel.name, options.arch, "", options.warps, registers, stack, shared, options.tma_bytes, text
        )  # fmt: skip
        print(f"{kernel.name}: {registers} registers, {stack} bytes spilled")
        if any(p.copies for p in specialised.programs(kernel)):
            whole = specialised.cycles(kernel, GPUS[options.arch], options.stages, options.tma_bytes)
            print(f"  {whole.border:.0f} cycles a partial tile, {whole.full:.0f} a full one, {whole.fixed:.0f} fixed")
            if options.causal:
                causal(whole, GPUS[options.arch], *map(int, options.causal.split(",")))
            continue
        report_loops(found, options.blocks or 1, options.pairs, options.flops, options.counts)


def causal(whole: specialised.Cycles, gpu: Gpu, queries: int, keys: int, dim: int) -> None:
    """Print the rate of a warp-specialised forward with such tiles: causal, 8k, 16 heads."""
    work = full.ours_work("forward", "causal", 8192, Tile(queries, keys, 4, 3))
    seconds, share = specialised.share(whole, work, 16, gpu, queries * keys, 4 * dim)
    rate = 4 * dim * full.Case(dim=dim).pairs / seconds / 1e12
    print(f"  causal, 8k, 16 heads: {share:.1%} of the matrix unit's peak, {rate:.0f} TFLOP/s of visible pairs")


def parts(options: argparse.Namespace) -> None:
    """One part of the results, in this interpreter or another."""
    if options.python:
        folder = [str(Path(options.folder).resolve())] if options.part == "mosaic" else []
        elsewhere(options.python, options.part, *folder)
        return
    rows = {}
    found = mosaic.predicted(Path(options.folder)) if options.part == "mosaic" else PARTS[options.part]()
    for name, row in found:
        rows[name] = row
        print(shown(name, row), flush=True)
    version = ".".join(triton_version().split(".")[:2])
    gpu = "B200" if options.part == "units" else GPUS["sm_90"].name
    settings = {"triton": triton_version(), "gpu": gpu, "dtype": "bfloat16", "rounds": 1}
    keep("gpu-model", f"{options.part}, Triton {version}", rows, settings)


def elsewhere(python: str, *argv: str) -> None:
    """This program in another interpreter, which finds frisket by links to the folders of this checkout."""
    top = folder() / "packages" / "frisket"
    mapping = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    top.mkdir(parents=True, exist_ok=True)
    links = {top / f.name: f for f in (ROOT / mapping["frisket"]).iterdir() if f.name != "__pycache__"}
    links |= {top / name.partition(".")[2]: ROOT / place for name, place in mapping.items() if "." in name}
    for link, place in links.items():
        if not link.is_symlink():
            link.symlink_to(place)
    paths = {**os.environ, "PYTHONPATH": str(top.parent)}
    subprocess.run([python, str(Path(__file__).resolve()), *argv], env=paths, cwd=top.parent, check=True)


def evaluate(options: argparse.Namespace) -> None:
    """The other Triton's half of a search: jobs from a file, answers to another."""
    jobs = [(Cell(*cell), Tile(*tile)) for cell, tile in json.loads(Path(options.jobs_file).read_text())]
    answers = [(vars(cell), astuple(tile), found) for cell, tile, found in search.evaluated(jobs, options.jobs)]
    Path(options.answers_file).write_text(json.dumps(answers))


def evaluated_by(python: str, jobs: list[tuple[Cell, Tile]], processes: int) -> Iterator[tuple[Cell, Tile, Found]]:
    """The jobs of a search with the Triton of another interpreter."""
    with tempfile.TemporaryDirectory() as place:
        to, back = Path(place) / "jobs.json", Path(place) / "answers.json"
        to.write_text(json.dumps([(astuple(cell), astuple(tile)) for cell, tile in jobs]))
        elsewhere(python, "evaluate", str(to), str(back), "--jobs", str(processes))
        for cell, tile, found in json.loads(back.read_text()):
            yield Cell(**cell), Tile(*tile), found


def tiles(options: argparse.Namespace) -> None:
    """Search the cells that are asked for, print the best tiles of each, and with --write make the best the default,
    but of cells whose tiles were measured."""
    known = search.table()
    asked = [x.split(",") for x in (options.arch, options.kernels, options.classes)]
    for cell in search.cells(*asked, [int(x) for x in options.dims.split(",")]):
        now = search.current(cell, known)
        if options.write and cell in search.MEASURED:
            print(f"{cell}: {now} stays, by measurement", flush=True)
            continue
        long = search.current(replace(cell, mask="long"), known)
        found = [*search.candidates(cell, long)]
        times = of_modelled(cell, [now, *found], options) if cell.modelled else of_ranked(cell, found, options)
        if not times:
            print(f"{cell}: nothing compiles without a spill; {now} stays", flush=True)
            continue
        first = ", ".join(f"{t} {x:.4g}" for t, x in [*times.items()][:3])
        print(f"{cell}: {first}; until now {now} {times.get(now, math.inf):.4g}", flush=True)
        if options.write:
            known[cell.arch][cell.kernel][cell.mask][str(cell.dim)] = list(astuple(next(iter(times))))
            search.write(known)


def of_modelled(cell: Cell, found: list[Tile], options: argparse.Namespace) -> dict[Tile, float]:
    """Tiles without a spill and their worse microseconds, best first."""

    def here(some: Iterable[Tile]) -> dict[Tile, Found]:  # with this interpreter's Triton
        jobs = [(cell, tile) for tile in dict.fromkeys(some)]
        return {tile: x for _, tile, x in search.evaluated(jobs, options.jobs)}

    own = here(found)
    own |= here(t for one in search.best(own, None)[: search.BEST] for t in search.staged(cell, one) if t not in own)
    sides = [own]
    if options.python:
        few = dict.fromkeys([found[0], *search.best(own, None)[: search.BEST]])
        sides.append({t: x for _, t, x in evaluated_by(options.python, [(cell, t) for t in few], options.jobs)})
    return {t: 1e6 * max(side[t]["seconds"] for side in sides) for t in search.best(*sides, *[None] * (2 - len(sides)))}


def of_ranked(cell: Cell, found: list[Tile], options: argparse.Namespace) -> dict[Tile, float]:
    """The first tile that spills nothing, with its order."""
    for tile in found:
        sides = [x for _, _, x in search.evaluated([(cell, tile)], 1)]
        if "seconds" in sides[0] and options.python:
            sides += [x for _, _, x in evaluated_by(options.python, [(cell, tile)], 1)]
        if all("seconds" in x for x in sides):
            return {tile: sides[0]["seconds"]}
    return {}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("loops", help="the steady loops of one of our kernels")
    one.add_argument("mask", help="a name in gpu_sim.ours.MASKS, or a mask's text")
    one.add_argument("dim", type=int)
    one.add_argument("kernel", choices=(*KERNELS, *APART))
    one.add_argument("--tiles", help="queries,keys,warps,stages;…")
    one.add_argument("--dtype", default="bfloat16")
    one.add_argument("--group", type=int, default=1, help="query heads of a key head")
    one.set_defaults(run=loops)
    other = commands.add_parser("sass", help="the loops of a cubin, or of a disassembler's text")
    other.add_argument("file")
    other.add_argument("--warps", type=int, required=True)
    other.add_argument("--pairs", type=int, default=0, help="of queries and keys of a tile")
    other.add_argument("--flops", type=float, default=0, help="of a pair")
    other.add_argument("--shared", type=int, default=0, help="bytes of shared memory of a block")
    other.add_argument("--registers", type=int, default=255, help="of a thread, where the file does not say so")
    other.add_argument("--stages", type=int, default=3, help="of copies, where a warp of its own makes them")
    other.add_argument("--causal", help="queries,keys,head size: and what such a forward makes of a causal mask")
    other.add_argument("--tma-bytes", type=float, default=0, help="of one TMA copy")
    other.set_defaults(run=of_file)
    for name in (*PARTS, "mosaic"):
        part = commands.add_parser(name, help=f"write the {name} of the results")
        if name == "mosaic":
            part.add_argument("folder", help="of kernels that were kept")
        part.add_argument("--python", help="another interpreter")
        part.set_defaults(run=parts, part=name)
    table_of = commands.add_parser("tiles", help="search the table of default tiles")
    table_of.add_argument("--arch", default=",".join(search.ARCHITECTURES))
    table_of.add_argument("--kernels", default=",".join(KERNELS))
    table_of.add_argument("--classes", default=",".join(search.CLASSES))
    table_of.add_argument("--dims", default=",".join(map(str, search.DIMS)))
    table_of.add_argument("--python", help="another interpreter, whose Triton has to agree")
    table_of.add_argument("--jobs", type=int, default=2, help="processes that compile")
    table_of.add_argument("--write", action="store_true", help="into runtime/backends/triton/tiles.json")
    table_of.set_defaults(run=tiles)
    half = commands.add_parser("evaluate")
    half.add_argument("jobs_file")
    half.add_argument("answers_file")
    half.add_argument("--jobs", type=int, default=2)
    half.set_defaults(run=evaluate)
    for x in (one, other):
        x.add_argument("--arch", default="sm_90")
        x.add_argument("--blocks", type=int, default=0, help="that share an SM; 0: as many as fit")
        x.add_argument("--counts", action="store_true", help="instructions by class, too")
    options = parser.parse_args(argv)
    options.run(options)


if __name__ == "__main__":
    main()
