"""Masks and score mods in a Pallas kernel for Hopper (Mosaic GPU): the values they read, and their text.

What belongs to the positions down a tile, or to those along it, is a vector in the layout that a row or a column of a
`wgmma` accumulator has. `down(x)` and `across(x)` spread it over a tile, which costs no instruction. Mosaic GPU spreads
nothing but numbers by itself, so the text says it everywhere. Kernels for Hopper have no gather: lookups come in as in
`kernels/inputs.py`, one value per head, query, key or pair, read from global memory where they are needed.

Operators that Mosaic GPU does not have (floor, pow, sqrt, erf, `not`, ...) are written by `legalise`. Its tanh is
good to eleven bits when exp2 is the machine's. It is taken where the target says so, but not where its value decides an
Int or a Bool.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from frisket.dsl.ir import Expr, make, substitute, walk
from frisket.lowering.kernels import jnp_expr as expr_jnp
from frisket.lowering.kernels.expr import COLUMN, LEVELS, POSITION, ROW, assignments, decisive, levels
from frisket.lowering.kernels.inputs import Down, TableInputs, floats, mosaic, numbers, plain, stored
from frisket.lowering.kernels.language import calls
from frisket.lowering.kernels.text import parts
from frisket.lowering.kernels.units import factored, last_factor
from frisket.lowering.plan import LoopPlan

_LACKING = frozenset("not sqrt isfinite log1p erf pow floor tan floordiv mod random".split())
MOSAIC_GPU: dict[str, str] = {op: row for op, row in expr_jnp.JNP.items() if op not in _LACKING}
MOSAIC_GPU |= calls("{}", "tanh:tanh seeded:seeded uniform:uniform")
MOSAIC_GPU |= calls("{}, {}", "stirred:stirred quotient:quotient remainder:remainder")
MOSAIC_GPU |= calls("{}", "down:down across:across tiled:tiled tanh_approximate:tanh_approximate")
MOSAIC_GPU |= {"where": "choose({}, {}, {})"}
_OWN = parts(__package__, "functions")
LANGUAGE = replace(
    expr_jnp.LANGUAGE,
    name="pallas-gpu",
    operators=MOSAIC_GPU,
    # JAX's functions are for what is computed before the kernel
    functions={name: text for name, text in expr_jnp.LANGUAGE.functions.items() if name not in _OWN} | _OWN,
    nameless=frozenset({"seeded", "stirred"}),
)


def prelude(source: str) -> list[str]:
    """The lines that define the functions `source` calls."""
    constants, functions = LANGUAGE.prelude(source)
    return [*constants, *(line for text in functions for line in f"\n\n{text.strip()}".splitlines())]


class Expressions:
    """The expressions of one kernel, whose tiles have queries down and keys across (`down="q"`), or are transposed.

    The kernel has `batch`, `head`, `start` (the first position of the warpgroup's own axis), `line` (its positions)
    and `tile` (the tile of the other axis). It also has the scores as `s`, and the functions `down`, `across`, `tiled`,
    `of_line`, `of_tile` and `steps_along` of `skeletons/kernel.tpl`. `tanh` is as of `Target`.

    With a score mod among them, `score`, they are of products where `products` says so, and not of scores. What is
    written of it has no last factor: that is `factor`."""

    def __init__(self, roots: Iterable[Expr], down: Down = "q", tanh: str = "exact", score: Expr | None = None) -> None:
        roots = tuple(roots)
        self.factored, self.products, self.factor = dict[Expr, Expr](), False, 1.0
        if score is not None:
            self.factored, self.products = factored(score, roots, forms=("div", "exp"))
            self.factored[score], self.factor = last_factor(self.factored.get(score, score))
        self.inputs = TableInputs(tuple(self.factored.get(e, e) for e in roots), down)
        self.tanh = tanh
        self.down = down
        owned, other = (ROW, COLUMN) if down == "q" else (COLUMN, ROW)
        self.spread = {owned: "down", other: "across"}
        self.names: dict[Expr, Expr] = {}
        self.when = dict(LEVELS)
        at = {"heads": 0, "queries": ROW, "keys": COLUMN, "distances": POSITION, "pairs": POSITION}
        for kind, level in at.items():
            for e, name in getattr(self.inputs, kind).items():
                self.names[e] = make("var", (), f"{name}_at", e.type)
                self.when[f"{name}_at"] = level

    # -- what the kernel is given -----------------------------------------------------------------------

    def operands(self, plan: LoopPlan) -> list[str]:
        """The arrays of the kernel, in the names that `inputs.before` gives them."""
        i = self.inputs
        listed = [*i.scalars, *i.queries.values(), *i.keys.values(), *i.distances.values(), *i.pairs.values()]
        return ["ints", "q_origin", "k_origin", *floats(plan), *listed]

    def lined(self) -> list[str]:
        """The lines that turn the values of `before` into arrays of whole tiles."""
        i = self.inputs
        lines = [f"{n} = lined({n}, BLOCK_Q)" for n in i.queries.values()]
        lines += [f"{n} = lined({n}, BLOCK_K)" for n in i.keys.values()]
        return lines + [f"{n} = paved({n})" for n in i.pairs.values()]

    def definitions(self, plan: LoopPlan) -> list[str]:
        """The lines that define the functions these expressions call, in the kernel and before it."""
        lines = self.inputs.before(plan)
        for root in self.inputs.roots:
            assignments, value = self._written(root, "x")
            lines += [*assignments, value]
        return prelude("\n".join(lines))

    # -- what it starts from ----------------------------------------------------------------------------

    def _used(self, plan: LoopPlan) -> set[str]:
        return {n.name for n in self.inputs.left() if n.op in ("var", "param")} | {str(plan.rate)}

    def once(self, plan: LoopPlan) -> list[str]:
        """The lines before the loops: coordinates, slots, and values of the warpgroup's own positions."""
        lines = numbers(plan)
        lines[self.down] = f"{self.down} = {self.down}_origin[batch] + start + steps_along(0)"
        used = self._used(plan)
        assignments = [text for n, text in lines.items() if n in used]
        assignments += [f"{n}_at = {stored(f'{n}[batch, head]', e.type).text}" for e, n in self.inputs.heads.items()]
        read = "of_line({}, batch, head, line, 0)".format
        return assignments + [f"{n}_at = {stored(read(n), e.type).text}" for e, n in self.inputs.row_values.items()]

    def each(self, plan: LoopPlan, *roots: Expr | None) -> list[str]:
        """The lines of one tile, before these expressions or all: values of its positions along the other axis, and of
        pairs. A vector that nothing reads has no layout, and Mosaic GPU looks for one without an end."""
        i = self.inputs
        other, block, vectors = ("k", "BLOCK_K", i.keys) if self.down == "q" else ("q", "BLOCK_Q", i.queries)
        width = "BLOCK_Q" if self.down == "q" else "BLOCK_K"
        line = f"pl.ds(tile * {block}, {block})"
        forms = (
            (vectors, f"of_line({{}}, batch, head, {line}, 1)"),
            (i.distances, f"of_distance({{}}, batch, head, tile * {block} - start + order.shape[1] * {width} - HALF)"),
            (i.pairs, "of_pair({}, batch, head, start, tile)"),
        )
        meant = [mosaic(self.factored.get(e, e)) for e in roots if e is not None] if roots else i.roots
        used = {n.name for e in meant for n in walk(substitute(e, self.names)) if n.op == "var"}
        lines = [f"{other} = {other}_origin[batch] + tile * {block} + steps_along(1)"] if other in used else []
        return lines + [
            f"{n}_at = {stored(form.format(n), e.type).text}"
            for of, form in forms
            for e, n in of.items()
            if f"{n}_at" in used
        ]

    # -- text -------------------------------------------------------------------------------------------

    def written(self, root: Expr, temporary: str) -> tuple[list[str], str]:
        """The (assignments to `temporary` 0, 1, ..., text of a whole tile) of one of the expressions."""
        return self._written(self.factored.get(root, root), temporary)

    def _written(self, root: Expr, temporary: str) -> tuple[list[str], str]:
        root = substitute(mosaic(root), self.names)
        known = levels(root, when=self.when)
        done: dict[Expr, Expr] = {}
        exact = decisive([root]) if self.tanh == "approximate" else set(walk(root))
        for e in walk(root):
            args = tuple(self._over(done[a], known[a], known[e]) for a in e.args)
            op = "tanh_approximate" if e.op == "tanh" and e not in exact else e.op
            done[e] = make(op, args, e.name, e.type) if e.args else e
        whole = self._over(done[root], known[root], POSITION)
        if known[root] == 0:  # a number has no tile to be spread over
            whole = make("tiled", (whole,), None, root.type)
        names = (f"{temporary}{n}" for n in itertools.count())
        lines, value = assignments(whole, LANGUAGE, lambda e, args: plain(e), lambda: next(names), self.when)
        return lines, value.text

    def _over(self, e: Expr, at: int, user: int) -> Expr:
        """The text of a vector over a tile, where its reader is a tile."""
        return make(self.spread[at], (e,), None, e.type) if user == POSITION and at in self.spread else e
