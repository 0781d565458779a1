"""Pictures of README and of pages: `python docs/pictures.py` writes them into docs/assets.

README has masks.svg, h100.svg and chart.svg, each with a dark one (masks-dark.svg), and badges. Pages have
long-run.svg, the five pictures of docs/block-sparsity.md and the two of docs/select.md. Charts are drawn from
benchmarks/results, badges from pyproject.toml and tests/versions.json.
"""

from __future__ import annotations

import json
import re
import tomllib
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import frisket as fk
from frisket.runtime.draw.pixels import DARK, LIGHT, Palette, of_tokens

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "benchmarks" / "results" / "cpu-torch.json"
H100 = RESULTS.with_name("gpu.json")
THEMES = {"": LIGHT, "-dark": DARK}  # the end of a file's name -> its colours
DOC = [i for i, n in enumerate((150, 210, 60, 92)) for _ in range(n)]  # four documents of 512 tokens
# the five pictures: (mask, tokens, tile)
FIVE = {
    "tokens": ("causal & window(5)", 16, 1),
    "tiles": ("causal & window(40)", 128, 16),
    "partial": ("causal & window(20)", 128, 16),
    "documents": ("causal & same(doc)", 512, 32),
    "smaller": ("causal & same(doc)", 512, 64),
}
# masks of the first picture, each the lines of its title
MASKS = (
    ("causal & window(96)",),
    ("causal & same(doc)",),
    ("causal & (same(doc) & window(96)", "          | sinks(8))"),
)
# rows of the chart of an H100; its bars (name in the results, label, colour of the palette); the columns of bars
ROWS_H100 = {
    "causal": "causal",
    "full": "no mask",
    "window 1024": "causal & window(1024)",
    "12 documents": "causal & same(doc)",
    "softcap, causal": "causal, softcap(50)",
}
BARS_H100 = (
    ("frisket", "frisket", "full"),
    ("flex", "flex_attention, compiled", "partial"),
    ("SDPA cudnn", "cuDNN, by SDPA: causal and no mask alone", "dim"),
)
COLUMNS = (("forward", 190), ("backward", 500))
# rows of the chart of CPUs, and its bars: (name in the results, what is written beside the bar, colour)
ROWS = {
    "causal": "causal",
    "causal & window(256)": "causal & window(256)",
    "causal & same(doc), 16 documents": "causal & same(doc), 16 documents",
    "ALiBi, causal": "causal, score mod ALiBi",
}
BARS = (
    ("native", "frisket, C++ kernel", "full"),
    ("flex", "flex_attention, compiled", "partial"),
    ("is_causal", "SDPA, is_causal=True", "dim"),
    ("dense mask", "SDPA, dense mask", "dim"),
)
# runs of benchmarks/long_run.py, and what is written beside their lines
LINES = {
    "frisket": "frisket and eager",
    "third": "eager, first a third of the keys, and eager",
    "fifth": "eager, first a fifth of the keys, and eager",
    "threads": "eager on two threads and on one",
}
COLOURS = (LIGHT.full, LIGHT.partial, LIGHT.dim, LIGHT.ink)
WIDTH, LEFT, BAR, GAP = 800, 260, 18, 16


def mask(text: str) -> fk.Mask:
    return fk.mask(text, doc=DOC) if "doc" in text else fk.mask(text)


def draw(folder: Path) -> None:
    """Write every picture under `folder`, which stands for docs/."""
    (folder / "assets").mkdir(parents=True, exist_ok=True)
    for name, svg in drawn().items():
        (folder / "assets" / name).write_text(svg, encoding="utf-8")
    (folder / "assets" / "long-run.svg").write_text(long_run(), encoding="utf-8")
    for name, (text, tokens, tile) in FIVE.items():
        mask(text).layout(tokens, tokens, block=tile).plot(folder / "assets" / f"sparsity-{name}.png", title=text)


def drawn() -> dict[str, str]:
    """The pictures of README, by the names of their files."""
    pictures = {"masks": masks, "h100": h100, "chart": chart}
    themed = {f"{name}{end}.svg": draw(c) for name, draw in pictures.items() for end, c in THEMES.items()}
    return themed | {f"badge-{name.lower()}.svg": badge(name, words) for name, words in badges().items()}


def badges() -> dict[str, str]:
    """The badges of README: what is supported, and what the tests ran with."""
    root = HERE.parent
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    environments = json.loads((root / "tests/versions.json").read_text(encoding="utf-8")).values()

    def tested(package: str) -> str:
        versions = {x["versions"][package] for x in environments if package in x["versions"]}
        ends = [f"{major}.{minor}" for major, minor in sorted(tuple(map(int, v.split(".")[:2])) for v in versions)]
        return f"{ends[0]} to {ends[-1]}"

    pythons = [c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r"Python :: 3\.\d+$", c)]
    return {
        "Python": f"{pythons[0]} to {pythons[-1]}",
        "torch": tested("torch"),
        "JAX": tested("jax"),
        "Licence": project["license"],
    }


def badge(name: str, words: str) -> str:
    """A name and a value in two colours, as SVG. `textLength` makes the text as wide as its box in any font."""
    left, right = 12 + 6.5 * len(name), 12 + 6.5 * len(words)
    wide = left + right
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} 20" width="{wide:g}" height="20" role="img" '
        f'aria-label="{name}: {words}" font-family="system-ui, sans-serif" font-size="11" fill="#ffffff">\n'
        f'<rect width="{wide:g}" height="20" rx="3" fill="#57606a"/>\n'
        f'<path d="M{left:g} 0h{right - 3:g}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3h-{right - 3:g}z" fill="{LIGHT.full}"/>\n'
        f'<text x="6" y="14" textLength="{left - 12:g}">{name}</text>\n'
        f'<text x="{left + 6:g}" y="14" textLength="{right - 12:g}">{words}</text>\n</svg>\n'
    )


def draw_choices(folder: Path) -> None:
    """Write the two pictures of docs/select.md under `folder`."""
    import torch

    from frisket import select

    rng = np.random.default_rng(3)
    topics = rng.normal(size=(8, 16))[np.repeat(rng.integers(0, 8, 16), 16)]  # one of eight for 16 tokens
    x = torch.from_numpy((topics + 0.4 * rng.normal(size=topics.shape))[None, None])
    map = select.blocks(x, x, 16, keep=4, always="sinks(1) | window(16)")
    vertical, slash = select.vertical_slash(x, x, 20, 24, sinks=4, window=8, last=64)
    lines = fk.mask("causal & (vertical[b, h, k] | slash[b, h, q - k])", vertical=vertical, slash=slash)
    for name, drawn in (("blocks", fk.mask("causal & topk_tiles(map, 16)", map=map)), ("slash", lines)):
        drawn.layout(256, 256, block=16).plot(folder / "assets" / f"select-{name}.png")


def masks(palette: Palette) -> str:
    """Three masks of 512 tokens, side by side, as SVG: the tiles, and the inside of partial ones."""
    side, top, cell = 240, 46, 4
    lines = []
    for i, title in enumerate(MASKS):
        left = 16 + i * 264
        layout = mask("".join(title)).layout(512, 512, block=32)
        colours = of_tokens(layout, palette, step=cell).colours
        counts = layout.counts
        read = (counts.full + counts.partial) / (counts.full + counts.partial + counts.empty)
        for line, words in enumerate(title):
            y = top - 10 - 16 * (len(title) - 1 - line)
            lines.append(text(left, y, words, palette.ink, 'font-family="monospace" font-size="12"', exact=True))
        lines.append(text(left, top + side + 18, f"{read:.0%} of the tiles are read", palette.dim))
        lines.append(f'<g transform="translate({left} {top}) scale({side / len(colours):g})">')
        lines += painted(colours)
        lines.append("</g>")
        steps = [top + side * n / 16 for n in range(1, 16)], [left + side * n / 16 for n in range(1, 16)]
        grid = [f"M{left} {y:g}h{side}" for y in steps[0]] + [f"M{x:g} {top}v{side}" for x in steps[1]]
        lines.append(f'<path d="{"".join(grid)}" stroke="{palette.dim}" stroke-opacity=".3" stroke-width=".6"/>')
    y = top + side + 44
    for x, colour, words in (
        (16, palette.full, "full tile: runs without the mask"),
        (250, palette.partial, "partial tile: applies the mask;"),
        (462, palette.tint, "hidden there"),
        (584, palette.empty, "empty tile: never read"),
    ):
        lines += [square(x, y - 10, colour, palette), text(x + 17, y, words, palette.ink)]
    return svg(y + 10, lines, palette)


def painted(colours: np.ndarray[Any, Any]) -> list[str]:
    """A path for each colour, of the rectangles with equal cells; a rectangle is as high as its rows are equal."""
    paths: dict[str, list[str]] = {}
    open_: dict[tuple[int, int, str], int] = {}  # (left, right, colour) -> the first row
    for y, row in enumerate([*colours, None]):
        runs = set()
        if row is not None:
            ends = [0, *(np.flatnonzero((row[1:] != row[:-1]).any(1)) + 1).tolist(), len(row)]
            runs = {(a, b, "#" + bytes(row[a]).hex()) for a, b in pairwise(ends)}
        for a, b, colour in sorted(open_.keys() - runs):
            first = open_.pop((a, b, colour))
            paths.setdefault(colour, []).append(f"M{a} {first}h{b - a}v{y - first}h{a - b}z")
        open_ |= dict.fromkeys(runs - open_.keys(), y)
    return [f'<path fill="{colour}" d="{"".join(d)}"/>' for colour, d in sorted(paths.items())]


def h100(palette: Palette) -> str:
    """The chart of an H100, as SVG: TFLOP/s of both directions."""
    part: Any = json.loads(H100.read_text(encoding="utf-8"))["parts"]["speed"]
    machine, most = part["machine"], 700.0
    lines, y, x, large = [], 112, 16.0, 'font-size="14"'
    for _, label, colour in BARS_H100:
        lines += [square(x, 60, getattr(palette, colour), palette), text(x + 17, 70, label, palette.ink, large)]
        x += 40 + 7.2 * len(label)
    lines += [text(left, 98, way, palette.ink, large) for way, left in COLUMNS]
    for name, shown in ROWS_H100.items():
        high = 0
        for way, left in COLUMNS:
            rates = part["rows"][f"{way}: {name}, D 128"]["rows"]["8192"]["figures"]["tflops"]
            bars = [(rates[key], colour) for key, _, colour in BARS_H100 if key in rates]
            high = max(high, len(bars) * BAR)
            for n, (rate, colour) in enumerate(bars):
                long = 240 * rate / most
                place = f'x="{left}" y="{y + n * BAR}" width="{long:.1f}" height="{BAR - 3}"'
                lines += [
                    f'<rect {place} fill="{getattr(palette, colour)}"/>',
                    text(left + long + 6, y + n * BAR + 12, f"{rate:.0f}", palette.ink, large),
                ]
        lines.append(text(COLUMNS[0][1] - 10, y + high / 2 + 3, shown, palette.ink, large + ' text-anchor="end"'))
        y += high + GAP - 4
    gpu = re.sub(r"NVIDIA | \d+GB.*", "", machine["gpu"])
    head = [
        text(16, 26, f"Attention on an {gpu}: TFLOP/s, longer is better", palette.ink, 'font-size="16"'),
        text(16, 46, f"8,192 tokens, batch 4, 16 heads of 128, {part['settings']['dtype']}; torch {machine['torch']}, "
             f"Triton {machine['triton']}, {machine['date']}; visible pairs alone count as work", palette.dim),
    ]  # fmt: skip
    return svg(y, head + lines, palette)


def chart(palette: Palette) -> str:
    """The chart of CPUs in README, as SVG: milliseconds of a forward on the CPU, the fastest bar in front."""
    part: Any = json.loads(RESULTS.read_text(encoding="utf-8"))["parts"]["forward"]
    machine, most = part["machine"], 300.0
    lines, y = [], 66
    for name, shown in ROWS.items():
        ms = part["rows"][name]["figures"]["ms"]
        top = y
        for key, label, colour in BARS:
            if key not in ms or (key == "dense mask" and "is_causal" in ms):
                continue
            long = (WIDTH - LEFT - 210) * ms[key] / most
            lines += [
                f'<rect x="{LEFT}" y="{y}" width="{long:.1f}" height="{BAR - 3}" fill="{getattr(palette, colour)}"/>',
                text(LEFT + long + 6, y + 12, f"{ms[key]:.0f} ms  {label}", palette.ink),
            ]
            y += BAR
        lines.append(text(LEFT - 10, (top + y) / 2 + 3, shown, palette.ink, 'text-anchor="end"'))
        y += GAP
    torch = machine["torch"].partition("+")[0]
    head = [
        text(16, 26, "Forward attention on a CPU: milliseconds, shorter is better", palette.ink, 'font-size="16"'),
        text(16, 46, f"4,096 tokens, 8 heads of 64, float32; {machine['cores']} cores of an {machine['cpu']}, torch "
             f"{torch}, {machine['date']}", palette.dim),
    ]  # fmt: skip
    return svg(y, head + lines, palette)


def svg(height: int, lines: list[str], palette: Palette) -> str:
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12.5" role="img">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="{palette.paper}"/>\n{body}\n</svg>\n'
    )


def long_run() -> str:
    """How far apart runs of training are, as SVG: the distance of weights over the steps."""
    from io import StringIO

    import matplotlib as mpl
    from matplotlib.figure import Figure

    parts = json.loads((RESULTS.parent / "long-run.json").read_text(encoding="utf-8"))["parts"]
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams |= {"svg.hashsalt": "frisket", "svg.fonttype": "none", "font.family": "sans-serif"}
        figure = Figure((8, 3.4))
        for axes, (framework, part) in zip(figure.subplots(1, 2, sharey=True), parts.items(), strict=True):
            for (run, shown), colour, mark in zip(
                LINES.items(), (LIGHT.full, LIGHT.partial, LIGHT.dim, LIGHT.ink), "os^v"
            ):
                distance = part["rows"][f"{framework}, {run}"]["figures"]["distance"]
                drawn = [(int(step), x) for step, x in distance.items() if x]
                label = shown if drawn else f"{shown}: equal bits"
                axes.loglog(*zip(*drawn) if drawn else ([], []), marker=mark, color=colour, label=label)
            axes.set_title({"torch": "torch", "jax": "JAX"}[framework], color=LIGHT.ink, loc="left")
            axes.set_xlabel("steps of training", color=LIGHT.dim)
            axes.grid(True, color=LIGHT.dim, alpha=0.25, linewidth=0.6)
        lines, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(lines, labels, frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=2)
        figure.axes[0].set_ylabel("distance of weights", color=LIGHT.dim)
        figure.set_facecolor(LIGHT.paper)
        out = StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    return out.getvalue()


def square(x: float, y: float, colour: str, palette: Palette) -> str:
    line = f'stroke="{palette.dim}" stroke-width=".5"'
    return f'<rect x="{x:.1f}" y="{y}" width="11" height="11" fill="{colour}" {line}/>'


def text(x: float, y: float, words: str, colour: str, more: str = "", exact: bool = False) -> str:
    """A line of text; several spaces in it are as wide as two, or exactly as many."""
    place = f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" {more}'.rstrip()
    spaces = (lambda m: "&#160;" * len(m[0])) if exact else "&#160;&#160;"
    return f"{place}>{re.sub(' {2,}', spaces, escape(words))}</text>"


if __name__ == "__main__":
    draw(HERE)
    draw_choices(HERE)
