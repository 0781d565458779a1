"""Counts what one call of frisket touches; docs/house.py runs it in the environment of the tree it measures.

python docs/house_call.py ROOT       JSON: hops, warm, grown, road, entered, objects, caches, each a list of texts
"""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SOURCES = ("grammar", "dsl", "lowering", "runtime")
KERNELS = ("lowering/kernels/cpp/forward.py", "lowering/emit/cpp.py")  # the module that writes the C++ kernel
MEMO = "grammar/memo.py"  # no hop, as functools.lru_cache was none
DEPTH = 8  # functions on the stack: what is called deeper is the private work of a hop
MASK, OTHER = "causal & window(64)", "causal & (q - k < 32 | k < 4)"

CONSTRUCTORS = ("__init__", "__new__", "<lambda>")

Call = tuple[str, str, list[str]]  # file, function, files of its callers, the nearest first


class Calls:
    """The functions of the tree that a call enters, in order, and the libraries that it loads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: dict[CodeType, str | None] = {}
        self.entered: list[Call] = []
        self.files: set[str] = set()  # whose functions ran, imports left out
        self.loads: list[int] = []  # how many functions were entered before
        self.classes: dict[str, None] = {}  # of the objects that were made, in order
        self.on = False
        sys.addaudithook(self.audit)

    def audit(self, event: str, _args: tuple[Any, ...]) -> None:
        if self.on and event == "ctypes.dlopen":
            self.loads.append(len(self.entered))

    def file(self, code: CodeType) -> str | None:
        """The file of a function, from the root; None outside of the sources."""
        if code not in self.names:
            path = Path(os.path.realpath(code.co_filename))
            inside = path.is_relative_to(self.root) and path.relative_to(self.root).parts[0] in SOURCES
            self.names[code] = path.relative_to(self.root).as_posix() if inside else None
        return self.names[code]

    def profile(self, frame: FrameType, event: str, _arg: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_argcount and code.co_name in CONSTRUCTORS:
            # dataclasses and named tuples have constructors without a file: the object tells
            first = frame.f_locals[code.co_varnames[0]]
            cls = type(first) if code.co_name == "__init__" else first
            if (
                isinstance(cls, type)
                and cls.__module__.startswith("frisket.runtime")
                and not issubclass(cls, BaseException)
            ):
                self.classes[f"{cls.__module__} {cls.__qualname__}"] = None
        if event == "call" and (file := self.file(frame.f_code)):
            callers, above, importing = [], frame.f_back, frame.f_code.co_name == "<module>"
            while above:
                if name := self.file(above.f_code):
                    callers.append(name)
                    importing |= above.f_code.co_name == "<module>"
                above = above.f_back
            self.entered.append((file, frame.f_code.co_qualname, callers))
            if not importing:
                self.files.add(file)

    def __call__(self, run: Any) -> list[Call]:
        self.entered, self.loads, self.classes, self.on = [], [], {}, True
        sys.setprofile(self.profile)
        run()
        sys.setprofile(None)
        self.on = False
        return self.entered


def hops(calls: list[Call], loads: list[int]) -> list[str]:
    """Functions that runtime enters from another file, until the kernel is loaded; none that begins with `_`."""
    writers = "emit", "source"
    written = min(
        i for i, (file, name, _) in enumerate(calls) if file in KERNELS and name.rpartition(".")[2] in writers
    )
    loaded = min(n for n in loads if n > written)
    found: dict[str, None] = {}
    for file, name, above in calls[:loaded]:
        callers = [caller for caller in above if caller != MEMO]
        public = not name.rpartition(".")[2].startswith("_")
        if (
            public
            and file != MEMO
            and 0 < len(callers) <= DEPTH
            and callers[0] != file
            and callers[0].startswith("runtime/")
        ):
            found[f"{file} {name}"] = None
    return list(found)


def tables() -> Iterator[tuple[str, int]]:
    """Each container of a module and each remembered function, with its size."""
    memo, interned = sys.modules.get("frisket.grammar.memo"), sys.modules["frisket.dsl.ir"]._interned
    known = [(info.name, info.entries) for info in memo.tables()] if memo else []
    yield from known
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "frisket" and module is not memo:
            for key, value in list(vars(module).items()):
                if hasattr(value, "memo"):
                    continue
                if hasattr(value, "cache_info"):
                    yield f"{value.__module__}.{getattr(value, '__qualname__', key)}", value.cache_info().currsize
                elif value is interned:
                    continue  # Exprs themselves, not answers about them
                elif isinstance(value, dict | list | set | weakref.WeakKeyDictionary | weakref.WeakValueDictionary):
                    yield f"{name}.{key}", len(value)


def dicts() -> dict[str, int]:
    """Entries of dicts by anything but names, by the class and attribute that they are found at."""
    sizes: dict[str, int] = {}
    for thing in gc.get_objects():
        cls = type(thing)
        if not getattr(cls, "__module__", "").startswith("frisket.runtime"):
            continue
        slots = [name for c in cls.__mro__ for name in getattr(c, "__slots__", ())]
        fields = {**{name: getattr(thing, name, None) for name in slots}, **getattr(thing, "__dict__", {})}
        for name, x in fields.items():
            if isinstance(x, dict) and not all(isinstance(key, str) for key in x):
                sizes[f"{cls.__qualname__}.{name}"] = sizes.get(f"{cls.__qualname__}.{name}", 0) + len(x)
    return sizes


def main() -> None:
    import torch

    import frisket as fk

    calls = Calls(Path(sys.argv[1]).resolve())
    q = torch.randn(1, 2, 256, 16)
    made: list[Any] = []
    calls(lambda: made.append(fk.compile(MASK)))
    attend, held = made[0], dicts()
    first = hops(calls(lambda: attend(q, q, q)), calls.loads)
    entered = dict.fromkeys(
        f"{file} {name}" for file, name, _ in calls.entered if not name.rpartition(".")[2].startswith("<")
    )
    entered = [line for line in entered if line.startswith("runtime/")]
    objects, caches = (
        [*calls.classes],
        [f"{n} {held.get(n, 0)} -> {x}" for n, x in dicts().items() if x != held.get(n, 0)],
    )
    road = sorted(calls.files)
    attend(q, q, q)
    warm = [f"{file} {name}" for file, name, _ in calls(lambda: attend(q, q, q))]
    before = dict(tables())
    fk.attention(q, q, q, mask=OTHER)
    grown = [f"{name} {before.get(name, 0)} -> {n}" for name, n in dict(tables()).items() if n != before.get(name, 0)]
    answers = {"hops": first, "warm": warm, "grown": grown, "road": road}
    print(json.dumps({**answers, "entered": entered, "objects": objects, "caches": caches}))


if __name__ == "__main__":
    main()
