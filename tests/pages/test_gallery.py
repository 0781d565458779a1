"""The gallery shows the whole library, as docs/gallery.py writes it."""

import re

import numpy as np
import pytest
import readme
from support.pages import DOCS, script

import frisket as fk
from frisket.dsl.library import library
from frisket.dsl.program import read

GALLERY = script("gallery")
FOLDERS = [GALLERY.ROOT / name for name in (GALLERY.OURS, GALLERY.PEERS)]
PAGES = {
    p.relative_to(GALLERY.ROOT).as_posix(): p.read_text(encoding="utf-8")
    for p in [DOCS / "gallery.md", *(p for folder in FOLDERS for p in sorted(folder.glob("*.md")))]
}
TEXT = "\n".join(PAGES.values())
PICTURES = [p for folder in FOLDERS for p in folder.glob("*.png")]
MASKS = [e for e in GALLERY.everything() if GALLERY.drawn(e) is not None and GALLERY.kind_of(e) == "mask"]
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
    assert sorted(shown) == sorted(p.name for p in PICTURES)
    assert len(set(shown)) == len(shown)
    ours = {f"gallery/{p.name}" for p in PICTURES if p.parent == FOLDERS[0]}
    assert ours == set(re.findall(r"\]\((gallery/\w+\.png)\)", PAGES["docs/gallery.md"]))


def in_order():
    """Entries in the order of the pages' names."""
    everything = GALLERY.everything()
    assert [e.signature for e in everything] == [*library(), *GALLERY.peer_cases.entries()]
    places = [p.rpartition("/")[2] for p in PAGES]
    return sorted(everything, key=lambda e: places.index(f"{GALLERY.slug(e.section)}.md"))


def test_gallery_python_makes_the_mask_of_the_picture():
    """The line of Python below a definition makes the mask or score mod of the picture."""
    lines = {e.signature: GALLERY.code(e, GALLERY.drawn(e)) for e in library().values() if GALLERY.drawn(e)}
    for signature, code in lines.items():
        one = GALLERY.drawn(library()[signature])
        made = eval(code[-2], {"fk": fk, **one.params})
        kind = GALLERY.kind_of(library()[signature])
        want = one.program if kind == "weight" else getattr(one, kind)
        assert made == want, signature
    assert sum(len(readme.blocks("python", GALLERY.ROOT / p)) for p in PAGES) == len(lines)


def test_gallery_code_of_peer_masks_is_a_program():
    for entry in GALLERY.peer_cases.entries().values():
        one, text = GALLERY.drawn(entry), "\n".join(GALLERY.code(entry, GALLERY.drawn(entry))[1:-1])
        params = {n: x for n, x in one.params.items() if isinstance(x, np.ndarray)}
        found = read(text, params={**one.params, **params})
        assert getattr(found, GALLERY.kind_of(entry)) is not None


def test_pictures_are_small_and_are_pictures():
    for path in PICTURES:
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert 300 < len(data) < 24_000, path.name


def test_gallery_script_draws_pictures(tmp_path):
    drawn = {f"docs/gallery/{name}.png" for name in ("causal", "softcap1", "alibi")}
    (tmp_path / "docs" / "gallery").mkdir(parents=True)
    for name, write in GALLERY.pictures():
        if name in drawn:
            write(tmp_path / name)
    assert {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.png")} == drawn
