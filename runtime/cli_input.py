"""From the arguments of a command to the mask and score mod they mean."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import ParameterError
from frisket.dsl.ir import Expr, free_names
from frisket.dsl.program import Parsed, read
from frisket.dsl.types import BOOL, FLOAT

from .mask import Mask, ScoreMod

Scalar = bool | int | float


@dataclass(frozen=True)
class Subject:
    """What a command is about; at least one of the two is there."""

    mask: Mask | None
    score: ScoreMod | None

    @property
    def params(self) -> dict[str, Any]:
        return {**(self.mask.params if self.mask else {}), **(self.score.params if self.score else {})}

    @property
    def scalars(self) -> dict[str, Scalar]:
        return {n: x for n, x in self.params.items() if not isinstance(x, np.ndarray)}

    @property
    def tables(self) -> dict[str, NDArray[Any]]:
        return {n: x for n, x in self.params.items() if isinstance(x, np.ndarray)}


def subject(args: argparse.Namespace, **more: Any) -> Subject:
    """The mask and score mod of EXPR, --score, --set and --table; `more` binds those names that occur."""
    text, name = source(args.expr, args.score)
    given = {**dict(map(scalar, args.set)), **dict(map(table, args.table))}
    if more:
        used = names(read(text, params=given, name=name))
        given |= {n: x for n, x in more.items() if n in used and n not in given}
    parsed = read(text, params=given, name=name)
    mask, score = parsed.mask, parsed.score
    if parsed.expr is not None and parsed.expr.type is FLOAT:
        score = parsed.expr
    elif parsed.expr is not None:
        mask = parsed.expr if parsed.expr.type is BOOL else read(text, kind="mask", params=given, name=name).mask
    bound = {**parsed.defaults, **given}

    def own(e: Expr) -> dict[str, Any]:
        scalars, tables = free_names(e)
        return {n: x for n, x in bound.items() if n in scalars or n in tables}

    return Subject(mask and Mask(mask, own(mask)), score and ScoreMod(score, own(score)))


def source(expr: str, score: str | None) -> tuple[str, str]:
    """(program text, name for errors): EXPR is a file when it ends in .frisket."""
    path = Path(expr)
    from_file = path.suffix == ".frisket"
    text = path.read_text(encoding="utf-8") if from_file else expr
    if score is not None:
        text = f"{text}\nscore = {score}" if from_file else f"mask = {text}\nscore = {score}"
    return text, path.name if from_file else "mask"


def names(parsed: Parsed) -> set[str]:
    """The scalars and tables a program mentions."""
    roots = [e for e in (parsed.mask, parsed.score, parsed.expr) if e is not None]
    return {name for e in roots for found in free_names(e) for name in found}


def scalar(text: str) -> tuple[str, Scalar]:
    """`scalar("w=256") == ("w", 256)`."""
    name, equals, value = text.partition("=")
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
