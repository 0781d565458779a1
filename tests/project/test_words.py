"""Words: a class name means one thing in the tree, and names that other files use say what they stand for."""

import ast
from collections import Counter

from support.scripts import script

HOUSE = script("house")
TREE = HOUSE.Tree(HOUSE.ROOT)
# public names that users import from two modules
SHARED = {
    "Attention": "frisket.Attention, and the layer frisket.integrations.flax.Attention",
    "Backend": "frisket.operations.Backend, and the record that a backend's module registers",
    "KVCache": "frisket.caches.jax and frisket.caches.torch",
    "PagedKVCache": "frisket.caches.jax and frisket.caches.torch",
    "RingKVCache": "frisket.caches.jax and frisket.caches.torch",
}
# public parameters, and an argument of lowering.dense that is passed on by its name
PUBLIC = {
    "Attention.__call__ given", "attention given", "mask what", "score what", "compared kept"
}  # fmt: skip

VAGUE = {"what", "given", "found", "made", "kept", "said", "held"}


def repeated(trees):
    """Names of classes that are defined more than once."""
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
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


def imported(trees):
    """Every name that some file imports."""
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {name.name for node in nodes for name in node.names}


def test_class_names_are_unique():
    assert repeated(TREE.parsed.values()) == {*SHARED}


def test_a_repeated_class_name_is_found():
    assert repeated([ast.parse("class A: ..."), ast.parse("def f():\n  class A: ...")]) == {"A"}


def test_names_that_other_files_use():
    shared = imported(TREE.parsed.values())
    assert len(shared) > 1000
    bad = {
        f"{file}: {name}" for file, tree in TREE.parsed.items() for name in vague(tree, shared) if name not in PUBLIC
    }
    assert bad == set()


def test_a_vague_name_is_found():
    text = "def f(given, /, *, x): ...\ndef g(what): ...\nclass C:\n  def __init__(self, *held): ..."
    assert [*vague(ast.parse(text), {"f", "C"})] == ["f given", "C.__init__ held"]
    assert [*vague(ast.parse("def made(): ..."), {"made"})] == ["made"]
