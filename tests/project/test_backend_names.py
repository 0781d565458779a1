"""Decisions about a backend stand in its record: outside runtime/backends no code compares with a backend's name."""

import ast
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.pages import sources

from frisket.runtime.backends.base import RECORDS, Executors, ModuleFunction, loaded

NAMES = frozenset(RECORDS)  # the tiers, `library` and `native`, are words of much else
ROOT = Path(__file__).parents[2]
OTHERS = {  # where a text that is a backend's name means something else -> the beginning of the line
    "packages by their names": ("PACKAGES = {", 'for name in ("numpy", "torch", ', 'versions = ", ".join('),
    "titles of columns": ('CHECK_HEAD = ("arrays", "backend", ',),
    "torch's namespace of operators": ('return name if library == "aten"',),
    "transformers' names of attention": ("if self._supports_sdpa and all(", 'tables.append((x, "sdpa" if "sdpa" in x'),
    "peers that are measured": ('FAMILIES = ("sdpa", "flex", "flash", ',),
}


def names_compared(nodes: Iterable[ast.AST]) -> list[int]:
    """Lines that compare with, match, look up or test membership of a backend's name, or keep a table by names."""

    def named(*nodes: ast.AST | None) -> bool:
        parts = [m for n in nodes if n for m in (n.elts if isinstance(n, ast.Tuple | ast.List | ast.Set) else [n])]
        return any(isinstance(n, ast.Constant) and n.value in NAMES for n in parts)

    def compares(node: ast.AST) -> bool:
        match node:
            case ast.Compare():
                return named(node.left, *node.comparators)
            case ast.MatchValue():
                return named(node.value)
            case ast.Dict():
                return named(*node.keys)
            case ast.Subscript():
                return named(node.slice)
            case ast.Call(func=ast.Attribute(attr="get" | "startswith" | "endswith" | "pop" | "__eq__" | "index")):
                return named(*node.args)
            case ast.Call(func=ast.Name(id="frozenset" | "set" | "tuple" | "dict")):
                return named(*node.args) or any(k.arg in NAMES for k in node.keywords)
            case (
                ast.Assign(value=listed)
                | ast.AnnAssign(value=listed)
                | ast.For(iter=listed)
                | ast.comprehension(iter=listed)
            ):  # a list of backends
                return isinstance(listed, ast.Tuple | ast.List | ast.Set) and named(listed)
        return False

    found = [n.iter if isinstance(n, ast.comprehension) else n for n in nodes if compares(n)]
    return sorted({n.lineno for n in found})


def test_code_outside_backends_never_compares_their_names():
    files = {f: nodes for f, nodes in sources().walked.items() if not f.startswith("runtime/backends/")}
    found = []
    for file, nodes in files.items():
        if numbers := names_compared(nodes):
            lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
            found += [(file, n, lines[n - 1].strip()) for n in numbers]
    others = tuple(begin for lines in OTHERS.values() for begin in lines)
    wrong = [f"{file}:{n}: {line}" for file, n, line in found if not line.startswith(others)]
    assert len(files) > 200
    assert not wrong, "give `Backend` a field for what is decided here:\n" + "\n".join(wrong)
    assert [begin for begin in others if not any(line.startswith(begin) for *_, line in found)] == []


@pytest.mark.parametrize("bad", [
    'if backend == "triton": pass',
    'if "cpp" != backend: pass',
    'if backend in ("aten", "cpp"): pass',
    'tiles = {"xla": 128}[backend]',
    'tile = tiles["pallas-tpu"]',
    'tile = tiles.get("dense")',
    'match backend:\n    case "gluon": pass',
    'GUARDED = ("triton", "pallas-tpu")',
    "tiles = dict(cpp=96)",
    'for backend in ("cpp", "aten"): pass',
    'made = [run(b) for b in ["cpp"]]',
])  # fmt: skip
def test_a_comparison_is_found(bad):
    assert names_compared(ast.walk(ast.parse(bad))) != []


@pytest.mark.parametrize(
    "good", ['def f(backend="cpp"): pass', 'choose("triton")', '"""of triton"""', 'x = {"a": "cpp"}']
)
def test_uses_of_a_backend_name_without_comparison_pass(good):
    assert names_compared(ast.walk(ast.parse(good))) == []


KERNELS = {  # backend -> the functions that its kernels' module has, those of engines with plans among them
    "cpp": "ahead call_target target text", "flash": "call_target engine_of_plans text",
    "gluon": "call_target compile_reports pays text", "pallas-mosaic-gpu": "target text", "pallas-tpu": "target text",
    "triton": "call_target compile_reports pays target text",
}  # fmt: skip
EXECUTORS = {  # (backend, framework) -> the functions beside the forward
    ("aten", "torch"): "backward", ("cpp", "torch"): "backward build columns repeat tangent",
    ("cpp", "jax"): "backward tangent",
    ("cudnn", "torch"): "backward", ("flash", "torch"): "backward checks_gradients refuses_gradients",
    ("gluon", "torch"): "backward compiles", ("pallas-mosaic-gpu", "jax"): "backward refuses refuses_gradients",
    ("pallas-tpu", "jax"): "backward refuses refuses_gradients", ("sdpa", "torch"): "backward", ("splash", "jax"): "",
    ("triton", "torch"): "backward compiles", ("triton", "jax"): "backward refuses", ("xla", "jax"): "backward",
}  # fmt: skip


def test_modules_of_records_have_the_listed_functions_alone():
    for module in ("torch", "jax", "triton"):
        pytest.importorskip(module)

    def functions(record, *more):
        names = [*more, *(n for n, x in vars(type(record)).items() if isinstance(x, ModuleFunction))]
        found = {n: x for n in names if (x := getattr(record, n)) is not None}
        assert all(map(callable, found.values()))
        return " ".join(sorted(found.keys() - {"forward"}))

    assert {b.name: functions(b, "engine_of_plans") for b in RECORDS.values() if b.module} == KERNELS
    run = {(b.name, f): e for b in RECORDS.values() for f, e in b.executors.items()}
    assert {key: functions(e) for key, e in run.items()} == EXECUTORS
    assert all(callable(e.forward) for e in run.values())


def test_a_module_is_loaded_whole(tmp_path, monkeypatch):
    """Threads whose first calls come at once wait for the import of the first."""
    (tmp_path / "slowly_imported.py").write_text(
        "import time\ntime.sleep(0.3)\ndef answer(): return AFTER\nAFTER = 42\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with ThreadPoolExecutor(6) as pool:
        assert [*pool.map(lambda _: loaded("slowly_imported").answer(), range(6))] == [42] * 6


def test_registering_imports_no_framework():
    code = "import sys, frisket.runtime.backends; print(sorted({'torch', 'jax', 'triton'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_module_without_a_forward_is_named():
    with pytest.raises(AttributeError, match=r"json.*forward"):
        _ = Executors("json").forward
    assert Executors("json").build is None
