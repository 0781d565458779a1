"""The order of the source tree: docs/house.py measures it, and no figure grows."""

import re

import pytest
from support.pages import DOCS, script, sources

from frisket.runtime.machine.cpp_build import reason

HOUSE = script("house")
# the most that each row may say: the goal where it is reached, else what the tree has reached
LIMITS = {
    "flat": (0, 6, 0),
    "folder": (20,),
    "cycles": (1,),
    "local": (32, 1),
    "backends": (0, 0),
    "memo": (0, 0, 2, 2),
    "grown": (7,),
    # which functions ask a CPU what it can differs by a few from machine to machine
    "hops": (28, 18),
    "entered": (90, 16),
    "objects": (7,),
    "caches": (2,),
    "modules": (263, 144),
    "imports": (61, 69),
    "fillers": (0, 0, 0, 0),
    "comments": (19,),
    "parameters": (11,),
    "skips": (34,),
    "strings": (21,),
    "code": (45_687, 26_496),
    "classes": (2,),
    "docstrings": (0,),
    "tour": (0, 0),
    "warm": (7, 6),
}


@pytest.fixture(scope="module")
def tree():
    return sources()


@pytest.mark.parametrize("name", [n for n in HOUSE.ROWS if n not in HOUSE.CALLED])
def test_house_figures_stay_within_their_limits(tree, name):
    count = HOUSE.ROWS[name].count(tree)
    over = [(n, limit) for n, limit in zip(count.figures, LIMITS[name], strict=False) if n > limit]
    assert not over, f"python docs/house.py --list {name}\n" + "\n".join(count.found)


FILES = {
    "runtime/__init__.py": "",
    "runtime/one.py": '''"""What it does."""
from functools import cache, lru_cache
from typing import TYPE_CHECKING
from collections import OrderedDict
from frisket.lowering.two import Step as S
if TYPE_CHECKING:
    from frisket.lowering import three
kept = OrderedDict()
BACKENDS = ("cpp", "triton")
class Step:
    """In-place work."""
class KVCache: pass
@cache
def f(backend):
    """…and more."""
    return backend == "triton"
g = lru_cache(maxsize=3)(f)
def h(x):
    key = id(x), 1
''',
    "runtime/backends/cpp.py": 'class KVCache: pass\nnames = ["cpp", "triton"]\nname == "cpp"\n',
    "lowering/two.py": '''"""Steps of a walk."""
class Step: pass
def f():
    """The same of a step."""
    from frisket.runtime.one import f
    from . import three
''',
    "lowering/three.py": """from importlib import import_module
def many(a, b, c, d, e, f, g, h): return import_module("x")  # fmt: skip
# one of two
""",
    "docs/tour.md": "- `a` — what a is\n- `b` — those of `a`\n- `c` — a thing\nmore\n",
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    root = tmp_path_factory.mktemp("small")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return HOUSE.Tree(root)


@pytest.mark.parametrize(
    ("name", "figures", "found"),
    [
        ("flat", (1, 2, 0), "runtime/one.py"),
        ("folder", (2,), "lowering 2"),
        ("cycles", (1,), "2: frisket.lowering.two frisket.runtime.one"),
        ("local", (2, 1), "lowering/two.py:5 frisket.runtime.one closes a cycle"),
        ("backends", (1, 1), "runtime/one.py:16 backend == 'triton'"),
        ("memo", (1, 1, 1, 1), "runtime/one.py:19 key = (id(x), 1)"),
        ("classes", (1,), "Step: lowering/two.py:2 runtime/one.py:10"),
        ("docstrings", (3, 5), "lowering/two.py:3 f: The same of a step."),
        ("tour", (1, 2, 3), "those of `a`"),
        ("code", (17, 14), "runtime/one.py 11"),
        ("modules", (4, 2), "lowering/two.py"),
        ("imports", (258, 227), "lowering/two.py 2 of 6"),
        ("fillers", (0, 0, 0, 45), "runtime/one.py:8 kept"),
        ("comments", (31,), "lowering/three.py:3 # one of two"),
        ("parameters", (250,), "lowering/three.py:2 many 8"),
        ("skips", (1,), 'lowering/three.py:2 def many(a, b, c, d, e, f, g, h): return import_module("x")  # fmt: skip'),
        (
            "strings",
            (1,),
            'lowering/three.py:2 def many(a, b, c, d, e, f, g, h): return import_module("x")  # fmt: skip',
        ),
    ],
)
def test_house_row_counts_the_listed_findings(small, name, figures, found):
    count = HOUSE.ROWS[name].count(small)
    assert count.figures == figures
    assert found in count.found


@pytest.mark.skipif(bool(reason()), reason="no C++ compiler, so no call of a native kernel")
def test_figures_and_files_of_a_first_and_a_warm_call(tree):
    """In one process: its figures are within their limits, its lists name functions and tables, and it enters the files
    of every step that docs/architecture.md tells of."""
    for name in HOUSE.CALLED:
        test_house_figures_stay_within_their_limits(tree, name)
    assert all(
        line.split()[0].endswith(".py") for name in ("hops", "warm") for line in HOUSE.ROWS[name].count(tree).found
    )
    assert any("runtime/torch/" in line for line in HOUSE.ROWS["hops"].count(tree).found)
    assert all(" -> " in line for line in HOUSE.ROWS["grown"].count(tree).found)
    steps = re.findall(r"^\| (\d+) \| .* \| (.*) \|$", (DOCS / "architecture.md").read_text(encoding="utf-8"), re.M)
    assert [int(step) for step, _ in steps] == [*range(1, 16)]
    entered = set(tree.called["road"])
    for step, files in steps:
        named = set(re.findall(r"`([^`]+)`", files))
        assert named <= entered, f"step {step}: a call enters no function of {named - entered}"


def test_house_rows_are_defined_and_limited():
    defined = {line.split()[0] for line in HOUSE.__doc__.splitlines() if line[:1].isalpha() and "  " in line}
    assert set(HOUSE.ROWS) <= defined | {"docstrings"}
    assert set(LIMITS) == set(HOUSE.ROWS)
    assert (DOCS / "house_call.py").exists()


def test_house_command_lists_and_prints_tables(small, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["house.py", "--tree", str(small.root), "--list", "classes"])
    HOUSE.main()
    assert capsys.readouterr().out == "Step: lowering/two.py:2 runtime/one.py:10\n"
    monkeypatch.setattr("sys.argv", ["house.py", "--tree", str(small.root), "--static"])
    HOUSE.main()
    assert "| names with more than one class | 51 | 1 | 0 |\n" in capsys.readouterr().out
