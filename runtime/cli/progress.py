"""How far long work is: a bar for people, nothing for files and pipes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr if that is a terminal, gone when the work is done; `step(name)` moves it."""
    err = Console(stderr=True)
    shown = sys.stderr.isatty() and not err.is_dumb_terminal  # colours may be forced into a pipe, a bar may not
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not shown) as bar:
        task = bar.add_task("preparing", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)
