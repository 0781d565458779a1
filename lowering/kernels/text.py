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
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import resources
from string import Template
from textwrap import dedent, indent
from typing import Any


class Page:
    """A text under construction. `str(page)` ends with one newline."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0

    def line(self, *lines: str) -> None:
        """Write lines at the present indentation; inner newlines are kept, empty lines stay empty."""
        for text in "\n".join(lines).split("\n") if lines else ():
            self._lines.append(("    " * self._depth + text).rstrip())

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

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._used = {*reserved, *keyword.kwlist}

    def new(self, wish: str) -> str:
        # Python folds other letters, so that two names could become one
        wish = wish if wish.isidentifier() and wish.isascii() else "x"
        while wish in self._used:
            wish += "_"
        self._used.add(wish)
        return wish

    def numbered(self, stem: str) -> str:
        n = 0
        while f"{stem}{n}" in self._used:
            n += 1
        return self.new(f"{stem}{n}")


def words(source: str) -> set[str]:
    """The identifiers of a text."""
    return set(re.findall(r"[A-Za-z_]\w*", source))


def parts(package: str, name: str) -> dict[str, str]:
    """The parts of skeletons/`name`.tpl by their names: each stands behind a line `$part name`.

    A line `$include other` stands for another part of the file, `$include shared.other` for a part of shared.tpl, and
    `$include triton.shared.other` for one of a sibling package's file. With a colon behind it, the block below is what
    `$body` stands for in that part.
    """
    source = resources.files(package).joinpath("skeletons", f"{name}.tpl").read_text("utf-8")
    pieces = re.split(r"(?m)^\$part (\w+)\n", source)
    texts = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    others: dict[str, dict[str, str]] = {}

    def whole(text: str) -> str:
        return re.sub(r"(?m)^( *)\$include ([\w.]+)(?::((?:\n+\1 +\S.*)+))?$", included, text)

    def included(match: re.Match[str]) -> str:
        pad, place, block = match.groups("")
        *files, name = place.split(".")
        *sibling, _ = files or [""]  # Gluon shares parts with Triton, word for word
        file = ".".join(files)
        other = f"{package.rpartition('.')[0]}.{sibling[0]}" if sibling else package
        if file and file not in others:
            others[file] = parts(other, files[-1])
        part = others[file][name].strip("\n") if file else whole(texts[name]).rstrip()
        if block:
            body = whole(dedent(block.strip("\n")))
            part = re.sub(r"(?m)^( *)\$body$", lambda m: indent(body, m[1]), part)
        return indent(part, pad)

    return {part: f"\n{whole(text).rstrip()}\n" for part, text in texts.items()}


def fields(record: object, names: str) -> dict[str, Any]:
    """The attributes of an object as holes of their names: `fields(target, "block_q block_k")`."""
    return {name: getattr(record, name) for name in names.split()}


def filled(text: str, finish: Callable[[str], str] = str, /, **holes: Any) -> str:
    """A skeleton with its holes filled: `$name` within a line by a text, alone on a line by lines, which take its
    indentation (no lines: the line goes).

    A line that ends in `$if hole` goes where the hole is false; what it opens stays, a step to the left. `$if hole:`,
    `$else:` and `$for holes:` are blocks that are printed a step to the left; `$for` takes a list of further holes.
    `$#` is a comment. `finish` has a last look at every line of the skeleton's own.

    >>> text = '''
    ... def f($arguments):
    ...     $body
    ...     for i in range(3):  $if several
    ...         x += 1
    ...     $for results:
    ...         $name = x  $if not hidden
    ...     return $value'''
    >>> results = [{"name": "y", "hidden": False}, {"name": "z", "hidden": True}]
    >>> print(filled(text, arguments="", body=["x = 1"], several=False, results=results, value="y"), end="")
    def f():
        x = 1
        x += 1
        y = x
        return y
    """
    return "\n".join(_filled(text.splitlines(), finish, holes)).strip("\n") + "\n"


def _filled(lines: list[str], finish: Callable[[str], str], holes: dict[str, Any]) -> list[str]:
    out: list[str] = []
    at, shown = 0, False
    while at < len(lines):
        line = lines[at].strip()
        pad = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        at += 1
        word, _, rest = line.partition(" ")
        if word in ("$if", "$else:", "$for"):
            end = _end(lines, at, len(pad))
            inner, at = [x[4:] for x in lines[at:end]], end
            if word == "$for":
                for more in holes[rest[:-1]]:
                    out += _filled(inner, finish, {**holes, **more})
                continue
            shown = not shown if word == "$else:" else _holds(rest[:-1], holes)
            out += _filled(inner, finish, holes) if shown else []
            continue
        if word == "$#":
            continue
        line, _, condition = line.partition("  $if ")
        if condition and not _holds(condition, holes):
            if line.endswith(":"):
                end = _end(lines, at, len(pad))
                lines = [*lines[:at], *(x[4:] for x in lines[at:end]), *lines[end:]]
        elif line.startswith("$") and isinstance(filling := holes.get(line[1:]), list):
            out += [f"{pad}{x}".rstrip() for x in "\n".join(filling).split("\n") if filling]
        else:
            texts = {n: x for n, x in holes.items() if not isinstance(x, list)} if "$" in line else {}
            text = finish(Template(line).substitute(texts)) if "$" in line else line
            out += [f"{pad}{x}".rstrip() for x in text.split("\n")]
    return out


def _end(lines: list[str], at: int, depth: int) -> int:
    """The end of the block whose lines begin at `at`, deeper than `depth`; blank lines behind it do not belong to
    it."""
    end = at
    for i in range(at, len(lines)):
        if lines[i].strip():
            if len(lines[i]) - len(lines[i].lstrip()) <= depth:
                break
            end = i + 1
    return end


def _holds(condition: str, holes: dict[str, Any]) -> bool:
    """Whether "a and not b" is true of the holes."""
    return all(bool(holes[w.removeprefix("not ")]) != w.startswith("not ") for w in condition.split(" and "))
