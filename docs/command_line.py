"""The page of the command line: `python docs/command_line.py` writes docs/command-line.md.

Descriptions of commands and options come from `--help`, outputs from running the commands.
"""

from __future__ import annotations

import argparse
import io
import os
import shlex
from contextlib import redirect_stderr, redirect_stdout
from itertools import groupby
from pathlib import Path

from frisket.runtime.cli.kernels import Case
from frisket.runtime.cli.main import COMMANDS, main, parser
from frisket.runtime.machine.settings import VARIABLES

PAGE = Path(__file__).resolve().parent / "command-line.md"
INTRO = """\
# The command line

For readers who use frisket from a shell. This page is the reference of every command and its options.

`frisket COMMAND` works on a mask as you write it in [the language](language.md): text in quotes, a `.frisket` file, or
`-` for standard input. `python docs/command_line.py` writes the page from the help and the output of the commands.
"""
SHOWN = [
    (
        "See",
        "`show` says what a mask shows, how much of dense attention's work is saved, how kernels find their tiles, and "
        "draws them. No framework is needed or loaded, and lengths may be large: tiles come from the mask, not from "
        "its pairs.",
        ["frisket show 'causal & (window(w) | sinks(4))' --set w=256 --q-len 1024"],
    ),
    (
        "Ask why",
        "`explain` marks the clauses that decide: in colour on a terminal, with carets elsewhere. A tile is explained "
        "as a whole. With neither, it prints every stage from the text to a kernel.",
        [
            "frisket explain 'causal & (window(w) | sinks(4))' --set w=256 --q 300 --k 17",
            "frisket explain 'causal & same(doc)' --table doc=[0,0,0,1,1,1,1,2] --q 5 --k 1 --q-len 8",
            "frisket explain 'causal & window(256)' --tile 8,2",
        ],
    ),
    (
        "Find a mask",
        "`library` lists every entry; words search names, sentences and sources, and a name shows an entry in full.",
        ["frisket library sliding window", "frisket library window"],
    ),
    (
        "Mistakes",
        "Errors say what is wrong, where, and how to write it right, on standard error. The status is 2 after an "
        "error, 1 after a mismatch with the interpreter in `check` and `run`, and 0 otherwise.",
        ["frisket show 'causal & windw(256)'", "frisket show causal --q-lne 512"],
    ),
]
NOTES = """\
## In scripts

Every command takes `--json` and prints one object, with `"NaN"` and `"Infinity"` as texts. Colour and progress bars are
for terminals: a pipe gets plain text, nothing is folded or cut, and `frisket … | head` is no error. `NO_COLOR=1` takes
colours away, `FORCE_COLOR=1` keeps them in a pipe, and a locale without `█` gets `#`. `frisket completion bash` (or
`zsh`, `fish`) prints the script that completes commands, options, files and the names of the library.

`frisket check` is for continuous integration: it compares the backends that are installed with a float64 reference,
and runs a failed case again by its name, `--case {case}`.
Kernels for accelerators that are not there run in interpreters, which take minutes, and only where `--backend` names
them.
"""
SETTINGS = """\
## Environment variables

They hold for every call of a process, in Python and on the command line. A keyword of a call beats its variable.
"""


def page() -> str:
    example = Case("torch", "cpp", "float32", 77, 131, 4, 2, False, True)
    parts = [INTRO]
    for title, words, lines in SHOWN:
        parts.append(f"## {title}\n\n{words}\n")
        parts += [f"```console\n$ {line}\n{printed(line)}\n```\n" for line in lines]
    parts.append(NOTES.format(case=example))
    for group, commands in groupby(COMMANDS.values(), key=lambda c: c.group):
        parts.append(f"## {group}\n")
        parts += [described(c.name) for c in commands]
    rows = [f"| `{v.name}` | {v.meaning} |" for v in VARIABLES]
    parts.append("\n".join([SETTINGS, "| variable | meaning |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def printed(line: str) -> str:
    """What a terminal without colours shows after a command."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        main(shlex.split(line)[1:])
    return out.getvalue().rstrip()


def described(name: str) -> str:
    """One command: how it is called, its options, its examples."""
    p = of(name)
    asked = [a for g in p._action_groups for a in g._group_actions if a.dest != "help"]
    asked.sort(key=lambda a: (bool(a.option_strings), a.container.title == "options"))  # of all commands: last
    rows = [f"| {written(a)} | {said(a)} |" for a in asked]
    examples = [f"- `{line.strip()}`" for line in str(p.epilog).splitlines()[1:]]
    head = [f"### frisket {name}", "", str(p.description).partition("\n")[0], "", f"`{p.usage}`", ""]
    return "\n".join([*head, "| option | |", "|---|---|", *rows, "", *examples, ""])


def of(name: str) -> argparse.ArgumentParser:
    (sub,) = (a for a in parser(name)._actions if isinstance(a, argparse._SubParsersAction))
    found: argparse.ArgumentParser = sub.choices[name]
    return found


def written(a: argparse.Action) -> str:
    """How an option is written: `--q-len TOKENS`."""
    value = a.metavar or ("|".join(map(str, a.choices)) if a.choices else a.dest.upper())
    taken = "" if a.nargs == 0 else f" {value}{' ...' if a.nargs in ('+', '*') else ''}"
    return ", ".join(f"`{s}{taken}`" for s in a.option_strings).replace("|", "\\|") or f"`{value}`"


def said(a: argparse.Action) -> str:
    return (str(a.help) % vars(a)).replace("|", "\\|")


if __name__ == "__main__":
    os.environ["COLUMNS"] = "80"
    PAGE.write_text(page(), encoding="utf-8")
