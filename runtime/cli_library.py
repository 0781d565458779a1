"""`frisket library`: the entries with a sentence each; with a name, all that is known of it."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from itertools import groupby

from rich.console import Console
from rich.text import Text

from frisket.dsl.errors import ParameterError
from frisket.dsl.library import library as entries
from frisket.dsl.program import nearest

from .cli_answer import Answer, rows


def library(args: argparse.Namespace, console: Console) -> Answer:
    """Every entry by part, or those called `args.name`."""
    chosen = [e for e in entries().values() if args.name in (None, e.name)]
    if not chosen:
        near = nearest(args.name, {e.name for e in entries().values()})
        hint = f"; did you mean `{near}`?" if near else ""
        raise ParameterError(f"the library has no `{args.name}`{hint}\n  `frisket library` lists it")
    answer = Answer({e.signature: asdict(e) for e in chosen})
    if args.name is not None:
        for e in chosen:
            facts = [("entry", e.signature), ("", e.sentence), ("formula", e.formula), ("source", e.source)]
            answer.text += [*([""] if answer.text else []), *rows([*facts, ("text", e.text)])]
        return answer
    for section, part in groupby(chosen, key=lambda e: e.section):
        answer.text += [*([""] if answer.text else []), Text(section, "bold")]
        for e in part:
            short = e.signature if len(e.signature) <= 44 else f"{e.name}(… {len(e.params)} arguments)"
            answer.text.append(f"  {short:<44}  {e.sentence}")
    return answer
