"""The gallery shows the whole library, as docs/gallery.py writes it."""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from frisket.dsl.library import library

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "gallery.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def gallery():
    spec = spec_from_file_location("gallery", DOCS / "gallery.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_writes(gallery):
    assert gallery.page() == PAGE


def test_every_entry_has_its_place_and_its_picture(gallery):
    assert re.findall(r"^### `(.*)`$", PAGE, re.M) == [*library(), *gallery.peer_cases.entries()]
    shown = re.findall(r"\]\(gallery/(\w+\.png)\)", PAGE)
    assert sorted(shown) == sorted(p.name for p in (DOCS / "gallery").glob("*"))
    assert len(set(shown)) == len(shown)


def test_pictures_are_small_and_are_pictures(gallery):
    for path in (DOCS / "gallery").glob("*.png"):
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert 300 < len(data) < 24_000, path.name


def test_the_script_draws_them(gallery, tmp_path):
    drawn = {"causal.png", "softcap1.png", "alibi.png"}
    for name, write in gallery.pictures():
        if name in drawn:
            write(tmp_path / name)
    assert {p.name for p in tmp_path.glob("*.png")} == drawn
