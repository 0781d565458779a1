"""Inputs of the expressions of a Pallas TPU kernel besides coordinates, and their way to the kernel.

- An expression with a lookup that depends on `b h q` or on `b h k` alone (`doc[q]`, `table[doc[k]]`) is computed
  before the kernel, one value per query or key, and comes in as a block.
- One that depends on `b h` alone (`slope[h]`) comes in as a scalar per batch and head.
- One that depends on `b h` and `q - k` (`bias[h, bucket(k - q)]`, of a table of any size) is computed before, one
  value per distance, and comes in as windows of BLOCK_Q + BLOCK_K distances, which the kernel skews into tiles.
- A lookup whose indices are `q` and `k` up to a shift (`bias[h, q, k]`) comes in as blocks of tile size.
- Any other lookup of `q` and `k` together (`sees[kind[q], kind[k]]`) picks from a table of at most `SMALL` entries in
  scalar memory, entry by entry: TPUs have no gather inside a kernel. Larger ones are a LoweringError.

A kernel's tiles have queries down and keys along (`down="q"`), or are transposed (`down="k"`). What belongs to the
positions down is turned upright where a row of tiles starts and kept; what belongs to those along is read as it lies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import COORDINATES, SIZES, Expr, param, substitute, transform, uses, var, walk
from frisket.dsl.types import BOOL, FLOAT, INT, Type
from frisket.lowering.derive import over
from frisket.lowering.kernels import jnp_expr
from frisket.lowering.kernels.expr import machine, prelude_of, printed
from frisket.lowering.kernels.language import COMPARISON, Text
from frisket.lowering.kernels.text import filled, parts
from frisket.lowering.plan import LoopPlan

LANGUAGE = replace(jnp_expr.LANGUAGE, name="pallas-tpu")
TEXT = parts(__package__, "inputs")
SMALL = 1024  # entries a kernel may try one by one

Down = Literal["q", "k"]


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
    """The inputs of the expressions that read tables; names are those of the generated module.

    >>> from frisket.dsl.ir import lookup
    >>> from frisket.dsl.sugar import eq, h, k, q
    >>> found = place([eq(lookup("doc", (q,)), lookup("doc", (k,))), lookup("bias", (h, q - k), FLOAT)])
    >>> found.queries, found.keys, [*found.distances.values()]
    ({doc[q]: 'of_query0'}, {doc[k]: 'of_key0'}, ['of_distance0'])
    """

    roots: tuple[Expr, ...]
    down: Down
    strided: bool = True  # TPUs from v5 on roll each row by another number
    program_heads: int = 1  # query heads of a program, each with values of the positions down
    heads: dict[Expr, str] = field(default_factory=dict)
    queries: dict[Expr, str] = field(default_factory=dict)
    keys: dict[Expr, str] = field(default_factory=dict)
    distances: dict[Expr, str] = field(default_factory=dict)
    pairs: dict[Expr, str] = field(default_factory=dict)
    picked: dict[str, str] = field(default_factory=dict)  # table -> its entries, flat

    @property
    def scratch_index(self) -> str:
        """The index of a head's share of scratch."""
        return "..." if self.program_heads == 1 else "part"

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
    def scratch_values(self) -> dict[Expr, str]:
        """Values of the positions down, turned once per row of tiles and kept in scratch."""
        return self.queries if self.down == "q" else self.keys

    @property
    def needs_math(self) -> bool:
        """Whether the definitions use Python's `math`."""
        return bool(self.picked or self.distances)

    @property
    def scalars(self) -> list[str]:
        """Operands in scalar memory."""
        return [*self.heads.values(), *self.picked]

    @property
    def blocks(self) -> list[str]:
        """Operands that come in blocks, in the order of `specs`."""
        return [*self.queries.values(), *self.keys.values(), *self.distances.values(), *self.pairs.values()]


def place(roots: Iterable[Expr], down: Down = "q", strided: bool = True, program_heads: int = 1) -> TableInputs:
    """Decide for every lookup of these expressions how its values reach the kernel."""
    inputs = TableInputs(tuple(mosaic(e) for e in roots), down, strided, program_heads)
    for root in inputs.roots:
        _place(root, inputs)
    for node in inputs.left():
        if node.op == "lookup":
            inputs.picked.setdefault(node.name, f"{node.name}.reshape(-1){_whole(node.type)}")
    return inputs


def _place(root: Expr, inputs: TableInputs) -> None:
    stack = [root]
    while stack:
        e = stack.pop()
        reads = [n for n in walk(e) if n.op == "lookup"]
        # without a lookup the kernel computes it, which is faster than to read it
        if not reads or e in inputs.outside():
            continue
        # from the root down, so that the largest part that depends on one axis is one operand
        used = uses(e) & {"q", "k", "score"}
        if not used:
            inputs.heads[e] = f"of_head{len(inputs.heads)}"
        elif used == {"q"}:
            inputs.queries[e] = f"of_query{len(inputs.queries)}"
        elif used == {"k"}:
            inputs.keys[e] = f"of_key{len(inputs.keys)}"
        elif used == {"q", "k"} and any(uses(n) & used for n in reads) and over((e,)) == "diagonal":
            inputs.distances[e] = f"of_distance{len(inputs.distances)}"
        elif e.op == "lookup" and _is_plane(e):
            inputs.pairs[e] = f"of_pair{len(inputs.pairs)}"
        else:
            stack.extend(reversed(e.args))


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


def check_tables(plan: LoopPlan, inputs: TableInputs, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise where a table is too large for the way this kernel reads it."""
    for node in inputs.left():
        if node.op != "lookup":
            continue
        ends = zip(node.args, shapes[node.name], strict=True)
        # without a gather each entry is compared with the index, so work grows with the entries tried
        tried = math.prod(n for index, n in ends if uses(index) & {"q", "k", "score"})
        if tried > SMALL:
            source = next(t.source for t in plan.tables if t.name == node.name)
            raise LoweringError(
                f"`{source}` is indexed by q and k together and a TPU kernel would have to try {tried} "
                f'entries, at most {SMALL}; index it by q, by k or by q - k alone, shrink it, or use backend="xla"'
            )


# -- expressions ------------------------------------------------------------------------------------


def written(
    root: Expr, names: Mapping[Expr, Text], look: Callable[[Expr, str], Text], temporary: str
) -> tuple[list[str], str]:
    """The (assignments to `temporary` 0, 1, ..., text of the value) of `root`, with `names` for known values."""
    at_hand = {e: param(f"{i} at hand", e.type) for i, e in enumerate(names)}  # no parameter has a space in its name
    shown = {at_hand[e]: shown for e, shown in names.items()}

    def leaf(e: Expr, args: list[Text]) -> Text | None:
        if e.op == "var":
            return Text("s" if e.name == "score" else str(e.name))
        if e.op == "param":
            return shown.get(e) or Text(str(e.name))
        return look(e, ", ".join(a.text for a in args)) if e.op == "lookup" else None

    count = itertools.count()
    root = substitute(root, at_hand)
    page = printed([root], LANGUAGE, leaf, lambda e, level: f"{temporary}{next(count)}")
    return [f"{line.name} = {line.text}" for line in page.lines], page.values[root]


def in_kernel(root: Expr, inputs: TableInputs, temporary: str) -> tuple[list[str], str]:
    """The text of `root`, one of the Exprs the inputs were made for, in the kernel: (assignments, text of the value),
    which broadcasts to a tile. The kernel has `batch`, `head`, those of `coordinate_lines`, and the scores as `s`."""
    forms = {"heads": "{}_ref[batch, head]", "pairs": "{}_ref[0, 0]", "distances": "skewed({}_ref[0, 0, 0])"}
    forms |= {
        "queries": "{}_ref[0, 0]",
        "keys": "{}_ref[0, 0]",
        ("queries" if inputs.down == "q" else "keys"): f"{{}}[{inputs.scratch_index}]",
    }
    if inputs.down == "k":
        forms["pairs"] += ".T"
    names = {
        e: _stored(form.format(name), e.type)
        for kind, form in forms.items()
        for e, name in getattr(inputs, kind).items()
    }

    def pick(e: Expr, indices: str) -> Text:
        return _stored(f"pick({e.name}_ref, {e.name}_shape, {indices})", e.type)

    return written(mosaic(root), names, pick, temporary)


def _stored(what: str, type: Type) -> Text:
    """The text that reads a stored value: Bool lives in memory as an integer."""
    return Text(f"{what} != 0", COMPARISON) if type is BOOL else Text(what)


def _whole(type: Type) -> str:
    return ".astype(Int)" if type is BOOL else ""


def memory(type: Type) -> str:
    """The dtype a value of this type has in memory."""
    return "Float" if type is FLOAT else "Int"


# -- lines of the module ----------------------------------------------------------------------------


def definitions(inputs: TableInputs, turns: bool = False) -> list[str]:
    """The constants and functions that the kernel and the code before it need, above the kernel; with `turns` the
    kernel has use for `turned` itself."""
    constants, functions = prelude_of(inputs.roots, LANGUAGE)
    optional: dict[str, object] = {
        "look": inputs.outside(),
        "turn": inputs.scratch_values or turns,
        "pick": inputs.picked,
        "share": inputs.blocks,
        "per_query": inputs.queries,
        "per_key": inputs.keys,
        "per_pair": inputs.pairs,
    }
    functions += [TEXT[name] for name, needed in optional.items() if needed]
    functions += [_distances(inputs)] if inputs.distances else []
    return constants + [line for what in functions for line in f"\n\n{what.strip()}".splitlines()]


def _distances(inputs: TableInputs) -> str:
    rows, columns = ("q", "k") if inputs.down == "q" else ("k", "q")
    names = {"down": f"BLOCK_{rows.upper()}", "along": f"BLOCK_{columns.upper()}", "rows": rows, "columns": columns}
    return filled(TEXT["distances"] + (TEXT["skewed"] if inputs.strided else TEXT["skewed_by_bits"]), **names)


def coordinate_lines(plan: LoopPlan, inputs: TableInputs) -> list[str]:
    """The lines of the coordinates, sizes and slots that the kernel computes with. It has `batch`, `head`, `q_tile`,
    `k_tile`."""
    used = {n.name for n in inputs.left() if n.op in ("var", "param")}
    shape = {"q": "(BLOCK_Q, 1), 0", "k": "(1, BLOCK_K), 1"}
    if inputs.down == "k":
        shape = {"q": "(1, BLOCK_Q), 1", "k": "(BLOCK_K, 1), 0"}
    lines = {
        "b": "b = ints[0] + batch",
        "h": "h = ints[1] + head",
        "q": f"q = q_origin[batch] + q_tile * BLOCK_Q + lax.broadcasted_iota(Int, {shape['q']})",
        "k": f"k = k_origin[batch] + k_tile * BLOCK_K + lax.broadcasted_iota(Int, {shape['k']})",
    } | {name: f"{name} = ints[{2 + i}]" for i, name in enumerate(SIZES)}
    wholes = floats = 0
    for s in plan.slots:
        source = f"floats[{floats}]" if s.type is FLOAT else f"ints[{6 + wholes}]"
        lines[s.name] = f"{s.name} = {_stored(source, s.type).text}"
        wholes, floats = wholes + (s.type is not FLOAT), floats + (s.type is FLOAT)
    return [line for name, line in lines.items() if name in used]


def turned(inputs: TableInputs) -> list[str]:
    """The lines that fill the scratch of a row of tiles, at its start."""
    return [f"{n}[{inputs.scratch_index}] = turned({n}_ref[0, 0])" for n in inputs.scratch_values.values()]


def scratch(inputs: TableInputs) -> list[str]:
    """The scratch arrays of a row of tiles."""
    size = ("" if inputs.program_heads == 1 else "HEADS, ") + ("BLOCK_Q" if inputs.down == "q" else "BLOCK_K")
    return [f"pltpu.VMEM(({size}, 1), {memory(e.type)})," for e in inputs.scratch_values]


def specs(inputs: TableInputs) -> list[str]:
    """The BlockSpecs of `inputs.blocks`, by `place`: a step of the grid to (batch, query head, q tile, k tile)."""
    makers = {"per_query": inputs.queries, "per_key": inputs.keys, "per_distance": inputs.distances}
    lines = [(name, maker) for maker, of in (makers | {"per_pair": inputs.pairs}).items() for name in of.values()]
    extra = {"per_distance": ", q_len" if inputs.down == "q" else ", kv_len"}
    return [f"{maker}({name}, place{extra.get(maker, '')})," for name, maker in lines]


_DTYPES = {BOOL: "jnp.bool_", INT: "Int", FLOAT: "Float"}


def before(plan: LoopPlan, inputs: TableInputs) -> list[str]:
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
    return lines + _outside(inputs)


def floats(plan: LoopPlan) -> list[str]:
    """The operand that holds the Float slots, if there are any."""
    return ["floats"] if any(s.type is FLOAT for s in plan.slots) else []


def _outside(inputs: TableInputs) -> list[str]:
    outside = inputs.outside()
    used = {name for e in outside if e not in inputs.distances for name in uses(e)}
    everywhere = {name for e in outside for name in uses(e)}
    lines = {
        "b": "b = jnp.asarray(origin[0], Int) + jnp.arange(batch, dtype=Int).reshape(-1, 1, 1, 1)",
        "h": "h = jnp.asarray(origin[1], Int) + jnp.arange(heads, dtype=Int).reshape(1, -1, 1, 1)",
    } | {name: f"{name} = jnp.asarray(sizes[{i}], Int)" for i, name in enumerate(SIZES)}
    out = [line for name, line in lines.items() if name in everywhere]
    start = "jnp.asarray(origin[{}], Int).reshape(-1, 1, 1, 1)"
    axes = {"q": (start.format(2), "q_len"), "k": (start.format(3), "kv_len")}
    out += [f"{n} = {at} + jnp.arange({length}, dtype=Int)" for n, (at, length) in axes.items() if n in used]
    if inputs.distances:  # any q and k that are so far apart
        along = "k" if inputs.down == "q" else "q"
        out += [
            "apart = distances(q_len, kv_len)",
            f"{along}_of = {axes[along][0]} + jnp.maximum(apart, 0)",
            f"{inputs.down}_of = {axes[inputs.down][0]} - jnp.minimum(apart, 0)",
        ]
    for e, name in outside.items():
        out += _worked_out(e, name, inputs)
    return out


def _worked_out(e: Expr, name: str, inputs: TableInputs) -> list[str]:
    at_hand = {}
    if e in inputs.pairs:
        at_hand = {var("q"): Text("q.swapaxes(2, 3)")}
    elif e in inputs.distances:
        at_hand = {var("q"): Text("q_of"), var("k"): Text("k_of")}
    temporaries, value = written(e, at_hand, lambda e, indices: Text(f"look({e.name}, {indices})"), f"{name}_")
    if e in inputs.heads:
        value = f"jnp.broadcast_to({value}, (batch, heads, 1, 1))[:, :, 0, 0]"
    elif e in inputs.distances:
        value = f"windows({value})"
    whole = _whole(e.type)
    return [*temporaries, f"{name} = ({value}){whole}" if whole else f"{name} = {value}"]
