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
leave the table). Rows are as in `kernels.language`; what is not torch is a function of `LANGUAGE`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from frisket.dsl.ir import Expr, transform, uses

from .expr import assignments
from .language import FLOORED, SHARED, SHIFTS, Language, Text, calls
from .legalise import folded
from .text import Names, Page, parts

NAMES = {"b": "b", "h": "h", "q": "q_idx", "k": "kv_idx", "score": "score"}

_METHODS = "abs exp exp2 log log2 log1p tanh sigmoid sin cos tan sqrt rsqrt erf isfinite"
_OF_TWO = "min:minimum max:maximum pow:torch.pow floordiv:floordiv mod:mod shl:shl shr:shr wrap:wrapped"
TORCH: dict[str, str] = SHARED | SHIFTS | FLOORED | {n: f"{{}}.{n}()" for n in _METHODS.split()}
TORCH |= calls("{}, {}", _OF_TWO) | {"not": "~{}", "where": "torch.where({}, {}, {})", "random": "random(*)"}
TORCH |= {"int": "to_int({})", "float": "{}.to(torch.float64)", "floor": "to_int(torch.floor({}))"}
LANGUAGE = Language("torch", TORCH, infinity="math.inf", nan="math.nan", bits=64, functions=parts(__package__, "torch"))


def mask_mod(
    mask: Expr, tables: Mapping[str, tuple[int, ...]], *, reach: Mapping[str, int], int64: bool = False, title: str = ""
) -> str:
    """The source of a function `make(*tables)`, which gives a `mask_mod(b, h, q_idx, kv_idx)`.

    `tables` are the shapes of the tables `mask` looks into, by the names it has for them (Float ones are float64).
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
    names = Names({"torch", "math", "make", name, *NAMES.values(), *LANGUAGE.reserved})
    known = {name: names.new(name) for name in tables}

    def leaf(node: Expr, args: list[Text]) -> Text | None:
        if node.op == "lookup":
            at = [_index(a, t, n, reach) for a, t, n in zip(node.args, args, tables[node.name], strict=True)]
            return Text(f"{known[node.name]}[{', '.join(at)}]")
        return _form(node, args)

    root = transform(root, folded)  # methods need a tensor
    lines, value = assignments(root, LANGUAGE, leaf, lambda: names.numbered("x"), {})
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
    functions = LANGUAGE.prelude(text)[1]
    return "\n".join([*(f.strip("\n") + "\n\n" for f in functions), text])


def _form(node: Expr, args: list[Text]) -> Text | None:
    """The text of operators that depend on more than the operator; None: the table's row."""
    if node.op == "var":
        return Text(NAMES[node.name])
    if node.op == "random":
        wide = [a.text if n.op == "lit" else f"{a.inside(10)}.to(torch.int64)" for n, a in zip(node.args, args)]
        return Text(f"random({', '.join(wide)})")
    return None


def _index(node: Expr, text: Text, size: int, reach: Mapping[str, int]) -> str:
    """The text of an index, clamped unless it cannot leave the table."""
    if node.op == "lit":
        return str(min(max(node.name, 0), size - 1))
    # indices within the table need no clamp, which inductor would keep
    if node.op == "var" and reach.get(node.name, size + 1) <= size:
        return text.text
    return f"{text.inside(10)}.clamp(0, {size - 1})"
