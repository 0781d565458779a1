"""Pictures of README and of pages: `python docs/pictures.py` writes docs/plot.png, docs/assets/chart.svg, the five
pictures of docs/block-sparsity.md, and docs/assets/long-run.svg.

Masks are drawn by `Layout.plot`, charts from benchmarks/results.
"""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path
from typing import Any

import frisket as fk
from frisket.runtime.draw.pixels import LIGHT

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "benchmarks" / "results" / "cpu-torch.json"
DOC = [i for i, n in enumerate((150, 210, 60, 92)) for _ in range(n)]  # four documents of 512 tokens
# the five pictures: (mask, tokens, tile)
FIVE = {
    "tokens": ("causal & window(5)", 16, 1),
    "tiles": ("causal & window(40)", 128, 16),
    "partial": ("causal & window(20)", 128, 16),
    "documents": ("causal & same(doc)", 512, 32),
    "smaller": ("causal & same(doc)", 512, 64),
}
# rows of the chart, and its bars: (name in the results, what is written beside the bar, colour)
ROWS = {
    "causal": "causal",
    "causal & window(256)": "causal & window(256)",
    "causal & same(doc), 16 documents": "causal & same(doc), 16 documents",
    "ALiBi, causal": "causal, score mod ALiBi",
}
BARS = (
    ("native", "frisket, C++ kernel", LIGHT.full),
    ("flex", "flex_attention, compiled", LIGHT.partial),
    ("is_causal", "SDPA, is_causal=True", LIGHT.dim),
    ("dense mask", "SDPA, dense mask", LIGHT.dim),
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
    (folder / "assets" / "chart.svg").write_text(chart(), encoding="utf-8")
    (folder / "assets" / "long-run.svg").write_text(long_run(), encoding="utf-8")
    readme = fk.mask("causal & (same(doc) & window(w) | sinks(8))", w=96, doc=DOC)
    readme.layout(512, 512, block=32).plot(folder / "plot.png")
    for name, (text, tokens, tile) in FIVE.items():
        mask(text).layout(tokens, tokens, block=tile).plot(folder / "assets" / f"sparsity-{name}.png", title=text)


def chart() -> str:
    """The chart of README, as SVG: milliseconds of a forward on the CPU, the fastest bar in front."""
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
                f'<rect x="{LEFT}" y="{y}" width="{long:.1f}" height="{BAR - 3}" fill="{colour}"/>',
                text(LEFT + long + 6, y + 12, f"{ms[key]:.0f} ms  {label}", LIGHT.ink),
            ]
            y += BAR
        lines.append(text(LEFT - 10, (top + y) / 2 + 3, shown, LIGHT.ink, 'text-anchor="end"'))
        y += GAP
    torch = machine["torch"].partition("+")[0]
    head = [
        text(16, 26, "Forward attention on a CPU: milliseconds, shorter is better", LIGHT.ink, 'font-size="16"'),
        text(16, 46, f"4,096 tokens, 8 heads of 64, float32; {machine['cores']} cores of an {machine['cpu']}, torch "
             f"{torch}, {machine['date']}", LIGHT.dim),
    ]  # fmt: skip
    body = "\n".join([*head, *lines])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" '
        f'font-family="system-ui, sans-serif" font-size="12.5" role="img">\n'
        f'<rect width="{WIDTH}" height="{y}" fill="{LIGHT.paper}"/>\n{body}\n</svg>\n'
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


def text(x: float, y: float, words: str, colour: str, more: str = "") -> str:
    place = f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" {more}'.rstrip()
    return f"{place}>{re.sub(' {2,}', '&#160;&#160;', escape(words))}</text>"


if __name__ == "__main__":
    draw(HERE)
