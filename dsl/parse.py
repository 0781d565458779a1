"""Parses text to a tree with positions: a lexer and an LALR loop over the tables of grammar/mask.lark.

>>> parse("q >= k").args[0].kind
'bare'

Neither recurses, and nothing is evaluated, so hostile text ends in a `MaskSyntaxError` and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from frisket.grammar import load

from .errors import GLYPHS, TURNED, MaskSyntaxError, Span, TextProblem

MAX_TEXT, MAX_NESTING, MAX_NODES = 64 * 1024, 200, 20_000  # hostile texts end here, not in memory or Python's stack
OPENING = {"(": ")", "[": "]"}


class Token(NamedTuple):
    symbol: str
    text: str
    start: int
    stop: int


class Node:
    """One node of the parsed tree: its kind, its parts, and its place in the text."""

    __slots__ = ("args", "kind", "start", "stop", "value")

    def __init__(self, kind: str, value: Any, args: list[Any], start: int, stop: int) -> None:
        self.kind, self.value, self.args, self.start, self.stop = kind, value, args, start, stop

    @property
    def span(self) -> Span:
        return Span(self.start, self.stop)


def fail(text: str, name: str, start: int, stop: int, message: str, remedy: str = "") -> NoReturn:
    raise MaskSyntaxError(text, [TextProblem(message, Span(start, stop), remedy)], name)


def parse(text: str, name: str = "mask") -> Node:
    """The tree of a program: a node `program` whose args are its statements."""
    if len(text) > MAX_TEXT:
        # an error quotes its text: the start is enough of a huge one
        fail(text[:200], name, 0, 1, f"the text has {len(text):,} characters, more than {MAX_TEXT:,}")
    return _run(_tokens(text, name), text, name)


# -- tokens ---------------------------------------------------------------------------------------


def _tokens(text: str, name: str) -> list[Token]:
    """The tokens of a text; a newline counts only outside brackets, and only between statements."""
    tables = load()
    out: list[Token] = []
    open_: list[Token] = []
    words = tables.words
    position = 0
    for match in tables.tokens.finditer(text):
        start, position = position, match.end()
        if match.start() > start:  # what no pattern matches lies between two matches
            _strange(text, name, start)
        kind, word = match.lastgroup, match.group()
        if kind == "NL":
            # after `=` the expression may begin on the next line
            if not open_ and out and out[-1].symbol not in ("NL", "="):
                out.append(Token("NL", word, start, position))
        elif kind != "SPACE":
            symbol = word if kind == "sign" or word in words else str(kind)
            token = Token(symbol, word, start, position)
            out.append(token)
            if word in OPENING:
                open_.append(token)
                if len(open_) > MAX_NESTING:
                    fail(text, name, start, position, f"brackets are nested more than {MAX_NESTING} deep")
            elif word in (")", "]"):
                _close(open_, token, text, name)
    if position < len(text):
        _strange(text, name, position)
    if open_:
        t = open_[-1]
        fail(text, name, t.start, t.stop, f"`{t.text}` is never closed", f"add a `{OPENING[t.text]}`")
    while out and out[-1].symbol == "NL":  # the grammar has no statement after a last newline
        out.pop()
    # an error at the end points behind the last word
    out.append(Token("$END", "", len(text.rstrip()), len(text.rstrip())))
    return out


def _close(open_: list[Token], token: Token, text: str, name: str) -> None:
    if not open_:
        fail(text, name, token.start, token.stop, f"`{token.text}` closes nothing", "remove it, or open it before")
    opened = open_.pop()
    if OPENING[opened.text] != token.text:
        want = OPENING[opened.text]
        fail(text, name, token.start, token.stop, f"`{token.text}` closes `{opened.text}`", f"write `{want}` here")


def _strange(text: str, name: str, at: int) -> NoReturn:
    c = text[at]
    shown = f"`{c}`" if c.isprintable() and not c.isspace() else f"U+{ord(c):04X}"
    remedies = {
        ".": "a float has a digit on both sides of its dot: `1.0`, `0.5`",
        '"': "there are no strings in the language",
        **dict.fromkeys("'“”‘’", "there are no strings in the language"),
        ";": "statements end with their line",
        "{": "brackets are `( )` and `[ ]`",
        "@": "to multiply, write `*`",
        "?": "to choose, write `a if c else b`",
    }
    remedy = f"write `{GLYPHS[c]}`" if c in GLYPHS else "the language is written in ASCII" if ord(c) > 126 else ""
    fail(text, name, at, at + 1, f"{shown} has no meaning here", remedies.get(c, remedy))


# -- the loop -------------------------------------------------------------------------------------


def _run(tokens: list[Token], text: str, name: str) -> Node:
    tables = load()
    states, rules, end = tables.states, tables.rules, tables.end
    path: list[int] = [tables.start]
    values: list[Any] = []
    node_count = 0
    for i, token in enumerate(tokens):
        while True:
            action = states[path[-1]].get(token.symbol)
            if action is None:
                _unexpected(tokens, i, states[path[-1]], text, name)
            if action >= 0:
                break
            origin, size, act = rules[-action - 1]
            if act is not None:  # a rule without an action hands on its only part, which is on the stack already
                node_count += 1
                parts = values[-size:]
                del values[-size:]
                values.append(ACTIONS[act](parts, text, name))
            del path[-size:]
            path.append(states[path[-1]][origin])
            if path[-1] == end:
                return Node("program", None, values[0], 0, len(text))
        path.append(action)
        values.append(token)
        if node_count > 4 * MAX_NODES:
            fail(text, name, token.start, token.stop, f"the text has more than {MAX_NODES:,} parts")
    raise AssertionError("the last token is $END, which ends the loop")


VALUES = frozenset({"NAME", "INT", "FLOAT", "(", ")", "]"})


def _unexpected(tokens: list[Token], i: int, row: dict[str, int], text: str, name: str) -> NoReturn:
    token, before = tokens[i], tokens[i - 1] if i else None
    last = before.symbol if before else ""
    wants_value = "NAME" in row and "(" in row
    if token.symbol == "$END":
        message = "the text ends where a value is expected" if wants_value else "the text ends too early"
        if before is None:
            message = "there is nothing here"
    elif token.symbol == "NL":
        message = "the line ends too early"
    elif wants_value:
        message = f"`{token.text}` stands where a value is expected"
    else:
        message = f"`{token.text}` is not expected here"
    fail(text, name, token.start, token.stop, message, _remedy(token, last, before, wants_value, row, text))


def _remedy(token: Token, last: str, before: Token | None, wants_value: bool, row: dict[str, int], text: str) -> str:
    symbol = token.symbol
    line = text[text.rfind("\n", 0, token.start) + 1 :].split("\n")[0].strip()
    defines = re.match(r"(?:(?:let|var|const)\s+)?([A-Za-z_]\w*\s*(?:\([\w\s,]*\))?\s*=[^=].*)", line)
    if defines and (symbol == "=" or (before and before.text in ("let", "var", "const"))):
        return f"to define, write `def {defines[1]}`; to compare, write `==`"
    if symbol == "[" and wants_value:
        return "a list is a table: name it, and give its numbers by that name, off=[0, 10]"
    if symbol == "NL":
        return "an expression over several lines goes in parentheses"
    if symbol == "$END" and before is None:
        return "write an expression, for example `q >= k`"
    if before and before.text == "lambda":
        return "a Python function is given as it is, not as text"
    # a space between the two signs makes two mistakes of them
    if before and token.start == before.stop and (last, symbol) in TURNED:
        return f"write `{TURNED[last, symbol]}`"
    if last == "NL" and symbol in ("&", "|", "^", "and", "or", "xor") and wants_value:
        return "an expression over several lines goes in parentheses"
    if symbol == "=":
        return "to compare, write `==`"
    if symbol in ("~", "not", "!") and wants_value:
        return f"put it in parentheses: `({symbol}{' ' if symbol == 'not' else ''}...)`"
    if symbol == last and symbol in ("&", "|"):
        return f"write one `{symbol}`, or `{'and' if symbol == '&' else 'or'}`"
    if symbol == "+" and wants_value:
        return "a value has no `+` before it"
    if symbol in load().words and wants_value:
        return f"`{symbol}` is a word of the language and cannot be a name"
    if symbol == "," and "," not in row and ")" in row:
        return "there are no tuples: give the numbers one by one"
    if symbol == ":" and "]" not in row:
        return "a `:` belongs in `any(j in 0..n: ...)`, in `dot(x[b, :], y[k, :])` or after `param`"
    if symbol in VALUES and symbol not in (")", "]") and last in VALUES and before and before.text != "(":
        return "put an operator between the two, for example `&`"
    return ""


# -- actions: the parts of a production to a node ---------------------------------------------------

Action = Callable[[list[Any], str, str], Any]


def _node(kind: str, value: Any, args: list[Any], parts: list[Any]) -> Node:
    return Node(kind, value, args, parts[0].start, parts[-1].stop)


def _more(parts: list[Any], text: str, name: str) -> list[Any]:
    items: list[Any] = parts[0]
    items.append(parts[-1])
    return items


def _number(parts: list[Any], text: str, name: str) -> Node:
    token = parts[0]
    if token.symbol == "FLOAT":
        value = float(token.text)
        if value == float("inf"):  # Python reads 1e999 as infinity without an error
            fail(text, name, token.start, token.stop, "this float does not fit 64 bits", "write `inf`")
        return _node("number", value, [], parts)
    digits = token.text.replace("_", "")
    if len(digits) > 80:  # far beyond 64 bits; Python would refuse thousands of digits in its own way
        fail(text, name, token.start, token.stop, "this integer does not fit 64 bits")
    # with base 0 Python refuses leading zeros
    return _node("number", int(digits, 0) if digits[:2].lower() in ("0x", "0b") else int(digits), [], parts)


def _junction(kind: str) -> Action:
    def make(parts: list[Any], text: str, name: str) -> Node:
        left, sign, right = parts
        if left.kind != kind:  # value: the spellings used
            return _node(kind, [sign.text], [left, right], parts)
        left.args.append(right)
        left.value.append(sign.text)
        left.stop = right.stop
        return left  # type: ignore[no-any-return]

    return make


def _lookup(parts: list[Any], text: str, name: str) -> Node:
    base, _, items, _ = parts
    if base.kind == "lookup":  # T[i][j] is T[i, j]
        base.args.extend(items)
        base.stop = parts[-1].stop
        return base  # type: ignore[no-any-return]
    return _node("lookup", None, [base, *items], parts)


def _negative(parts: list[Any], text: str, name: str) -> Node:
    x = parts[1]
    # of `--4` one sign joins the literal, the other stays an operator
    if x.kind == "number" and text[x.start : x.start + 1] != "-":
        return _node("number", -x.value, [], parts)
    return _node("negative", None, [x], parts)


ACTIONS: dict[str, Action] = {
    "first": lambda p, *_: [p[0]],
    "more": _more,
    "bare": lambda p, *_: _node("bare", None, [p[0]], p),
    "assign": lambda p, *_: _node("assign", p[0], [p[2]], p),
    "define": lambda p, *_: _node("define", p[1], [[], p[3]], p),
    "define_with": lambda p, *_: _node("define", p[1], [p[3], p[6]], p),
    "param": lambda p, *_: _node("param", p[1], [p[3], None], p),
    "param_default": lambda p, *_: _node("param", p[1], [p[3], p[5]], p),
    "type": lambda p, *_: _node("type", (None, p[0]), [], p),
    "type_fact": lambda p, *_: _node("type", (p[0], p[1]), [], p),
    "type_table": lambda p, *_: _node("type", (None, p[0]), p[2], p),
    "type_fact_table": lambda p, *_: _node("type", (p[0], p[1]), p[3], p),
    "then": lambda p, *_: _node("then", None, [p[0], p[2]], p),
    "choose": lambda p, *_: _node("choose", None, [p[2], p[0], p[4]], p),
    "or": _junction("or"),
    "and": _junction("and"),
    "xor": lambda p, *_: _node("xor", [p[1].text], [p[0], p[2]], p),
    "not": lambda p, *_: _node("not", "not", [p[1]], p),
    "invert": lambda p, *_: _node("not", p[0].text, [p[1]], p),
    "compare": _junction("compare"),
    "binary": lambda p, *_: _node("binary", p[1].text, [p[0], p[2]], p),
    "negative": _negative,
    "lookup": _lookup,
    "call_empty": lambda p, *_: _node("call", p[0], [], p),
    "call": lambda p, *_: _node("call", p[0], p[2], p),
    "reduce": lambda p, *_: _node("reduce", (p[0], p[2]), [p[4], p[6], p[8]], p),
    "colon": lambda p, *_: _node("colon", None, [], p),
    "keyword": lambda p, *_: _node("keyword", p[0], [p[2]], p),
    "name": lambda p, *_: _node("name", p[0].text, [], p),
    "number": _number,
    # `~(x)` is allowed where `~x` is not: the parentheses have to be seen
    "parens": lambda p, *_: _node("parens", None, [p[1]], p),
}
