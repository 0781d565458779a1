"""Errors at the line of the user's function that is being traced.

>>> line("no_such_file.py", 3)
'no_such_file.py:3'
"""

from __future__ import annotations

import linecache
import re
import sys
from traceback import walk_tb
from types import FrameType, ModuleType
from typing import Any, NoReturn

from frisket.dsl.errors import TraceError

LIBRARY_FRAMES = frozenset({"frisket", "numpy", "torch", "jax", "jaxlib"})

WORDS = {
    "and": "write `(x) & (y)` for `x and y`",
    "or": "write `(x) | (y)` for `x or y`",
    "not": "write `~(x)` for `not x`",
    "if": "write `{module}.where(condition, a, b)` for `a if condition else b`",
}
NO_TRUTH = "a position has no truth value while the function is traced"
CHAIN = "write `(a <= x) & (x < b)` for `a <= x < b`"
CALLS = {
    "min": "write `{module}.minimum(x, y)` for `min(x, y)`",
    "max": "write `{module}.maximum(x, y)` for `max(x, y)`",
    "any": "write `(x) | (y)` for `any([x, y])`",
    "all": "write `(x) & (y)` for `all([x, y])`",
}


def package(frame: FrameType) -> str:
    """The name of the package that a frame belongs to."""
    return str(frame.f_globals.get("__name__", "")).split(".")[0]


def is_users(frame: FrameType) -> bool:
    return package(frame) not in LIBRARY_FRAMES


def user_frame() -> FrameType | None:
    """The innermost running frame that belongs to no library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    return frame


def line(file: str, number: int) -> str:
    """ "file:line" and the source of that line."""
    source = linecache.getline(file, number).strip()
    return f"{file}:{number}" + (f"\n    {source}" if source else "")


def place() -> str:
    frame = user_frame()
    return "" if frame is None else line(frame.f_code.co_filename, frame.f_lineno)


def fail(message: str, cause: BaseException | None = None) -> NoReturn:
    """Raise `TraceError` at the user's line that runs, or where `cause` was raised."""
    if cause is None:
        raise TraceError(f"{message}\n  {place()}")
    raise TraceError(f"{message}\n  {raised_at(cause)}".rstrip()) from cause


def raised_at(cause: BaseException) -> str:
    """The user's line that an error passed through last."""
    lines = [line(frame.f_code.co_filename, n) for frame, n in walk_tb(cause.__traceback__) if is_users(frame)]
    return lines[-1] if lines else ""


def no_truth() -> NoReturn:
    """Raise the error for a symbol used as a truth value: the text says what the user's line does instead."""
    fail(f"{NO_TRUTH}: {instead(place(), _array_module())}")


def instead(where: str, module: str) -> str:
    """The replacement for the words on a user's line, with the functions of `module`."""
    source = where.partition("\n")[2]
    replacements = [say for word, say in WORDS.items() if re.search(rf"\b{word}\b", source)]
    # no dot before the word: np.min is no builtin
    replacements = replacements or [say for word, say in CALLS.items() if re.search(rf"(?<![\w.]){word}\(", source)]
    if not replacements and re.search(r"[<>]=?[^<>=]+[<>]=?", source) and not re.search(r"[&|]", source):
        replacements = [CHAIN]
    return "; ".join(replacements or [*WORDS.values(), CHAIN]).format(module=module)


def _array_module() -> str:
    """The name under which the user's file knows torch, else "np"."""
    frame = user_frame()
    scope: dict[str, Any] = {} if frame is None else frame.f_globals
    return next((n for n, m in scope.items() if isinstance(m, ModuleType) and m.__name__ == "torch"), "np")
