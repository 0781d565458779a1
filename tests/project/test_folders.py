"""Folders that one can read: twenty modules at most, and no second file for one prefix but where a list says why.
Golden files are under the path of their test."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST = 20
# (folder, prefix): files that serve one framework or language each, or one family of rules
FAMILIES = {
    ("lowering/simplify", "rules"),
    ("runtime/caches", "jax"),
    ("runtime/caches", "torch"),
    ("runtime/integrations", "transformers"),
    ("runtime/integrations", "vllm"),
}
SOURCES = ("grammar", "dsl", "lowering", "runtime")


def modules(root, rooms):
    """Folder -> stems of its modules, `__init__.py` left out."""
    found = {}
    for path in (p for room in rooms for p in (root / room).rglob("*.py")):
        if path.stem != "__init__":
            found.setdefault(path.parent.relative_to(root).as_posix(), []).append(path.stem)
    return found


def crowded(folders):
    return {folder: len(stems) for folder, stems in folders.items() if len(stems) > MOST}


def shared_prefixes(folders):
    counts = {(f, prefix): n for f, stems in folders.items() for prefix, n in Counter(map(prefix_of, stems)).items()}
    return {key for key, n in counts.items() if n > 1}


def prefix_of(stem):
    return stem.partition("_")[0]


@pytest.mark.parametrize("room", [*SOURCES, "tests"])
def test_a_folder_has_twenty_modules(room):
    assert not crowded(modules(ROOT, [room]))


def test_files_of_one_prefix_are_a_family():
    assert shared_prefixes(modules(ROOT, SOURCES)) == FAMILIES


def test_files_that_prose_names_are_there():
    named = re.compile(r"`((?:grammar|dsl|lowering|runtime|tests|docs)/[\w/]+\.\w+)`")
    texts = [p for room in (*SOURCES, "docs") for p in (ROOT / room).rglob("*") if p.suffix in (".py", ".md", ".hpp")]
    found = {(p.name, name) for p in texts for name in named.findall(p.read_text(encoding="utf-8"))}
    assert len(found) > 300
    assert not [one for one in found if not (ROOT / one[1]).exists()]


def homeless_goldens(tests):
    """The folders of golden files that are not the path of a test, without its suffix."""
    folders = {path.parent.relative_to(tests / "golden") for path in (tests / "golden").rglob("*") if path.is_file()}
    return {folder.as_posix() for folder in folders if not (tests / folder).with_suffix(".py").is_file()}


def test_goldens_are_under_the_path_of_their_test():
    assert not homeless_goldens(ROOT / "tests")


def test_a_golden_without_its_test_is_seen(tmp_path):
    for name in ("golden/dsl/test_x/a.txt", "golden/dsl/test_y/a.txt", "golden/a.txt", "dsl/test_x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert homeless_goldens(tmp_path) == {"dsl/test_y", "."}


def test_a_bad_folder_is_seen(tmp_path):
    (tmp_path / "dsl" / "deep").mkdir(parents=True)
    for name in ("one.py", "one_more.py", "two.py", "__init__.py", *(f"deep/m{i}.py" for i in range(MOST + 1))):
        (tmp_path / "dsl" / name).touch()
    found = modules(tmp_path, ["dsl"])
    assert crowded(found) == {"dsl/deep": MOST + 1}
    assert shared_prefixes(found) == {("dsl", "one")}
