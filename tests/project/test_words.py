"""Words: a class name means one thing in the tree, names that other files use say what they stand for, and the name of
a test says its subject, then what holds."""

import ast
import re
from collections import Counter
from itertools import chain

from support.pages import script, sources

HOUSE = script("house")
# public names that users import from two modules
SHARED = {
    "Attention": "frisket.Attention, and the layer frisket.integrations.flax.Attention",
    "Backend": "frisket.operations.Backend, and the record that a backend's module registers",
    "KVCache": "frisket.caches.jax and frisket.caches.torch",
    "PagedKVCache": "frisket.caches.jax and frisket.caches.torch",
    "RingKVCache": "frisket.caches.jax and frisket.caches.torch",
}
PUBLIC = {"mask what", "score what"}  # public parameters

VAGUE = {"what", "given", "found", "made", "kept", "said", "held"}
# a report of pytest shows the name of a test without its file, and these are no subject there
POINTING = frozenset(
    "it its they them their this that these those what which who whose other others another one same the "
    "all every some no none nothing nobody".split()
)


def repeated(nodes):
    """Names of classes that are defined more than once."""
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return {name for name, count in names.items() if count > 1}


def vague(tree, shared):
    """Vague names of functions in `shared`, of their parameters, and of parameters of classes in `shared`."""
    for node in tree.body:
        if getattr(node, "name", None) not in shared:
            continue
        if isinstance(node, ast.FunctionDef) and node.name in VAGUE:
            yield node.name
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        for one in (x for x in inside if isinstance(x, ast.FunctionDef)):
            if isinstance(node, ast.ClassDef) and one.name.startswith("_") and one.name not in ("__init__", "__call__"):
                continue
            name = one.name if one is node else f"{node.name}.{one.name}"
            yield from (f"{name} {x.arg}" for x in ast.walk(one.args) if isinstance(x, ast.arg) and x.arg in VAGUE)


def imported(nodes):
    """Every name that some file imports."""
    return {name.name for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names}


def names_of_tests(folder):
    """The names of all test functions, those of files that run as children too."""
    paths = (path for path in folder.rglob("*.py") if "golden" not in path.parts)
    return [name for path in paths for name in re.findall(r"^ *def (test_\w+)\(", path.read_text("utf-8"), re.M)]


def unclear(names):
    """Names of tests that are shared, long, of one or two words, or begin without a subject."""
    counts = Counter(names)
    words = {name: name.split("_")[1:] for name in counts}
    return {n for n, w in words.items() if counts[n] > 1 or len(n) > 60 or len(w) < 3 or w[0] in POINTING}


def test_names_of_tests_say_subject_and_what_holds():
    assert unclear(names_of_tests(HOUSE.ROOT / "tests")) == set()


def test_an_unclear_name_of_a_test_is_found():
    long = f"test_layout_of_{'documents_' * 5}is_exact"
    bad = {"test_rest", "test_what_is_refused_here", "test_tiles_of_two_files", long}
    assert unclear([*bad, "test_tiles_of_two_files", "test_layout_is_exact"]) == bad


def test_class_names_are_unique():
    assert repeated(chain(*sources().walked.values())) == {*SHARED}


def test_a_repeated_class_name_is_found():
    assert repeated(ast.walk(ast.parse("class A: ...\ndef f():\n  class A: ..."))) == {"A"}


def test_names_that_other_files_use():
    shared = imported(chain(*sources().walked.values()))
    assert len(shared) > 1000
    bad = {
        f"{file}: {name}"
        for file, tree in sources().parsed.items()
        for name in vague(tree, shared)
        if name not in PUBLIC
    }
    assert bad == set()


def test_a_vague_name_is_found():
    text = "def f(given, /, *, x): ...\ndef g(what): ...\nclass C:\n  def __init__(self, *held): ..."
    assert [*vague(ast.parse(text), {"f", "C"})] == ["f given", "C.__init__ held"]
    assert [*vague(ast.parse("def made(): ..."), {"made"})] == ["made"]
