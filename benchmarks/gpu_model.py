"""Predicts how fast our kernels run on a GPU, without one: nothing here is measured but the figures of `measured`.

    python benchmarks/gpu_model.py loops causal 128 forward --tiles "128,64,8,3;64,64,4,3"
    python benchmarks/gpu_model.py sass kernel.cubin --warps 8 --pairs 8192 --flops 512
    python benchmarks/gpu_model.py gluon 192 192/128
    python benchmarks/gpu_model.py gluon 128 --dtype float8_e4m3fn --tokens 0
    python benchmarks/gpu_model.py fused causal 128 --group 4
    python benchmarks/gpu_model.py chunks 0 16 128
    python benchmarks/gpu_model.py measured
    python benchmarks/gpu_model.py figures --python /usr/bin/python3.12
    python benchmarks/gpu_model.py jax
    python benchmarks/gpu_model.py serving
    python benchmarks/gpu_model.py cascade
    python benchmarks/gpu_model.py latent
    python benchmarks/gpu_model.py prefill
    python benchmarks/gpu_model.py schedules
    python benchmarks/gpu_model.py units
    python benchmarks/gpu_model.py tiles --write --python /usr/bin/python3.12
    python benchmarks/gpu_model.py mosaic FOLDER

`loops` compiles one of our kernels ahead of time, with each of the tiles (queries, keys, warps, stages), or with the
tile that frisket chooses, and simulates its loops in their steady state. `sass` does so for a cubin, or for the text of
`nvdisasm -c -hex`. `gluon` compiles Gluon's forward of a causal mask for Hopper, by head sizes, and predicts its rate.
`chunks` does so for parts of prompts over caches in pages of so many tokens (0: in one piece), next to Triton's.
`measured`, `validation`, `figures`, `masks`, `jax`, `serving`, `cascade`, `latent`, `prefill`, `schedules`,
`sensitivity` and `units` write parts of benchmarks/results/gpu-model.json: rates, orders of tiles and steps beside
those of an H100, by the Triton that gpu.json names; flex_attention beside its published figures, our kernels beside
flex_attention's, the instructions of masks, Triton's forward as JAX calls it, steps of serving as shares of the memory
rate, prefixes that sequences share, latents that are keys and values, chunked prefill, what other orders of programs
would save, how much each constant of the model matters, and how busy the Gluon forward keeps the units of a Blackwell
SM. `mosaic` writes a part for the kernels that
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

from gpu_sim import amd, chunks, full, fused, measured, mosaic, report, search, specialised, units
from gpu_sim.compiled import ROOT, Compiled, disassembled, folder, resources, triton_version
from gpu_sim.loops import LoopFigures, figures
from gpu_sim.machine import GPUS, Gpu
from gpu_sim.ours import APART, KERNELS, Ours, Tile, chosen, compiled, compiled_gluon
from gpu_sim.sass import parse
from gpu_sim.search import Cell
from gpu_sim.serving import Step, timed
from store import keep, shown

from frisket.lowering.dtypes import FP8

Found = dict[str, Any]
PARTS = {
    "measured": measured.compared, "validation": report.validation, "figures": report.predicted, "masks": report.masks,
    "jax": report.jax, "serving": report.serving, "cascade": report.cascade, "latent": report.latent,
    "prefill": report.prefill,
    "schedules": report.schedules, "sensitivity": report.sensitivity, "units": units.tiles,
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
    if found.arch in amd.SIMDS:
        print(f"  {1e12 * amd.seconds_of_a_pair(found, pairs):.0f} cycles of a compute unit for 1,000 pairs")
        return
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
                queries, keys, dim = map(int, options.causal.split(","))
                causal(whole, GPUS[options.arch], queries, keys, 4 * dim)
            continue
        report_loops(found, options.blocks or 1, options.pairs, options.flops, options.counts)


def of_gluon(options: argparse.Namespace) -> None:
    """Print the tiles' cycles and the rate of Gluon's forward for Hopper, for each of the head sizes."""
    gpu = GPUS["sm_90"]
    for sizes in options.sizes:
        dim, _, v_dim = sizes.partition("/")
        found, tile = compiled_gluon("causal", "sm_90", int(dim), int(v_dim or dim), options.dtype, options.tokens)
        print(
            f"head size {sizes}, {tile.block_q} x {tile.block_k}, {tile.num_stages} stages, Triton {found.triton}: ",
            end="",
        )
        print(f"{found.registers} registers, {found.stack} bytes spilled, {found.shared} shared")
        whole = specialised.cycles(found.sass, gpu, tile.num_stages, found.tma_bytes)
        print(f"  {whole.border:.0f} cycles a partial tile, {whole.full:.0f} a full one, {whole.fixed:.0f} fixed")
        causal(whole, gpu, tile.block_q, tile.block_k, 2 * (int(dim) + int(v_dim or dim)), options.dtype == FP8)


def of_chunks(options: argparse.Namespace) -> None:
    """Print the rates of parts of prompts over a cache of 32,768 tokens, by Gluon's and by Triton's forward."""
    for page in options.pages:
        for queries, batch in ((512, 1), (512, 8), (1024, 1), (2048, 1), (2048, 8)):
            step = Step(queries, (32_768,) * batch, "", page)
            ours, theirs = chunks.rate(step), timed(step).rate
            print(
                f"pages of {page}, {queries} queries of {batch} sequences: Gluon {ours:.0f}, Triton {theirs:.0f} "
                f"TFLOP/s of visible pairs, {ours / theirs:.2f} times"
            )


def causal(
    whole: specialised.Cycles, gpu: Gpu, queries: int, keys: int, flops: int, eight: bool = False
) -> None:  # fmt: skip
    """Print the rate of a warp-specialised forward with such tiles: causal, 8k, 16 heads; `flops` are those of a
    pair. Those of numbers of `eight` bits take the matrix unit half as long."""
    work = full.ours_work("forward", "causal", 8192, Tile(queries, keys, 4, 3))
    seconds, share = specialised.share(whole, work, 16, gpu, queries * keys, flops / (2 if eight else 1))
    rate = flops * full.Case().pairs / seconds / 1e12
    print(f"  causal, 8k, 16 heads: {share:.1%} of the matrix unit's peak, {rate:.0f} TFLOP/s of visible pairs")


def fused_backward(options: argparse.Namespace) -> None:
    """Print the time of the fused backward, and that of Triton's pair over it: 16 heads, bfloat16."""
    case = full.Case(options.mask, options.dim, options.length, group=options.group)
    made, tile = fused.compiled(case), fused.queries_of(options.dim)
    found = fused.cycles(made.sass, GPUS["sm_90"], made.stages, fused.Bytes.of(tile, options.dim))
    print(f"Triton {triton_version()}, {tile} queries x {fused.KEYS} keys: {made.stack} spilled, {made.shared} shared")
    print(f"  {found.border:.0f} cycles a partial tile, {found.full:.0f} a full one, {found.fixed:.0f} fixed")
    took, ratio = fused.fused_seconds(case), fused.ratio(case)
    rate = fused.FLOPS * case.dim * case.pairs / took / 1e12
    print(f"  {took * 1e3:.3f} ms, {rate:.0f} TFLOP/s of visible pairs; speed-up over the pair {ratio:.2f}")


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
            known[cell.arch][cell.kernel][cell.mask][str(cell.dim)] = list(astuple(next(iter(times)))[:5])
            search.write(known)


def of_modelled(cell: Cell, found: list[Tile], options: argparse.Namespace) -> dict[Tile, float]:
    """Tiles without a spill and their worse microseconds, best first."""

    def here(some: Iterable[Tile], whole: bool = False) -> dict[Tile, Found]:  # with this interpreter's Triton
        jobs = [(cell, tile) for tile in dict.fromkeys(some)]
        return {tile: x for _, tile, x in search.evaluated(jobs, options.jobs, whole)}

    def fastest() -> list[Tile]:  # that spill nothing in any form: those are compiled for the fastest alone
        fine: list[Tile] = []
        for tile in search.best(first, None):
            own.update({} if tile in own else here([tile], whole=True))
            fine += [tile] * ("seconds" in own[tile])
            if len(fine) == search.BEST:
                break
        return fine

    first, own = here(found), here(found[:1], whole=True)
    first |= here(t for one in fastest() for t in search.staged(cell, one) if t not in first)
    fastest()
    sides = [own]
    if options.python:
        few = dict.fromkeys([found[0], *fastest()])
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
    of_heads = commands.add_parser("gluon", help="compile Gluon's forward for Hopper, and predict its rate")
    of_heads.add_argument("sizes", nargs="+", help="of heads: 192, or 192/128 with values of 128")
    of_heads.add_argument("--dtype", default="bfloat16", help=f"of q, k and v: bfloat16, float16 or {FP8}")
    of_heads.add_argument("--tokens", type=int, default=128, help="that share a scale of 8 bits; 0: those of a head")
    of_heads.set_defaults(run=of_gluon)
    fusing = commands.add_parser("fused", help="the fused Gluon backward beside Triton's pair of kernels")
    fusing.add_argument("mask", help="a name in gpu_sim.ours.MASKS, or a mask's text")
    fusing.add_argument("dim", type=int)
    fusing.add_argument("--group", type=int, default=1, help="query heads of a key head")
    fusing.add_argument("--length", type=int, default=8192)
    fusing.set_defaults(run=fused_backward)
    of_parts = commands.add_parser("chunks", help="predict Gluon's forward of chunked prefill")
    of_parts.add_argument("pages", nargs="+", type=int, help="tokens of a page, 0: no pages")
    of_parts.set_defaults(run=of_chunks)
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
