"""Inputs of the expressions of a Pallas kernel besides coordinates: how their values reach the kernel, and the plain
JAX that computes them before.

- An expression with a lookup that depends on `b h q` or on `b h k` alone (`doc[q]`, `table[doc[k]]`) is computed
  before the kernel, one value per query or key.
- One that depends on `b h` alone (`slope[h]`) comes in as a scalar per batch and head.
- One that depends on `b h` and `q - k` (`bias[h, bucket(k - q)]`, of a table of any size) is computed before: one
  value per distance. It comes in as windows of distances, which become tiles.
- A lookup whose indices are `q` and `k` up to a shift (`bias[h, q, k]`) comes in as tiles.
- Any other lookup of `q` and `k` together (`sees[kind[q], kind[k]]`) is left to the kernel.

A kernel's tiles have queries down and keys along (`down="q"`), or are transposed (`down="k"`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from frisket.dsl.ir import COORDINATES, SIZES, Expr, param, substitute, transform, uses, var, walk
from frisket.dsl.types import BOOL, FLOAT, INT, Type
from frisket.lowering.derive import over
from frisket.lowering.plan import LoopPlan

from . import jnp_expr
from .expr import assignments, machine
from .language import COMPARISON, Text

LANGUAGE = replace(jnp_expr.LANGUAGE, name="pallas-tpu")
Down = Literal["q", "k"]
# variables that a kernel has by another name
NAMES = {"score": "s", "scale": "SCALE", "total": "whole", "count": "many"}


def mosaic(root: Expr) -> Expr:
    """An equal Expr that Mosaic compiles: cheaper operators, and no choice between two vectors of Bool."""

    def change(e: Expr) -> Expr:
        if e.op == "where" and e.type is BOOL:
            when, yes, no = e.args  # Mosaic has no select of vectors of Bool
            return (when & yes) | (~when & no)
        return e

    return transform(machine(root), change)


@dataclass
class TableInputs:
    """The inputs of expressions, `roots`, which become what Mosaic compiles; names are those of the generated module.

    >>> from frisket.dsl.ir import lookup
    >>> from frisket.dsl.sugar import eq, h, k, q
    >>> inputs = TableInputs((eq(lookup("doc", (q,)), lookup("doc", (k,))), lookup("bias", (h, q - k), FLOAT)))
    >>> inputs.queries, inputs.keys, [*inputs.distances.values()]
    ({doc[q]: 'of_query0'}, {doc[k]: 'of_key0'}, ['of_distance0'])
    """

    roots: tuple[Expr, ...]
    down: Down = "q"
    heads: dict[Expr, str] = field(default_factory=dict)
    queries: dict[Expr, str] = field(default_factory=dict)
    keys: dict[Expr, str] = field(default_factory=dict)
    distances: dict[Expr, str] = field(default_factory=dict)
    pairs: dict[Expr, str] = field(default_factory=dict)
    picked: dict[str, str] = field(default_factory=dict)  # table -> its entries, flat

    def __post_init__(self) -> None:
        self.roots = tuple(mosaic(e) for e in self.roots)
        for root in self.roots:
            self._place(root)
        for node in self.left():
            if node.op == "lookup":
                self.picked.setdefault(node.name, f"{node.name}.reshape(-1){_whole(node.type)}")

    def _place(self, root: Expr) -> None:
        """Decide for every lookup of an expression how its values reach the kernel."""
        stack = [root]
        while stack:
            e = stack.pop()
            reads = [n for n in walk(e) if n.op == "lookup"]
            # without a lookup the kernel computes it, which is faster than to read it
            if not reads or e in self.outside():
                continue
            # from the root down, so that the largest part that depends on one axis is one operand
            used = uses(e) & {"q", "k", "score", "total", "count"}
            if not used:
                self.heads[e] = f"of_head{len(self.heads)}"
            elif used == {"q"}:
                self.queries[e] = f"of_query{len(self.queries)}"
            elif used == {"k"}:
                self.keys[e] = f"of_key{len(self.keys)}"
            elif used == {"q", "k"} and any(uses(n) & used for n in reads) and over((e,)) == "diagonal":
                self.distances[e] = f"of_distance{len(self.distances)}"
            elif e.op == "lookup" and _is_plane(e):
                self.pairs[e] = f"of_pair{len(self.pairs)}"
            else:
                stack.extend(reversed(e.args))

    def outside(self) -> dict[Expr, str]:
        """The nodes computed before the kernel."""
        return self.heads | self.queries | self.keys | self.distances | self.pairs

    def left(self) -> list[Expr]:
        """The nodes that the kernel computes."""
        at_hand = self.outside()
        nodes: dict[Expr, None] = {}
        # a node inside one that was placed is not visited: it is computed outside with it
        stack = list(reversed(self.roots))
        while stack:
            e = stack.pop()
            if e not in nodes and e not in at_hand:
                nodes[e] = None
                stack.extend(e.args)
        return list(nodes)

    @property
    def row_values(self) -> dict[Expr, str]:
        """Values of the positions down, the same in all tiles of a row."""
        return self.queries if self.down == "q" else self.keys

    @property
    def scalars(self) -> list[str]:
        """Operands that hold numbers: one for a head, or those that are picked from."""
        return [*self.heads.values(), *self.picked]

    @property
    def blocks(self) -> list[str]:
        """Operands that come in vectors and tiles."""
        return [*self.queries.values(), *self.keys.values(), *self.distances.values(), *self.pairs.values()]

    def before(self, plan: LoopPlan) -> list[str]:
        """The lines of plain JAX before the kernel, which compute from `origin`, `sizes`, `slots`, `tables`, `batch`,
        `heads` (of queries), `q_len` and `kv_len`: `ints`, `q_origin`, `k_origin`, `floats` if there are any, and the
        inputs."""
        lines = ["q_origin, k_origin = (jnp.broadcast_to(jnp.asarray(x, Int), (batch,)) for x in origin[2:])"]
        whole, floating = ([s.name for s in plan.slots if (s.type is FLOAT) is kind] for kind in (False, True))
        lines += [f"{s.name} = jnp.asarray(slots[{i}], {_DTYPES[s.type]})" for i, s in enumerate(plan.slots)]
        lines += [f"{t.name} = jnp.asarray(tables[{i}], {_DTYPES[t.type]})" for i, t in enumerate(plan.tables)]
        listed = "".join(f", {n}" for n in whole)
        lines.append(f"ints = jnp.stack([jnp.asarray(x, Int) for x in (*origin[:2], *sizes{listed})])")
        if floating:
            lines.append(f"floats = jnp.stack([{', '.join(floating)}])")
        return lines + self._outside_lines()

    def _outside_lines(self) -> list[str]:
        outside = self.outside()
        used = {name for e in outside if e not in self.distances for name in uses(e)}
        everywhere = {name for e in outside for name in uses(e)}
        lines = {
            "b": "b = jnp.asarray(origin[0], Int) + jnp.arange(batch, dtype=Int).reshape(-1, 1, 1, 1)",
            "h": "h = jnp.asarray(origin[1], Int) + jnp.arange(heads, dtype=Int).reshape(1, -1, 1, 1)",
        } | {name: f"{name} = jnp.asarray(sizes[{i}], Int)" for i, name in enumerate(SIZES)}
        out = [line for name, line in lines.items() if name in everywhere]
        start = "jnp.asarray(origin[{}], Int).reshape(-1, 1, 1, 1)"
        axes = {"q": (start.format(2), "q_len"), "k": (start.format(3), "kv_len")}
        out += [f"{n} = {at} + jnp.arange({length}, dtype=Int)" for n, (at, length) in axes.items() if n in used]
        if self.distances:  # any q and k that are so far apart
            along = "k" if self.down == "q" else "q"
            out += [
                "apart = distances(q_len, kv_len)",
                f"{along}_of = {axes[along][0]} + jnp.maximum(apart, 0)",
                f"{self.down}_of = {axes[self.down][0]} - jnp.minimum(apart, 0)",
            ]
        return out + [line for e, name in outside.items() for line in self._worked_out(e, name)]

    def _worked_out(self, e: Expr, name: str) -> list[str]:
        at_hand = {}
        if e in self.pairs:
            at_hand = {var("q"): Text("q.swapaxes(2, 3)")}
        elif e in self.distances:
            at_hand = {var("q"): Text("q_of"), var("k"): Text("k_of")}
        temporaries, value = written(e, at_hand, lambda e, indices: Text(f"look({e.name}, {indices})"), f"{name}_")
        if e in self.heads:
            value = f"jnp.broadcast_to({value}, (batch, heads, 1, 1))[:, :, 0, 0]"
        elif e in self.distances:
            value = f"windows({value})"
        whole = _whole(e.type)
        return [*temporaries, f"{name} = ({value}){whole}" if whole else f"{name} = {value}"]


def _is_plane(e: Expr) -> bool:
    """Whether a lookup is `T[.., q + c, k + c']`: a table as large as the problem itself."""
    moving = [i for i in e.args if uses(i) & {"q", "k"}]
    return len(moving) == 2 and {v for i in moving for v in "qk" if _shifted(i, v)} == {"q", "k"}


def _shifted(e: Expr, name: str) -> bool:
    if e.op == "var":
        return bool(e.name == name)
    if e.op not in ("add", "sub"):
        return False
    x, y = e.args
    constant = not uses(y) & set(COORDINATES)  # sizes and parameters are the same for a whole call
    return (_shifted(x, name) and constant) or (e.op == "add" and _shifted(y, name) and not uses(x) & set(COORDINATES))


def roots(plan: LoopPlan) -> tuple[Expr, ...]:
    """The expressions that a forward kernel computes."""
    every = plan.mask, plan.score, plan.keep_mask, plan.value_scale, plan.counted, plan.divide
    return tuple(e for e in every if e is not None)


# -- text of a kernel ---------------------------------------------------------------------------------


def written(
    root: Expr, names: Mapping[Expr, Text], look: Callable[[Expr, str], Text], temporary: str
) -> tuple[list[str], str]:
    """The (assignments to `temporary` 0, 1, ..., text of the value) of `root`, with `names` for known values."""
    at_hand = {e: param(f"{i} at hand", e.type) for i, e in enumerate(names)}  # no parameter has a space in its name
    shown = {at_hand[e]: shown for e, shown in names.items()}

    def leaf(e: Expr, args: list[Text]) -> Text | None:
        return look(e, ", ".join(a.text for a in args)) if e.op == "lookup" else shown.get(e) or plain(e)

    count = itertools.count()
    lines, value = assignments(substitute(root, at_hand), LANGUAGE, leaf, lambda: f"{temporary}{next(count)}")
    return lines, value.text


def plain(e: Expr) -> Text | None:
    """The text of a variable or a parameter."""
    return Text(NAMES.get(e.name, str(e.name))) if e.op in ("var", "param") else None


def stored(text: str, type: Type) -> Text:
    """The text that reads a stored value: Bool lives in memory as an integer."""
    return Text(f"{text} != 0", COMPARISON) if type is BOOL else Text(text)


def _whole(type: Type) -> str:
    return ".astype(Int)" if type is BOOL else ""


_DTYPES = {BOOL: "jnp.bool_", INT: "Int", FLOAT: "Float"}


def floats(plan: LoopPlan) -> list[str]:
    """The operand that holds the Float slots, if there are any."""
    return ["floats"] if any(s.type is FLOAT for s in plan.slots) else []


def numbers(plan: LoopPlan) -> dict[str, str]:
    """The lines of `b` and `h`, sizes and slots in a kernel, by their names, from its `ints`, `floats`, `batch` and
    `head`."""
    lines = {"b": "b = ints[0] + batch", "h": "h = ints[1] + head"}
    lines |= {name: f"{name} = ints[{2 + i}]" for i, name in enumerate(SIZES)}
    ints, reals = itertools.count(2 + len(SIZES)), itertools.count()
    for s in plan.slots:
        source = f"floats[{next(reals)}]" if s.type is FLOAT else f"ints[{next(ints)}]"
        lines[s.name] = f"{s.name} = {stored(source, s.type).text}"
    return lines
