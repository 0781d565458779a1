"""Writes the native kernels of a LoopPlan: one self-contained C++ source for g++ or clang.

The text is made of hand-written parts (vectors.hpp, gemm.hpp, forward.hpp and others). Between them is what the
plan says: its sizes, and the mask and the score mod as functions over a vector of keys. What depends on the batch
entry and the head is computed once (`Fixed`). What depends on the query once per row (`Row`), what depends on the
key once per vector of keys (`Column`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from frisket.dsl import ir
from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import SIZES, TRUE, Expr, fold, uses, var, walk
from frisket.dsl.show import show
from frisket.dsl.transfer import nonnegative, within_one
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.grammar.memo import memo
from frisket.lowering.dtypes import BYTES, DOUBLE, DTYPES, FLOATS, HALVES, SUMS
from frisket.lowering.kernels import expr
from frisket.lowering.kernels.expr import COLUMN, POSITION, ROW, SCALAR, levels
from frisket.lowering.kernels.text import Names, filled, parts
from frisket.lowering.plan import (
    FIRST,
    K_SCALE,
    PAGES,
    RATE,
    SEED,
    V_SCALE,
    KernelInputs,
    LoopPlan,
    Slot,
    TableUse,
    Target,
)

from . import call as cpp_call
from . import expr as expr_cpp
from .tiles import tallest

KEYWORDS = (
    "alignas,alignof,and,asm,auto,bool,break,case,catch,char,class,const,constexpr,continue,decltype,default,delete,do,"
    "double,else,enum,explicit,extern,false,float,for,friend,goto,if,inline,int,long,mutable,namespace,new,noexcept,"
    "not,nullptr,operator,or,private,protected,public,register,return,short,signed,sizeof,static,struct,switch,"
    "template,this,throw,true,try,typedef,typeid,typename,union,unsigned,using,virtual,void,volatile,while,xor"
).split(",")
MACROS = (
    "AMX,APART,BYTES,BY_LANES,EACH_LANE,EIGHT,FIRST_BLOCKS,FIRST_FOURS,FIRST_HALVES,FROM_LEFT,FROM_RIGHT,HALF,INLINE,"
    "INSERTED,INT_BYTES,INVARIANT,IN_BLOCKS,LANES,LAST_BLOCKS,LAST_FOURS,LAST_HALVES,METHOD,NULL,PAIRS,REAL_BYTES,"
    "REGISTER,REGISTERS,REGISTER_BYTES,SHUFFLE,SIX,SWAPPED,TERMS,UNPACK_HIGH,UNPACK_LOW,UNROLLED,WEIGHTED,WIDER"
).split(",")
SCALES = {K_SCALE: "k_scale", V_SCALE: "v_scale"}
WISHES = {SEED: "seed", RATE: "rate", PAGES: "pages", FIRST: "first_key", **SCALES}  # C++ names of frisket's own
NUMBERS = ("B", "H", "Q_LEN", "KV_LEN", "b", "h")
COSTLY = frozenset("lookup pow exp exp2 log log2 log1p tanh sigmoid sin cos tan sqrt rsqrt erf floor".split())
KEYS = 16  # tiles of keys are whole vectors, the widest of which has 16 lanes


@dataclass(frozen=True)
class CppArrays:
    """The properties of arrays on which a kernel's text depends."""

    head_dim: int
    v_dim: int
    dtype: str  # of q and out, and of k and v
    kv_dtype: str = ""  # of k and v where it is another one, of 8 bits
    permuted: bool = False


def natural(inputs: KernelInputs) -> bool:
    """Whether the online softmax of native kernels has base e, and not 2: see forward.hpp."""
    return inputs.plan.score is not None or inputs.target.invariant


class CppKernel:
    """The parts of one C++ source, that of `int64_t frisket_forward(const Call *)` and the same behind XLA's calling
    convention; the backward is written from them. The same input gives the same text.

    Numbers of the mask and score mod that no speed depends on are slots: the plan's, and behind them `literals`.
    Without `named` the text leaves out the user's names and numbers, so that masks of one shape are one text.
    """

    name = "frisket_forward"
    tangent = False  # whether the kernel computes tangents too
    guarded = False  # whether a weight of 0 may meet an infinite slope

    def __init__(self, plan: LoopPlan, target: Target, arrays: CppArrays, named: bool = True) -> None:
        dtype, kv_dtype = arrays.dtype, arrays.kv_dtype
        if dtype not in FLOATS:
            raise LoweringError(
                f"the C++ kernels take {', '.join((*SUMS, *reversed(HALVES)))}, not {dtype}; convert q, k and v"
            )
        if kv_dtype not in ("", dtype, *BYTES):
            raise LoweringError(
                f"the C++ kernels take k and v of {dtype} with such a q, or of {', '.join(BYTES)}, not {kv_dtype}; "
                "convert k and v"
            )
        if target.block_k % KEYS or target.block_q < 1:  # a vector of keys must not cross the end of a tile
            raise LoweringError(
                f"C++ tiles have a multiple of {KEYS} keys, this one is {target.block_q} queries by "
                f"{target.block_k} keys; take 64 by 64"
            )
        self.plan, self.target, self.arrays, self.named = plan, target, arrays, named
        self.kv_dtype, self.double = kv_dtype or dtype, dtype == DOUBLE
        self.roots = self.source_roots()  # a method, since a backward has more functions
        language = expr_cpp.language(self.double, plan.int64)
        paged = [t.name for t in plan.tables if plan.pages is not None and t.source in SCALES]
        self.ready = {
            n: expr_cpp.prepared(expr.machine(expr_cpp.parted(e)), language, paged)
            for n, e in self.roots.items()
            if e is not None
        }
        # after `prepared`: a table by distance is written in its operators
        self.ready, self.distances = by_distance(self.ready)
        self.ready |= self.distances
        names = Names({*KEYWORDS, *MACROS, *NUMBERS, "fixed", "row", "column", "score"})
        self.names = self._named(names)
        # passed as arguments: other values of them need no new compilation
        lifted = [e for e in walk(*self.ready.values()) if expr_cpp.liftable(e)]
        self.lifted = {e: names.new(f"c{i}") for i, e in enumerate(lifted)}
        self.literals = tuple(e.name for e in lifted)
        self.forms = expr_cpp.Forms(list(self.ready.values()), self.names, self.double, plan.int64, self.lifted)
        self.locals = Names({*KEYWORDS, *NUMBERS, "distances", *self.names.values(), *self.lifted.values()})
        scale = self.ready.get("scale_of_value")  # kept for the rows, which would each look it up again
        inner, early = list(self.ready.values()), [] if scale is None else [scale]
        self.printed = expr.printed(inner, language, self.forms.leaf, self._name, inner, expr_cpp.WHEN, early)
        # of the prepared roots: a name that was simplified away needs no argument
        self.used = frozenset[str]().union(*map(uses, self.ready.values()))

    def source_roots(self) -> dict[str, Expr | None]:
        """The Exprs that become functions of positions, by the function's name; None: a trivial function."""
        mask = None if self.plan.mask in (None, TRUE) else self.plan.mask
        plan = self.plan
        roots = {"visible": mask, "modified": plan.score, "kept": plan.keep_mask, "scale_of_value": plan.value_scale}
        if plan.weighted:
            roots |= {"counted": plan.counted if plan.counts else None, "divisor": plan.divide}
        return roots | self.interval_roots()

    def interval_roots(self) -> dict[str, Expr | None]:
        """The ends of the keys that a query sees, where these are one interval and nothing else is asked of a key."""
        # run tables are not passed to C++: an interval that reads one is left to the mask
        ends, known = self.plan.by_query, {t.name for t in self.plan.tables}
        if ends is None or ends.rest is not TRUE or self.plan.value_scale is not None:
            return {}
        roots = {"first_key": ends.first, "last_key": ends.last, "asked": None if ends.asks is TRUE else ends.asks}
        read = {n.name for e in roots.values() if e is not None for n in ir.find(e, "lookup")}
        return roots if read <= known else {}

    def _named(self, names: Names) -> dict[str, str]:
        """The C++ names of slots and tables: the user's names where C++ allows them."""

        def wish(use: Slot | TableUse) -> str:
            return WISHES.get(use.source or "", (self.named and use.source) or use.name)

        # always in this order: equal plans give equal texts, which are compiled once
        slots = {s.name: names.new(wish(s)) for s in self.plan.slots}
        return slots | {t.name: names.new(wish(t) + ("_by_index" if t.derived else "")) for t in self.plan.tables}

    def _name(self, node: Expr, level: int) -> str:
        if level == POSITION:  # a local of a function; other levels are fields of a struct
            return self.locals.numbered("x")
        where = {SCALAR: "fixed", ROW: "row", COLUMN: "column"}[level]
        return f"{where}.{self.locals.new(self._called(node)) if node.op in LOOKUPS else self.locals.numbered('x')}"

    def _called(self, node: Expr) -> str:
        if node.op == "var":
            return "k" if node.name == "first" else str(node.name)
        if node.op not in LOOKUPS:
            return "at"
        return "_".join([self.names[node.name], *map(self._called, node.args[node.op != "lookup" :])])

    # -- the source -------------------------------------------------------------------------------

    def source(self) -> str:
        whole = DTYPES[self.kv_dtype].kind == "int8"  # numbers that a matrix unit multiplies without rounding
        parts = [
            self.head(),
            *map(part, ARITHMETIC),
            self.expressions(),
            self.storage(),
            *map(part, ("scores", "work", "forward", *["bytes"] * whole, "forward_work")),
            *map(part, [*["weighted"] * self.plan.weighted, "decode"]),
            self.entries(),
        ]
        return "\n".join(parts)

    def head(self) -> str:
        """The head of the source: a comment, the constants, and the record of a call."""
        of_q, of_kv = DTYPES[self.arrays.dtype], DTYPES[self.kv_dtype]
        dim, v_dim, dtype = self.arrays.head_dim, self.arrays.v_dim, self.arrays.dtype
        weight = self.plan.score if self.plan.value_scale is None else None
        entry, eight = (of_kv.cpp, of_kv.cpp_form) if of_kv.bytes == 1 else ("Entry", 0)
        text = filled(
            TEXT["head"],
            mask=[f"//     {line}" for line in self._shown().split("\n")],
            size=f"{dim}" if dim == v_dim else f"{dim} (values {v_dim})",
            dtype=dtype,
            note="" if self.kv_dtype == dtype else f", keys and values in {self.kv_dtype}",
            block_k=self.target.block_k, real_bytes=8 if self.double else 4, int_bytes=8 if self.plan.int64 else 4,
            half=of_q.cpp_form, six=self.target.precision == "bf16x6", real="double" if self.double else "float",
            int="int64_t" if self.plan.int64 else "int32_t", eight=eight,
            kinds=", ".join(["0: as those of q", *(f"{DTYPES[n].cpp_form}: {n}" for n in BYTES)]),
            entry=of_q.cpp, stored=entry,
            constants=[f"const int {name} = {value};" for name, value in self.constants().items()],
            scored=_boolean("modified" in self.ready), dropped=_boolean("kept" in self.ready),
            scaled=_boolean("scale_of_value" in self.ready), by_head=_boolean("h" in self.used),
            moved=_boolean(self.arrays.permuted), weighted=self.plan.weighted, counts=_boolean(self.plan.counts),
            invariant=int(self.target.invariant),
            counted=_boolean("counted" in self.ready), tangent=_boolean(self.tangent),
            nonnegative=_boolean(weight is not None and nonnegative(weight)),
            near_one=_boolean(weight is not None and self.plan.divide is None and within_one(weight)),
        )  # fmt: skip
        return f"{text}{cpp_call.text()}\nnamespace {{\n"

    def constants(self) -> dict[str, int]:
        head_dim, v_dim = self.arrays.head_dim, self.arrays.v_dim
        most = tallest(head_dim, v_dim, self.target.precision == "bf16x6")  # one text for every length
        # tiles of any call have to fit the buffers, whose size is a constant
        tile = {"BLOCK_Q": max(self.target.block_q, most), "BLOCK_K": self.target.block_k}
        return tile | {"HEAD_DIM": head_dim, "V_DIM": v_dim, "PAGE": self.plan.page}

    def entries(self) -> str:
        """The exported functions of the kernels."""
        kernel = f'extern "C" int64_t {self.name}(const Call *call) {{ return forward(call); }}\n'
        return "}  // namespace\n\n" + kernel + cpp_call.bridged(self.name)

    def _shown(self) -> str:
        if not self.named:
            return "masks and score mods of this shape, whatever their names and numbers"
        lines = [self.plan.text or "every key visible, plain scores"]
        for s in self.plan.slots:
            if s.source != self.names[s.name]:
                lines.append(f"{self.names[s.name]} = {s.source if s.value is None else s.value}")
        lines += [f"{name} = {e.name}" for e, name in self.lifted.items()]
        return "\n".join(lines).replace("\\\n", "\\ \n")  # a backslash at the end would join two lines

    def quoted(self, root: Expr) -> list[str]:
        """The expression in the language, with the kernel's names of slots and tables."""
        if not self.named:
            return []
        shown = show(ir.renamed(root, self.names), known=set(self.names.values()))
        return [f"// {line}" for line in textwrap.wrap(shown, 110, break_long_words=False)]

    # -- expressions ------------------------------------------------------------------------------

    def expressions(self) -> str:
        """The text of `Fixed`, `Row`, `Column` and the functions of positions."""
        functions = self._function("visible", f"Bits visible({ARGUMENTS})", "bits(true)")
        functions += self._function("modified", f"Vec modified({ARGUMENTS}, Vec score)", "score")
        functions += self._function("kept", f"Bits kept({ARGUMENTS})", "bits(true)")
        functions += self._function("scale_of_value", f"Vec scale_of_value({ARGUMENTS})", "reals(1)")
        if self.plan.weighted:
            functions += self._function("counted", f"Bits counted({ARGUMENTS}, Vec score)", "bits(true)")
            if "divisor" in self.roots:
                sums = "const Fixed &fixed, const Row &row, Real total, Int count"
                functions += self._function("divisor", f"Real divisor({sums})", "1", spread=False)
        functions += self._function("slope", f"Vec slope({ARGUMENTS}, Vec score)", "reals(1)")
        of_distance = [self._function(name, f"Vec {name}({ARGUMENTS})", "reals(0)") for name in self.distances]
        calls = [f"store(to + {n} * SPAN, {name}(fixed, row, column));" for n, name in enumerate(self.distances)]
        rate = f"fixed.{self.names[self.plan.rate]}" if self.plan.rate else ""
        return filled(
            TEXT["positions"],
            **self._fixed(),
            **self._known("row", ROW),
            **self._known("column", COLUMN),
            **self._repeated(),
            of_distance=[line for lines in of_distance for line in lines],
            distances=len(self.distances),
            tabulated=calls,
            functions=functions,
            sloped=_boolean("slope" in self.ready),
            guarded=_boolean(self.guarded),
            survivors=f"{rate} < 1 ? 1 / (1 - {rate}) : 0" if rate else "1",
        )

    def storage(self) -> str:
        """The constants of stored keys. These are the places of keys and whether the heads that share them agree in all
        else. Where the keys of a tile that a row sees are one interval, they have its ends."""
        pages, share = self.plan.pages, self._sharing()
        ends = {n: self.printed.values[self.ready[n]] if n in self.ready else "" for n in INTERVAL}
        return filled(
            TEXT["storage"],
            page="0" if pages is None else f"at(fixed.{self.names[pages]}, (Int)batch, (Int)page)",
            # a head that is read as h // n is the same for n heads in a row, from a multiple of n on
            alike=f"{share} % group == 0 && call->h_origin % group == 0" if share else "false",
            interval=_boolean(bool(ends["first_key"] or ends["last_key"])),
            **{name: ends[root] for root, name in INTERVAL.items()},
        )

    def _sharing(self) -> int:
        """The number n where the head is read as h // n and in no other way, otherwise 0."""
        divisors = {1}
        for root in self.roots.values():
            for e in list(walk(root)) if root is not None else []:
                shared = e.op == "floordiv" and ir.literal_value(e.args[1], 0) > 0
                divisors |= {e.args[1].name if shared and i == 0 else 0 for i, a in enumerate(e.args) if a is var("h")}
        sizes = divisors - {1}
        return sizes.pop() if len(sizes) == 1 else 0  # two divisors would agree only on a common multiple

    def _function(self, name: str, head: str, otherwise: str, spread: bool = True) -> list[str]:
        root, plain = self.ready.get(name), self.roots.get(name)
        lines, value = [], otherwise
        if root is not None:
            needed = self.printed.needed([root], POSITION)
            lines = [f"    const {self.forms.type(one.node)} {one.name} = {one.text};" for one in needed]
            text = self.printed.values[root]
            # a value that is the same for all keys is spread here, once, and not at every use
            value = text if self.forms.wide[root] or not spread else expr_cpp.SPREAD[root.type].format(text)
        quoted = [] if plain is None else self.quoted(plain)
        return [*quoted, f"INLINE {head} {{", *lines, f"    return {value};", "}", ""]

    def _known(self, name: str, level: int) -> dict[str, list[str]]:
        """The fields of the record `name` that are known at a level, and the lines that fill them."""
        lines = self.printed.needed(self.ready.values(), level)
        return {
            f"{name}_fields": [f"{self.forms.type(one.node)} {one.name.split('.')[1]};" for one in lines],
            f"{name}_lines": [f"{one.name} = {one.text};" for one in lines],
        }

    def _fixed(self) -> dict[str, list[str]]:
        names, plan, known = self.names, self.plan, self._known("fixed", SCALAR)
        variables = [n for n in NUMBERS if n in self.used]
        fields = [f"Int {n};" for n in variables]
        fields += [f"{SINGLE[s.type]} {names[s.name]};" for s in plan.slots]
        fields += [f"Real {name};" for name in self.lifted.values()]
        fields += [f"Table<{STORED[t.type]}, {t.rank}> {names[t.name]};" for t in plan.tables]
        lines = [f"fixed.{n} = (Int)({SOURCES[n]});" for n in variables]
        for i, s in enumerate(plan.slots):
            lines.append(f"fixed.{names[s.name]} = {VALUES[s.type].format(f'call->slots[{i}]')};")
        for i, name in enumerate(self.lifted.values(), len(plan.slots)):
            lines.append(f"fixed.{name} = (Real)call->slots[{i}].f;")
        if plan.tables:
            # tables of any rank follow one another, each with sizes and strides
            lines.append("const int64_t *words = call->tables;")
        lines += [f"words = read(fixed.{names[t.name]}, words);" for t in plan.tables]
        return {"fixed_fields": fields + known["fixed_fields"], "fixed_lines": lines + known["fixed_lines"]}

    def _repeated(self) -> dict[str, str]:
        """The condition that two rows see the same keys, where neighbours may: what the mask knows of a query is read
        by blocks or from a table."""
        root = self.ready.get("visible")
        known = levels(root, when=expr_cpp.WHEN) if root is not None else {}
        above = {a for node in known if known[node] == POSITION for a in node.args}
        read = [node for node in known if known[node] == ROW and (node in above or node is root)]
        distinct = root is None or any(_tells_apart(node) for node in read)
        same = " & ".join(f"(a.{x} == b.{x})" for x in (self.printed.texts[n].text.removeprefix("row.") for n in read))
        return {"repeated": _boolean(not distinct), "alike": "false" if distinct else same or "true"}


def by_distance(roots: Mapping[str, Expr]) -> tuple[dict[str, Expr], dict[str, Expr]]:
    """Prepared roots without their costly functions of `q - k` alone, and these by new names: a tile has fewer
    diagonals than positions, so a kernel tabulates them for each tile."""
    both = tuple(roots.values())
    slopes = fold(both, _slopes)

    def sees_distance(e: Expr, args: list[bool]) -> bool:
        pair = [slopes[a] for a in e.args]
        between = _moves_by("sub", pair) if e.op in ir.COMPARISONS and not _fixed(e) else slopes[e]
        return sum(between) == 0 if between else bool(args) and all(args)

    on_distance = fold(both, sees_distance)
    costly = fold(both, lambda e, args: any(args) or (e.op in COSTLY and not _fixed(e)))
    tabled = [e for e in on_distance if e.type is FLOAT and on_distance[e] and costly[e] and {"q", "k"} <= uses(e)]
    below = {a for e in tabled for a in walk(e) if a is not e}
    tabled = [e for e in tabled if e not in below]
    leaves = {e: ir.make("distance", (var("q"), var("k")), n, FLOAT) for n, e in enumerate(tabled)}
    return {n: ir.substitute(e, leaves) for n, e in roots.items()}, {f"distance{n}": e for n, e in enumerate(tabled)}


Slopes = tuple[int, int] | None  # of q and k, where a node is an affine function of these


def _slopes(e: Expr, args: list[Slopes]) -> Slopes:
    on = int(e is var("q")), int(e is var("k"))
    return on if any(on) or _fixed(e) else _moves_by(e.op, args)


def _fixed(e: Expr) -> bool:
    return not uses(e) & {"q", "k", "first", "score"}


def _moves_by(op: str, args: list[Slopes]) -> Slopes:
    signs = {"add": (1, 1), "sub": (1, -1), "neg": (-1,)}.get(op)
    known = [x for x in args if x is not None]
    if signs is None or len(known) < len(args):
        return None
    q, k = (sum(sign * x[i] for sign, x in zip(signs, known, strict=True)) for i in (0, 1))
    return q, k


TEXT = parts(__package__, "source")
ARGUMENTS = "const Fixed &fixed, const Row &row, const Column &column"
INTERVAL = {"first_key": "first", "last_key": "last", "asked": "asked"}  # roots, and holes of their texts
LOOKUPS = ("lookup", "ahead", "behind")
SINGLE = {INT: "Int", FLOAT: "Real", BOOL: "bool"}
VALUES = {INT: "(Int){}.i", FLOAT: "(Real){}.f", BOOL: "{}.i != 0"}
STORED = {INT: "Int", FLOAT: "Real", BOOL: "uint8_t"}
SOURCES = {name: f"call->size_{axis}" for name, axis in zip(SIZES, "bhqk", strict=True)}
SOURCES |= {"b": "call->b_origin + batch", "h": "call->h_origin + head"}


def _boolean(value: bool) -> str:
    return "true" if value else "false"


def _tells_apart(root: Expr) -> bool:
    """Whether an Expr differs between neighbouring queries: no quotient or table entry may be the same for both."""

    def step(e: Expr, args: list[bool]) -> bool:
        alike = e.op == "lookup" or (e.op in ("floordiv", "shr", "rshift") and not uses(e.args[1]))
        return not alike and (e is var("q") or any(args))

    return fold(root, step)[root]


ARITHMETIC = ("vectors", "functions", "integers", "gemm")  # what comes before the mask and the score mod


@memo(group="once")
def part(name: str) -> str:
    """A hand-written part of the source, from a file."""
    return resources.files(__package__).joinpath(f"{name}.hpp").read_text("utf-8")
