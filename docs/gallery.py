"""The gallery of the library: `python docs/gallery.py` writes docs/gallery.md, and for each part of the library a page
and its pictures in docs/gallery/. Those of tests/peers/peers.frisket are in tests/peers/.

What is drawn and counted is from benchmarks/cases.py and peer_cases.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

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
from frisket.lowering.plan import Problem  # noqa: E402
from frisket.runtime.draw.pixels import LIGHT  # noqa: E402

ROOT = HERE.parent
OURS, PEERS = "docs/gallery", "tests/peers"  # folders of pages and pictures
LENGTH, TILE = 64, 8
LONGER = {  # pictures that need more tokens than 64: (tokens, tile)
    "svg_spatial(p, t, w)": (640, 64),
    "svg_spatial_sink(p, t, w)": (640, 64),
    "svg_temporal(p, t, frames, w)": (160, 16),
}
CURVES = {
    "softcap(c)": 150.0,
    "softcap_fraction(c)": 150.0,
    "sigmoid_attention(bias)": 10.0,
}  # scores drawn, where more than 4
TALL = 3  # curves are drawn up to this many times the largest score
COUNTED = 4096  # tokens, at which tiles are counted
INTRO = """\
# The library, in pictures

For readers who look for a mask, score mod or weight that has a name already. Each entry has a sentence, a formula, its
source, and its text in [the language](language.md). A picture on a few tokens shows it, with the share of dense
attention that is left to compute. The text is
[dsl/library.frisket](../dsl/library.frisket); `frisket.library()` gives it in Python, and
`frisket library NAME` on the command line. Masks and score mods of the test
suites of PyTorch and FlashAttention are in a separate [collection](../tests/peers/from-test-suites-masks.md).

Queries run down and keys to the right, in tiles. Dark orange is visible. Light orange is hidden in a tile that a
kernel reads and masks. Dark blue tiles are visible whole and read without a mask. Grey tiles are never read. Where
batch entries or heads differ, each has its own square. Score mods that know positions show what becomes of a
score of 1 in head 0 (orange more, violet less, white 1, grey hidden). The others are a curve, one line for each head.
[Weights in place of the softmax](weights.md) are drawn in the same way, those of positions under a causal mask.
"""
HEAD = """\
# {section}

A part of [the library]({gallery}), which says how to read the pictures.
"""


def pages() -> dict[str, str]:
    """Path -> text: the overview, a page for each part of the library, and the pages of its peers."""
    overview, parts = [INTRO], {}
    for section, group in groupby(everything(), key=lambda e: e.section):
        entries, name = list(group), slug(section)
        own = entries[0].signature in fk.library()
        head = HEAD.format(section=section, gallery="../gallery.md" if own else "../../docs/gallery.md")
        parts[f"{OURS if own else PEERS}/{name}.md"] = "\n".join([head, *map(shown, entries)])
        if own:
            thumbnails = " ".join(thumbnail(e, f"gallery/{name}.md") for e in entries)
            overview += [f"## [{section}](gallery/{name}.md)\n", thumbnails + "\n"]
    return {"docs/gallery.md": "\n".join(overview), **parts}


def everything() -> list[Entry]:
    return [*fk.library().values(), *peer_cases.entries().values()]


def slug(heading: str) -> str:
    """The anchor that GitHub and mkdocs give a heading."""
    return re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-")


def thumbnail(entry: Entry, place: str) -> str:
    picture = "" if drawn(entry) is None else f"![{entry.signature}](gallery/{file(entry)})<br>"
    return f"[{picture}{entry.name}]({place}#{slug(entry.signature)})"


def shown(entry: Entry) -> str:
    lines = [f"### `{entry.signature}`", ""]
    if (one := drawn(entry)) is not None:
        lines += [f"![{entry.name}]({file(entry)})", ""]
    lines += [entry.sentence, "", f"- Formula: {entry.formula}", f"- From: {entry.source}"]
    if one is not None and kind_of(entry) == "mask":
        lines += [f"- Drawn: {one.q_len} queries, {one.kv_len} keys", f"- {counted(entry)}"]
    return "\n".join([*lines, "", *code(entry, one), ""])


def code(entry: Entry, one: cases.Case | None) -> list[str]:
    """The definition, and how what is drawn is written: in Python, or beside a definition that has no name there."""
    text = entry.text
    if one is None:
        return ["```frisket", text, "```"]
    if entry.signature not in fk.library():
        return ["```frisket", text, "", f"{kind_of(entry)} = {one.text.splitlines()[-1]}", "```"]
    values = "".join(f", {n}={n if isinstance(x, np.ndarray) else repr(x)}" for n, x in one.params.items())
    kinds = "; ".join(f"{n}: {type_of(x)}" for n, x in one.params.items() if isinstance(x, np.ndarray))
    divide = f', divide="{one.divide}"' if one.divide else ""
    call = f'fk.{kind_of(entry)}("{one.text}"{divide}{values})'
    return ["```frisket", text, "```", "", "```python", *([f"# {kinds}"] if kinds else []), call, "```"]


def type_of(x: np.ndarray) -> str:
    name = {"b": "bool", "i": "int", "u": "int", "f": "float"}[x.dtype.kind]
    return f"{name}[{', '.join(map(str, x.shape))}]"


@cache
def counted(entry: Entry) -> str:
    """What is left of dense attention at COUNTED tokens, by its layout in tiles of 128."""
    one = masks(COUNTED)[entry.signature]
    layout = one.mask.layout(**one.lengths)
    pairs = one.batch * one.heads * one.q_len * one.kv_len
    seen, read = (f"{100 * share:.3g} %" for share in (layout.visible_pairs / pairs, layout.density))
    saved = f"{1 / layout.density:.3g} times fewer FLOPs than dense attention" if layout.density < 1 else "none saved"
    return (
        f"FLOPs: of {one.q_len:,} × {one.kv_len:,} pairs `{one.text.splitlines()[-1]}` shows {seen}; {read} are in "
        f"tiles that are computed, {saved}"
    )


def kind_of(entry: Entry) -> str:
    """The part of a program that an entry is: "mask", "score" or "weight"."""
    if entry.signature in cases.weights(LENGTH):
        return "weight"
    return "score" if entry.signature in mods(LENGTH) else "mask"


def drawn(entry: Entry) -> cases.Case | None:
    """The case whose picture stands for an entry; definitions that are for use in others have none."""
    length = LONGER.get(entry.signature, (LENGTH, TILE))[0]
    return {**masks(length), **mods(length), **cases.weights(length)}.get(entry.signature)


@cache
def masks(length: int) -> dict[str, cases.Case]:
    return {**cases.masks(length), **peer_cases.masks(length)}


@cache
def mods(length: int) -> dict[str, cases.Case]:
    return {**cases.mods(length), **peer_cases.mods(length // 2)}


def file(entry: Entry) -> str:
    return f"{entry.name}{len(entry.params) or ''}.png"


def pictures() -> Iterator[tuple[str, Callable[[Path], None]]]:
    """(path of a file, what writes it to a path)."""
    for entry in everything():
        one = drawn(entry)
        if one is not None:
            folder = OURS if entry.signature in fk.library() else PEERS
            draw = mask_picture if kind_of(entry) == "mask" else mod_picture
            yield f"{folder}/{file(entry)}", partial(draw, entry.signature, one)


def mask_picture(signature: str, one: cases.Case, path: Path) -> None:
    tile = LONGER.get(signature, (LENGTH, TILE))[1]
    one.mask.layout(**one.lengths, block=tile).plot(path, compact=True, size=1.4)


def mod_picture(signature: str, one: cases.Case, path: Path) -> None:
    """Score mods and weights of positions as a map of what becomes of a score of 1, others as curves. Weights are drawn
    where keys are not ahead, as decays are meant."""
    from matplotlib.figure import Figure

    weight = signature in cases.weights(LENGTH)
    mod: Any = one.program.weight if weight else one.score
    figure = Figure((1.4, 1.4), dpi=150)
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.96))
    if uses(mod.expr) & {"q", "k"}:
        env = {**coordinates(Problem(one.q_len, one.kv_len, 1, one.heads)), **mod.scalars, "score": 1.0}
        value = np.broadcast_to(evaluate(mod.expr, env, mod.tables), (1, one.heads, one.q_len, one.kv_len))
        change = np.ma.masked_invalid(np.where(weight & (env["k"] > env["q"]), np.nan, value - 1)[0, 0])
        reach = np.abs(change).max() or 1.0
        axes.imshow(change, cmap="PuOr_r", vmin=-reach, vmax=reach, interpolation="none")
        axes.set_facecolor("0.85")
    else:
        x = np.linspace(-1, 1, 200) * CURVES.get(signature, 4.0)
        axes.axhline(0, color="0.8", linewidth=0.6)
        axes.axvline(0, color="0.8", linewidth=0.6)
        for h, colour in enumerate((LIGHT.full, LIGHT.partial, LIGHT.dim, LIGHT.ink)):
            env = {
                **coordinates(Problem(one.q_len, one.kv_len, 1, one.heads)),
                **mod.scalars,
                "b": 0,
                "h": h,
                "score": x,
            }
            y = np.broadcast_to(evaluate(mod.expr, env, mod.tables), x.shape)
            low, high = -TALL * x[-1], TALL * x[-1]
            y = np.ma.masked_outside(y, low, high) if weight else np.clip(y, low, high)  # no weight looks bounded
            axes.plot(x, y, color=colour, linewidth=1.2)
    axes.set_xticks([])
    axes.set_yticks([])
    figure.savefig(path, metadata={"Software": None})


def main() -> None:
    texts = pages()
    kept = {ROOT / name for name in texts} | {ROOT / PEERS / "peers.frisket"}
    for name, text in texts.items():
        (ROOT / name).write_text(text, encoding="utf-8")
    for name, write in pictures():
        write(ROOT / name)
        kept.add(ROOT / name)
    for folder in (OURS, PEERS):
        for stray in set((ROOT / folder).iterdir()) - kept:
            stray.unlink()


if __name__ == "__main__":
    main()
