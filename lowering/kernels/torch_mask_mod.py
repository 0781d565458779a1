"""Prints an Expr as torch source: a `mask_mod` or `score_mod` for flex_attention that needs torch alone.

>>> from frisket.dsl.ir import lookup
>>> from frisket.dsl.sugar import eq, k, q
>>> same = eq(lookup("doc", (q,)), lookup("doc", (k,)))
>>> print(mask_mod((q >= k) & same, {"doc": (1024,)}, reach={"q": 1024}))
def make(doc):
    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (doc[q_idx] == doc[kv_idx.clamp(0, 1023)])
    return mask_mod
<BLANKLINE>

Meanings are those of `dsl.evaluate`: Float is float64, a division by zero is 0, lookups clamp (where the index may
leave the table). Rows are as in `kernels.expr`; what is not torch is a function of `PRELUDE`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import Expr, lit, transform, uses, walk
from frisket.dsl.types import BOOL

from .expr import PRECEDENCE, PREFIX, SHARED, Language, Text, calls, named_lines
from .text import Names, Page, parts

NAMES = {"b": "b", "h": "h", "q": "q_idx", "k": "kv_idx", "score": "score"}

_METHODS = "abs exp exp2 log log2 log1p tanh sigmoid sin cos tan sqrt rsqrt erf isfinite"
_OF_TWO = "min:minimum max:maximum pow:torch.pow floordiv:floordiv mod:mod shl:shl shr:shr wrap:wrapped"
TORCH: dict[str, str] = SHARED | {n: f"{{}}.{n}()" for n in _METHODS.split()} | calls("{}, {}", _OF_TWO)
TORCH |= {"sign": "sign({})", "not": "~{}", "where": "torch.where({}, {}, {})", "random": "random"}
TORCH |= {"int": "to_int({})", "float": "{}.to(torch.float64)", "floor": "to_int(torch.floor({}))"}
LANGUAGE = Language("torch", TORCH)

PRELUDE = parts(__package__, "torch")


def mask_mod(
    mask: Expr, tables: Mapping[str, tuple[int, ...]], *, reach: Mapping[str, int], int64: bool = False, title: str = ""
) -> str:
    """The source of a function `make(*tables)`, which gives a `mask_mod(b, h, q_idx, kv_idx)`.

    `tables` are the shapes of the tables `mask` looks into, by the names it has for them (Float ones are float64);
    `reach` are what `b h q k` stay below, as far as that is known: an index inside its table is not clamped. `int64`
    widens the positions first, for a mask whose integers may leave 32 bits. Parameters and sizes are literals by now.
    """
    return _function("mask_mod", mask, tables, reach, int64, title)


def score_mod(
    score: Expr, tables: Mapping[str, Sequence[int]], *, reach: Mapping[str, int], int64: bool = False, title: str = ""
) -> str:
    """The source of a function that gives `score_mod(score, b, h, q_idx, kv_idx)`; Float is float32, Float tables too.

    >>> from frisket.dsl.ir import lookup
    >>> from frisket.dsl.sugar import h, score
    >>> from frisket.dsl.types import FLOAT
    >>> print(score_mod(score * lookup("gain", (h,), FLOAT), {"gain": (8,)}, reach={"h": 8}))
    def make(gain):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score * gain[h]
        return score_mod
    <BLANKLINE>
    """
    return _function("score_mod", score, tables, reach, int64, title).replace("torch.float64", "torch.float32")


def _function(
    name: str, root: Expr, tables: Mapping[str, Sequence[int]], reach: Mapping[str, int], int64: bool, title: str
) -> str:
    scored = name == "score_mod"
    names = Names({"torch", "math", "make", name, *NAMES.values(), *PRELUDE, "times", "mix"})
    known = {name: names.new(name) for name in tables}

    def leaf(node: Expr, args: list[Text]) -> Text | None:
        if node.op == "lookup":
            at = [_index(a, t, n, reach) for a, t, n in zip(node.args, args, tables[node.name], strict=True)]
            return Text(f"{known[node.name]}[{', '.join(at)}]")
        return _form(node, args)

    root = transform(root, _folded)
    users = Counter(a for node in walk(root) for a in dict.fromkeys(node.args))
    lines, value = named_lines(root, leaf, LANGUAGE, users, lambda: names.numbered("x"))
    body = Page()
    with body.block(f"def make({', '.join(known.values())}):"):
        with body.block(f"def {name}({'score, ' * scored}b, h, q_idx, kv_idx):"):
            if title:
                body.comment(title)
            for v in sorted(NAMES[v] for v in uses(root) & set("bhqk")) if int64 else ():
                body.line(f"{v} = {v}.to(torch.int64)")
            body.line(*lines)
            # a literal has no shape, and vmap needs a tensor
            alike = "score.new_full((), {})" if scored else "q_idx.new_full((), {}, dtype=torch.bool)"
            body.line(f"return {alike.format(value.text) if root.op == 'lit' else value.text}")
        body.line(f"return {name}")
    text = str(body)
    # no dot before the name: torch.minimum is not the prelude's
    used = [PRELUDE[name] for name in PRELUDE if re.search(rf"(?<![.\w]){name}\(", text)]
    return "\n".join([d.strip("\n") + "\n\n" for d in used] + [text]) if used else text


def _folded(e: Expr) -> Expr:
    """The Expr with constant parts folded to literals, because methods need a tensor."""
    if not e.args or e.op == "lookup" or any(a.op != "lit" for a in e.args):
        return e
    value = evaluate(e, {}).item()
    return lit(bool(value) if e.type is BOOL else value)


def _form(node: Expr, args: list[Text]) -> Text | None:
    """The text of operators that depend on more than the operator; None: the table's row."""
    if node.op == "lit":
        return _literal(node.name)
    if node.op == "var":
        return Text(NAMES[node.name])
    if node.op == "random":
        wide = [a.text if n.op == "lit" else f"{a.inside(10)}.to(torch.int64)" for n, a in zip(node.args, args)]
        return Text(f"random({', '.join(wide)})")
    # a divisor that may be 0 goes through the prelude, which gives 0 for it
    if node.op in ("floordiv", "mod") and node.args[1].op == "lit" and node.args[1].name:
        symbol = "//" if node.op == "floordiv" else "%"
        binds = PRECEDENCE[symbol]
        return Text(f"{args[0].inside(binds)} {symbol} {args[1].inside(binds + 1)}", binds)
    if node.op in ("shl", "shr") and node.args[1].op == "lit" and 0 <= node.args[1].name < 64:
        symbol = "<<" if node.op == "shl" else ">>"
        binds = PRECEDENCE[symbol]
        return Text(f"{args[0].inside(binds)} {symbol} {args[1].text}", binds)
    return None


def _literal(value: bool | int | float) -> Text:
    if isinstance(value, float) and not math.isfinite(value):
        return Text("math.nan" if math.isnan(value) else "math.inf" if value > 0 else "-math.inf", PREFIX)
    text = repr(value)
    return Text(text, PREFIX if text[0] == "-" else 10)


def _index(node: Expr, text: Text, size: int, reach: Mapping[str, int]) -> str:
    """The text of an index, clamped unless it cannot leave the table."""
    if node.op == "lit":
        return str(min(max(node.name, 0), size - 1))
    # indices within the table need no clamp, which inductor would keep
    if node.op == "var" and reach.get(node.name, size + 1) <= size:
        return text.text
    return f"{text.inside(10)}.clamp(0, {size - 1})"
