"""From the arguments of a command to the mask and score mod they mean."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import ParameterError
from frisket.dsl.program import Parsed, read
from frisket.dsl.types import FLOAT

from .mask import Program, mask, program
from .parameters import names_of

Scalar = bool | int | float


def subject(args: argparse.Namespace, **more: Any) -> Program:
    """The mask and score mod of EXPR, --score, --set and --table; `more` binds those names that occur."""
    text, name = source(args.expr, args.score)
    given = {**dict(map(scalar, args.set)), **dict(map(table, args.table))}
    parsed = read(text, params=given, name=name)
    if parsed.expr is not None and parsed.expr.type is not FLOAT:
        return Program(mask(text, **given, **chosen(more, given, parsed)))
    return program(text, name, **given, **chosen(more, given, parsed))


def require_bound(what: Program) -> None:
    """Every parameter has a value, or an error that says how to give it here."""
    for part in (what.mask, what.score):
        for name in () if part is None else part.unbound:
            assert part is not None
            how = f"--table {name}=FILE.npy" if names_of(part.expr)[name][0] != 0 else f"--set {name}=VALUE"
            raise ParameterError(f"`{name}` has no value; give it: {how}")


def chosen(more: dict[str, Any], given: dict[str, Any], parsed: Parsed) -> dict[str, Any]:
    """Those of `more` that the program mentions and nobody has bound."""
    roots = [e for e in (parsed.mask, parsed.score, parsed.expr) if e is not None]
    names = {name for e in roots for name in names_of(e)}
    return {n: x for n, x in more.items() if n in names and n not in given}


def scalars(what: Program) -> dict[str, Scalar]:
    return {n: x for part in (what.mask, what.score) if part is not None for n, x in part.scalars.items()}


def tables(what: Program) -> dict[str, NDArray[Any]]:
    return {n: x for part in (what.mask, what.score) if part is not None for n, x in part.tables.items()}


def source(expr: str, score: str | None) -> tuple[str, str]:
    """(program text, name for errors): EXPR is a file when it ends in .frisket."""
    path = Path(expr)
    from_file = path.suffix == ".frisket"
    try:
        text = path.read_text(encoding="utf-8") if from_file else expr
    except UnicodeDecodeError:
        raise ParameterError(f"{expr} is not UTF-8 text") from None
    except ValueError:
        raise ParameterError(f"{expr!r} is no name of a file") from None
    if score is not None:
        text = f"{text}\nscore = {score}" if from_file else f"mask = {text}\nscore = {score}"
    return text, path.name if from_file else "mask"


def scalar(text: str) -> tuple[str, Scalar]:
    """`scalar("w=256") == ("w", 256)`."""
    name, _, value = text.partition("=")
    if value.strip() in ("true", "false"):
        return name.strip(), value.strip() == "true"
    for kind in (int, float):
        try:
            return name.strip(), kind(value)
        except ValueError:
            continue
    raise ParameterError(f"--set {text}: write NAME=VALUE with a number, true or false, for example --set w=256")


def table(text: str) -> tuple[str, NDArray[Any]]:
    """`table("doc=doc.npy")`: the name and the array of a .npy file."""
    name, _, file = text.partition("=")
    if not file:
        raise ParameterError(f"--table {text}: write NAME=FILE.npy, for example --table doc=doc.npy")
    try:
        array = np.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ParameterError(f"--table {text}: {file} is not a .npy file ({error}); write it with numpy.save") from None
    if not isinstance(array, np.ndarray):
        raise ParameterError(f"--table {text}: {file} holds several arrays; save one with numpy.save")
    return name.strip(), array
