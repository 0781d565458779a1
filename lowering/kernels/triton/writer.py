"""The writer of all Triton kernels of a LoopPlan: expressions, names, lookups, and modules of kernels.

Parts of an expression that depend on b, h and the coordinate of the program's own tile are computed before the loop
over the other's tiles, parts that depend on the other coordinate alone once per tile, the rest per position.

A kernel says what it reads by the names of its parameters: pointers, strides, lengths, and values such as origins and
slots. Its entry for JAX takes arrays, lengths, and results, in this order; it works the strides out, where their
factors tell the compiler what divides them, and loads values from two vectors, so that they are operands and never a
part of what is compiled.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import SIZES, TRUE, Expr, renamed, transform, uses, var, walk
from frisket.dsl.show import show
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.dtypes import ACCELERATED, BYTES, DTYPES
from frisket.lowering.features import TRITON
from frisket.lowering.kernels import expr
from frisket.lowering.kernels.expr import COLUMN, LEVELS, POSITION, ROW, SCALAR, levels
from frisket.lowering.kernels.language import COMPARISON, PRECEDENCE, Text
from frisket.lowering.kernels.legalise import legalise
from frisket.lowering.kernels.text import Names, Page, filled, skeleton, words
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.kernels.units import ALONG, GATHERED, Q_LINE, START
from frisket.lowering.plan import FIRST, K_SCALE, PAGES, RATE, SEED, V_SCALE, LoopPlan

from . import expr as expr_triton

NAMED = {SEED: "seed", RATE: "rate", K_SCALE: "k_scale", V_SCALE: "v_scale", PAGES: "pages", FIRST: "first_key"}
QUERY = var("q")
# Names that a kernel uses itself: a slot or table of such a name gets another one.
OWN = (
    """
attention_forward attention_delta attention_dq attention_dkv attention_dv attention_decode attention_combine
Q K V Out Lse Low Top Sinks DOut DQ DK DV Spans Count SliceOf Order records scale heads q_len kv_len
b_origin h_origin q_origin k_origin ORIGIN_PER_BATCH NEAR b h q k q_first q_last k_first k_last
BLOCK_Q BLOCK_K HEAD_DIM V_DIM DIM DIM_V GROUP LOWEST program row batch head place kv_head distinct entry record used
query keys values d e rows columns start lo full_lo full_hi hi first full_first full_last last key_at value_at
at i j tile inside visible score unit top peak rescale total p kept acc out lse largest sink empty present
range float int bool out_at
attention_diagonal attention_plane attention_total attention_scatter Sums Total PerUnit Into Counted q_at k_at v_at
dout_at dout dp dm modified survivor seen share shift diagonal diagonals turned moved ahead counted per parts to batches
Acc Tops Totals splits part packed QUERIES PACK first_head PARTS row_at begin end tiles border full tops totals
weight query_at pool page paged seen scaled h_first
q_line k_line away here
Stats stats stats_at pairs factor edge _ DLse low near dq dk dv at_q at_k queries douts own delta ds derivative
Parts LANES lanes rows_of_tiles of_rows needed begun at_row first_at
gluon gl hopper mbarrier tma produce consume load_tile store_tile group_barrier sigmoid ALL STAGES half outs turns
q_full k_full k_free v_full v_free slot phase before before_phase left borders n weights zero dtype
SCORES SUMS ROWS COLUMNS HALF EACH LAYOUT blackwell multiply columns_of seen_as weights_in
s_full p_full o_full scores sums key grown some every of_sequences behind exp2_polynomial exponent biased rest whole
any_grown
of_slice At Rows within listed part_at attention_dq_sums attention_dkv_sums attention_dv_sums
""".split()
    + [f"stride_{tensor}{axis}" for tensor in "qkvog" for axis in "bhsd"]
    + [f"{name}{part}" for name in "d e query keys values key_at value_at acc".split() for part in "01"]
)


@dataclass(frozen=True)
class Argument:
    """A slot or table as a parameter of the kernel: its value or pointer, and for a table its axes."""

    name: str
    sizes: tuple[str, ...] = ()
    strides: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return (self.name, *self.sizes, *self.strides)


def arguments(plan: LoopPlan) -> dict[str, Argument]:
    """The names in the kernel by `Slot.name` and `TableUse.name`: the user's own where they are free."""
    names = Names({*OWN, *SIZES, *expr_triton.LANGUAGE.reserved})
    by_name = {s.name: Argument(names.new(NAMED.get(str(s.source), s.name))) for s in plan.slots}
    for t in plan.every_table:
        wish = NAMED.get(t.source, t.source)
        name = names.new(f"{wish}_{t.derived.split('_')[1]}" if t in plan.run_tables else wish)
        # a table of one axis reads better without a number
        axes = [""] if t.rank == 1 else [str(i) for i in range(t.rank)]
        sizes = tuple(names.new(f"{name}_size{i}") for i in axes)
        by_name[t.name] = Argument(name, sizes, tuple(names.new(f"{name}_stride{i}") for i in axes))
    return by_name


def rows_of_tables(plan: LoopPlan) -> dict[str, int]:
    """The axis of each table, before its last, that counts queries: the 1 of `bias[h, q, k]`, by `TableUse.name`."""
    roots = [e for e in (plan.mask, plan.score, plan.weight) if e is not None]
    query_axes: dict[str, set[int]] = {}
    for node in walk(*roots):
        if node.op == "lookup":
            # two reads with q on different axes leave no one axis to count rows along
            axes = [i for i, a in enumerate(node.args[:-1]) if a is QUERY]
            query_axes.setdefault(node.name, set()).add(axes[0] if len(axes) == 1 else -1)
    return {n: axes.pop() for n, axes in query_axes.items() if len(axes) == 1 and -1 not in axes}


def near(shape: Sequence[int], strides: Sequence[int], axis: int, rows: int) -> bool:
    """Whether so many rows of a table, along one of its axes, are within 2**31 entries of one another."""
    return rows * strides[axis] + shape[-1] * strides[-1] < 1 << 31  # Triton computes such offsets in 32 bits


def reserved_names(plan: LoopPlan) -> Names:
    """The names that the kernel of this plan uses for other things."""
    return Names({*OWN, *SIZES, *expr_triton.LANGUAGE.reserved}.union(*(a.all for a in arguments(plan).values())))


def parts(dim: int) -> tuple[int, ...]:
    """The powers of two, one or two, that a head size is worked on in: 96 as 64 and 32, not as a padded 128.

    >>> parts(96), parts(128), parts(72), parts(112), parts(40)
    ((64, 32), (128,), (64, 16), (128,), (64,))
    """
    # dots take powers of two, and a padded one multiplies zeros
    most = 1 << (dim.bit_length() - 1)
    rest = padded(dim - most)
    # two parts only where they are less than one padded power of two
    return (most, rest) if dim > 64 and dim > most > rest else (padded(dim),)


def padded(dim: int) -> int:
    """The power of two, at least 16, that Triton's dot needs."""
    return max(16, 1 << (dim - 1).bit_length())


@dataclass(frozen=True)
class Parameters:
    """The parameters of one kernel beside its tensors: `used` are the variables its expressions mention, `tabled`
    says that the records come from a table, `closed` that they come from formulas, `ordered` that rows are taken in
    the order of their work."""

    plan: LoopPlan
    used: frozenset[str]
    tabled: bool
    closed: bool
    ordered: bool = True

    def origins(self) -> list[str]:
        """The origins that the expressions and bounds ask for."""
        of = {"b": ["b"], "h": ["h", "h_first"], "q": ["q", "q0", "q1", "q_line"], "k": ["k", "k0", "k1", "k_line"]}
        if self.closed:  # the formulas count from the first query and the first key of the call
            return [n for n, names in of.items() if n in "qk" or self.used.intersection(names)]
        return [n for n, names in of.items() if self.used.intersection(names)]

    def run_time(self, numbers: Sequence[str]) -> list[str]:
        """The scalars whose value must not make a new kernel."""
        slots = [arguments(self.plan)[s.name].name for s in self.plan.slots]
        sizes = [n for t in self.plan.every_table for n in arguments(self.plan)[t.name].sizes]
        records = ["records"] if self.tabled else []  # their number changes with the mask
        return [
            *numbers,
            *records,
            *(f"{n}_origin" for n in self.origins()),
            *self.sizes(),
            *slots,
            *sizes,
            *self._steps(),
        ]

    def _steps(self) -> list[str]:
        """The strides of tables where loads are no wider for being divisible: they depend on lengths."""
        roots = [e for e in (self.plan.mask, self.plan.score, self.plan.weight) if e is not None]
        # a load for each position is wider where its strides are known to be divisible: those stay specialised
        wide = {n.name for n, at in levels(*roots).items() if n.op == "lookup" and at == POSITION}
        tables = [arguments(self.plan)[t.name] for t in self.plan.every_table if t.name not in wide]
        return [n for t in tables for n in t.strides[:-1]]

    def sizes(self) -> list[str]:
        """The global sizes that the expressions read."""
        return [n for n in SIZES if n in self.used]

    def holes(self, numbers: Sequence[str]) -> dict[str, Any]:
        """The holes of a kernel's decorator and of parameters.tpl; `numbers` are integers of the kernel's own."""
        named, origins = arguments(self.plan), self.origins()
        # Triton makes a kernel for each divisibility by 16 of an argument, unless told not to
        varying = ", ".join(f'"{n}"' for n in self.run_time(numbers))
        jit = [f"@triton.jit(do_not_specialize=[{varying}])"]
        if len(varying) >= 80:
            wrapped = [f"        {line}" for line in textwrap.wrap(f"{varying},", 100)]
            jit = ["@triton.jit(", "    do_not_specialize=[", *wrapped, "    ]", ")"]
        return {
            "jit": jit,
            "numbers": ", ".join(numbers),
            "tabled": self.tabled,
            "closed": self.closed,
            "everything": not self.tabled and not self.closed,
            "ordered": self.ordered,
            "origins": "".join(f"{n}_origin, " for n in origins)[:-1],
            "moved": [n for n in origins if n in "qk"],
            "sizes": "".join(f"{n}, " for n in self.sizes())[:-1],
            "slots": "".join(f"{named[s.name].name}, " for s in self.plan.slots)[:-1],
            "tables": [f"{', '.join(named[t.name].all)}," for t in self.plan.every_table],
        }


EDGES = {"q0": "q_first", "q1": "q_last", "k0": "k_first", "k1": "k_last"}
LINE = 105  # of a load, before its indentation
MODULE = skeleton(__package__, "module")
LOAD_MASK = "\0"  # stands in a load where a border tile may restrict it


@dataclass(frozen=True)
class Dims:
    """The properties of the arrays on which a kernel's text depends: head sizes, the dtype of q, the query heads of a
    key head, and the dtype of k and v where it is another one, the Float slots that come as pointers, their values
    being on the device, and whether gradients of arrays are written as [batch, length, heads, dim], not by heads."""

    head_dim: int
    v_dim: int
    dtype: str
    group: int = 1
    kv_dtype: str = ""
    device_slots: tuple[str, ...] = ()
    by_length: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ACCELERATED:
            raise LoweringError(TRITON["float64"].format(dtype=self.dtype))
        if self.kv_dtype and self.kv_dtype not in BYTES:
            raise LoweringError(
                "the Triton kernel takes keys and values in the dtype of the queries, or in "
                f"{', '.join(BYTES[:-1])} or {BYTES[-1]}; they are {self.kv_dtype}, queries {self.dtype}"
            )

    @property
    def half(self) -> bool:
        """Whether queries have 16 bits."""
        return DTYPES[self.dtype].half

    @property
    def fp8(self) -> bool:
        """Whether keys and values are Floats of 8 bits."""
        return self.kv_dtype != "" and DTYPES[self.kv_dtype].kind == "fp8"

    @property
    def kv_bytes(self) -> int:
        """The bytes of an entry of keys and values."""
        return DTYPES[self.kv_dtype or self.dtype].bytes

    def __str__(self) -> str:
        size = str(self.head_dim) if self.head_dim == self.v_dim else f"{self.head_dim} (values {self.v_dim})"
        keys = f", keys and values {self.kv_dtype}" if self.kv_dtype else ""
        group = f", {self.group} query heads to a key head" if self.group > 1 else ""
        return f"Head size {size}, {self.dtype}{keys}{group}"


@dataclass(frozen=True)
class TritonKernel:
    """The text of one kernel, and the grid of its launch, for the head of the module."""

    name: str
    text: str
    launch: str


def launched(name: str, text: str, grid: str, target: Target, *, swapped: bool = False) -> TritonKernel:
    """The kernel of a text. The tile that a program owns is named first; with `swapped` it is a tile of keys."""
    queries, walked = f"{target.block_q} queries", f"{target.block_k} keys"
    tiles = f"{walked} by {queries}" if swapped else f"{queries} by {walked}"
    launch = f"{name}: grid {grid}, tiles of {tiles}, num_warps={target.num_warps}, num_stages={target.num_stages}."
    return TritonKernel(name, text, launch)


def check_tile(target: Target) -> None:
    for name, block in (("block_q", target.block_q), ("block_k", target.block_k)):
        if block < 16 or block & (block - 1):
            raise LoweringError(f"Triton tiles are powers of two from 16 on, {name} is {block}; take 64 or 128")


def module(title: str, plan: LoopPlan, dims: Dims, kernels: Sequence[TritonKernel], head: str = MODULE) -> str:
    """The text of a module: its head, by a skeleton, the constants and functions that the kernels use, and the
    kernels."""
    # the head comes last: it holds only what the kernels below turn out to use
    texts = "\n\n".join(k.text for k in kernels)
    prelude = expr_triton.prelude(texts, expr_triton.language(dims.half, plan.int64))
    needed = words(prelude + texts)
    constants: dict[str, object] = {
        "GROUP": dims.group,
        "HEAD_DIM": dims.head_dim,
        "V_DIM": dims.v_dim,
        "DIM": padded(dims.head_dim),
        "DIM_V": padded(dims.v_dim),
        "LOG2E": 1.4426950408889634,
        "LN2": 0.6931471805599453,
        "PARTS": 16,
        "LANES": 128,
        "LOWEST": "-3.4028234663852886e38",
        "INFINITY": 'float("inf")',
    }
    filled_head = filled(
        head,
        title=title,
        plan=[line.rstrip() for line in _shown(plan).split("\n")],
        dims=str(dims),
        launches=[k.launch for k in kernels],
        constants=[f"{name} = tl.constexpr({x})" for name, x in constants.items() if name in needed],
    )
    return f"{filled_head}{prelude}\n\n{texts}"


def _shown(plan: LoopPlan) -> str:
    """The text of the plan and the meaning of its slots, fit for a docstring."""
    names = arguments(plan)
    lines = [plan.text or "every key visible, plain scores"]
    for s in plan.slots:
        name = names[s.name].name
        if s.source != name:
            lines.append(f"{name} = {s.source if s.value is None else s.value}")
    # the text of a mask is the user's, and a quote in it would end the docstring
    return "\n".join(lines).replace("\\", "\\\\").replace('"""', "'''")


@dataclass(frozen=True)
class KernelTraits:
    """The choices by which the text of one kernel of a plan differs from that of another kernel."""

    swapped: bool = False  # the program's own tile is one of keys: tensors are [keys, queries]
    listed: bool = False  # a table lists the programs: their rows, and their parts of them
    parted: bool = False  # a program may have a part of the tiles of its row alone
    packs: bool = False  # a tile holds several heads, which are rows of it
    bounded: bool = True  # the ends of what a row sees are computed once, before its tiles
    gathers: bool = (
        True  # tables by distance are loaded as one vector a tile, out of which positions take their entries
    )
    selects: bool = False  # values by distance are 0 where the mask hides the position

    @property
    def levels(self) -> Mapping[str, int]:
        """When the coordinates are known, for a tile of queries."""
        return {**LEVELS, "h": ROW} if self.packs else LEVELS


class TritonWriter:
    """The writer of a plan's expressions. `roots` are the expressions the kernel needs; the roots in `inner` are used
    per position. `when` gives the levels of the coordinates; where the tiles are `swapped`, values that depend on k are
    computed before the loop."""

    def __init__(
        self,
        plan: LoopPlan,
        dims: Dims,
        target: Target,
        roots: Iterable[Expr],
        inner: Collection[Expr],
        traits: KernelTraits,
        when: Mapping[str, int],
    ) -> None:
        self.plan, self.dims, self.traits = plan, dims, traits
        self.wide = ".to(tl.int64)" if plan.int64 else ""
        self.precision = f', input_precision="{target.precision}"' if not dims.half else ""
        self.e, self.v = ("d", "HEAD_DIM") if dims.v_dim == dims.head_dim else ("e", "V_DIM")  # along the values' axis
        if traits.swapped:
            when = {**when, "q": when["k"], "k": when["q"]}
        when = {**when, **ALONG}
        self.arguments = arguments(plan)
        self.names = reserved_names(plan)
        roots, language = tuple(roots), expr_triton.language(dims.half, plan.int64)
        self.used = frozenset[str]().union(*map(uses, roots))
        self.decisive = expr.decisive(legalise(e, language) for e in roots)
        self.approximate = dims.half and target.tanh == "approximate"
        self.printed = expr.printed(roots, language, self._leaf, self._name, inner, when)
        self.hoisted: set[str] = set()  # lines that stand before the loops

    # -- expressions ------------------------------------------------------------------------------

    def _leaf(self, node: Expr, args: list[Text]) -> Text | None:
        if node is START:
            return Text(f"{'k' if self.traits.swapped else 'q'}_origin + start", PRECEDENCE["+"])
        if node.op == "var":
            return Text(EDGES.get(node.name, node.name))
        if node.op == "param":
            return Text(self._argument(node).name)
        if node.op == "lookup":
            return self._lookup(node, args)
        if node.op == GATHERED:
            return Text(f"along({args[0].text}, away{LOAD_MASK})")
        if node.op == "div" and node in self.decisive:  # an Int or a Bool depends on it: the last bit may decide a tile
            return Text(f"tl.div_rn({args[0].text}, {args[1].text})")
        if node.op == "tanh" and self.approximate and node not in self.decisive:
            return Text(f"tanh_approximate({args[0].text})")
        return expr_triton.operator(node, args)

    def _argument(self, node: Expr) -> Argument:
        if node.name not in self.arguments:
            raise LoweringError(f"`{node.name}` is neither a slot nor a table of the plan; make it one first")
        return self.arguments[node.name]

    def address(self, table: Argument, args: Sequence[Text]) -> str:
        """The address of an entry of a table, indices clamped."""
        *outer, (index, size, stride) = zip(args, table.sizes, table.strides, strict=True)
        # The last axis counts in 32 bits: the launcher sees to it that it fits.
        steps = [table.name, *(self.step(i, n, by) for i, n, by in outer)]
        return f"{' + '.join(steps)} + {self.clamped(index, size)} * {stride}"

    def step(self, index: Text, size: str, stride: str) -> str:
        """The step of an address along an axis that is not the last."""
        return f"step({index.text}, {size}, {stride})"

    def clamped(self, index: Text, size: str) -> str:
        """An index along the last axis, which counts in 32 bits."""
        return f"clamp({index.text}, {size})"

    def _lookup(self, node: Expr, args: list[Text]) -> Text:
        load = f"tl.load({self.address(self._argument(node), args)}{LOAD_MASK})"
        if node.type is BOOL:
            return Text(f"{load} != 0", COMPARISON)
        if node.type is FLOAT:
            return Text(f"{load}.to(tl.float32)")
        return Text(f"{load}.to(tl.int64)" if self.plan.int64 else load)

    def _name(self, node: Expr, level: int) -> str:
        """A name `doc_q` for `doc[q]`, otherwise a number behind a word for the level of the value."""
        if node.op == "lookup":
            return self.names.new(self._called(node))
        words = {SCALAR: "fixed", ROW: "row", COLUMN: "column", POSITION: "x"}
        if self.traits.swapped:
            words |= {ROW: "column", COLUMN: "row"}
        return self.names.numbered(words[level])

    def _called(self, node: Expr) -> str:
        if node.op == "var":
            return str(node.name)
        if node.op != "lookup":
            return "at"
        return "_".join([self.arguments[node.name].name, *map(self._called, node.args)])

    def lines(self, roots: Sequence[Expr], level: int, written: set[str] | None = None, mask: str = "") -> list[str]:
        """The lines of this level that the roots need and that are not written yet; `mask` is the mask of loads."""
        written, texts = self.hoisted if written is None else written, []
        for line in self.printed.needed(roots, level):
            if line.name not in written:
                written.add(line.name)
                loads = line.node.op == "lookup"
                only = f", mask={mask}" if mask and loads else f", {mask}" if mask and self.traits.selects else ""
                text = f"{line.name} = {line.text.replace(LOAD_MASK, only)}"
                texts.append(wrapped(text) if loads else text)
        return texts

    def value(self, root: Expr) -> str:
        return self.printed.values[root].replace(LOAD_MASK, "")

    def quote(self, e: Expr) -> list[str]:
        """A comment: the expression in the language, with the kernel's names of slots and tables."""
        named = {n: a.name for n, a in self.arguments.items()}
        shown = show(renamed(e, named), known={a.name for a in self.arguments.values()})
        return [f"# {line}" for line in textwrap.wrap(shown, 100, break_long_words=False)]

    def conversions(self) -> list[str]:
        """The lines that convert sizes and slots for the expressions."""
        lines = [f"{n} = tl.cast({n}, tl.int64)" for n in SIZES if self.wide and n in self.used]
        for slot in self.plan.slots:
            n = self.arguments[slot.name].name
            if slot.name in self.dims.device_slots:
                lines.append(f"{n} = tl.load({n}).to(tl.float32)")
            elif slot.type is FLOAT or (self.wide and slot.type is INT):
                lines.append(f"{n} = tl.cast({n}, {'tl.float32' if slot.type is FLOAT else 'tl.int64'})")
        return lines

    def coordinate(self, name: str, local: str) -> list[str]:
        """The line `q = ...` or `k = ...` of a tile, along its axis; `local` counts from the call's first."""
        along = "[:, None]" if (name == "q") != self.traits.swapped else "[None, :]"
        return [f"{name} = ({name}_origin + {local}){along}{self.wide}"]

    def line(self, roots: Iterable[Expr]) -> list[str]:
        """The coordinates along the diagonals of a tile, where `roots` take values by distance."""
        if not any(Q_LINE.name in uses(r) for r in roots):
            return []
        q, k = ("tile * BLOCK_Q", "start") if self.traits.swapped else ("start", "tile * BLOCK_K")
        rows, columns = ("[None, :]", "[:, None]") if self.traits.swapped else ("[:, None]", "[None, :]")
        return [
            "# One vector of the tile's distances, of which every position takes its own.",
            f"q_line = span(q_origin + {q} - (BLOCK_K - 1), BLOCK_Q, BLOCK_K){self.wide}",
            f"k_line = (k_origin + {k}){self.wide}" if self.wide else f"k_line = k_origin + {k}",
            f"away = rows{rows} - columns{columns} + (BLOCK_K - 1)",
        ]

    def head_pad(self, index: str) -> str:
        return "" if padded(self.dims.head_dim) == self.dims.head_dim else f"{index} < HEAD_DIM"

    def value_pad(self, index: str) -> str:
        return "" if padded(self.dims.v_dim) == self.dims.v_dim else f"{index} < {self.v}"


def conjuncts(mask: Expr | None) -> list[Expr]:
    """The terms of a mask, written with the operators that machines have."""
    if mask is None:
        return []
    mask = expr.machine(transform(mask, expr.same_remainder))
    return list(mask.args) if mask.op == "and" else [] if mask is TRUE else [mask]


def bounds_of(plan: LoopPlan) -> dict[str, Expr]:
    """The bounds of the closed form by name; empty where there is none."""
    if plan.bounds is None or plan.mask is None:
        return {}
    return {n: expr.machine(getattr(plan.bounds, n)) for n in ("first", "full_first", "full_last", "last")}


def masked(*terms: str, other: str = ", other=0.0") -> str:
    """The mask of a load, or with no `other` of a store; an empty term asks for nothing."""
    terms = tuple(t for t in terms if t)
    # `&` binds tighter than `<` in Python
    joined = " & ".join(f"({t})" if "<" in t and len(terms) > 1 else t for t in terms)
    return f", mask={joined}{other}" if joined else ""


def wrapped(load: str, longest: int = LINE) -> str:
    """A long load over several lines: the axes of its address, then its mask."""
    match = re.fullmatch(r"(.*?tl\.load\()(.*?)(\)(?:(?:\.to\([\w.]+\))*| != 0))", load)
    if len(load) <= longest or match is None:
        return load
    head, inside, tail = match.groups()
    address, mask = inside.split(", mask=") if ", mask=" in inside else (inside, "")
    if len(address) > 100:
        address = re.sub(r" \+ (?=step\(|\(?step_from\(|clamp\(|page\b|at\[|\(tile )", "\n    + ", address)
    return "\n".join([head, f"    {address},", *[f"    mask={mask},"] * bool(mask), tail])


LENGTHS = ("heads", "q_len", "kv_len", "records", "splits", "pool", "share", "batches", "queries", "pack")
ORIGINS = ("b_origin", "h_origin", "q_origin", "k_origin")
STRIDE = re.compile(r"stride_([qkvog])([bhsd])")
PAIRS = "tl.cast({}, tl.pointer_type(tl.int64), bitcast=True)"  # 64 bits in two int32, as JAX has them


@dataclass(frozen=True)
class Form:
    """The properties of a call on which the text of its entries depends, beside the plan: head sizes, whether
    `q_origin` and `k_origin` are vectors, the arrays that are pairs of int32, and the strides of tables that 16
    divides."""

    dims: Dims
    per_batch: bool = False
    pairs: frozenset[str] = frozenset()
    aligned: frozenset[str] = frozenset()


@dataclass(frozen=True)
class JaxEntry:
    """The text of an entry, and its arguments: `arrays` and `results` by the kernel's names, `whole` and `real` the
    contents of the vectors of values."""

    name: str
    text: str
    arrays: tuple[str, ...]
    lengths: tuple[str, ...]
    results: tuple[str, ...]
    constants: tuple[str, ...]
    whole: tuple[str, ...]
    real: tuple[str, ...]


def parameters(source: str) -> dict[str, dict[str, bool]]:
    """The kernels of a module's text, each with its parameters: whether they are constants of the compiler."""
    return {
        node.name: {a.arg: a.annotation is not None for a in node.args.args}
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("attention_")
    }


def entry(kernel: str, named: dict[str, bool], plan: LoopPlan, form: Form, results: Sequence[str]) -> JaxEntry:
    """The entry to a kernel with these parameters; the kernel writes `results`."""
    known = arguments(plan)
    slots = {known[s.name].name: s.type for s in plan.slots}
    tables = [known[t.name] for t in plan.every_table]
    sizes = [n for t in tables for n in t.sizes if n in named]
    steps = {n: t.sizes[i + 1 :] for t in tables for i, n in enumerate(t.strides)}
    vectors = {"q_origin", "k_origin"} if form.per_batch else set()
    constants = tuple(n for n, constant in named.items() if constant)
    lengths = (*(n for n in ("scale", *LENGTHS) if n in named), *sizes)
    values = [n for n in named if n in (*ORIGINS, *SIZES, *slots) and n not in vectors]
    whole = tuple(n for n in values if slots.get(n) is not FLOAT)
    real = tuple(n for n in values if slots.get(n) is FLOAT)
    rest = {*constants, *lengths, *values, *results, *steps}
    arrays = tuple(n for n in named if n not in rest and not STRIDE.fullmatch(n))

    def value_of(n: str) -> str:
        if match := STRIDE.fullmatch(n):
            return _stride(match[1], match[2], form.dims, plan.page)
        if n in steps:
            text = " * ".join(f"tl.cast({x}, tl.int64)" if i else x for i, x in enumerate(steps[n])) or "1"
            # tells the compiler that 16 divides it: loads may be wide
            return f"({text}) // 16 * 16" if n in form.aligned else text
        if n in real:
            return f"tl.load(Real + {real.index(n)})"
        if n in whole:
            load = f"tl.load(Whole + {whole.index(n)})"
            return f"{load} != 0" if slots.get(n) is BOOL else load
        if n in form.pairs:
            return PAIRS.format(n)
        if n in lengths:  # jax-triton makes a constant of every 1
            return f"tl.cast({n}, tl.{'float32' if n == 'scale' else 'int32'})"
        return n

    page, name = Page(), f"{kernel}_from_jax"
    page.line("@triton.jit")
    with page.block(f"def {name}(", "):"):
        vectors_of_values = ("Whole",) * bool(whole) + ("Real",) * bool(real)
        for group in ((*arrays, *vectors_of_values), lengths, results, [f"{n}: tl.constexpr" for n in constants]):
            if group:
                page.line(", ".join(group) + ",")
    head = Page()
    with head.block(str(page).rstrip()):
        if whole and plan.int64:
            head.line(f"Whole = {PAIRS.format('Whole')}")
        with head.block(f"{kernel}(", ")"):
            head.line(*(f"{n}={value_of(n)}," for n in named))
    return JaxEntry(name, str(head), arrays, lengths, tuple(results), constants, whole, real)


def _stride(letter: str, axis: str, dims: Dims, page: int) -> str:
    """The strides of a compact [batch, length, heads, dim], or of keys [pages, tokens of a `page`, heads, dim]."""
    dim = dims.head_dim if letter in "qk" else dims.v_dim
    keys = letter in "kv"
    heads = f"heads // {dims.group}" if keys and dims.group > 1 else "heads"
    step = f"{heads} * {dim}"
    length = str(page) if keys and page else "kv_len" if keys else "q_len"
    return {"b": f"tl.cast({length}, tl.int64) * ({step})", "h": str(dim), "s": step, "d": "1"}[axis]
