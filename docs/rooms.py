"""Draws the rooms of the source and the road of a call: `python docs/rooms.py` writes docs/assets/rooms.svg from the
imports, and docs/assets/road.svg from the steps of docs/architecture.md.

A box is a folder with the folders below it. An arrow says that modules of one import modules of the other; an arrow is
left out where a path of others goes the same way. Red arrows go up, against the order of the rooms.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import house  # noqa: E402

FILE, ROAD = HERE / "assets" / "rooms.svg", HERE / "assets" / "road.svg"
STEPS = re.compile(r"^\| (\d+) \| \*\*(.*?)\*\* .* \| `(.*?)` \|$", re.M)  # number, name, file
# from the users' side down: the rooms of a row, and what they hold
ROWS = [
    [("cli", "the command"), ("integrations", "transformers, flax")],
    [("facade", "public names"), ("bench", "benchmarks")],
    [("operations", "attention by name"), ("explore", "masks in a browser")],
    [("modeling", "attention in models"), ("select", "blocks by scores")],
    [("flex", "torch's API"), ("caches", "KV caches"), ("parallel", "context parallelism")],
    [("attention", "options, checks, report")],
    [("torch", "operator, autograd"), ("jax", "operator, vmap")],
    [("backends", "one record a backend"), ("sharding", "over a mesh")],
    [("plans", "host and device plans")],
    [("calls", "arrays, options, program")],
    [("masks", "mask and layout")],
    [("draw", "pictures"), ("export", "to other formats")],
    [("machine", "settings, parameters, builds")],
    [("aten", "calls of torch"), ("xla", "calls of JAX")],
    [("planner", "layouts on devices")],
    [("orders", "of tokens, by a mask")],
    [("kernels", "text, a folder a target"), ("engines", "masks as their flags")],
    [("analysis", "tiles, counts, facts")],
    [("lowering", "plan, pipeline, derivatives")],
    [("simplify", "rules to one form")],
    [("from_torch", "mask_mod"), ("from_jax", "jaxpr")],
    [("from_python", "lambdas")],
    [("dsl", "Expr, text, types, reference")],
    [("grammar", "LALR tables, memo")],
]
BANDS = [("runtime", 0, 13), ("lowering", 13, 20), ("dsl", 20, 23), ("grammar", 23, 24)]
WIDTH, STEP, BOX, LEFT = 1040, 66, 40, 92
COLOURS = {"runtime": "#e8f0fb", "lowering": "#eaf6ec", "dsl": "#fdf4e3", "grammar": "#f3ecf8"}
CSS = """
text { font: 13px system-ui, sans-serif; fill: #1c2733 } .words { font-size: 10.5px; fill: #5b6875 }
.band { font-size: 15px; font-weight: 600; fill: #5b6875 } rect.room { fill: #fff; stroke: #5b6875 }
path { fill: none; stroke: #54738f; opacity: .75 } path.up { stroke: #c0392b; stroke-dasharray: 5 3; opacity: .9 }
"""

Edge = tuple[str, str]


def room(file: str) -> str:
    """The room of a file: the first two folders, and the first alone for what lies in it."""
    folders = file.split("/")[:-1][:2]
    return folders[-1]


def imports(tree: house.Tree) -> Counter[Edge]:
    """How many imports lead from one room to another."""
    pairs = ((room(tree.modules[x.source]), room(tree.modules[x.target])) for x in tree.imports)
    return Counter((a, b) for a, b in pairs if a != b and "runtime" not in (a, b))


def rows() -> dict[str, int]:
    return {name: i for i, names in enumerate(ROWS) for name, _ in names}


def arrows(edges: Counter[Edge]) -> tuple[list[Edge], list[Edge]]:
    """The arrows down that no path of others replaces, and the arrows up or across."""
    at = rows()
    down = {(a, b) for a, b in edges if at[a] < at[b]}
    below = {a: {b for x, b in down if x == a} for a in at}
    needed = [(a, b) for a, b in down if not any(b in house.reached(below, c) for c in below[a] - {b})]
    return sorted(needed), sorted(set(edges) - down)


def boxes() -> dict[str, tuple[float, float, float]]:
    """Left, top and width of each box."""
    made = {}
    for i, names in enumerate(ROWS):
        wide = min(200.0, (WIDTH - LEFT - 40) / len(names) - 30)
        gap = (WIDTH - LEFT - 20 - wide * len(names)) / (len(names) + 1)
        for j, (name, _) in enumerate(names):
            made[name] = (LEFT + gap + j * (wide + gap), 16 + i * STEP, wide)
    return made


def path(edge: Edge, count: int, at: dict[str, tuple[float, float, float]], kind: str) -> str:
    """One arrow, as wide as its imports are many: up to 4, up to 16, more."""
    (x, y, w), (u, v, s) = at[edge[0]], at[edge[1]]
    shift = max(-0.35, min(0.35, (u + s / 2 - x - w / 2) / WIDTH))  # arrows of one box leave side by side
    a, b = x + w * (0.5 + shift), u + s * (0.5 - shift)
    if y == v:
        side = 1 if x < u else -1
        start, end = (x + (w if side > 0 else 0), y + BOX / 2), (u + (0 if side > 0 else s), y + BOX / 2)
        bend = f"C {start[0] + 20 * side:.0f} {y + BOX / 2:.0f} {end[0] - 20 * side:.0f} {y + BOX / 2:.0f}"
    else:
        start, end = ((a, y + BOX), (b, v)) if y < v else ((a, y), (b, v + BOX))
        middle = (v - y) / 2 if y < v else (y - v) / 2 * -1
        bend = f"C {a:.0f} {start[1] + middle * 0.8:.0f} {b:.0f} {end[1] - middle * 0.8:.0f}"
    stroke = 1.0 if count <= 4 else 2.0 if count <= 16 else 3.2
    head = "up" if kind == "up" else "down"
    return (
        f'<path class="{kind}" stroke-width="{stroke}" marker-end="url(#{head})" '
        f'd="M {start[0]:.0f} {start[1]:.0f} {bend} {end[0]:.0f} {end[1]:.0f}">'
        f"<title>{edge[0]} imports {edge[1]}</title></path>"
    )


def svg(edges: Counter[Edge]) -> str:
    at = boxes()
    down, up = arrows(edges)
    height = 16 + len(ROWS) * STEP
    heads = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'markerUnits="userSpaceOnUse" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" style="fill:{colour};stroke:none"/></marker>'
        for name, colour in (("down", "#54738f"), ("up", "#c0392b"))
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>The rooms of the source, and who imports whom</title>",
        f"<style>{CSS}</style><defs>{heads}</defs>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for name, first, last in BANDS:
        top, tall = 6 + first * STEP, (last - first) * STEP - 10
        lines.append(f'<rect x="4" y="{top}" width="{WIDTH - 8}" height="{tall}" rx="8" fill="{COLOURS[name]}"/>')
        lines.append(f'<text class="band" x="14" y="{top + 22}">{name}/</text>')
    lines += [path(edge, edges[edge], at, "down") for edge in down]
    lines += [path(edge, edges[edge], at, "up") for edge in up]
    for name, words in (pair for names in ROWS for pair in names):
        x, y, wide = at[name]
        lines.append(f'<rect class="room" x="{x:.0f}" y="{y}" width="{wide:.0f}" height="{BOX}" rx="5"/>')
        lines.append(f'<text x="{x + wide / 2:.0f}" y="{y + 18}" text-anchor="middle">{name}</text>')
        lines.append(
            f'<text class="words" x="{x + wide / 2:.0f}" y="{y + 33}" text-anchor="middle">{escape(words)}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def road(page: str) -> str:
    """The steps of a first call, five in a row, and the way of later calls, which know all steps between."""
    steps, across, wide, tall = STEPS.findall(page), 5, 200, 96
    known, last = (next(i for i, (_, name, _) in enumerate(steps) if name == x) for x in ("key", "launch"))
    at = [(14 + i % across * (wide + 6), 14 + i // across * tall) for i in range(len(steps))]
    width, height = 22 + across * (wide + 6), 14 + -(-len(steps) // across) * tall
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<title>The steps of a first call; a later call goes from its key to the launch</title>",
        f"<style>{CSS} .number {{ font-weight: 600 }} rect.later {{ stroke: #c0392b; stroke-width: 2 }}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for (x, y), (number, name, file) in zip(at, steps, strict=True):
        i, colour = int(number) - 1, COLOURS[file.split("/")[0]]
        kind = "later" if i in (known, last) else "step"
        folder, _, module = file.rpartition("/")
        lines += [
            f'<rect class="room {kind}" x="{x}" y="{y}" width="{wide - 18}" height="68" rx="5" style="fill:{colour}"/>',
            f'<text class="number" x="{x + 10}" y="{y + 20}">{number} {escape(name)}</text>',
            f'<text class="words" x="{x + 10}" y="{y + 40}">{folder}/</text>',
            f'<text class="words" x="{x + 10}" y="{y + 56}">{module}</text>',
        ]
        if i + 1 < len(steps) and (i + 1) % across:
            lines.append(f'<path d="M {x + wide - 18} {y + 34} h 22" stroke-width="2"/>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    FILE.write_text(svg(imports(house.Tree(house.ROOT))), encoding="utf-8")
    ROAD.write_text(road(house.PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
