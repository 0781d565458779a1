"""Dependencies point one way, and the heavy frameworks stay out until somebody brings their arrays."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from support.pages import script, sources

HOUSE = script("house")
ROOT = Path(__file__).resolve().parents[2]
LAYERS = ["grammar", "dsl", "lowering", "runtime"]
FILES = [file for layer in LAYERS for file in sorted((ROOT / layer).rglob("*.py"))]
FRAMEWORKS = {"torch", "jax", "jaxlib", "triton"}
# of runtime, imported by functions alone: classes, operators and primitives of a framework
IN_TORCH = "autograd differentiable dtensor graph op operators ready running statistics tangents weighted".split()
OF_TORCH = {
    "runtime.torch.decode",
    *(f"runtime.torch.{name}" for name in IN_TORCH),
}
IN_JAX = "call derivatives differentiable op primitives statistics symbolic".split()
OF_JAX = {f"runtime.jax.{name}" for name in IN_JAX}
# packages behind doors of their own (`frisket.caches`, ...), whose modules may each be about one framework
DOORS = ("caches", "integrations", "modeling", "operations", "parallel", "select", "sharding")
FLEX = {ROOT / "runtime" / "facade" / "flex.py", *(ROOT / "runtime" / "flex").glob("*.py")}  # torch's own API

OPTIONAL = {*FRAMEWORKS, "matplotlib", "flax", "transformers", "qwix"}
# imported inside functions, by a module of `frisket show`, which starts without them
LATER = {
    "frisket.runtime.cli.show": {"frisket.runtime.attention.entry"},
    "frisket.runtime.masks.layout": {"frisket.runtime.draw", "frisket.runtime.export"},
    "frisket.runtime.masks.mask": {"frisket.dsl.from_python.trace"},
    "frisket.dsl.ir": {"frisket.dsl.show"},  # ir and show are the one cycle
}


def imports(nodes, path):
    """Absolute names of the modules that these nodes of a file import, relative ones resolved."""
    inside = path.relative_to(ROOT).parent.parts
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(("frisket", *inside[: len(inside) - node.level + 1])) if node.level else ""
            yield ".".join(part for part in (base, node.module or "") if part)


def at_module_level(tree):
    """The statements that run on import: those outside functions and `if TYPE_CHECKING`."""
    kept = []
    stack = list(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            kept.append(node)
        stack.extend(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.ExceptHandler))
    return kept


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_layers_never_import_a_layer_above(path):
    layer = LAYERS.index(path.relative_to(ROOT).parts[0])
    above = tuple(f"frisket.{name}" for name in LAYERS[layer + 1 :])
    named = set(imports(sources().walked[path.relative_to(ROOT).as_posix()], path))
    assert not [name for name in named if f"{name}.".startswith(tuple(f"{a}." for a in above))]
    if layer < LAYERS.index("runtime"):
        assert "frisket" not in named, "the facade is above every layer"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_module_level_imports(path):
    """numpy and lark below runtime; no framework at module level, but in modules that only functions import."""
    names = set(imports(at_module_level(sources().parsed[path.relative_to(ROOT).as_posix()]), path))
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    roots = {name.split(".")[0] for name in names}
    if path in FLEX:
        assert roots & FRAMEWORKS <= {"torch"}
    elif module in OF_TORCH:
        assert roots & FRAMEWORKS == {"torch"}
    elif module in OF_JAX:
        assert roots & FRAMEWORKS == {"jax"}
    elif {path.parent.name, path.stem} & set(DOORS):
        assert len(roots & FRAMEWORKS) <= 1
    else:
        assert not roots & FRAMEWORKS
        assert not names & {f"frisket.{name}" for name in OF_TORCH | OF_JAX}
        behind = tuple(f"frisket.{room}{door}." for door in ("flex", *DOORS) for room in ("", "runtime."))
        assert not [name for name in names if f"{name}.".startswith(behind)]
    if path.relative_to(ROOT).parts[0] != "runtime":
        assert roots - set(sys.stdlib_module_names) <= {"numpy", "lark", "frisket"}


def test_importing_frisket_touches_no_framework():
    code = "import sys, frisket; print(sorted({'torch', 'jax', 'triton', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_layer_rule_sees_a_wrong_import():
    tree = ast.parse("def f():\n    from frisket.runtime.masks.mask import Mask\nimport torch")
    assert set(imports(ast.walk(tree), ROOT / "dsl" / "x.py")) == {"frisket.runtime.masks.mask", "torch"}
    assert set(imports(at_module_level(tree), ROOT / "dsl" / "x.py")) == {"torch"}
    assert list(imports(ast.parse("from ..dsl import ir").body, ROOT / "lowering" / "x.py")) == ["frisket.dsl"]


def behind_frameworks(tree):
    """Modules whose import brings an optional framework."""
    above = {name: set() for name in tree.modules}
    for found in tree.imports:
        if not found.local:
            above[found.target].add(found.source)
    heavy = set()
    rest = [
        name
        for name, file in tree.modules.items()
        if {n.split(".")[0] for n in imports(at_module_level(tree.parsed[file]), ROOT / file)} & OPTIONAL
    ]
    while rest:
        heavy.add(name := rest.pop())
        rest += above[name] - heavy
    return heavy


def misplaced(tree):
    """Imports inside functions that belong at the top of their file."""
    heavy = behind_frameworks(tree)
    for found in tree.imports:
        later = any(f"{found.target}.".startswith(f"{name}.") for name in LATER.get(found.source, ()))
        if found.local and found.target not in heavy and not later:
            yield f"{found.place} imports {found.target}"


@pytest.fixture(scope="module")
def tree():
    return sources()


def test_modules_have_no_import_cycle(tree):
    assert HOUSE.cycles(tree).found == ["2: frisket.dsl.ir frisket.dsl.show"]


def test_imports_inside_functions_wait_for_a_framework(tree):
    """Or for a command other than `frisket show`."""
    assert not list(misplaced(tree))


def test_heavy_frameworks_are_imported_inside_functions(tree):
    local = {(found.source, found.target) for found in tree.imports if found.local}
    for source, targets in LATER.items():
        assert all(any(s == source and t.startswith(name) for s, t in local) for name in targets)


def test_a_bad_tree_is_seen(tmp_path):
    texts = {
        "dsl/one.py": "def f():\n    from . import two\n    from . import three, four\n    from .five import x\n",
        "dsl/two.py": "from .one import f\n",
        "dsl/three.py": "import torch\n",
        "dsl/four.py": "from .three import x\n",
        "dsl/five.py": "def g():\n    import torch\n",
    }
    (tmp_path / "dsl").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    bad = HOUSE.Tree(tmp_path)
    assert HOUSE.cycles(bad).found == ["2: frisket.dsl.one frisket.dsl.two"]
    assert list(misplaced(bad)) == [
        "dsl/one.py:2 imports frisket.dsl.two", "dsl/one.py:4 imports frisket.dsl.five"
    ]  # fmt: skip
