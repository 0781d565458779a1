"""What is remembered is remembered by grammar/memo.py: no other caches in the sources."""

import ast

import pytest
from support.pages import sources

FORBIDDEN = {"lru_cache", "cache"}  # of functools
CONTAINERS = {"dict", "set", "list", "OrderedDict", "defaultdict"}
WEAK = {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "WeakIdKeyDictionary"}
# containers of a module that functions add to, and that are no caches: nothing of them may ever be forgotten
REGISTRIES = {
    ("dsl/from_python/symbol.py", "_handlers"),
    ("dsl/ir.py", "_interned"),  # equal nodes are one object
    ("grammar/memo.py", "_tables"),
    ("grammar/memo.py", "lru_cache"),  # what tables by value are made of
    ("lowering/analysis/intervals.py", "ASK"),  # who answers which question
    ("runtime/backends/base.py", "RECORDS"),
    ("runtime/backends/cpp/jax.py", "_registered"),  # XLA may call these libraries at any time
    ("runtime/calls/arrays.py", "_of_graphs"),  # what captured graphs read by its address
    ("runtime/calls/options.py", "_makers"),
    ("runtime/integrations/transformers_masks.py", "BOOLS"),  # kinds of models
    ("runtime/machine/cpp_build.py", "_threads"),  # of builds that are under way
    ("runtime/machine/cpp_build.py", "_building"),  # locks of builds that are under way
    ("runtime/machine/cpp_build.py", "_kept"),  # memory that compiled functions point to
    ("runtime/machine/settings.py", "choices"),  # names that records of backends say
    ("runtime/machine/caller.py", "SAID"),  # warnings that were given
    ("runtime/parallel/jax_ring.py", "_met"),  # what all processes agreed on
    ("runtime/parallel/torch_ring.py", "_agreed"),
}


def name_of(node):
    """The last name of `name`, `module.name`, `name[...]` or `name(...)`."""
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def is_empty(value):
    """Whether a container starts without entries, or with weak ones."""
    if isinstance(value, ast.Call):
        return name_of(value) in WEAK or (name_of(value) in CONTAINERS and not value.args)
    if isinstance(value, ast.Dict):
        return not any(not isinstance(v, ast.Dict) or v.keys for v in value.values)
    return isinstance(value, ast.List | ast.Set) and not value.elts


def caches(nodes):
    """Names of functools' caches that a module's nodes take, and of empty containers that its functions change."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "functools":
            yield from (alias.name for alias in node.names if alias.name in FORBIDDEN)
        if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN and name_of(node.value) == "functools":
            yield node.attr
    empty = set()
    for node in nodes[0].body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and is_empty(node.value):
            empty |= {name_of(t) for t in (node.targets if isinstance(node, ast.Assign) else [node.target])}
    changing = {"setdefault", "update", "add", "append", "insert", "extend"}
    for function in nodes if empty else ():
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                changed = name_of(node.value)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in changing:
                changed = name_of(node.func.value)
            elif isinstance(node, ast.Call) and any(name_of(a) in empty for a in node.args):
                changed = next(name_of(a) for a in node.args if name_of(a) in empty)  # by whom it is given to
            else:
                continue
            if changed in empty:
                yield changed


@pytest.fixture(scope="module")
def found():
    return {(file, name) for file, nodes in sources().walked.items() for name in caches(nodes)}


def test_sources_have_no_cache_outside_memo(found):
    assert found - REGISTRIES == set()


def test_registries_that_are_not_caches_exist(found):
    assert found >= REGISTRIES


@pytest.mark.parametrize(
    "text",
    [
        "from functools import lru_cache",
        "from functools import cache, partial",
        "import functools\n@functools.lru_cache(maxsize=3)\ndef f(): ...",
        "kept = {}\ndef f(x):\n    kept[x] = 1",
        "kept: dict[int, str] = {}\ndef f(x):\n    return kept.setdefault(x, str(x))",
        "kept = OrderedDict()\ndef f(x):\n    kept[x, 1] = 1",
        "kept: WeakKeyDictionary[A, B] = weakref.WeakKeyDictionary()\ndef f(x):\n    kept[x] = 1",
        "kept = {0: {}}\ndef f(x):\n    kept[x] = {}",
        "kept = {}\ndef f(x):\n    remember(kept, x, 1)",
        "kept = []\nclass A:\n    def f(self, x):\n        kept.append(x)",
    ],
)
def test_a_cache_is_seen(text):
    assert list(caches([*ast.walk(ast.parse(text))]))


@pytest.mark.parametrize(
    "text",
    [
        "from functools import cached_property, partial",
        "RULES = {}\nfor n in NAMES:\n    RULES[n] = 1",
        "def f(x):\n    kept = {}\n    kept[x] = 1",
        "NAMES = {'a': 1}\ndef f(x):\n    return NAMES[x]",
    ],
)
def test_a_table_is_no_cache(text):
    assert not list(caches([*ast.walk(ast.parse(text))]))
