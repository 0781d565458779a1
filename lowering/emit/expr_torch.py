"""Expr as torch source: a `mask_mod` for flex_attention, readable and free of everything but torch.

>>> from frisket.dsl.sugar import q, k, lookup, eq
>>> print(mask_mod((q >= k) & eq(lookup("doc", (q,)), lookup("doc", (k,))), {"doc": (1024,)}, reach={"q": 1024}))
def make(doc):
    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (doc[q_idx] == doc[kv_idx.clamp(0, 1023)])
    return mask_mod
<BLANKLINE>

Meanings are those of `dsl.evaluate`: Float is float64, a division by zero is 0, lookups clamp (where the index may
leave the table). Rows are those of `emit.expr`; what is not torch is a function of `PRELUDE`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from frisket.dsl.ir import Expr, uses
from frisket.dsl.types import FLOAT

from .expr import PRECEDENCE, PREFIX, Text, printed
from .text import Names, Page

NAMES = {"b": "b", "h": "h", "q": "q_idx", "k": "kv_idx"}

TORCH: dict[str, str] = {
    "neg": "-{}", "abs": "{}.abs()", "sign": "sign({})",
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "pow": "torch.pow({}, {})",
    "min": "minimum({}, {})", "max": "maximum({}, {})",
    "div": "{} / {}", "floordiv": "floordiv({}, {})", "mod": "mod({}, {})",
    "bitand": "{} & {}", "bitor": "{} | {}", "bitxor": "{} ^ {}", "bitnot": "~{}",
    "shl": "shl({}, {})", "shr": "shr({}, {})",
    "lt": "{} < {}", "le": "{} <= {}", "gt": "{} > {}", "ge": "{} >= {}", "eq": "{} == {}", "ne": "{} != {}",
    "and": "{} & {}", "or": "{} | {}", "xor": "{} ^ {}", "not": "~{}",
    "where": "torch.where({}, {}, {})",
    "int": "to_int({})", "float": "{}.to(torch.float64)", "floor": "to_int({}.floor())",
    "exp": "{}.exp()", "exp2": "{}.exp2()", "log": "{}.log()", "log2": "{}.log2()", "log1p": "{}.log1p()",
    "tanh": "{}.tanh()", "sigmoid": "{}.sigmoid()", "sin": "{}.sin()", "cos": "{}.cos()", "tan": "{}.tan()",
    "sqrt": "{}.sqrt()", "rsqrt": "{}.rsqrt()", "erf": "{}.erf()",
    "isfinite": "{}.isfinite()", "random": "random",
}  # fmt: skip

PRELUDE: dict[str, str] = {
    "sign": """
def sign(x):
    return torch.where(x != x, x, x.sign())
""",
    "minimum": """
def minimum(x, y):
    return torch.where((x <= y) | (x != x), x, y)
""",
    "maximum": """
def maximum(x, y):
    return torch.where((x >= y) | (x != x), x, y)
""",
    "floordiv": """
def floordiv(x, y):
    zero = y == 0
    return torch.where(zero, 0, torch.div(x, torch.where(zero, 1, y), rounding_mode="floor"))
""",
    "mod": """
def mod(x, y):
    zero = y == 0
    return torch.where(zero, 0, torch.remainder(x, torch.where(zero, 1, y)))
""",
    "shl": """
def shl(x, y):
    inside = (y >= 0) & (y < 64)
    return torch.where(inside, x << torch.where(inside, y, 0), 0)
""",
    "shr": """
def shr(x, y):
    inside = (y >= 0) & (y < 64)
    return torch.where(inside, x >> torch.where(inside, y, 0), 0)
""",
    "to_int": """
def to_int(x):
    if x.dtype == torch.bool:
        return x.to(torch.int64)
    return x.nan_to_num(0.0, math.inf, -math.inf).clamp(-(2.0**62), 2.0**62).to(torch.int64)
""",
    "random": """
def times(x, factor):
    return (((x >> 16) * factor << 16) + (x & 0xFFFF) * factor) & 0xFFFFFFFF


def mix(x):
    x = times(x ^ (x >> 16), 0x85EBCA6B)
    x = times(x ^ (x >> 13), 0xC2B2AE35)
    return x ^ (x >> 16)


def random(*counters):
    x = mix((counters[0] + 0x9E3779B9) & 0xFFFFFFFF)
    for c in counters[1:]:
        x = mix(x ^ times(c & 0xFFFFFFFF, 0x9E3779B1))
    return (x >> 8).to(torch.float64) * 2.0**-24
""",
}


def mask_mod(
    mask: Expr, tables: Mapping[str, tuple[int, ...]], *, reach: Mapping[str, int], int64: bool = False, title: str = ""
) -> str:
    """The source of `make(*tables)`, which gives a `mask_mod(b, h, q_idx, kv_idx)`.

    `tables` are the shapes of the tables `mask` looks into, by the names it has for them; `reach` are what
    `b h q k` stay below, as far as that is known: an index inside its table is not clamped. `int64` widens the
    positions first, for a mask whose integers may leave 32 bits. Parameters and sizes are literals by now.
    """
    names = Names({"torch", "math", "make", "mask_mod", *NAMES.values(), *PRELUDE, "times", "mix"})
    known = {name: names.new(name) for name in tables}

    def leaf(node: Expr, args: list[Text]) -> Text | None:
        if node.op == "lookup":
            at = [_index(a, t, n, reach) for a, t, n in zip(node.args, args, tables[node.name], strict=True)]
            found = f"{known[node.name]}[{', '.join(at)}]"
            return Text(f"{found}.to(torch.float64)" if node.type is FLOAT else found)
        return _form(node, args)

    page = printed([mask], TORCH, leaf, lambda node, level: names.numbered("x"), "torch")
    body = Page()
    with body.block(f"def make({', '.join(known.values())}):"):
        with body.block("def mask_mod(b, h, q_idx, kv_idx):"):
            if title:
                body.comment(title)
            for name in sorted(NAMES[v] for v in uses(mask) & set(NAMES)) if int64 else ():
                body.line(f"{name} = {name}.to(torch.int64)")
            for line in page.lines:
                body.line(f"{line.name} = {line.text}")
            value = page.values[mask]
            body.line(
                f"return q_idx.new_full((), {value}, dtype=torch.bool)" if mask.op == "lit" else f"return {value}"
            )
        body.line("return mask_mod")
    text = str(body)
    used = [PRELUDE[name] for name in PRELUDE if f"{name}(" in text.replace(f".{name}(", "")]
    return "\n".join([d.strip("\n") + "\n\n" for d in used] + [text]) if used else text


def _form(node: Expr, args: list[Text]) -> Text | None:
    """The forms that depend on more than the operator; None: the table's row."""
    if node.op == "lit":
        return _literal(node.name)
    if node.op == "var":
        return Text(NAMES[node.name])
    if node.op == "random":
        return Text(f"random({', '.join(_wide(n, a) for n, a in zip(node.args, args, strict=True))})")
    if node.op in ("floordiv", "mod") and node.args[1].op == "lit" and node.args[1].name:
        symbol = "//" if node.op == "floordiv" else "%"
        binds = PRECEDENCE[symbol]
        return Text(f"{args[0].inside(binds)} {symbol} {args[1].inside(binds + 1)}", binds)
    if node.op in ("shl", "shr") and node.args[1].op == "lit" and 0 <= node.args[1].name < 64:
        symbol = "<<" if node.op == "shl" else ">>"
        binds = PRECEDENCE[symbol]
        return Text(f"{args[0].inside(binds)} {symbol} {args[1].text}", binds)
    return None


def _wide(node: Expr, text: Text) -> str:
    if node.op == "lit":
        return f"torch.tensor({node.name})"
    return f"{text.inside(10)}.to(torch.int64)"


def _literal(value: bool | int | float) -> Text:
    if isinstance(value, float) and not math.isfinite(value):
        return Text("math.nan" if math.isnan(value) else "math.inf" if value > 0 else "-math.inf", PREFIX)
    text = repr(value)
    return Text(text, PREFIX if text[0] == "-" else 10)


def _index(node: Expr, text: Text, size: int, reach: Mapping[str, int]) -> str:
    """An index, clamped unless it cannot leave the table."""
    if node.op == "lit":
        return str(min(max(node.name, 0), size - 1))
    if node.op == "var" and reach.get(node.name, size + 1) <= size:
        return text.text
    return f"{text.inside(10)}.clamp(0, {size - 1})"
