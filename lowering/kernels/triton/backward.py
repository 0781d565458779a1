"""Writes the Triton backward kernels of a LoopPlan, by the formulas of `lowering.derive`.

`attention_delta` computes three numbers per query. `attention_dq` owns a tile of queries and walks tiles of keys,
`attention_dkv` owns a tile of keys of one key head and walks tiles of queries. Where registers do not hold the sums of
both, it has dk alone, and `attention_dv` the rest. All compute the scores again: seven products, or eight, instead of
five, but no two programs add to one entry, and results repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import Expr, lit, renamed
from frisket.dsl.show import show
from frisket.lowering.architectures import architecture_of
from frisket.lowering.derive import Gradient, backward_of
from frisket.lowering.kernels import expr
from frisket.lowering.kernels.expr import POSITION
from frisket.lowering.kernels.text import fields, filled, parts
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.kernels.units import HALF, machine
from frisket.lowering.plan import LoopPlan

from .forward import PartSums, describable
from .module import Dims, TritonKernel, arguments, check_tile, module, padded, reserved_names
from .writer import LINE, KernelTraits, Writer, masked, wrapped

DQ, DKV = parts(__package__, "dq"), parts(__package__, "dkv")
Strings = Collection[str]  # names of arrays, tables and slots, or of kernels
DELTA = Target("triton", 32, 32, 4, 1)  # of attention_delta, which reads whole rows and waits for memory


def emit(
    plan: LoopPlan, target: Target, dims: Dims, grad_names: Strings, *, dlse: bool = True, listed: Strings = ()
) -> str:
    """The text of the backward's module: `emit(plan, target, Dims(128, 128, "bfloat16"), {"q", "k", "v"})`. The kernels
    compute the gradients of the arrays, tables and slots in `grad_names` (plan names), with or without a cotangent of
    lse; the same input gives the same text. A table lists the programs of the kernels that are `listed`, of which
    several share a long row of tiles; `attention_dq_sums` and `attention_dkv_sums` add up what these write."""
    return module("Attention backward", plan, dims, kernels(plan, target, dims, grad_names, dlse=dlse, listed=listed))


def kernels(
    plan: LoopPlan, target: Target, dims: Dims, grad_names: Strings, *, dlse: bool = True, listed: Strings = ()
) -> list[TritonKernel]:
    """The kernels that these gradients take. Of `target` their text depends on the order of rows, the precision, tensor
    descriptors and on whether each thread of dkv has a load of two numbers of a query."""
    if dims.kv_dtype:
        raise LoweringError(
            f"gradients need q, k and v of one dtype, not {dims.dtype} and {dims.kv_dtype}; convert k and v before"
        )
    along = {s.along for s in sums(plan, grad_names)}
    emitted = [] if plan.weighted else [delta_kernel(plan, dims, dlse)]
    if "q" in grad_names or "q" in along:
        emitted += _dq_kernels(plan, target.dq or target, dims, grad_names, "attention_dq" in listed)
    dv_target = target.dv if {"k", "v"} <= set(grad_names) else None
    if {"k", "v"} & set(grad_names) or "k" in along:
        both = set(grad_names) - {"v"} if dv_target else grad_names
        emitted += _dkv_kernels(plan, target.dkv or target, dims, both, "attention_dkv", listed)
    if dv_target:
        emitted += _dkv_kernels(plan, dv_target, dims, {"v"}, "attention_dv", listed)
    return emitted


def bare(plan: LoopPlan) -> LoopPlan:
    """The plan of `attention_delta`: rows without mask, score mod or weights."""
    none: dict[str, Any] = dict.fromkeys(("mask", "score", "bounds", "keep_mask", "by_query", "by_key"))
    return replace(plan, slots=(), tables=(), run_tables=(), **none)


def delta_kernel(plan: LoopPlan, dims: Dims, dlse: bool, *, apart: bool = False) -> TritonKernel:
    """The kernel that computes the numbers per query for dq and dkv, with or without a cotangent of lse. `apart`: each
    number has its array, as TMA copies them."""
    e, dim, length = ("d", "DIM", "HEAD_DIM") if dims.v_dim == dims.head_dim else ("e", "DIM_V", "V_DIM")
    pad = "" if padded(dims.v_dim) == dims.v_dim else f"{e}[None, :] < {length}"
    of_dlse = {"and_dlse": ", DLse" * dlse, "less_dlse": " - dlse" * dlse}
    mask = masked("present[:, None]", pad)
    text = filled(DQ["delta"], wrapped, e=e, dim=dim, mask=mask, guard=plan.guard, apart=apart, **of_dlse)
    launch = (
        f"attention_delta: grid (query tiles, heads, batch), tiles of {DELTA.block_q} queries, "
        f"num_warps={DELTA.num_warps}."
    )
    return TritonKernel("attention_delta", text, launch)


@dataclass(frozen=True)
class Sum:
    """A captured gradient that a row or column of tiles sums: `buffer` is the pointer, `total` the running sum."""

    gradient: Gradient
    buffer: str
    total: str

    @property
    def along(self) -> str:
        """The last axis of the buffer, float32 [batch, heads, q_len] or [batch, heads, kv_len]. A sum per head is
        summed per query first."""
        return "k" if self.gradient.over == "column" else "q"


def sums(plan: LoopPlan, grad_names: Strings) -> list[Sum]:
    """The sums of the tables and slots in `grad_names`, in the order of `backward_of(plan).gradients`; "diagonal" and
    "scatter" are not among them."""
    names, known = reserved_names(plan), arguments(plan)
    return [
        Sum(g, names.new(f"D{known[g.source].name}"), names.new(f"d{known[g.source].name}"))
        for g in backward_of(plan).gradients
        if g.source in grad_names and g.over in ("head", "row", "column")
    ]


class GradientKernel(Writer):
    """A kernel that owns a tile of queries, or swapped one of keys, and walks tiles of the other axis. `p` are the
    weights of a tile before dropout, `dm` is the cotangent of its modified scores, `ds` the cotangent of the plain
    ones. Of weighted rows dout is divided, `dm` is the cotangent of the weights, and `added` that of the sum of these.

    `gradients` are those among "qkv" that the kernel writes: those of q and k want ds. `summed` are the sums it takes
    of dm; where it wants neither, p suffices. `others` are other expressions that it uses per position."""

    def __init__(
        self,
        plan: LoopPlan,
        target: Target,
        dims: Dims,
        traits: KernelTraits,
        gradients: Strings = (),
        summed: Iterable[Sum] = (),
        others: Iterable[Expr] = (),
    ) -> None:
        check_tile(target)
        derived = backward_of(plan)
        self.careful = derived.guard  # 0 * inf is NaN where nothing is seen
        slope = bool({"q", "k"}.intersection(gradients))
        self.slope = (
            machine(derived.slope, dims, gathers=traits.gathers) if slope and derived.slope is not None else None
        )
        self.keep_mask = None if plan.keep_mask is None else expr.machine(plan.keep_mask)
        self.sums = [(s, machine(s.gradient.weight, dims)) for s in summed]
        self.inner = slope or bool(self.sums)  # otherwise no product of dout and v is computed
        axes = {"v": "d" if dims.v_dim == dims.head_dim else "e"}
        arrays = [(f"D{n.upper()}", f"d{n}", axes.get(n, "d")) for n in gradients]
        heads = dims.group if traits.swapped else 1
        self.part = PartSums(dims, arrays, [(s.buffer, s.total) for s, _ in self.sums], heads)
        # what is None here is not written: its nodes would take registers
        more = [e for e in (self.slope, self.keep_mask, *(w for _, w in self.sums), *others) if e is not None]
        weighs = not plan.weighted or "v" in gradients
        super().__init__(plan, dims, target, replace(traits, selects=True, weighs=weighs), more)
        self.described = target.descriptors and describable(plan, dims)
        # without a slope ds is dm itself, and one name is enough for both
        self.ds = "ds" if self.slope is not None or not self.sums else "dm"
        # dropout multiplies what is at most 1 in the softmax
        self.wide_weights = self.leaves_16_bits(self.score, HALF if self.keep_mask is None else 1.0)
        self.wide_slopes = self.leaves_16_bits([] if self.slope is None else [self.slope], 1.0)

    def kernels(self, part: str, grid: str, length: str, holes: dict[str, Any]) -> list[TritonKernel]:
        """The kernel of a part of a skeleton. Where a table lists its programs, also the kernel that adds up the sums
        of rows in parts, of queries or keys by `length`."""
        kernel = self.kernel(self.filled(part, {**self.holes(), **holes, **self.before_loops()}), grid)
        name = f"{self.traits.name}_sums"
        return [kernel, *[self.part.kernel(name, length, self.buffers())] * self.traits.listed]

    def holes(self) -> dict[str, Any]:
        swapped, dims = self.traits.swapped, self.dims
        axis, index, block = ("k", "columns", "BLOCK_K") if swapped else ("q", "rows", "BLOCK_Q")
        common = super().holes()
        loaded, stored = ({n: self.tile_mask(n, "present", other) for n in "de"} for other in (", other=0.0", ""))
        boxes = "tensor descriptors of [batch, heads, length, dim], in blocks of a head's tile"
        return {
            **common,
            **fields(self, "e inner described"),
            "dim_e": "DIM" if self.e == "d" else "DIM_V",
            "v_dim": self.v,
            "apart": self.e == "e",
            "of_arrays": boxes if self.described else "[batch, heads, length, dim], any strides",
            "strides": [{"tensor": x} for x in ("" if self.described else "qkvg" if self.inner else "qkg")],
            "kept": "" if self.keep_mask is None else " * kept",
            **{f"own_{n}": mask for n, mask in loaded.items()},
            **{f"store_{n}": mask for n, mask in stored.items()},
            "exponent": f"{'modified' if self.score else 'score'} * {common['unit']}",  # the forward's own product
            "ds": self.ds,
            "dm": "ds" if self.ds == "ds" and not self.sums and self.slope is None else "dm",
            "buffers": self.buffers(),
            "zeros": [f"{s.total} = tl.zeros([{block}], tl.float32)" for s, _ in self.sums],
            "edges": True,
            "own_block": block,
            "numbers_of_part": self.part.numbers,
            "place": "batch * heads + kv_head * GROUP" if swapped and dims.group > 1 else "place",
            "own_place": f"batch * tl.num_programs({self.axes[1]}) + kv_head" if dims.group > 1 else "place",
            "partial": self.part.stores(stored),
            "partial_totals": self.part.stores_of_totals(),
            "stores": [f"tl.store({s.buffer} + at_{axis} + {index}, {s.total}, mask=present)" for s, _ in self.sums],
        }

    def before_loops(self) -> dict[str, Any]:
        """The lines before the loop over tiles, except origins and slots."""
        axis, index = ("k", "columns") if self.traits.swapped else ("q", "rows")
        return {
            "own": self.coordinate(axis, f"start + {index}") if axis in self.used else [],
            **self.closed_form(),
            "hoisted": self.before_tiles(),
            "tiles": self.tiles(),
        }

    def tile_mask(self, axis: str, inside: str, other: str = ", other=0.0") -> str:
        """The mask of a tile of keys or queries, "d", or of values, "e", whose rows are `inside`; all rows where that
        is empty."""
        index, dim, length = (self.e, self.dims.v_dim, self.v) if axis == "e" else ("d", self.dims.head_dim, "HEAD_DIM")
        pad = "" if padded(dim) == dim else f"{index}[None, :] < {length}"
        return masked(inside and f"{inside}[:, None]", pad, other=other)

    def inside_of_tile(self) -> list[str]:
        walked = "BLOCK_Q + rows < q_len" if self.traits.swapped else "BLOCK_K + columns < kv_len"
        return ["edge = tile", f"inside = tile * {walked}"]

    def tile(self, inside: str) -> dict[str, Any]:
        written = set(self.hoisted)
        visible = inside and "visible"
        walked = ("q", "tile * BLOCK_Q + rows") if self.traits.swapped else ("k", "tile * BLOCK_K + columns")
        return {
            **{f"walked_{n}": self.tile_mask(n, inside) for n in "de"},
            "stats": masked(inside if self.plan.weighted else inside and f"{inside}[:, None]"),
            "column": self.along_tile(*walked, self.positions if inside else self.full, written),
            "visible": self.visible(written) if inside else [],
            **self.modified(written, visible),
            "sums": [line for s, w in self.sums for line in self._summed(s, w, written, visible)],
            "derivative": self._derivative(written, visible),
        }

    def modified(self, written: set[str], visible: str) -> dict[str, Any]:
        """The modified score, and with dropout `kept`, the factor of the weights."""
        score_mod, line = self.score_mod("modified", written, visible), "kept = tl.where({}, survivor, 0.0)"
        dropout = self.quoted(self.plan.keep_mask, self.keep_mask, line, written, visible)
        return {"score_mod": score_mod, "dropout": dropout}

    def _summed(self, s: Sum, weight: Expr, written: set[str], visible: str) -> list[str]:
        lines, share = self.times(weight, "weight", written, visible)
        return [f"# The gradient of {self.read(s.gradient)}.", *lines, f"{s.total} += tl.sum({share}, 1)"]

    def _derivative(self, written: set[str], visible: str) -> list[str]:
        if self.slope is None:
            return []
        lines, ds = self.times(self.slope, "derivative", written, visible)
        return ["# The derivative of the score mod.", *lines, f"ds = {ds}"]

    def times(self, factor: Expr, name: str, written: set[str], visible: str) -> tuple[list[str], str]:
        """The text of `dm` times a factor, 0 where p is 0 if the factor may be infinite or NaN there; and the lines
        before it."""
        if factor is lit(1.0):
            return [], "dm"
        lines, value = self.lines([factor], POSITION, written, visible), self.value(factor)
        if not value.isidentifier():
            lines.append(f"{name} = {value}")
            value = name
        # 0 times an infinite slope is NaN
        if self.plan.weighted:
            return lines, f"tl.where(visible, dm * {value}, 0.0)" if self.careful and visible else f"dm * {value}"
        return lines, f"tl.where(p == 0.0, 0.0, dm * {value})" if self.careful else f"dm * {value}"

    def read(self, gradient: Gradient) -> str:
        """The text `slope[h]`, or the name of a slot."""
        named = {n: a.name for n, a in self.arguments.items()}
        index = [show(renamed(i, named), known=set(named.values())) for i in gradient.index]
        return f"{named[gradient.source]}[{', '.join(index)}]" if index else named[gradient.source]

    def buffers(self) -> list[str]:
        """The lines of the signature for the buffers of sums."""
        length, over = ("kv_len", "queries") if self.traits.swapped else ("q_len", "keys")
        shape = f"float32 [batch, heads, {length}]"
        return [
            f"{s.buffer},  # {shape}: the gradient of {self.read(s.gradient)}, summed over {over}" for s, _ in self.sums
        ]


def _dq_kernels(plan: LoopPlan, target: Target, dims: Dims, grad_names: Strings, listed: bool) -> list[TritonKernel]:
    """The kernel of dq, and of sums of captured gradients over keys."""
    summed = [s for s in sums(plan, grad_names) if s.along == "q"]
    traits = KernelTraits("attention_dq", listed=listed, parted=listed, longest=LINE + 1)
    writer = GradientKernel(plan, target, dims, traits, "q" if "q" in grad_names else "", summed)
    by_length = dims.by_length
    axes = "q_len, heads" if by_length else "heads, q_len"
    holes = {
        "dq": "q" in grad_names,
        "dq_product": writer.product(writer.ds, "keys", "dq", writer.wide_slopes),
        "results": [f"DQ,  # [batch, {axes}, dim], contiguous"] * ("q" in grad_names),
        "own_row": "((tl.cast(batch, tl.int64) * q_len + start) * heads + head)" if by_length else "at_q",
        "row_step": "(heads * HEAD_DIM)" if by_length else "HEAD_DIM",
    }
    return writer.kernels(DQ["kernel"], writer.grid_of("query tiles", "heads"), "q_len", holes)


def _dkv_kernels(
    plan: LoopPlan, target: Target, dims: Dims, grad_names: Strings, name: str, listed: Strings
) -> list[TritonKernel]:
    """The kernel of dk and dv, or of one of them, and of sums of captured gradients over queries."""
    summed = [s for s in sums(plan, grad_names) if s.along == "k"]
    written = [n for n in "kv" if n in grad_names]
    traits = KernelTraits(name, swapped=True, listed=name in listed, parted=name in listed)
    writer = GradientKernel(plan, target, dims, traits, written, summed)
    inner, by_length = writer.inner, dims.by_length
    by_pairs = 2 * target.block_q >= architecture_of(target.arch).lanes * target.num_warps
    heads, kv_head = f"tl.num_programs({writer.axes[1]})", "head" if dims.group == 1 else "kv_head"
    by_heads = f"(batch * {heads} + {kv_head}).to(tl.int64) * kv_len + start"
    by_keys = f"(tl.cast(batch, tl.int64) * kv_len + start) * {heads} + {kv_head}"
    step = f"({heads} * {{}})" if by_length else "{}"
    survivors = "p" if writer.keep_mask is None else "(p * kept)"
    names = ", ".join(f"D{n.upper()}" for n in written)
    axes = "kv_len, key heads" if by_length else "key heads, kv_len"
    holes = {
        "dk": "k" in grad_names,
        "dv": "v" in grad_names,
        "by_pairs": by_pairs,
        "arrays": "Q, K, V, DOut" if inner else "Q, K, DOut",
        "unordered": not traits.listed and not (writer.tabled and writer.ordered),
        # With fewer entries than threads the compiler loads what each thread uses, past shared memory.
        "numbers_a_load": 2 if by_pairs else 4,
        "results": [f"{names},  # [batch, {axes}, dim], contiguous"] * bool(written),
        "dout": "v" in grad_names or inner,
        "dv_product": writer.product(survivors, "dout", "dv", writer.wide_weights),
        "dk_product": writer.product(writer.ds, "query", "dk", writer.wide_slopes),
        "own_row": by_keys if by_length else by_heads,
        "row_step_of_k": step.format("HEAD_DIM"),
        "row_step_of_v": step.format(writer.v),
    }
    return writer.kernels(DKV["kernel"], writer.grid_of("key tiles", "key heads"), "kv_len", holes)
