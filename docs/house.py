"""Measures the order of the source tree: `python docs/house.py` prints the table of docs/architecture.md.

    python docs/house.py                      the table of this tree
    python docs/house.py --static             without the rows that run a call
    python docs/house.py --list docstrings    the findings of one row, a line each
    python docs/house.py --write              the table of this tree, into docs/architecture.md
    python docs/house.py --tree ../before     another checkout, of older commits too

The rows, with the figures that the script prints on commit 05096f2:

flat        Modules directly in runtime / lowering / lowering/emit: 83 / 24 / 37 (84 / 25 / 38 with `__init__.py`).
folder      The most modules in one folder of the source: 83 (84 with `__init__.py`).
cycles      Groups of modules that import one another, imports inside functions and modules named by a text counted,
            `if TYPE_CHECKING` not: 11.
local       Imports of frisket's own modules inside functions: 143. Of 55, the target imports the source again.
backends    Comparisons with the name of a backend, and files with a literal of two names or more, both outside
            runtime/backends: 39 and 10. A count by hand said 40 comparisons and 12 files.
memo        Calls of lru_cache + uses of cache + ordered and weak dicts of modules: 96 + 20 + 14. Then assignments to
            `key`, in lowering and runtime, that take the id() of one object: 6. grammar/memo.py is not counted.
grown       Containers of modules and tables of functions that grow in the first call with a new mask, on the C++
            backend in a process that has called another mask; interned Exprs are no answers: 22.
hops        Functions that a function of runtime enters in another file, from `Attention.__call__` until the kernel is
            loaded: at most eight functions deep, names that begin with `_` and grammar/memo.py left out. 47 in 22.
entered     Functions of runtime that a first call enters, and their files: class bodies of modules that it imports too.
objects     Classes of runtime of which a first call makes an object.
caches      Attributes of frisket's objects that are dicts by anything but names, and that a first call fills.
classes     Names of classes in two files or more: 51. The caches that torch and JAX both call KVCache are left out.
docstrings  First lines of docstrings that begin with a pronoun, a preposition or a relative word: 444 of 2,584.
tour        Lines of docs/tour.md that begin with "what": 32; that break the rule of docstrings: 78; all: 352. A count
            by hand said 32 of 340.
warm        Python functions entered in a warm torch call on the C++ backend: 41 in 8 files.
modules     Modules with a line in them, and those of runtime.
imports     Lines of import statements, per 1,000 lines, in all four folders and in runtime.
fillers     Uses of a word that says nothing as the name of a value, per 1,000 lines: grammar, dsl, lowering, runtime.
comments    Lines for each comment: a comment behind code counts, marks for tools do not.
parameters  Functions with eight parameters or more, of 1,000.
skips       Lines that the formatter leaves alone.
strings     Functions that are named by a string, and modules that are imported by one.
code        Lines of code, no import, docstring, comment or blank line: of the four folders, and of runtime. No line
            falls here when a docstring or a comment goes.

The rows that run a call take the defaults of users, and an empty folder for kernels. The column "before"
holds figures of 05096f2, and from `entered` on those of 8aac6bcb, counted by other rules: functions and modules are
comparable, objects and dicts nearly.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
MARK = re.compile(r"(<!-- figures, written by docs/house\.py --write -->\n).*?(<!-- end -->)", re.S)
SOURCES = ("grammar", "dsl", "lowering", "runtime")
FACADES = {
    "runtime.facade": "frisket",
    "runtime.integrations": "frisket.integrations",
}  # folders that pyproject renames
NAMES = {"aten", "xla", "cpp", "triton", "gluon", "pallas-tpu", "pallas-mosaic-gpu", "dense", "native", "library"}
IMPORTERS = {"import_module", "loaded", "Executors", "Backend"}  # calls that name a module by a text
# names that say nothing of what they hold
FILLERS = set("found given made own said moved kept told held taken asked wanted here beside apart live".split())
SHARED = {"KVCache", "PagedKVCache", "RingKVCache"}  # public names, the same in torch and in JAX
# a first line begins with its noun or its verb, not with a word that points elsewhere
POINTS = re.compile(
    r"((the |that )same|those|these|that|this|they|it|its|their|them|what|where|which|whose|why|as|of|for|from|by|in"
    r"|with|on|at|to|under|both|all|each|none)(?![\w-])|…|\.\.\.",
    re.IGNORECASE,
)

COUNTED = (
    *(ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Assign, ast.Call, ast.Compare),
    *(ast.match_case, ast.Tuple, ast.List, ast.Set, ast.Dict),
)


class Import(NamedTuple):
    source: str
    target: str
    local: bool
    place: str


class Tree:
    """The Python sources of a checkout, parsed."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    @cached_property
    def files(self) -> list[Path]:
        return sorted(p for folder in SOURCES for p in (self.root / folder).rglob("*.py"))

    @cached_property
    def parsed(self) -> dict[str, ast.Module]:
        """The tree of each file, by its path from the root."""
        return {p.relative_to(self.root).as_posix(): ast.parse(p.read_text(encoding="utf-8")) for p in self.files}

    @cached_property
    def kinds(self) -> dict[str, Counter[str]]:
        """How many lines of each kind a file has, by its path from the root."""
        return {
            name: kinds_of_lines((self.root / name).read_text(encoding="utf-8"), node)
            for name, node in self.parsed.items()
        }

    @cached_property
    def modules(self) -> dict[str, str]:
        """Module -> file."""
        return {module(name): name for name in self.parsed}

    @cached_property
    def imports(self) -> list[Import]:
        """Imports of frisket's own modules; `if TYPE_CHECKING` is left out."""
        return [found for name, tree in self.parsed.items() for found in self._imports(name, tree, False)]

    def _imports(self, name: str, node: ast.AST, local: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import | ast.ImportFrom):
                for target in targets(module(name), name.endswith("__init__.py"), child):
                    target = target if target in self.modules else target.rpartition(".")[0]
                    if target in self.modules:
                        yield Import(module(name), target, local, f"{name}:{child.lineno}")
            if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):  # expressions import nothing
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                yield from self._imports(name, child, local or inside)

    @cached_property
    def named(self) -> list[Import]:
        """Modules that a text names in an argument of `import_module`, `loaded` or a record of a backend."""
        found = []
        for name, nodes in self.walked.items():
            for call in (
                x
                for x in nodes
                if isinstance(x, ast.Call) and getattr(x.func, "attr", getattr(x.func, "id", "")) in IMPORTERS
            ):
                values = [*call.args, *(k.value for k in call.keywords)]
                # the executors of a backend are in the module of the framework's name
                keys = [key for x in values if isinstance(x, ast.Dict) for key in x.keys if key is not None]
                for node in [*values, *keys]:
                    text = text_of(node, module(name)).partition(":")[0]
                    for target in {text, f"{module(name)}.{text}"} & self.modules.keys():
                        found.append(Import(module(name), target, True, f"{name}:{call.lineno}"))
        return found

    @cached_property
    def reach(self) -> dict[str, set[str]]:
        """Module -> modules that it imports, directly or not."""
        edges: dict[str, set[str]] = defaultdict(set)
        for found in [*self.imports, *self.named]:
            edges[found.source].add(found.target)
        return {name: reached(edges, name) for name in self.modules}

    @cached_property
    def walked(self) -> dict[str, list[ast.AST]]:
        """All nodes of each file, by its path from the root."""
        return {name: [*ast.walk(tree)] for name, tree in self.parsed.items()}

    @cached_property
    def nodes(self) -> list[tuple[str, ast.AST]]:
        """Nodes that the rows look at: definitions, assignments, calls, comparisons and displays."""
        return [(name, x) for name, nodes in self.walked.items() for x in nodes if isinstance(x, COUNTED)]

    @cached_property
    def called(self) -> dict[str, list[str]]:
        """The lists of docs/house_call.py, run by the tree's own interpreter where it has one."""
        own = self.root / ".venv" / "bin" / "python"
        command = [str(own) if own.exists() else sys.executable, str(ROOT / "docs" / "house_call.py"), str(self.root)]
        environment = {n: x for n, x in os.environ.items() if not n.startswith("FRISKET_")}
        environment["OMP_NUM_THREADS"] = "1"  # with more, a call enters functions that share its work
        with tempfile.TemporaryDirectory() as cache:
            environment["XDG_CACHE_HOME"] = cache  # of platformdirs: FRISKET_CACHE_DIR would be a setting
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return json.loads(done.stdout)


def module(name: str) -> str:
    dotted = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    for folder, package in FACADES.items():
        if dotted == folder or dotted.startswith(folder + "."):
            return package + dotted[len(folder) :]
    return f"frisket.{dotted}"


def text_of(node: ast.AST, name: str) -> str:
    """A literal text, or an f-string of the module's `__name__`; "" for any other expression."""
    if isinstance(node, ast.JoinedStr):
        parts = [x.value if isinstance(x, ast.FormattedValue) else x for x in node.values]
        known = {"__name__": name}
        texts = [known.get(x.id) if isinstance(x, ast.Name) else getattr(x, "value", None) for x in parts]
        return "".join(map(str, texts)) if None not in texts else ""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def targets(name: str, package: bool, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Full names in an import statement."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    inside = name.split(".") if package else name.split(".")[:-1]
    base = inside[: len(inside) - node.level + 1] if node.level else []
    whole = ".".join([*base, *([node.module] if node.module else [])])
    yield from (f"{whole}.{alias.name}" for alias in node.names)


def reached(edges: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    rest = [start]
    while rest:
        new = edges.get(rest.pop(), set()) - seen
        seen |= new
        rest += new
    return seen


class Count(NamedTuple):
    """A row: its figures, and what they count, a line each."""

    figures: tuple[int, ...]
    found: list[str]


def flat(tree: Tree) -> Count:
    folders = ["runtime", "lowering", "lowering/emit"]
    modules = [name for name in tree.parsed if not name.endswith("__init__.py")]
    lists = [[name for name in modules if name.rpartition("/")[0] == folder] for folder in folders]
    return Count(tuple(map(len, lists)), [*chain(*lists)])


def folder(tree: Tree) -> Count:
    sizes = Counter(name.rpartition("/")[0] for name in tree.parsed if not name.endswith("__init__.py"))
    return Count((max(sizes.values(), default=0),), [f"{n} {size}" for n, size in sizes.most_common()])


def cycles(tree: Tree) -> Count:
    groups = {frozenset(b for b in tree.reach[a] if a in tree.reach[b]) for a in tree.modules}
    groups = {group for group in groups if len(group) > 1}
    ordered = sorted(groups, key=lambda group: (-len(group), sorted(group)))
    return Count((len(ordered),), [f"{len(group)}: {' '.join(sorted(group))}" for group in ordered])


def local(tree: Tree) -> Count:
    """Imports inside functions, and how many of them close a cycle."""
    inside = [found for found in tree.imports if found.local]
    closing = [found for found in inside if found.source in tree.reach[found.target]]
    lines = [f"{x.place} {x.target}{' closes a cycle' if x in closing else ''}" for x in inside]
    return Count((len(inside), len(closing)), lines)


def constants(nodes: Iterable[ast.AST | None]) -> set[str]:
    """Names of backends among literals, and in tuples, lists and sets of them."""
    flat = [x for node in nodes for x in (node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node])]
    return {x.value for x in flat if isinstance(x, ast.Constant) and isinstance(x.value, str)} & NAMES


def backends(tree: Tree) -> Count:
    """Comparisons with backends' names, and files that list names, outside runtime/backends/."""
    compared, listing = [], {}
    for name, node in tree.nodes:
        if name.startswith("runtime/backends/"):
            continue
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            text = ast.unparse(node)
            if constants(sides) and re.search(r"backend|name|choose", text):
                compared.append(f"{name}:{node.lineno} {text}")
        elif isinstance(node, ast.match_case) and constants(
            x.value for x in ast.walk(node.pattern) if isinstance(x, ast.MatchValue)
        ):
            compared.append(f"{name}:{node.pattern.lineno} case {ast.unparse(node.pattern)}")
        elif len(constants(getattr(node, "keys", None) or getattr(node, "elts", None) or [])) > 1:
            listing.setdefault(name, f"{name}:{node.lineno} lists {ast.unparse(node)[:80]}")
    return Count((len(compared), len(listing)), [*compared, *listing.values()])


def memo(tree: Tree) -> Count:
    """lru_cache, cache, dicts of modules that forget, and keys by id()."""
    found: dict[str, list[str]] = {"lru_cache": [], "cache": [], "dict": [], "id": []}
    dicts = re.compile(r"(OrderedDict|Weak\w*Dict\w*)(\[.*\])?\(")
    for name, node in tree.nodes:
        if name == "grammar/memo.py":
            continue
        for x in [node.func] if isinstance(node, ast.Call) else getattr(node, "decorator_list", []):
            kind = x.id if isinstance(x, ast.Name) else x.attr if isinstance(x, ast.Attribute) else ""
            if kind in ("lru_cache", "cache"):
                found[kind].append(f"{name}:{x.lineno} {kind}")
        if isinstance(node, ast.Module):
            for x in node.body:
                if isinstance(x, ast.Assign | ast.AnnAssign) and x.value and dicts.match(ast.unparse(x.value)):
                    found["dict"].append(f"{name}:{x.lineno} {ast.unparse(x)[:80]}")
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "key" and not name.startswith("dsl/"):
            loops = {x for loop in ast.walk(node) if isinstance(loop, ast.GeneratorExp) for x in ast.walk(loop)}
            taken = (x for x in ast.walk(node) if isinstance(x, ast.Call) and x not in loops)
            if any(ast.unparse(x.func) == "id" for x in taken):
                found["id"].append(f"{name}:{node.lineno} {ast.unparse(node)}")
    return Count(tuple(map(len, found.values())), [*chain(*found.values())])


def classes(tree: Tree) -> Count:
    places: dict[str, list[str]] = defaultdict(list)
    for name, node in tree.nodes:
        if isinstance(node, ast.ClassDef) and node.name not in SHARED:
            places[node.name].append(f"{name}:{node.lineno}")
    many = {name: where for name, where in sorted(places.items()) if len({x.split(":")[0] for x in where}) > 1}
    return Count((len(many),), [f"{name}: {' '.join(where)}" for name, where in many.items()])


def points(line: str) -> bool:
    """Whether a line begins with a word that means something only beside other text."""
    return POINTS.match(line) is not None


def docstrings(tree: Tree) -> Count:
    """First lines that do not stand alone, of all."""
    bad, every = [], 0
    for name, node in tree.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node)
            every += bool(text)
            if text and points(first := text.split("\n")[0]):
                bad.append(f"{name}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', 'module')}: {first}")
    return Count((len(bad), every), bad)


def tour(tree: Tree) -> Count:
    """Lines of docs/tour.md that begin with `what`, those that do not stand alone, and all."""
    lines = (tree.root / "docs" / "tour.md").read_text(encoding="utf-8").splitlines()
    said = [line.partition(" — ")[2] for line in lines if line.startswith("- ") and " — " in line]
    bad = [line for line in said if points(line)]
    return Count((sum(line.startswith("what ") for line in bad), len(bad), len(said)), bad)


def hops(tree: Tree) -> Count:
    found = tree.called["hops"]
    return Count((len(found), files(found)), found)


def warm(tree: Tree) -> Count:
    found = tree.called["warm"]
    return Count((len(found), files(found)), found)


def files(found: list[str]) -> int:
    return len({line.split()[0] for line in found})


def grown(tree: Tree) -> Count:
    return Count((len(tree.called["grown"]),), tree.called["grown"])


def entered(tree: Tree) -> Count:
    found = tree.called["entered"]
    return Count((len(found), files(found)), found)


def objects(tree: Tree) -> Count:
    return Count((len(tree.called["objects"]),), tree.called["objects"])


def caches(tree: Tree) -> Count:
    return Count((len(tree.called["caches"]),), tree.called["caches"])


def modules(tree: Tree) -> Count:
    filled = [name for name, node in tree.parsed.items() if node.body]
    return Count((len(filled), sum(name.startswith("runtime/") for name in filled)), filled)


def imports(tree: Tree) -> Count:
    shares = [_per_thousand(tree, "import", folder) for folder in ("", "runtime/")]
    lines = [f"{name} {kinds['import']} of {kinds.total()}" for name, kinds in tree.kinds.items()]
    return Count((shares[0], shares[1]), lines)


def _per_thousand(tree: Tree, kind: str, folder: str) -> int:
    kinds = [x for name, x in tree.kinds.items() if name.startswith(folder)]
    return round(1000 * sum(x[kind] for x in kinds) / max(1, sum(x.total() for x in kinds)))


def fillers(tree: Tree) -> Count:
    """Names of variables, arguments and attributes, each use."""
    uses: dict[str, list[str]] = {name: [] for name in tree.parsed}
    for name, nodes in tree.walked.items():
        for x in nodes:
            word = x.id if isinstance(x, ast.Name) else x.arg if isinstance(x, ast.arg) else getattr(x, "attr", "")
            if word in FILLERS:
                uses[name].append(f"{name}:{getattr(x, 'lineno', 1)} {word}")
    figures = []
    for folder in SOURCES:
        size = sum(kinds.total() for name, kinds in tree.kinds.items() if name.startswith(folder + "/"))
        named = sum(len(found) for name, found in uses.items() if name.startswith(folder + "/"))
        figures.append(round(1000 * named / max(1, size)))
    return Count(tuple(figures), [*chain(*uses.values())])


def comments(tree: Tree) -> Count:
    marks = ("fmt:", "type:", "noqa")
    size = sum(kinds.total() for kinds in tree.kinds.values())
    lines = [
        f"{name}:{token.start[0]} {token.string}"
        for name in tree.parsed
        for token in tokenize.generate_tokens(io.StringIO((tree.root / name).read_text(encoding="utf-8")).readline)
        if token.type == tokenize.COMMENT and not any(mark in token.string for mark in marks)
    ]
    return Count((round(size / max(1, len(lines))),), lines)


def parameters(tree: Tree) -> Count:
    many, every = [], 0
    for name, node in tree.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            every += 1
            number = len(node.args.args) + len(node.args.kwonlyargs) + len(node.args.posonlyargs)
            if number >= 8:
                many.append(f"{name}:{node.lineno} {node.name} {number}")
    return Count((round(1000 * len(many) / max(1, every)),), many)


def written(tree: Tree, pattern: str) -> Count:
    """Places of a pattern in the text of the sources."""
    rows = [
        f"{name}:{number} {row.strip()}"
        for name in tree.parsed
        for number, row in enumerate((tree.root / name).read_text(encoding="utf-8").splitlines(), 1)
        for _ in re.findall(pattern, row)
    ]
    return Count((len(rows),), rows)


def code(tree: Tree) -> Count:
    sizes = {name: kinds["code"] for name, kinds in tree.kinds.items()}
    folders = Counter({f: sum(n for name, n in sizes.items() if name.startswith(f + "/")) for f in SOURCES})
    return Count((folders.total(), folders["runtime"]), [f"{name} {n}" for name, n in sizes.items()])


def kinds_of_lines(text: str, tree: ast.Module) -> Counter[str]:
    """How many lines of a module are blank, a comment, a docstring, an import, code."""
    docs: set[int] = set()
    importing: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            importing |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        defines = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if defines and ast.get_docstring(node) is not None:
            docs |= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    kinds: Counter[str] = Counter()
    for number, row in enumerate(text.splitlines(), 1):
        if number in docs or number in importing:
            kinds["docstring" if number in docs else "import"] += 1
        else:
            kinds["blank" if not row.strip() else "comment" if row.lstrip().startswith("#") else "code"] += 1
    return kinds


class Row(NamedTuple):
    words: str
    count: Callable[[Tree], Count]
    before: str  # at 05096f2
    wanted: str
    form: str = "{}"


# names of modules that are loaded later, most of them in the records of backends
STRINGS = r'import_module\(|\bloaded\(f?"|(?:Executors\(|\bmodule=)f?"|", "frisket\.'
ROWS = {
    "flat": Row(
        "flat files in runtime / lowering / lowering/emit", flat, "83 / 24 / 37", "0 / ≤ 6 / 0", "{} / {} / {}"
    ),
    "folder": Row("largest folder, modules", folder, "83", "≤ 20"),
    "cycles": Row("import cycles, imports inside functions counted", cycles, "11", "1: ir and show"),
    "local": Row(
        "imports of frisket's own modules inside functions, of them to break a cycle",
        local,
        "143, 55",
        "those behind optional frameworks, 0",
        "{}, {}",
    ),
    "backends": Row(
        "comparisons with a backend's name, files that list names, outside runtime/backends",
        backends,
        "39, 10",
        "0, 0",
        "{}, {}",
    ),
    "memo": Row(
        "lru_cache + cache + dicts of modules, keys by id()",
        memo,
        "96 + 20 + 14, 6",
        "0 + 0 + 0, 0",
        "{} + {} + {}, {}",
    ),
    "grown": Row("tables that one first call grows", grown, "22", "3"),
    "hops": Row("functions, files of the road of a first torch call", hops, "47, 22", "≤ 25, ≤ 14", "{}, {}"),
    "classes": Row("names with more than one class", classes, "51", "0"),
    "docstrings": Row("first lines of docstrings that mean nothing alone", docstrings, "444 of 2584", "0", "{} of {}"),
    "tour": Row(
        'lines of docs/tour.md that begin with "what", that mean nothing alone',
        tour,
        "32, 78 of 352",
        "0, 0",
        "{}, {} of {}",
    ),
    "warm": Row("Python functions in a warm torch call", warm, "41 in 8 files", "not more", "{} in {} files"),
    "entered": Row(
        "functions of runtime, their files, that a first torch call enters", entered, "212, 32", "≤ 90, ≤ 16", "{}, {}"
    ),
    "objects": Row("kinds of object that a first torch call makes", objects, "20", "≤ 9"),
    "caches": Row("dicts on objects that a first torch call fills", caches, "13", "2"),
    "modules": Row("modules, of them in runtime", modules, "417, 274", "≤ 260, ≤ 130", "{}, {}"),
    "imports": Row("lines of imports per 1,000, in runtime", imports, "79, 95", "≤ 50, ≤ 60", "{}, {}"),
    "fillers": Row(
        "names that say nothing per 1,000 lines of grammar / dsl / lowering / runtime",
        fillers,
        "– / – / – / 105",
        "≤ 10 each",
        "{} / {} / {} / {}",
    ),
    "comments": Row("lines for each comment", comments, "33", "≤ 20"),
    "parameters": Row("functions with eight parameters or more, of 1,000", parameters, "35", "≤ 10"),
    "skips": Row("`# fmt: skip`", lambda tree: written(tree, r"# fmt: skip"), "543", "≤ 40"),
    "strings": Row("functions and modules named by a string", lambda tree: written(tree, STRINGS), "75", "≤ 20"),
    "code": Row("lines of code in the four source folders, in runtime", code, "39968, –", "≤ 34500", "{}, {}"),
}


CALLED = ("grown", "hops", "warm", "entered", "objects", "caches")  # the rows that run a call


def table(tree: Tree, rows: Iterable[str] = ROWS) -> str:
    """The rows in Markdown: figures of before, those of the tree, the goal."""
    made = ["| | before | now | wanted |", "| --- | --- | --- | --- |"]
    for row in (ROWS[name] for name in rows):
        made.append(f"| {row.words} | {row.before} | {row.form.format(*row.count(tree).figures)} | {row.wanted} |")
    return "\n".join(made) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the order of the source tree.")
    parser.add_argument("--tree", type=Path, default=ROOT, help="another checkout of frisket")
    parser.add_argument("--static", action="store_true", help="leave out the rows that run a call")
    parser.add_argument("--list", choices=ROWS, help="the findings of one row, a line each")
    parser.add_argument("--write", action="store_true", help="write the table into docs/architecture.md")
    options = parser.parse_args()
    tree = Tree(options.tree)
    if options.list:
        print("\n".join(ROWS[options.list].count(tree).found))
    elif options.write:
        PAGE.write_text(MARK.sub(lambda m: f"{m[1]}\n{table(tree)}\n{m[2]}", PAGE.read_text("utf-8")), "utf-8")
    else:
        print(table(tree, [name for name in ROWS if not (options.static and name in CALLED)]), end="")


if __name__ == "__main__":
    main()
