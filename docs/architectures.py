"""The table of NVIDIA's GPUs in docs/triton.md: `python docs/architectures.py` writes it between its two comments.

Figures are those of benchmarks/results/compiled, of a causal mask in 16 bits.
"""

from __future__ import annotations

import re
from pathlib import Path

from frisket.lowering.architectures import GPUS, MEASURED, WRITTEN

DOCS = Path(__file__).parent
PAGE = DOCS / "triton.md"
RESULTS = DOCS.parent / "benchmarks" / "results" / "compiled"
VERSIONS = ("3.6", "3.9")
BEGIN, END = "<!-- architectures, written by docs/architectures.py -->", "<!-- end of architectures -->"
KERNELS = ("forward", "dq", "dkv", "dv", "decode")
HEAD = ("GPU", "head size", *KERNELS, "limit", "spills, Triton 3.6", "3.9", "checked")
Figures = dict[tuple[str, int, str], tuple[int, ...]]  # by GPU, head size and kernel
LINE = re.compile(
    r"(sm_\d+) +D (\d+) +causal +(forward|dq|dkv|dv|decode) +(\d+) x (\d+) +(\d+) warps (\d+) stages +\d+ registers +"
    r"(\d+) spilled +(\d+) shared"
)


def figures(version: str) -> Figures:
    """(queries, keys, warps, stages, spills, shared memory) of every kernel."""
    text = "".join((RESULTS / f"{n}triton-{version}.txt").read_text(encoding="utf-8") for n in ("", "gpus-"))
    return {(arch, int(dim), kernel): tuple(map(int, numbers)) for arch, dim, kernel, *numbers in LINE.findall(text)}


def rows() -> list[tuple[str, ...]]:
    """A row for each GPU and head size, in the order of GPUS: tiles and memory by the newest Triton."""
    old, new = map(figures, VERSIONS)
    return [row(*x, old, new) for x in sorted({x[:2] for x in new}, key=lambda x: (list(GPUS).index(x[0]), x[1]))]


def row(arch: str, dim: int, old: Figures, new: Figures) -> tuple[str, ...]:
    gpu, written = GPUS[arch], ", Gluon forward" if arch in WRITTEN else ""
    tiles = [tile(new[arch, dim, n]) if (arch, dim, n) in new else "" for n in KERNELS]
    spills = [spilled({n: x[arch, dim, n][4] for n in KERNELS if (arch, dim, n) in x}) for x in (old, new)]
    name = f"{arch}: {', '.join(gpu.kinds)}"
    checked = f"measured on an {', '.join(MEASURED[arch])}" if arch in MEASURED else "compiles"
    return name, str(dim), *tiles, f"{gpu.shared:,}", *spills, checked + written


def tile(figures: tuple[int, ...]) -> str:
    block_q, block_k, warps, stages, _, shared = figures
    return f"{block_q} x {block_k}, {warps}, {stages}: {shared:,}"


def spilled(spills: dict[str, int]) -> str:
    """The kernels that spill, "–" where none was compiled."""
    return ", ".join(f"`{n}` {x}" for n, x in spills.items() if x) or "0" if spills else "–"


def table() -> str:
    lines = [f"| {' | '.join(HEAD)} |", "|" + " --- |" * len(HEAD)]
    return "\n".join([*lines, *(f"| {' | '.join(x)} |" for x in rows())])


def page() -> str:
    """The page with the table as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN, 1)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
