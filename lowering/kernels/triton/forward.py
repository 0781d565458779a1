"""Writes the Triton forward and decode kernels of a LoopPlan, and the kernels that combine parts of a row in their
order.

One program works on one tile of queries of one head. It walks the records of its row: first the partial tiles of
keys, with the mask as a predicate, then the full tiles without it. The softmax is to base 2. One factor converts a
score to its unit; with the running maximum subtracted this is one fused multiply-add.

Keys and values of 8 bits are converted tile by tile. In a paged cache, the number of a page is a scalar where a tile
lies in one page. Where a tile lies in several, each key has the number of its page.

Tensor descriptors stand for queries, keys and values where the target asks for them. The copy of a tile is then one
instruction, and entries past the lengths are 0, whatever memory holds there.

A program of the decode kernel works on one tile of few queries and one part of the key tiles that these queries see.
The query heads that share a key head are packed into one tile, so that keys and values are read once for all of them.
They are not where the mask depends on the head. Values that are the first numbers of keys come from the tile of keys.
A second kernel combines the parts of a row in the order of the keys:
equal calls give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from frisket.dsl.ir import Expr, build, lookup, make, transform, var
from frisket.dsl.types import INT
from frisket.lowering.kernels import expr
from frisket.lowering.kernels.language import Text
from frisket.lowering.kernels.text import fields, filled, parts
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.kernels.units import HALF, machine
from frisket.lowering.plan import LoopPlan

from .module import Dims, TritonKernel, check_tile, module, padded, widths
from .writer import PAGE, TOKEN, KernelTraits, Writer, masked, wrapped

FORWARD, DECODE = parts(__package__, "forward"), parts(__package__, "decode")
SUMS = parts(__package__, "dkv")["sums"]
H, FIRST = var("h"), var("h_first")  # the head, and the first of those in a tile


@dataclass(frozen=True)
class OptionalArrays:
    """The arrays of a forward kernel that a call may leave out."""

    sinks: bool = False  # read: attention sinks
    row_max: bool = False  # written: the largest score of each row
    lse_residual: bool = False  # written, for a backward: the rounding error of lse

    @property
    def holes(self) -> dict[str, Any]:
        """The holes of a forward's skeleton about them; `rescale` is the factor of the sums."""
        return {**vars(self), "rescale": "rescale" if self.sinks else "1.0"}


NO_ARRAYS = OptionalArrays()


def emit(
    plan: LoopPlan, target: Target, dims: Dims, optional: OptionalArrays = NO_ARRAYS, *, listed: bool = False
) -> str:
    """The text of the forward's module: `emit(plan, target, Dims(128, 128, "bfloat16", group=4))`; the same input gives
    the same text.

    The kernel is `attention_forward`; its parameters say by their names what they hold, and those the plan has no use
    for are absent. With `listed` a table lists the programs, and several share a long row of tiles: `attention_combine`
    combines what they write.
    """
    title = "Attention forward, long rows in parts" if listed else "Attention forward"
    return module(title, plan, dims, kernels(plan, target, dims, optional, listed=listed))


def kernels(
    plan: LoopPlan, target: Target, dims: Dims, optional: OptionalArrays = NO_ARRAYS, *, listed: bool = False
) -> list[TritonKernel]:
    """The forward kernel, and with `listed` the one that combines parts of rows. Of `target` the text depends on the
    order of rows and the precision alone, and where keys are in pages on the number of pages of a tile."""
    traits = KernelTraits(listed=listed, parted=listed, words=target.words)
    writer = ForwardKernel(plan, target, dims, optional, traits)
    first = writer.kernel(writer.filled(FORWARD["kernel"], writer.holes()), writer.grid_of("q tiles", "heads"))
    return [first, *[combine(plan, dims, optional, "listed")] * listed]


def emit_decode(
    plan: LoopPlan,
    target: Target,
    dims: Dims,
    optional: OptionalArrays = NO_ARRAYS,
    *,
    packs: bool = True,
    balanced: bool = False,
) -> str:
    """The text of a module with `attention_decode` and `attention_combine`; arguments as in `emit`. Without `packs`, a
    tile holds the queries of one head. Where `target.splits` is 1 there are no parts: `attention_decode` writes the
    results. With `balanced`, each row has parts in proportion to the tiles that it sees. The kernel reads their number
    from the table of spans, so the host need not know it."""
    parted = target.splits != 1
    balanced = balanced and parted
    numbers = ("heads", "q_len", "kv_len", *["splits"] * parted, *["batches"] * balanced)
    traits = KernelTraits(
        "attention_decode",
        numbers,
        parted=parted,
        balanced=balanced,
        pack=packed(plan, dims, target.block_q if dims.values_in_keys else 0) if packs else 1,
        bounded=False,  # loads of keys take the time here, not the mask, and stored keys need the registers
        words=target.words,
    )
    writer = ForwardKernel(plan, target, dims, NO_ARRAYS if parted else optional, traits)
    emitted = [writer.decode()]
    if parted:
        emitted.append(combine(plan, dims, optional, "balanced" if balanced else "split"))
    return module("Attention of few queries", plan, dims, emitted)


def packed(plan: LoopPlan, dims: Dims, most: int = 0) -> int:
    """The number of query heads packed into a tile of `most` rows: all that share a key head, or the largest divisor of
    their number whose tile fits into registers. It is 1 where the mask depends on the head."""
    if plan.uses_head:
        return 1
    dim, most = padded(max(dims.head_dim, dims.v_dim)), most or rows_of_a_tile(dims)
    if dims.group <= (128 if dim <= 128 else most):
        return dims.group
    return max(n for n in range(1, most + 1) if dims.group % n == 0)


def rows_of_a_tile(dims: Dims) -> int:
    """The most rows of a packed tile. A row is one query of one head: 128 rows hold 16 queries of each of 8 heads,
    which read keys and values once. Where keys have 8 bits, two programs of 64 rows would take a tenth less time by the
    model of an H100, and read them twice. A key head with more heads than this may have a larger tile."""
    dim = padded(max(dims.head_dim, dims.v_dim))
    return 128 if dim <= 128 and dims.half else 64 if dim <= 256 else 16


def describable(plan: LoopPlan, dims: Dims) -> bool:
    """Whether a kernel of `plan` can read its arrays through tensor descriptors. These take 16-bit numbers, in one part
    along the head dimension, neither in pages nor such that keys which no query sees may hold anything."""
    whole = len(widths(dims.head_dim)) == len(widths(dims.v_dim)) == 1
    return whole and dims.half and not dims.kv_dtype and plan.pages is None and not plan.unwritten


@dataclass(frozen=True)
class HeadPart:
    """A power of two along the head dimension, or along the values' dimension: `mark` ends the names of its tensors,
    `index` names its positions."""

    mark: str
    index: str
    start: int
    width: str
    length: str  # the dimension's, where the part goes past it

    @property
    def positions(self) -> str:
        along = f"tl.arange(0, {self.width})"
        return f"{self.start} + {along}" if self.start else along

    def pad(self, axes: str) -> str:
        return f"{self.index}{axes} < {self.length}" if self.length else ""

    def holes(self, rows: str, axes: str = "[None, :]", other: str = ", other=0.0") -> dict[str, str]:
        """The holes of a part: its names, and the mask of its tile whose `rows` exist."""
        mask = masked(rows, self.pad(axes), other=other)
        return {"mark": self.mark, "d": self.index, "width": self.width, "mask": mask}


def parts_of(dim: int, of_dim: tuple[int, ...], index: str, constant: str, length: str) -> list[HeadPart]:
    """The parts of a head dimension, one or two, by their widths."""
    if len(of_dim) == 1:  # no mark: kernels of one part have the plain names
        return [HeadPart("", index, 0, constant, length if of_dim[0] > dim else "")]
    whole, rest = of_dim
    return [
        HeadPart("0", f"{index}0", 0, str(whole), ""),
        HeadPart("1", f"{index}1", whole, str(rest), length if whole + rest > dim else ""),
    ]


class ForwardKernel(Writer):
    """The forward kernel, or by its traits the decode kernel, which have the same tile of keys."""

    def __init__(
        self, plan: LoopPlan, target: Target, dims: Dims, optional: OptionalArrays, traits: KernelTraits
    ) -> None:
        check_tile(target)
        self.plan, self.dims, self.optional, self.traits = plan, dims, optional, traits
        self.paged = plan.pages is not None
        self.numbered = self.paged and plan.page % target.block_k != 0  # each key of a tile by its own page
        # a tile within one page has one number of it, which is loaded once
        token = "at" if self.numbered else f"(tile * BLOCK_K % {plan.page} + columns)"
        self.placed = {PAGE: Text("page[None, :]" if self.numbered else "page"), TOKEN: Text(f"{token}[None, :]")}
        self.page_of = lookup(plan.pages, (var("b"), var("k") // plan.page), INT) if plan.pages else None
        self.keep_mask = [] if plan.keep_mask is None else [expr.machine(plan.keep_mask)]
        self.weight = (
            [] if plan.value_scale is None else [machine(self.rewritten(plan.value_scale), dims, traits.levels)]
        )
        self.counted = [] if plan.counted is None else [machine(self.rewritten(plan.counted), dims, traits.levels)]
        few = traits.name == "attention_decode"
        if few:
            target = replace(target, order="forward", descriptors=False)
        if self.paged:
            traits = replace(traits, numbers=(*traits.numbers, "pool"))
        more = [*self.keep_mask, *self.weight, *self.counted]
        # rows of which all programs have parts are divided by the kernel that combines these
        super().__init__(plan, dims, target, traits, more, [] if few and traits.parted else [plan.divide])
        # a row that is an interval knows its keys before its tiles
        interval = bool(self.rows) and not (self.mask or self.counted or traits.parted)
        many = "many" if "least" in self.rows else "most + 1"
        self.counted_before = f"tl.reshape({many}, [BLOCK_Q])" if interval else "tl.zeros([BLOCK_Q], tl.int32)"
        self.counts_tiles = plan.counts and not interval
        # a scale of values or dropout multiplies what is at most 1 in the softmax
        self.wide_weights = self.leaves_16_bits(self.score, HALF if plan.value_scale is None else 1.0)
        self.head = parts_of(dims.head_dim, widths(dims.head_dim), "d", "DIM", "HEAD_DIM")
        same = dims.head_dim == dims.v_dim
        # one set of masks and offsets for both
        self.values = self.head if same else parts_of(dims.v_dim, widths(dims.v_dim), "e", "DIM_V", "V_DIM")
        # TMA reads boxes of an array as it lies: no pages, no conversion
        self.described = target.descriptors and describable(plan, dims)
        self.unwritten = plan.mask is not None and plan.unwritten  # keys in a partial tile may be so
        self.shared_values = traits.name == "attention_decode" and dims.values_in_keys
        # The tiles of such values take most registers. What the compiler would compute before the loops has no room
        # there, such as addresses of queries in shared memory.
        self.wide_latent = self.shared_values and padded(dims.v_dim) > 256

    def rewritten(self, e: Expr) -> Expr:
        """A score mod or weight as a tile reads it. Scales are found by the page of the tile and the places in it.
        Where all heads of a packed tile have the same `h // n`, it is that of the first head. Values that depend on
        the key head alone are then read once, not for every row."""
        e = transform(e, self._of_group) if self.traits.packs else e
        return e if self.page_of is None else transform(e, self._in_page)

    def _of_group(self, e: Expr) -> Expr:
        shared = e.op == "floordiv" and e.args[0] is H and e.args[1].op == "lit" and e.args[1].name > 0
        return build("floordiv", FIRST, e.args[1]) if shared and e.args[1].name % self.dims.group == 0 else e

    def _in_page(self, e: Expr) -> Expr:
        if e.op != "lookup" or self.page_of not in e.args:
            return e
        known = {self.page_of: PAGE, var("k") % self.plan.page: TOKEN}
        return make("lookup", tuple(known.get(x, x) for x in e.args), e.name, e.type)

    def _leaf(self, node: Expr, args: list[Text]) -> Text | None:
        return self.placed.get(node) or super()._leaf(node, args)

    def step(self, index: Text, size: str, stride: str) -> str:
        """A step of an address: a page is in the pool, and a place in its page, which has as many scales as keys."""
        return f"{index.text} * {stride}" if self._known(index) else super().step(index, size, stride)

    def clamped(self, index: Text, size: str) -> str:
        return index.text if self._known(index) else super().clamped(index, size)

    def _known(self, index: Text) -> bool:
        return any(index is x for x in self.placed.values())

    @property
    def cast(self) -> str:
        """The conversion of keys of 8 bits for a product. GPUs convert float8 to float16, and from there to float32 by
        an addition; a conversion to bfloat16 has a quarter of the rate of other instructions."""
        wide = self.dims.fp8 and self.dims.dtype == "bfloat16"
        return ".to(tl.float32)" * wide + ".to(Q.dtype.element_ty)" * bool(self.dims.kv_dtype)

    def decode(self) -> TritonKernel:
        """The kernel of few queries."""
        t, traits = self.target, self.traits
        heads, queries = (f"heads / {traits.pack}", "packed queries") if traits.packs else ("heads", "queries")
        rows = "q tiles * splits, {}, batch" if traits.parted else "q tiles, {}, batch"
        rows = "{}, batch * q tiles * (splits + 1)" if traits.balanced else rows
        launch = (
            f"attention_decode: grid ({rows.format(heads)}), tiles of {t.block_q} {queries} by {t.block_k} "
            f"keys,\n    num_warps={t.num_warps}, num_stages={t.num_stages}."
        )
        holes = self.holes()
        holes |= self._of_few(holes["counts"])
        return TritonKernel(traits.name, self.filled(DECODE["kernel"], holes), launch)

    def holes(self) -> dict[str, Any]:
        # a descriptor carries the range of the head dimension
        axes = [self.values] if self.described or self.values is self.head else [self.head, self.values]
        decodes = self.traits.name == "attention_decode"
        common = super().holes()
        return {
            **common,
            "loaded": not decodes,
            **({"over": "tl.range", "hints": ", disable_licm=True"} if self.wide_latent else {}),
            "ranges": common["ranges"] if decodes else "used",
            "axes": [f"{', '.join(p.index for p in a)} = {', '.join(p.positions for p in a)}" for a in axes],
            **self.optional.holes,
            **fields(self, "paged numbered described unwritten shared_values cast counted_before"),
            "tensors": self._tensors("" if decodes else "Out"),
            "strides": [{"tensor": x} for x in ("o" if self.described else "qkvo")],
            **self._pages(),
            "first_key": self._first("k", "[None, :]"),
            "first_value": self._first("v", "[:, None]"),
            "head": [p.holes("present[:, None]") for p in self.head],
            "values": [p.holes("present[:, None]", other="") for p in self.values],
            "rows_of_q": self.coordinate("q", "start + rows") if "q" in self.used else [],
            **self.closed_form(),
            "hoisted": self.before_tiles(),
            "tiles": self.tiles(),
            **self.divided(),
            "survived": f" * (1.0 / {self.survival})" if self.survival else "",
            "v_dim": self.v,
        }

    def _tensors(self, out: str) -> list[str]:
        """The lines of the signature for tensors; `out` follows them where it is one of the kernel."""
        strided = "[batch, heads, length, dim], any strides"
        if self.described:
            boxes = "tensor descriptors of [batch, heads, length, dim], in blocks of a head's tile"
            return [f"Q, K, V,  # {boxes}", f"{out},  # {strided}"]
        keys = ["K", *["V"] * (not self.shared_values)]
        tensors = ", ".join(["Q", *keys * (not self.paged), *[out] * bool(out)])
        return [
            f"{tensors},  # {strided}",
            *[f"{', '.join(keys)},  # [pages, heads, tokens of a page, dim], any strides"] * self.paged,
        ]

    def _pages(self) -> dict[str, Any]:
        """The holes about pages, and about the batch axis, which is that of pages in a pool."""
        pages, page = self.arguments[str(self.plan.pages)] if self.paged else None, self.plan.page
        return {
            "pages": pages and pages.name,
            "pages_step": pages and pages.strides[0],
            "pages_stride": pages and pages.strides[1],
            "place_in_page": f"at % {page}" if self.numbered else f"tl.cast(tile * BLOCK_K % {page}, tl.int64)",
            **{f"batch_of_{x}": "" if self.paged else f"batch.to(tl.int64) * stride_{x}b + " for x in "kv"},
            "key_columns": "" if self.numbered else "columns[None, :] * stride_ks + ",
            "value_columns": "" if self.numbered else "columns[:, None] * stride_vs + ",
        }

    def _number_of_page(self, inside: str) -> str:
        """The place of a tile's or a key's page in its row of the table."""
        number = f"{'at' if self.numbered else 'tile * BLOCK_K'} // {self.plan.page}"
        size = self.arguments[str(self.plan.pages)].sizes[1] if self.paged else ""
        return f"clamp({number}, {size})" if inside else number

    def _of_few(self, counts: list[str]) -> dict[str, Any]:
        """The holes of the decode kernel in addition to those of the forward."""
        traits = self.traits
        whole = traits.pack == self.dims.group  # all query heads of a key head in one tile
        own_head = "head" if not traits.packs else "kv_head" if whole else "first_head"
        first_head = "kv_head * GROUP" if own_head == "kv_head" else own_head
        packed_heads = "GROUP" if whole else "PACK"
        present = "start + rows < q_len"
        share = [
            "tiles = hi - lo",
            "# This part's share of the tiles that the row sees.",
            "begin, end = part * tiles // splits, (part + 1) * tiles // splits",
        ] * (traits.parted and not self.tabled)
        line_of_h = self.own_coordinate("h")
        if line_of_h and traits.packs:
            line_of_h = [f"h = (h_origin + head)[:, None]{self.wide}"]
        if FIRST.name in self.used:
            line_of_h.append(f"h_first = {self.plus_origin('h', first_head)}")
        return {
            "strides": [{"tensor": x} for x in "qkvo" if x not in "v" * self.shared_values + "o" * traits.parted],
            "parts_of_rows": "programs, heads, queries" if traits.balanced else "splits, batch, heads, q_len",
            "first_head": first_head,
            "rows_of_tiles": "rows_of_tiles" if traits.parted else "tl.num_programs(0)",
            "counts": [*share, *counts],
            "parts": "parts" if traits.balanced else "splits",
            "queries": "QUERIES" if traits.packs else "BLOCK_Q",
            "partly": own_head == "first_head",
            "again": self.wide_latent and traits.balanced and traits.packs,
            "heads_of_program": " * PACK" if own_head == "first_head" else "",
            "packed_heads": packed_heads,
            "of_heads": "the GROUP" if whole else "PACK",
            "own_head": own_head,
            "present": f"(packed < QUERIES * {packed_heads}) & ({present})" if traits.packs else present,
            "line_of_h": line_of_h,
        }

    def tiles(self) -> list[dict[str, Any]]:
        if not self.target.invariant:
            return super().tiles()
        # which tiles are partial depends on the other queries of a tile: all are visited in order, under the mask
        which = "The tiles in the order of their keys, whatever other queries see: the mask is a predicate."
        step = self.inside_of_tile()
        loop = {"which": which, "range": "lo, hi", "tile": "tile", "tile_of_step": step, "past": [], "border": True}
        return [{**loop, **self.tile("inside")}]

    def inside_of_tile(self) -> list[str]:
        # One subtraction a tile, not an addition a key, where registers are left for it. A tile of 128 x 128 at head
        # size 128 would spill 16 bytes with Triton 3.9.
        few = self.traits.bounded and self.target.block_k <= 64
        return [f"inside = {'columns < kv_len - tile * BLOCK_K' if few else 'tile * BLOCK_K + columns < kv_len'}"]

    def _first(self, step: str, axes: str) -> str:
        """The offset of a tile's first key, or of each key where keys are `numbered`."""
        if not self.paged:
            return f"at * stride_{step}s"
        # the batch axis of a pool is that of pages
        offset = f"page * stride_{step}b + at * stride_{step}s"
        return f"({offset}){axes}" if self.numbered else offset

    def tile(self, inside: str) -> dict[str, Any]:
        written = set(self.hoisted)
        # keys of a partial tile have values to read
        seen = "seen" if self.unwritten else "inside"
        seen_first = bool(inside) and self.unwritten and self.shared_values
        row, column = (f"{seen if seen_first else inside}[None, :]", f"{seen}[:, None]") if inside else ("", "")
        first, last, scale = self.head[0], self.head[-1], self.units()["scale"]
        # values that lie in no keys may have more parts than keys
        key_marks = [p.mark for p in (self.head if self.shared_values else self.values)][: len(self.values)]
        return {
            "seen_first": seen_first,
            "head": [
                {**p.holes(row, "[:, None]"), "sum": ", score" * (p is not first), "scale": scale * (p is last)}
                for p in self.head
            ],
            "values": [
                {**p.holes(column), "key_mark": mark, "product": self._product(p)}
                for p, mark in zip(self.values, key_marks, strict=True)
            ],
            "number_of_page": self._number_of_page(inside),
            **self.tile_of_keys(inside, self.keep_mask, written),
            "weight": self._weighed(inside, written),
            "count": self._counted(inside, written) if self.counts_tiles else [],
        }

    def _product(self, p: HeadPart) -> str:
        into = f"acc{p.mark}" if self.plan.weighted else f"acc{p.mark} * rescale[:, None]"
        return self.product("p", f"values{p.mark}", into, self.wide_weights)

    def _counted(self, inside: str, written: set[str]) -> list[str]:
        """The lines that count the keys of a tile that a row sees."""
        if not self.counted:
            return [f"count += {'tl.sum(visible.to(tl.int32), 1)' if inside else 'BLOCK_K'}"]
        value = f"_, counted = tl.broadcast(score, {self.value(self.counted[0])})"
        lines = [*self.quoted(self.plan.counted, self.counted[0], "", written), wrapped(value)]
        return [*lines, *["counted &= visible"] * bool(inside), "count += tl.sum(counted.to(tl.int32), 1)"]

    def _weighed(self, inside: str, written: set[str]) -> list[str]:
        """The lines that multiply the weights of a tile by those of its values."""
        if not self.weight:
            return []
        scaled = wrapped(f"scaled = {self.value(self.weight[0])}")
        product = "p = tl.where(visible, p * scaled, 0.0)" if inside else "p *= scaled"
        return [*self.quoted(self.plan.value_scale, self.weight[0], "", written), scaled, product]


NUMBERS = {"split": ("splits",), "balanced": ("queries", "pack"), "listed": ("queries",)}  # by what divides the rows


class CombineKernel(Writer):
    """The writer of what the kernel that combines parts of weighted rows divides a row by: a program has one row."""

    of_sums = ""

    def __init__(self, plan: LoopPlan, dims: Dims, way: str) -> None:
        parts = "mask", "score", "bounds", "keep_mask", "value_scale", "by_query", "by_key", "counted"
        none: dict[str, Any] = dict.fromkeys(parts)
        traits = KernelTraits("attention_combine", ("heads", "q_len", *NUMBERS[way]))
        target: Any = Target("triton", 16, 16)
        super().__init__(replace(plan, **none), dims, target, traits, [], [plan.divide])

    def holes(self) -> dict[str, Any]:
        return {**super().holes(), "line_of_q": self.own_coordinate("q", "row"), **self.divided()}


def combine(plan: LoopPlan, dims: Dims, optional: OptionalArrays, way: str) -> TritonKernel:
    """The kernel that combines the parts of each row, by how these are divided: "split" and "balanced" by
    `attention_decode`, or "listed" by a table of `attention_forward`. Of the plan it reads `guard`, whether a row may
    be empty, and of a weighted one what its rows are divided by."""
    e, dim, length = ("d", "DIM", "HEAD_DIM") if dims.v_dim == dims.head_dim else ("e", "DIM_V", "V_DIM")
    ragged = padded(dims.v_dim) != dims.v_dim  # without a mask loads are wider
    holes = {
        **(CombineKernel(plan, dims, way).holes() if plan.weighted else {"weighted": False}),
        "varying": ", ".join(f'"{n}"' for n in ("heads", "q_len", *NUMBERS[way])),
        "number": NUMBERS[way][0],
        "source": "attention_forward" if way == "listed" else "attention_decode",
        **{name: name == way for name in NUMBERS},
        "part_at": "row_at" if way == "split" else "first_at",
        "of_place": "place",
        "length": "q_len",
        "d": e,
        "dim": dim,
        "v_dim": length,
        "load": masked("part[:, None] < splits", f"{e}[None, :] < {length}" if ragged else ""),
        "store": masked(f"{e} < {length}" if ragged else "", other=""),
        "guard": plan.guard,
        "of_rows": "",
        **optional.holes,
    }
    rows = "queries of rows in parts" if way == "listed" else "q_len"
    text = filled(DECODE["combine"], wrapped, **holes)
    return TritonKernel("attention_combine", text, f"attention_combine: grid ({rows}, heads, batch).")


class PartSums:
    """The sums of a part of a row of a backward kernel, which are adjacent in float32. `arrays` are
    (gradient, its sum, "d" or "e"), `totals` (buffer, its sum), of which each of `heads` heads has one. `numbers` are
    those of a query or key."""

    def __init__(
        self, dims: Dims, arrays: Sequence[tuple[str, str, str]], totals: Sequence[tuple[str, str]], heads: int = 1
    ) -> None:
        of_axis = {"d": dims.head_dim, "e": dims.v_dim}
        self.several, self.numbers = heads > 1, 0
        self.arrays, self.totals = [], []
        for result, total, d in arrays:
            self.arrays.append((result, total, d, of_axis[d], self.numbers))
            self.numbers += of_axis[d]
        for buffer, total in totals:
            self.totals.append((buffer, total, self.numbers))
            self.numbers += heads

    def stores(self, masks: dict[str, str]) -> list[str]:
        """The lines that store the sums of arrays at `part_at`."""
        places = [f"({at} + {d}[None, :])" if at else f"{d}[None, :]" for *_, d, _, at in self.arrays]
        return [
            f"tl.store(Acc + part_at[:, None] * {self.numbers} + {place}, {total}{masks[d]})"
            for place, (_, total, d, _, _) in zip(places, self.arrays)
        ]

    def stores_of_totals(self) -> list[str]:
        """The lines that store the totals of a head there."""
        head = " + head - kv_head * GROUP" if self.several else ""
        return [
            f"tl.store(Acc + part_at * {self.numbers} + {at}{head}, {total}, mask=present)"
            for _, total, at in self.totals
        ]

    def kernel(self, name: str, length: str, buffers: Sequence[str]) -> TritonKernel:
        """The kernel that adds the parts of rows up; `buffers` are the parameters of totals."""
        # a key head sums over its query heads, and a total has one entry for each of them
        place = f"(place * GROUP + i).to(tl.int64) * {length} + row" if self.several else "row_at"
        holes = {
            "name": name,
            "length": length,
            "results": ", ".join(result for result, *_ in self.arrays),
            "buffers": list(buffers),
            "of_place": "place * GROUP" if self.several else "place",
            "arrays": [self._array(*x) for x in self.arrays],
            "totals": [
                {"offset": (f" + {at}" if at else "") + " + i" * self.several, "place_of_total": f"{buffer} + {place}"}
                for buffer, _, at in self.totals
            ],
            **fields(self, "numbers several"),
        }
        text = filled(SUMS, wrapped, **holes)
        return TritonKernel(name, text, f"{name}: grid (rows of tiles in parts, heads, batch).")

    def _array(self, result: str, total: str, d: str, width: int, at: int) -> dict[str, Any]:
        ragged = f"{{}} < {width}" * (padded(width) != width)
        return {
            "result": result,
            "d": d,
            "dim": padded(width),
            "width": width,
            "scaled": result != "DV",
            "offset": f" + {at}" if at else "",
            "load": masked("part[:, None] < splits", ragged.format(f"{d}[None, :]")),
            "store": masked(ragged.format(d), other=""),
        }
