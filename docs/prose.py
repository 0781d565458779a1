"""The linter of prose: `python docs/prose.py` counts findings by source and rule, and compares them with their limits.

    python docs/prose.py                         the counts, and those that are not their limits
    python docs/prose.py CHANGELOG               the findings of a source or by a rule, a line each
    python docs/prose.py comments dialect        the findings of a source by a rule
    python docs/prose.py --limits                lower the limits, tests/pages/prose.json, to the counts; none rises
    python docs/prose.py --commits               commits since the rule whose subject is not `area: verb object`
    python docs/prose.py --commits main..HEAD    those of a range

Sources, without their code and links:

pages       README.md, CONTRIBUTING.md and docs/, without `headings`.
headings    Headings, and first rows of tables, of pages.
help        Output of `--help`.
public      Docstrings of public names, inherited ones included.
CHANGELOG, SECURITY
docstrings  All docstrings in dsl/, grammar/, lowering/ and runtime/.
comments    Comments there.
texts       Other strings of five words or more there: error texts, in a `raise` or in a table.

Rules; `FORMS` has what to write instead:

forms       Pronouns in the place of a noun, participles as nouns, metaphors for machinery, foreign word order.
dialect     "beside", and other forms that only this project uses.
terms       Words that are not the glossary's. Only a reader can tell when `interpreter`, `layout`, `record`, `run` or
            `sinks` stands for a reference, an axis order, a tile range or a sink token.
diary       Goals, commits, and how the work went.
ratios      First rows with a ratio that does not say whose speed-up it is.
sentences   Sentences over 30 words.
clauses     Parts of sentences over 46 words, up to a colon or a semicolon.
entries     Entries of the changelog over two lines of 120 characters.
sparse      Lines of code for each comment inside a function.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from frisket.runtime.cli.main import COMMANDS, parser

ROOT = Path(__file__).resolve().parent.parent
LIMITS = ROOT / "tests" / "pages" / "prose.json"
FOLDERS = ("dsl", "grammar", "lowering", "runtime")
MODULES = (
    "frisket",
    *(
        f"frisket.{m}"
        for m in (
            "caches",
            "caches.jax",
            "caches.torch",
            "flex",
            "modeling",
            "operations",
            "parallel",
            "select",
            "sharding",
        )
    ),
)
ENTRY = 240  # characters of an entry of the changelog, at most
SUBJECT = 72  # characters of a commit's subject, at most
SINCE = "d4b1b9f18a19e26caac650924e9512fbd8ff628b"  # later commits keep the rule of subjects
FORMS = {  # rule -> a regular expression -> what to write instead
    "forms": {
        # pronouns in the place of a noun
        r"the (latter|former)\b(?! of)": "the noun again",
        r"(those|that) of the same": "the same, and the noun",
        r"it has those": "the noun",
        r"the same of": "the noun again",
        r"(of )?(its|their) own(?=[.,;:)]|$)": "a separate one, or the noun again",
        r"of (its|their) own": "separate",
        r"whoever|nobody": "the person who does it, or the thing as the subject",
        # participles as nouns, metaphors for machinery
        r"the (given|kept)(?=[.,;:)]| (is|are|of|and|in)\b)": "what is given or kept, by its noun",
        r"seams?|doors?|twins?": "the thing itself: an interface, a module, a copy",
        r"dealt|deals (tokens|them|it)": "distributed, distributes",
        # words of another language's order
        r"(hang|hangs|hung) on": "depends on",
        r"at hand": "this, available, current",
        r"anew": "again",
        r"turn about": "in turns, interleaved",
        r"in silence|lets? pass": "silently accepts",
        r"(is|are) told(?! apart)": "receives, is listed",
        r"compiles? nothing": "does not recompile",
        r"which is right and slower": "still correct, but slower",
        r"(is|are) to be": "must be, or is",
        r"for ever": "forever, without end",
        r"(is|are|was|were) worked out|worked out (by|from|in|before)": "computed",
        r"launch(es|ed)? into nothing": "launched without a device",
        r"(stand|stands|standing) together": "adjacent",
        r"falls? apart": "what it becomes",
        r"(said|refused) in words": "an error that gives the reason",
    },
    "dialect": {
        r"beside": "compared with, vs., and, next to",
        r"wrong in silence": "wrong results",
        r"as (they|it) comes?": "in the caller's order, unchanged",
        r"where nobody": "where no user, no call",
        r"(is|are|was|were) of (the|an?)": "belongs to, is for",
        r"asked for most": "headline",
        r"(has|have|had)( \w+)? of": "contains, lists, keeps",
        r"next to nothing": "tiny, small",
    },
    "terms": {
        r"border tiles?": "partial tile",
        r"oracles?|(float64|dense|independent) interpreters?|interpreter \(x\)": "reference",
        r"(runs?|spans?|records?) of (tiles|a row|rows)|tile (runs?|spans?|records?)": "tile range",
        r"layouts? of (the )?axes": "axis order",
    },
    "diary": {
        r"goals?": "what was measured; goals are in benchmarks/",
        r"(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}": "a version; commits are compared in benchmarks/",
        r"by hand and (is|are) not|tried by hand|(came|comes?) after (it|them|this)": "nothing",
        r"(this|that) (morning|afternoon|evening|week)": "nothing",
    },
    "ratios": {r"(?<=\|\s)(?![^|]*speed-up)[^|]* / (?!ours\b)[^|]*(?=\s\|)": "speed-up over NAME, or NAME / ours"},
}
PATTERNS = {
    rule: re.compile(
        rf"\b(?:{'|'.join(f'(?P<r{i}>{form})' for i, form in enumerate(forms))})(?!\w)".replace(" ", r"\s+"), re.I
    )
    for rule, forms in FORMS.items()
}
LENGTHS = {"clauses": (46, ".!?:;"), "sentences": (30, ".!?")}  # rule -> the most words, and signs that end them
ENDS = {
    rule: re.compile(rf"\n\s*(?:[-*+|#>]|\d+\.) |\n\s*\n|[{signs}](?=\s|$)|\||\Z")
    for rule, (_, signs) in LENGTHS.items()
}
SOURCES = ("pages", "headings", "help", "public", "CHANGELOG", "SECURITY", "docstrings", "comments", "texts")
RULES = (*FORMS, *LENGTHS, "entries", "sparse")
STRING_OR_COMMENT = re.compile(
    r"""(?s:("{3}|'{3})(?:\\.|.)*?\1)|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'"""
    r"|(?m:(?P<comment>^[ \t]*#.*(?:\n[ \t]*#.*)*|#.*))"
)
PRAGMA = re.compile(r"(fmt|type|pragma|ruff|pyright|mypy):|noqa|!|--")


class Text(NamedTuple):
    """A text in Markdown: its file, public name or command, and the number of its first line there."""

    place: str
    text: str
    line: int = 1

    def at(self, start: int) -> str:
        """The file and line of a character."""
        return f"{self.place}:{self.line + self.text.count(chr(10), 0, start)}"


class Finding(NamedTuple):
    rule: str
    where: str
    words: str
    instead: str

    def __str__(self) -> str:
        return f"{self.where}: {self.words!r}: write {self.instead}"


def findings(text: Text, rules: Iterable[str] = FORMS) -> Iterator[Finding]:
    """Forms and long sentences of a text, by its lines."""
    text = text._replace(text=prose(text.text))
    for rule in rules:
        for m in PATTERNS[rule].finditer(text.text):
            instead = [*FORMS[rule].values()][int(str(m.lastgroup)[1:])]
            yield Finding(rule, text.at(m.start()), m[0], instead)
    for rule, (most, _) in LENGTHS.items():
        start = 0
        for m in ENDS[rule].finditer(text.text):
            words = text.text[start : m.start()].split()
            if len(words) > most:
                where = text.at(text.text.index(words[0], start))
                yield Finding(rule, where, f"{' '.join(words[:8])} …", f"shorter sentences: {len(words)} words")
            start = m.end()


def prose(text: str) -> str:
    """The text without code, comments, links and lists of names, each line in its place."""

    def blank(m: re.Match[str]) -> str:
        return "\n" * m[0].count("\n")

    text = re.sub(r"^( *)(```|~~~).*?^\1\2 *$", blank, text, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->|<[^>\n]*>", blank, text, flags=re.S)
    text = re.sub(r"^>>> .*(?:\n.+)*", blank, text, flags=re.M)  # a session, with its output
    text = re.sub(r"^(?:    |\t|:::|\[!\[).*$", "", text, flags=re.M)
    text = re.sub(r"`[^`]*`", lambda m: "x" + blank(m), text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)\s]*\)", r"\1", text)
    return re.sub(r"(\bx,?\s+){3,}", lambda m: "x " + blank(m), text)


def read(path: str) -> Text:
    return Text(path, (ROOT / path).read_text(encoding="utf-8"))


def files_of(folder: str, pattern: str) -> Iterator[Text]:
    """The files of a folder and its folders, in order."""
    return (read(path.relative_to(ROOT).as_posix()) for path in sorted((ROOT / folder).rglob(pattern)))


def pages() -> Iterator[Text]:
    return chain([read("README.md"), read("CONTRIBUTING.md")], files_of("docs", "*.md"))


def without_headings(page: Text) -> tuple[Text, Text]:
    """A page without its headings and the first rows of its tables, and these alone; each line in its place."""
    lines = prose(page.text).split("\n")
    pairs = zip(lines, [*lines[1:], ""], strict=True)
    heads = [line if line.startswith("#") or re.match(r"\| ?:?-", after) else "" for line, after in pairs]
    rest = ["" if head else line for line, head in zip(lines, heads, strict=True)]
    return page._replace(text="\n".join(rest)), page._replace(text="\n".join(heads))


def long_entries(changelog: Text) -> Iterator[Finding]:
    """Entries of the changelog over two lines."""
    for m in re.finditer(r"^- (.*(?:\n  .*)*)", changelog.text, re.M):
        entry = re.sub(r"\[([^\]]*)\]\([^)\s]*\)", r"\1", m[1])
        if len(entry) > ENTRY:
            yield Finding("entries", changelog.at(m.start()), f"{entry[:50]} …", f"two lines: {len(entry)} characters")


def helps() -> Iterator[Text]:
    for name in COMMANDS:
        (commands,) = (a for a in parser(name)._actions if isinstance(a, argparse._SubParsersAction))
        sub = commands.choices[name]
        options = [str(a.help) for a in sub._actions if a.help and a.help != argparse.SUPPRESS]
        yield Text(f"frisket {name} --help", "\n\n".join([str(sub.description), *options]))


def public() -> Iterator[Text]:
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            yield from docstrings(f"{module.__name__}.{name}", getattr(module, name))


def docstrings(place: str, value: object) -> Iterator[Text]:
    """The docstring of a public name, and those of a class's public methods."""
    if not str(getattr(value, "__module__", None)).startswith("frisket"):
        return
    if text := inspect.getdoc(value):
        yield Text(place, text)
    for name, method in vars(value).items() if inspect.isclass(value) else ():
        if not name.startswith("_") and (text := getattr(method, "__doc__", None)):
            yield Text(f"{place}.{name}", inspect.cleandoc(text))


class Code:
    """The prose of Python files: their docstrings, comments and texts, and the lines that are inside functions."""

    def __init__(self) -> None:
        self.docstrings: list[Text] = []
        self.comments: list[Text] = []
        self.texts: list[Text] = []
        self.lines = self.comments_in_functions = 0

    def read(self, file: Text) -> None:
        self._read_comments(file, self._read_strings(file))
        self.lines += file.text.count("\n")

    def _read_strings(self, file: Text) -> set[int]:
        """Add docstrings and texts, and return the lines of functions."""
        nodes: list[ast.AST] = [ast.parse(file.text)]
        inside: set[int] = set()
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.Constant | ast.JoinedStr):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                text = "".join(str(x.value) if isinstance(x, ast.Constant) else "x" for x in parts)
                lines = [line for line in text.split("\n") if len(line.split()) >= 5]
                self.texts += [Text(file.place, line, node.lineno) for line in lines]
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                self.docstrings.append(Text(file.place, inspect.cleandoc(str(node.value.value)), node.lineno))
            else:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    inside.update(range(node.lineno, (node.end_lineno or 0) + 1))
                nodes += ast.iter_child_nodes(node)
        return inside

    def _read_comments(self, file: Text, inside: set[int]) -> None:
        """Add comments, those of adjacent lines as one text."""
        line, end = 1, 0
        for m in STRING_OR_COMMENT.finditer(file.text):
            if m["comment"] is None:
                continue
            line, end = line + file.text.count("\n", end, m.start()), m.start()
            rows = [re.sub(r"\s*#+ ?", "", row, count=1) for row in m["comment"].split("\n")]
            rows = ["" if PRAGMA.match(row) else row for row in rows]
            self.comments.append(Text(file.place, "\n".join(rows), line))
            self.comments_in_functions += sum(bool(row) and line + i in inside for i, row in enumerate(rows))


def code() -> Code:
    """The prose of the source folders; each file is parsed once."""
    files = Code()
    for folder in FOLDERS:
        for file in files_of(folder, "*.py"):
            files.read(file)
    return files


def texts(files: Code) -> dict[str, Iterable[Text]]:
    """source -> texts, of all sources; `files` has the source folders."""
    bodies, heads = zip(*map(without_headings, pages()), strict=True)
    return {
        "pages": bodies,
        "headings": heads,
        "help": helps(),
        "public": public(),
        "CHANGELOG": [read("CHANGELOG.md")],
        "SECURITY": [read("SECURITY.md")],
        "docstrings": files.docstrings,
        "comments": files.comments,
        "texts": files.texts,
    }


def every_finding(files: Code) -> Iterator[tuple[str, Finding]]:
    """(source, finding), of all sources."""
    for source, parts in texts(files).items():
        rules = [rule for rule in FORMS if rule != "ratios" or source == "headings"]
        yield from ((source, finding) for text in parts for finding in findings(text, rules))
    yield from (("CHANGELOG", finding) for finding in long_entries(read("CHANGELOG.md")))


def counts(files: Code) -> Counter[str]:
    """source and rule -> findings."""
    numbers = Counter(f"{source} {finding.rule}" for source, finding in every_finding(files))
    numbers["comments sparse"] = files.lines // files.comments_in_functions
    return numbers


def limits() -> Counter[str]:
    return Counter(json.loads(LIMITS.read_text(encoding="utf-8")))


def complaints(now: Counter[str], most: Counter[str]) -> list[str]:
    """A line for each count that is not its limit."""
    over = [f"{name}: {now[name]}, over the limit, {most[name]}: python docs/prose.py {name}" for name in now - most]
    under = [
        f"{name}: {now[name]}, under the limit, {most[name]}: python docs/prose.py --limits" for name in most - now
    ]
    return [*over, *under]


def git(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=check)


def subjects(commits: str) -> list[str]:
    """Commits of a range whose subject has another form than `area: verb object`, or is too long."""
    log = git("log", "--no-merges", "--format=%h %s", commits).stdout
    return [line for line in log.splitlines() if not well_formed(line.partition(" ")[2])]


def well_formed(subject: str) -> bool:
    """Whether a commit's subject is `area: verb object`, as far as a program can tell a verb."""
    return len(subject) <= SUBJECT and re.match(r"[\w./-]+(, [\w./-]+)*: [a-z-]+ \S", subject) is not None


def main() -> None:
    command = argparse.ArgumentParser(description="Count what breaks a rule of prose.")
    command.add_argument("names", nargs="*", help="a source, a rule, or both: print the findings")
    command.add_argument("--limits", action="store_true", help="lower the limits to the counts")
    since = f"{SINCE}..HEAD"
    command.add_argument("--commits", metavar="RANGE", nargs="?", const=since, help="print commits with other subjects")
    options = command.parse_args()
    if unknown := {*options.names} - {*SOURCES, *RULES}:
        command.error(f"{', '.join(unknown)}: neither a source nor a rule: {', '.join(SOURCES + RULES)}")
    if options.commits == since and git("cat-file", "-e", SINCE, check=False).returncode:
        lines = []
        print(f"the history here has no {SINCE[:8]}, where the rule begins: no commit was read")
    elif options.commits:
        lines = subjects(options.commits)
    elif options.names:
        lines = [str(f) for source, f in every_finding(code()) if {*options.names} <= {source, f.rule}]
    else:
        now, most = counts(code()), limits()
        if options.limits:
            most &= now  # the lower of the two
            LIMITS.write_text(json.dumps(most, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        print(*(f"{n:4} {name}" for name, n in sorted(now.items())), sep="\n")
        lines = complaints(now, most)
    print(*lines, sep="\n", end="\n" if lines else "")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
