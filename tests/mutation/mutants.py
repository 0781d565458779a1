"""Small wrong changes of a source file, found by its syntax: `ast` for Python, tokens for C++ headers and templates."""

from __future__ import annotations

import ast
import copy
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

Edit = tuple[str, int, int, str]  # kind, first byte, byte after the last one, new text


@dataclass(frozen=True)
class Mutant:
    """One change of one file. The id says file, line of text and change, and survives edits of other lines."""

    id: str
    file: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.id} {self.file}:{self.line} {self.kind}: {self.before or '(nothing)'} -> {self.after or 'gone'}"

    def applied(self, source: bytes) -> bytes:
        assert source[self.start : self.end].decode() == self.before, "the file is not the one that was read"
        return source[: self.start] + self.after.encode() + source[self.end :]


def mutants_of(root: Path, file: str) -> list[Mutant]:
    """All mutants of a file, in the order of its text."""
    source = (root / file).read_bytes()
    found, many = [], Counter[tuple[str, ...]]()
    edits = python_edits(source) if file.endswith(".py") else token_edits(source.decode(), file.endswith(".tpl"))
    for kind, start, end, after in sorted(set(edits), key=lambda e: (e[1], e[2], e[3])):
        before = source[start:end].decode()
        line = source[source.rfind(b"\n", 0, start) + 1 :].split(b"\n", 1)[0].decode().strip()
        what = (file, kind, line, before, after)
        many[what] += 1
        id = blake2b("\0".join((*what, str(many[what]))).encode(), digest_size=5).hexdigest()
        found.append(Mutant(id, file, source.count(b"\n", 0, start) + 1, kind, before, after, start, end))
    return found


# -- Python -----------------------------------------------------------------------------------------

BOUNDARY: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.Pow: ast.Mult,
}  # fmt: skip
ORDERED = (ast.Sub, ast.FloorDiv, ast.Div, ast.Mod, ast.LShift, ast.RShift, ast.Pow)
PAIRS = (
    "min max, minimum maximum, conj disj, any all, _least _most, TRUE FALSE, Q0 Q1, K0 K1, lo hi, "
    "and or, add sub, always never, range_min range_max, shl shr, first last, floor ceil, amin amax"
)
SWAPPED = {a: b for x, y in (p.split() for p in PAIRS.split(", ")) for a, b in ((x, y), (y, x))}
OPERATORS = SWAPPED | {
    "ge": "gt", "gt": "ge", "le": "lt", "lt": "le", "eq": "ne", "ne": "eq", "mul": "floordiv", "floordiv": "mod",
    "mod": "floordiv",
}  # fmt: skip


def python_edits(source: bytes) -> Iterator[Edit]:
    tree = ast.parse(source)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.AST) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def visit(node: ast.AST) -> Iterator[Edit]:
        for kind, old, new in changes(node):
            yield kind, *span(old), new if isinstance(old, ast.stmt) else f"({new})"
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in SWAPPED:
                end = span(node)[1]
                yield "another name", end - len(name), end, SWAPPED[name]
        for child in seen(node):
            yield from visit(child)

    yield from visit(tree)
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value:
            for part in ast.walk(statement.value):
                yield from rows_left_out(part, source, span)
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and "\n" in part.value:
                    start, end = span(part)  # the text of a kernel
                    for kind, a, b, new in token_edits(source[start:end].decode(), template=True):
                        yield kind, start + a, start + b, new


def seen(node: ast.AST) -> list[ast.AST]:
    """Children that decide something: no annotation, decorator, error, assertion, text or import."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return []
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return list(node.orelse)
    out = []
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or (name == "keys" and isinstance(node, ast.Dict)):
            continue
        out += [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, ast.AST)]
    return out


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """The changes of one node: (kind, what is replaced, by which text)."""

    def with_field(name: str, value: object) -> str:
        new = copy.copy(node)
        setattr(new, name, value)
        return ast.unparse(new)

    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                yield "comparison", node, with_field("ops", [*ops[:i], BOUNDARY[type(op)](), *ops[i + 1 :]])
        case ast.BoolOp(op=op, values=values):
            yield "and/or", node, with_field("op", ast.Or() if isinstance(op, ast.And) else ast.And())
            for i in range(len(values)):
                rest = [*values[:i], *values[i + 1 :]]
                yield "condition left out", node, ast.unparse(rest[0]) if len(rest) == 1 else with_field("values", rest)
        case ast.BinOp(left=left, op=op, right=right):
            if type(op) in ARITHMETIC:
                yield "arithmetic", node, with_field("op", ARITHMETIC[type(op)]())
            if isinstance(op, ORDERED):
                yield "operands swapped", node, ast.unparse(ast.BinOp(right, op, left))
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "sign left out", node, ast.unparse(operand)
        case ast.Constant(value=value):
            if isinstance(value, bool):
                yield "constant", node, str(not value)
            elif isinstance(value, int | float):
                yield "constant", node, repr(value + 1)
            elif isinstance(value, str) and value in OPERATORS:
                yield "another operator", node, repr(OPERATORS[value])
        case ast.If(test=test) | ast.While(test=test):
            yield "guard left out", test, "False"
        case ast.IfExp(body=body, orelse=orelse):
            yield "one branch", node, ast.unparse(body)
            yield "one branch", node, ast.unparse(orelse)
        case ast.comprehension(ifs=ifs):
            for test in ifs:
                yield "filter left out", test, "True"
        case ast.Call(func=ast.Name(id="Range" | "where"), args=[*some, x, y]) if len(some) < 2:
            yield "operands swapped", node, with_field("args", [*some, y, x])
        case ast.Tuple(elts=[x, y], ctx=ast.Load()) if not isinstance(x, ast.Constant):
            yield "pair swapped", node, ast.unparse(ast.Tuple([y, x], ast.Load()))[1:-1]
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="blank" | "comment"))):
            return  # of a generated text
        case ast.AugAssign() | ast.Continue() | ast.Break() | ast.Expr(value=ast.Call()):
            yield "statement left out", node, "pass"
        case ast.Assign(targets=[ast.Subscript() | ast.Attribute()]):
            yield "statement left out", node, "pass"
        case _:
            return


def rows_left_out(table: ast.AST, source: bytes, span) -> Iterator[Edit]:
    """Each row of a list, set, tuple or dict that stands at the top of a module."""
    if isinstance(table, ast.Dict):
        first = [key or value for key, value in zip(table.keys, table.values, strict=True)]
        rows = [(span(a)[0] - (0 if key else 2), span(b)[1]) for key, a, b in zip(table.keys, first, table.values)]
    elif isinstance(table, ast.List | ast.Set | ast.Tuple):
        rows = [span(e) for e in table.elts]
    else:
        return
    for start, end in rows if len(rows) > 1 else ():
        comma = re.match(rb"\s*,", source[end:])
        yield "row left out", start, end + (comma.end() if comma else 0), ""


# -- C++ headers and templates ------------------------------------------------------------------------

TOKENS = {
    " < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == ", " + ": " - ",
    " - ": " + ", " * ": " + ", " / ": " * ", " // ": " * ", " % ": " / ", " && ": " || ", " || ": " && ",
    " & ": " | ", " | ": " & ", " and ": " or ", " or ": " and ", " += ": " -= ", " << ": " >> ", " >> ": " << ",
}  # fmt: skip
WORDS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "true": "false", "false": "true"}
TOKEN = re.compile(
    r'"(?:\\.|[^"\\\n])*"|' + "|".join(rf"(?={re.escape(t)}) \S+" for t in sorted(TOKENS, key=len, reverse=True))
    + r"|(?<![\w.$])\d+(?![\w.])|(?<![\w$])[A-Za-z_]\w*"
)  # fmt: skip
CALL = re.compile(
    r"\s*(?!__builtin_prefetch)[\w.:>\[\]-]+(\(.*\)| [-+*|&/]= .*)"
)  # or an assignment that adds to what is there
# what is there when a constant of it is larger: sizes of arrays that are declared
ROOM = re.compile(r"\s*(?!return\b)(?:(?:const|static|volatile) )?[\w:<>]+ [*\w]+[^=(]*\[.*\][^=]*;")
SIZES = re.compile(r"\[[^\[\]/>-]*\]")
# of equal numbers either is chosen
CHOICE = re.compile(r"\b(\w+) ([<>]=?) (?:(\w+) \? (?:\1 : \3|\3 : \1)|0 \? (?:-\1 : \1|\1 : -\1))(?=[;,)])")
LANE = re.compile(r"\(reals\(\w+\)\)(\[\d+\])")  # all lanes are the same
JUMP_OR_STORE = re.compile(r"\s*(break|continue|return|[\w.>-]+\[.*\] = .*)")


def token_edits(text: str, template: bool) -> Iterator[Edit]:
    """Changes by tokens: of code, not of comments, docstrings, includes, or what decides whether a line is there."""
    comment = re.compile(r"#.*|  \$if .*" if template else r"//.*")
    at, within = 0, False
    for line in text.splitlines(keepends=True):
        quotes, inside = line.count('"""') if template else 0, within
        within ^= quotes % 2 == 1
        code = comment.sub("", line.rstrip("\n")).rstrip()
        begin, at = at, at + len(line.encode())
        if (
            inside
            or quotes
            or code.lstrip().startswith(
                ("$if", "$else", "$include", "$#", "#", "template", "import", "from", "def ", "@")
            )
        ):
            continue

        def edit(kind: str, start: int, end: int, new: str, code=code, begin=begin) -> Edit:
            return kind, begin + len(code[:start].encode()), begin + len(code[:end].encode()), new

        larger = [] if template else [m.span() for m in SIZES.finditer(code) if ROOM.fullmatch(code)]
        larger += [m.span(1) for m in LANE.finditer(code)]
        ties = [m.span(2) for m in CHOICE.finditer(code)]
        for found in TOKEN.finditer(code):
            token, (start, end) = found[0], found.span()
            if (start + 1, end) in ties or (token.isdecimal() and any(a < start < b for a, b in larger)):
                continue
            if (new := TOKENS.get(f"{token} ")) and code[end : end + 1] == " ":
                yield edit("operator", start, end, new[:-1])
            elif token in WORDS:
                yield edit("another name", start, end, WORDS[token])
            elif token.isdecimal():
                yield edit("constant", start, end, str(int(token) + 1))
        yield from (edit(*e) for e in statements_left_out(code, template))


def statements_left_out(code: str, template: bool) -> Iterator[Edit]:
    indent = len(code) - len(code.lstrip())
    body = code.removesuffix(";")
    balanced = all(code.count(a) == code.count(b) for a, b in ("()", "[]", "{}"))
    if balanced and (template or body != code) and (CALL.fullmatch(body) or JUMP_OR_STORE.fullmatch(body)):
        yield "statement left out", indent, len(code), "pass" if template else ";"
    if found := re.match(r"\s*(?:\} else )?if \((.*)\) (?:\{$|\S.*;$)", code):
        depth, stop = 1, found.start(1)
        while depth:
            depth += {"(": 1, ")": -1}.get(code[stop], 0)
            stop += 1
        yield "guard left out", found.start(1), stop - 1, "false"
    elif template and (found := re.fullmatch(r"\s*(?:if|while) (.*):", code)):
        yield "guard left out", *found.span(1), "False"
