"""The gallery shows the whole library, as docs/gallery.py writes it."""

import re

import numpy as np
import pytest
import readme
from support.pages import DOCS, script

import frisket as fk
from frisket.dsl.library import library
from frisket.dsl.program import read

PAGES = {
    str(p.relative_to(DOCS)): p.read_text(encoding="utf-8")
    for p in [DOCS / "gallery.md", *sorted((DOCS / "gallery").glob("*.md"))]
}
TEXT = "\n".join(PAGES.values())


GALLERY = script("gallery")
MASKS = [e for e in GALLERY.everything() if GALLERY.drawn(e) is not None and not GALLERY.is_mod(e)]
COUNTED = {  # signature -> the line that is counted at 4,096 tokens
    signature: line
    for signature, rest in re.findall(r"^### `([^\n]*)`$(.*?)(?=^###|\Z)", TEXT, re.M | re.S)
    for line in re.findall(r"^- (FLOPs: .*)$", rest, re.M)
}


def test_gallery_pages_are_up_to_date(monkeypatch):
    monkeypatch.setattr(GALLERY, "counted", lambda entry: COUNTED[entry.signature])  # the next two look at these
    assert GALLERY.pages() == PAGES


@pytest.mark.parametrize("entry", MASKS[::8], ids=lambda e: e.signature)
def test_saved_tiles_of_selected_masks_are_up_to_date(entry):
    assert GALLERY.counted(entry) == COUNTED[entry.signature]


@pytest.mark.exhaustive
def test_saved_tiles_of_the_library_are_up_to_date():
    assert {e.signature: GALLERY.counted(e) for e in MASKS} == COUNTED


def test_gallery_entries_have_their_place_and_picture():
    assert re.findall(r"^### `(.*)`$", TEXT, re.M) == [e.signature for e in in_order()]
    shown = re.findall(r"^!\[\w+\]\((\w+\.png)\)$", TEXT, re.M)
    assert sorted(shown) == sorted(p.name for p in (DOCS / "gallery").glob("*.png"))
    assert len(set(shown)) == len(shown)
    assert {f"gallery/{name}" for name in shown} == set(re.findall(r"\]\((gallery/\w+\.png)\)", PAGES["gallery.md"]))


def in_order():
    """Entries in the order of the pages' names."""
    everything = GALLERY.everything()
    assert [e.signature for e in everything] == [*library(), *GALLERY.peer_cases.entries()]
    return sorted(everything, key=lambda e: list(PAGES).index(f"gallery/{GALLERY.slug(e.section)}.md"))


def test_gallery_python_makes_the_mask_of_the_picture():
    """The line of Python below a definition makes the mask or score mod of the picture."""
    lines = {e.signature: GALLERY.code(e, GALLERY.drawn(e)) for e in library().values() if GALLERY.drawn(e)}
    for signature, code in lines.items():
        one = GALLERY.drawn(library()[signature])
        made = eval(code[-2], {"fk": fk, **one.params})
        assert made == (one.score if GALLERY.is_mod(library()[signature]) else one.mask), signature
    assert sum(len(readme.blocks("python", DOCS / p)) for p in PAGES) == len(lines)


def test_gallery_code_of_peer_masks_is_a_program():
    for entry in GALLERY.peer_cases.entries().values():
        one, text = GALLERY.drawn(entry), "\n".join(GALLERY.code(entry, GALLERY.drawn(entry))[1:-1])
        params = {n: x for n, x in one.params.items() if isinstance(x, np.ndarray)}
        found = read(text, params={**one.params, **params})
        assert (found.score if GALLERY.is_mod(entry) else found.mask) is not None


def test_pictures_are_small_and_are_pictures():
    for path in (DOCS / "gallery").glob("*.png"):
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert 300 < len(data) < 24_000, path.name


def test_gallery_script_draws_pictures(tmp_path):
    drawn = {"causal.png", "softcap1.png", "alibi.png"}
    for name, write in GALLERY.pictures():
        if name in drawn:
            write(tmp_path / name)
    assert {p.name for p in tmp_path.glob("*.png")} == drawn
