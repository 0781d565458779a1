"""Reads a mask and score mod from the arguments of a command."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import MaskSyntaxError, ParameterError, ShapeError, misnamed
from frisket.dsl.parse import parse
from frisket.dsl.program import Parsed, read
from frisket.dsl.types import FLOAT
from frisket.runtime.machine.parameters import names_of
from frisket.runtime.masks.layout import Layout
from frisket.runtime.masks.mask import Mask, Program, mask, program, score

Scalar = bool | int | float
LENGTH = 2048  # of queries, where nobody says
ROWS = 1 << 24  # rows of tiles that are laid out: some gigabytes of bounds


def read_program(args: argparse.Namespace, **more: Any) -> Program:
    """The mask and score mod of EXPR, --score, --set and --table; `more` binds those names that occur."""
    text, name = source(args.expr, args.score)
    bindings = {**dict(map(scalar, args.set)), **dict(map(table, args.table))}
    parsed = read(text, params=bindings, name=name)
    values = {**bindings, **chosen(more, bindings, parsed)}
    lone = parsed.expr is not None and parsed.expr.type is not FLOAT
    whole = Program(mask(text, **values)) if lone else program(text, name, **values)
    if getattr(args, "expand", False):  # the same, read from its formulas
        shown, scored = whole.mask, whole.score
        shown = None if shown is None else mask(shown.expanded, **shown.params)
        return Program(shown, None if scored is None else score(scored.expanded, **scored.params), name)
    return whole


def require_bound(program: Program) -> None:
    """Every parameter has a value, or an error that says how to give it here."""
    for part in (program.mask, program.score):
        for name in () if part is None else part.unbound:
            assert part is not None
            how = f"--table {name}=FILE" if names_of(part.expr)[name][0] != 0 else f"--set {name}=VALUE"
            hint = f" ({named})" if (named := misnamed(name)) else ""
            raise ParameterError(f"`{name}` has no value{hint}; give it: {how}")


def chosen(more: dict[str, Any], values: dict[str, Any], parsed: Parsed) -> dict[str, Any]:
    """The values among `more` that the program mentions and nobody has bound."""
    roots = [e for e in (parsed.mask, parsed.score, parsed.expr) if e is not None]
    names = {name for e in roots for name in names_of(e)}
    return {n: x for n, x in more.items() if n in names and n not in values}


def scalars(program: Program) -> dict[str, Scalar]:
    return {n: x for part in (program.mask, program.score) if part is not None for n, x in part.scalars.items()}


def tables(program: Program) -> dict[str, NDArray[Any]]:
    return {n: x for part in (program.mask, program.score) if part is not None for n, x in part.tables.items()}


def visible_mask(program: Program, why: str) -> Mask:
    """The mask with what the score mod hides; an error where there is no mask and the score mod hides nothing."""
    require_bound(program)
    if (visible := program.visible) is None:
        raise ParameterError(f"this score mod hides nothing, so there are no tiles {why}; give a mask")
    return visible


def compiled(program: Program, tile: tuple[int, int] | None = None, **options: Any) -> Any:
    """The attention of a mask and score mod whose parameters all have values."""
    from frisket.runtime.attention.entry import compile  # the frameworks behind it are none of `show`'s business

    require_bound(program)
    return compile(mask=program.mask, score=program.score, tile=tile, **options)


def shapes(args: argparse.Namespace) -> dict[str, Any]:
    """The sizes, as `source` and `stages` of an attention take them."""
    q_len, kv_heads = args.q_len or LENGTH, args.kv_heads or args.heads
    if args.heads % kv_heads:
        raise ShapeError(f"--heads {args.heads} is no multiple of --kv-heads {kv_heads}; key heads are shared evenly")
    return {
        "q_len": q_len, "kv_len": args.kv_len or q_len, "batch": args.batch, "heads": args.heads, "kv_heads": kv_heads,
        "head_dim": args.head_dim, "v_dim": args.v_dim, "dtype": args.dtype,
    }  # fmt: skip


def laid_out(args: argparse.Namespace, mask: Mask) -> Layout:
    """The layout of the sizes and tile that are given."""
    q_len = args.q_len or LENGTH
    kv_len = args.kv_len or q_len
    if (rows := -(-q_len // args.block[0])) > ROWS:
        raise ParameterError(
            f"{q_len:,} queries are {rows:,} rows of tiles, more than {ROWS:,}\n"
            f"  take larger tiles, for example --block {-(-q_len // ROWS)}"
        )
    mask.check_tables(q_len, kv_len, args.batch, args.heads)
    for name, at, size in (("--b", args.b, args.batch), ("--h", args.h, args.heads)):
        if at is not None and at >= size:
            raise ShapeError(f"{name} {at} is outside the {size} there are; give --batch or --heads")
    return mask.layout(q_len, kv_len, batch=args.batch, heads=args.heads, block=args.block)


def source(expr: str, score: str | None) -> tuple[str, str]:
    """(program text, name for errors): EXPR is a file when it ends in .frisket, and standard input when it is -."""
    path = Path(expr)
    is_program = expr == "-" or path.suffix == ".frisket"
    try:
        text = expr if not is_program else sys.stdin.read() if expr == "-" else path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ParameterError(f"{'standard input' if expr == '-' else expr} is not UTF-8 text") from None
    except ValueError:
        raise ParameterError(f"{expr!r} is no name of a file") from None
    name = "standard input" if expr == "-" else path.name if is_program else "mask"
    text = text.removeprefix("\ufeff") if is_program else text  # some editors and shells begin with it
    if score is not None:
        at = lone(text)
        text = f"{text}\nscore = {score}" if at is None else f"{text[:at]}mask = {text[at:]}\nscore = {score}"
    return text, name


def lone(text: str) -> int | None:
    """The start of a text's lone expression, which is its mask; a text with mistakes is taken for one."""
    try:
        return next((one.start for one in parse(text).args if one.kind == "bare"), None)
    except MaskSyntaxError:
        return 0


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
    if value.strip().startswith("[") or "," in value:
        raise ParameterError(f"--set {text}: a list is a table: write --table {name}=[{value.strip(' []')}]")
    raise ParameterError(f"--set {text}: write NAME=VALUE with a number, true or false, for example --set w=256")


def table(text: str) -> tuple[str, NDArray[Any]]:
    """`table("doc=doc.npy")` or `table("doc=[0, 0, 1]")`: the name and the array."""
    name, _, value = (part.strip() for part in text.partition("="))
    if not value or not name:
        raise ParameterError(
            f"--table {text}: write NAME=FILE with a .npy file, for example --table doc=doc.npy, or the numbers, "
            "for example --table doc=[0,0,1,1]"
        )
    if not value.startswith("[") and re.fullmatch(r"[-+\w.]+(\s*,\s*[-+\w.]*)+", value):
        raise ParameterError(f"--table {text}: the numbers stand in brackets: write --table {name}=[{value}]")
    return name, written(text, value) if value.startswith("[") else saved(text, value)


def written(text: str, value: str) -> NDArray[Any]:
    try:
        array = np.asarray(json.loads(value))
    except (ValueError, RecursionError, OverflowError):
        array = np.empty(0, object)
    if array.dtype.kind not in "biuf":
        raise ParameterError(
            f"--table {text}: the numbers stand in brackets, for example doc=[0,0,1,1], and rows of equal length in "
            "brackets of theirs, for example t=[[0,1],[2,3]]"
        )
    return array


def saved(text: str, file: str) -> NDArray[Any]:
    try:
        array = np.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ParameterError(f"--table {text}: {file} is not a .npy file ({error}); write it with numpy.save") from None
    if not isinstance(array, np.ndarray):
        raise ParameterError(f"--table {text}: {file} holds several arrays; save one with numpy.save")
    return array
