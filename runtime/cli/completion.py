"""`frisket completion bash`: a script that completes commands, options and the names of the library."""

from __future__ import annotations

import argparse

from rich.console import Console

from frisket.dsl.library import library

from .answer import CommandResult, examples
from .main import COMMANDS, parser

HOW = {
    "bash": 'eval "$(frisket completion bash)"            # for this shell; or a line of ~/.bashrc',
    "zsh": 'frisket completion zsh > "${fpath[1]}/_frisket"  # then start a new shell',
    "fish": "frisket completion fish > ~/.config/fish/completions/frisket.fish",
}


def add_completion(p: argparse.ArgumentParser) -> None:
    p.add_argument("shell", choices=list(HOW), metavar="SHELL", help=", ".join(HOW))
    p.description = "\n".join(
        ["A script that completes commands, options, files, and after EXPR the names of the library:", ""]
        + [f"  {line}" for line in HOW.values()]
    )
    examples(p, *(f"frisket completion {shell}" for shell in HOW))


def completion(args: argparse.Namespace, console: Console) -> CommandResult:
    import shtab

    top = parser(*COMMANDS)
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            action.help = "a command"  # which the top help lists in its own way, and shtab skips without this
            for p in action.choices.values():
                complete(p)
    script = shtab.complete(top, shell=args.shell)
    return CommandResult({"shell": args.shell, "script": script}, [script.rstrip("\n")])


def complete(p: argparse.ArgumentParser) -> None:
    """Names of the library where an EXPR stands, files where a file does."""
    names = " ".join(sorted({e.name for e in library().values()}))
    known = {
        "preamble": {
            "bash": f'_frisket_library() {{ compgen -W "{names}" -- "$1"; compgen -f -X "!*.frisket" -- "$1"; }}'
        },
        "bash": "_frisket_library",
        "zsh": f"({names})",
        "fish": names,
    }
    for action in p._actions:
        if action.metavar in ("EXPR", "WORD"):
            action.complete = known  # type: ignore[attr-defined]
        elif action.metavar == "FILE":
            action.complete = "file"  # type: ignore[attr-defined]
