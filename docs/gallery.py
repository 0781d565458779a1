"""The gallery of the library: `python docs/gallery.py` writes docs/gallery.md and its pictures, docs/gallery/*.png.

Text comes from dsl/library.frisket and docs/peers.frisket, what is drawn from benchmarks/cases.py and peer_cases.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import groupby
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

import cases  # noqa: E402
import peer_cases  # noqa: E402

import frisket as fk  # noqa: E402
from frisket.dsl.evaluate import evaluate  # noqa: E402
from frisket.dsl.ir import uses  # noqa: E402
from frisket.dsl.library import Entry  # noqa: E402
from frisket.lowering.dense import coordinates  # noqa: E402
from frisket.runtime.draw.palette import LIGHT  # noqa: E402

LENGTH, TILE = 64, 8
LONGER = {  # pictures that need more tokens than 64: (tokens, tile)
    "svg_spatial(p, t, w)": (640, 64),
    "svg_spatial_sink(p, t, w)": (640, 64),
    "svg_temporal(p, t, frames, w)": (160, 16),
}
CURVES = {"softcap(c)": 150.0, "softcap_fraction(c)": 150.0}  # scores drawn, where more than 4
TALL = 3  # curves are drawn up to this many times the largest score
INTRO = """\
# The library, in pictures

Every entry of [the library](../dsl/library.frisket): a sentence, a formula, where it comes from, its text in
[the language](language.md), and what it looks like on a few tokens. `frisket.library()` gives the same in Python.
The last two parts are no library entries but [a collection](peers.frisket) of what the test suites of PyTorch and
FlashAttention try. Written by `python docs/gallery.py`.

Queries run down and keys to the right, in tiles. Dark orange is visible; light orange is hidden in a tile that a
kernel reads and masks; dark blue tiles are visible whole and read without a mask; grey tiles are never read. Where
batch entries or heads differ, each has its own square. Score mods that know positions are drawn as what becomes of a
score of 1 in head 0 (orange more, violet less, white 1, grey hidden); the others as a curve, one line for each head.
"""


def page() -> str:
    parts = [INTRO]
    for section, entries in groupby(everything(), key=lambda e: e.section):
        parts.append(f"## {section}\n")
        parts += [shown(entry) for entry in entries]
    return "\n".join(parts)


def everything() -> list[Entry]:
    return [*fk.library().values(), *peer_cases.entries().values()]


def shown(entry: Entry) -> str:
    lines = [f"### `{entry.signature}`", ""]
    if (one := drawn(entry)) is not None:
        lines += [f"![{entry.name}](gallery/{file(entry)})", ""]
    lines += [entry.sentence, "", f"- {entry.formula}", f"- {entry.source}"]
    if one is not None:
        sizes = "" if is_mod(entry) else f" on {one.q_len} queries, {one.kv_len} keys"
        lines.append(f"- drawn: `{one.text.splitlines()[-1]}`{sizes}")
    return "\n".join([*lines, "", "```frisket", entry.text, "```", ""])


def is_mod(entry: Entry) -> bool:
    return entry.signature in _cases(LENGTH)[1]


def drawn(entry: Entry) -> cases.Case | None:
    """The case whose picture stands for an entry; definitions that are for use in others have none."""
    masks, mods = _cases(LONGER.get(entry.signature, (LENGTH, TILE))[0])
    return {**masks, **mods}.get(entry.signature)


@cache
def _cases(length: int) -> tuple[dict[str, cases.Case], dict[str, cases.Case]]:
    return (
        {**cases.masks(length), **peer_cases.masks(length)},
        {**cases.mods(length), **peer_cases.mods(length // 2)},
    )


def file(entry: Entry) -> str:
    return f"{entry.name}{len(entry.params) or ''}.png"


def pictures() -> Iterator[tuple[str, Callable[[Path], None]]]:
    """(file name, what writes it to a path)."""
    for entry in everything():
        one = drawn(entry)
        if one is not None:
            yield file(entry), partial(mod_picture if is_mod(entry) else mask_picture, entry.signature, one)


def mask_picture(signature: str, one: cases.Case, path: Path) -> None:
    tile = LONGER.get(signature, (LENGTH, TILE))[1]
    one.mask.layout(**one.lengths, block=tile).plot(path, compact=True, size=1.4)


def mod_picture(signature: str, one: cases.Case, path: Path) -> None:
    """Score mods of positions as a map of what becomes of a score of 1, others as curves."""
    from matplotlib.figure import Figure

    mod = one.score
    figure = Figure((1.4, 1.4), dpi=150)
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.96))
    if uses(mod.expr) & {"q", "k"}:
        env = {**coordinates(1, one.heads, one.q_len, one.kv_len), **mod.scalars, "score": 1.0}
        value = np.broadcast_to(evaluate(mod.expr, env, mod.tables), (1, one.heads, one.q_len, one.kv_len))[0, 0]
        change = np.ma.masked_invalid(value - 1)
        reach = np.abs(change).max() or 1.0
        axes.imshow(change, cmap="PuOr_r", vmin=-reach, vmax=reach, interpolation="none")
        axes.set_facecolor("0.85")
    else:
        x = np.linspace(-1, 1, 200) * CURVES.get(signature, 4.0)
        axes.axhline(0, color="0.8", linewidth=0.6)
        axes.axvline(0, color="0.8", linewidth=0.6)
        for h, colour in enumerate((LIGHT.full, LIGHT.partial, LIGHT.dim, LIGHT.ink)):
            env = {**coordinates(1, one.heads, one.q_len, one.kv_len), **mod.scalars, "b": 0, "h": h, "score": x}
            y = np.broadcast_to(evaluate(mod.expr, env, mod.tables), x.shape)
            axes.plot(x, np.clip(y, -TALL * x[-1], TALL * x[-1]), color=colour, linewidth=1.2)
    axes.set_xticks([])
    axes.set_yticks([])
    figure.savefig(path, metadata={"Software": None})


def main() -> None:
    folder = HERE / "gallery"
    folder.mkdir(exist_ok=True)
    names = set()
    for name, write in pictures():
        write(folder / name)
        names.add(name)
    for stray in folder.glob("*.png"):
        if stray.name not in names:
            stray.unlink()
    (HERE / "gallery.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
