"""`frisket library`: the entries with a sentence each; with a name all that is known of it, with words a search."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby

from rich.console import Console
from rich.text import Text

from frisket.dsl.errors import ParameterError, nearest
from frisket.dsl.library import Entry
from frisket.dsl.library import library as entries
from frisket.runtime.masks.mask import program

from .answer import AnswerRow, CommandResult, Piece, examples, rows
from .input import LENGTH
from .show import picture


def add_library(p: argparse.ArgumentParser) -> None:
    p.add_argument("words", nargs="*", metavar="WORD", help="a name, or words to search for; default: everything")
    examples(p, "frisket library window", "frisket library sliding window", "frisket library")


def library(args: argparse.Namespace, console: Console) -> CommandResult:
    """Every entry by part, those called by a name in full, or those that hold every word."""
    known = entries()
    named = [e for e in known.values() if [e.name] == args.words or [e.signature] == args.words]
    chosen = named or [e for e in known.values() if holds(e, args.words)]
    if not chosen:
        near = nearest(" ".join(args.words), {e.name for e in known.values()})
        hint = f"; did you mean `{near}`?" if near else ""
        raise ParameterError(f"the library has no `{' '.join(args.words)}`{hint}\n  `frisket library` lists it")
    answer = CommandResult({e.signature: asdict(e) for e in chosen})
    for e in named:
        answer.text += [*([""] if answer.text else []), *in_full(e, console)]
    return answer if named else CommandResult(answer.data, listed(chosen, console))


def holds(e: Entry, words: Sequence[str]) -> bool:
    text = " ".join((e.signature, e.sentence, e.formula, e.source, e.section)).casefold()
    return all(word.casefold() in text for word in words)


def listed(chosen: Sequence[Entry], console: Console) -> list[Piece]:
    """A line for each entry: its signature and its sentence."""
    most = min(44, console.width * 2 // 5)
    width = min(most, max(len(short(e, most)) for e in chosen))
    text: list[Piece] = []
    for section, part in groupby(chosen, key=lambda e: e.section):
        text += [*([""] if text else []), Text(section, "bold")]
        for e in part:
            text.append(AnswerRow(Text.assemble("  ", (short(e, most), "cyan")), Text(e.sentence), width + 4))
    return text


def short(e: Entry, most: int) -> str:
    return e.signature if len(e.signature) <= most else f"{e.name}(…)"


def in_full(e: Entry, console: Console) -> list[Piece]:
    """A description of one library entry, with an example mask whose numbers suit it."""
    text = rows([
        ("entry", Text(e.signature, "bold cyan")), ("", e.sentence), ("formula", e.formula), ("source", e.source),
        ("text", e.text), ("example", e.example),
    ])  # fmt: skip
    mask = program(e.example).mask if e.example else None
    if mask is not None:
        layout = mask.layout(LENGTH, LENGTH)
        text += ["", picture(layout, argparse.Namespace(b=0, h=0), console)]
    return text
