"""A source writer: lines, indented blocks, and names that stay apart.

>>> page = Page()
>>> with page.block("for i in range(n):"):
...     page.line("total += i")
>>> print(page)
for i in range(n):
    total += i
<BLANKLINE>
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from string import Template
from typing import Any


class Page:
    """A text under construction. `str(page)` ends with one newline."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0

    def line(self, *lines: str) -> None:
        """Write lines at the present indentation; inner newlines are kept, empty lines stay empty."""
        for text in "\n".join(lines).split("\n"):
            self._lines.append(("    " * self._depth + text).rstrip())

    def blank(self, n: int = 1) -> None:
        self._lines.extend([""] * n)

    def comment(self, text: str) -> None:
        self.line(*(f"# {t}".rstrip() for t in text.split("\n")))

    @contextmanager
    def block(self, head: str, tail: str = "") -> Iterator[None]:
        """Write `head`, then whatever is written inside, one step deeper, then `tail`."""
        self.line(head)
        self._depth += 1
        yield
        self._depth -= 1
        if tail:
            self.line(tail)

    def __str__(self) -> str:
        return "\n".join(self._lines).strip("\n") + "\n"


class Names:
    """A source of unique identifiers: the wish itself, or the wish with `_` or a number behind it when it is taken.

    >>> names = Names({"q"})
    >>> names.new("w"), names.new("q"), names.new("w"), names.numbered("x"), names.numbered("x")
    ('w', 'q_', 'w_', 'x0', 'x1')
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = {*taken, *keyword.kwlist}

    def new(self, wish: str) -> str:
        wish = wish if wish.isidentifier() and wish.isascii() else "x"
        while wish in self._taken:
            wish += "_"
        self._taken.add(wish)
        return wish

    def numbered(self, stem: str) -> str:
        n = 0
        while f"{stem}{n}" in self._taken:
            n += 1
        return self.new(f"{stem}{n}")


def filled(skeleton: str, **holes: Any) -> str:
    """A skeleton with its holes filled: `$name` within a line by a text, alone on a line by lines, which take its
    indentation (no lines: the line goes).

    >>> print(filled("def f():\\n    $body\\n    return $value", body=["x = 1"], value="x"), end="")
    def f():
        x = 1
        return x
    """
    out: list[str] = []
    for line in skeleton.splitlines():
        hole = line.strip().removeprefix("$")
        if line.strip().startswith("$") and isinstance(holes.get(hole), list):
            pad = line[: len(line) - len(line.lstrip())]
            out += [f"{pad}{x}".rstrip() for x in holes[hole]]
        else:
            out.append(Template(line).substitute({n: x for n, x in holes.items() if not isinstance(x, list)}))
    return "\n".join(out).strip("\n") + "\n"
