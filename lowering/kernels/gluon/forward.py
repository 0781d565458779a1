"""Writes the Gluon forward kernel of a LoopPlan, warp-specialised for Hopper and for Blackwell.

One program works on one tile of queries of one head. One warp, `produce`, walks the records of the row and loads tiles
of keys and of values by TMA into rings in shared memory. Two warp groups, `consume`, compute half of the queries each:
the softmax of one group runs during the products of the other.

On Hopper keys and values may be in pages of a pool: a tile is loaded in pieces that lie in one page each. Where keys
may never have been written, partial tiles set values that no query sees to 0.
Queries, keys and values of 8 bits are for Hopper. Its products of 8 bits read both operands along the summed axis, so
that values come transposed, [batch, heads, dim, keys]. The keys of a thread's scores are not those whose weights it
gives to the next product. So the keys of values are in another order too, `ORDER`, and weights stay in their threads.
Weights are 2**8 times as large, as in FlashAttention 3: float8_e4m3fn reaches 448. Scales of queries and keys are in
the factor that makes exponents of scores, where they are known once for a row or a tile.

On Hopper a tile has 128 queries. Each group issues its own products, in turns with the other group. The product with
values runs during the softmax of the next tile. A head of 192 is worked on in two parts, of 128 and 64: each has its
own descriptors, shared memory and sums. On Blackwell a tile has 256 queries, and another warp, `multiply`,
issues the products of both groups, whose results are in tensor memory. Keys and values take the slots of one ring in
turn. At head size 128 weights are stored in two pieces, and the product with the first one begins before the other one
is computed. Heads past 128 fill tensor memory with 128 queries: their tile has 128 and one group, whose scores are
computed a tile ahead.

Expressions are printed by Triton's table of operators: in the text of both languages only the module's name differs.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import SCORE, Expr, substitute, uses, var, walk
from frisket.dsl.types import FLOAT
from frisket.dsl.work import HEAVY
from frisket.lowering.architectures import architecture_of
from frisket.lowering.dtypes import FP8
from frisket.lowering.kernels import expr
from frisket.lowering.kernels.expr import COLUMN, ROW, levels
from frisket.lowering.kernels.features import GLUON, ONLY_HOPPER, missing
from frisket.lowering.kernels.text import fields, parts
from frisket.lowering.kernels.triton.forward import NO_ARRAYS, OptionalArrays, parts_of
from frisket.lowering.kernels.triton.module import Dims, TritonKernel, module, padded, widths
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.kernels.triton.writer import K_TILE, Q_ROW, KernelTraits, Writer
from frisket.lowering.plan import K_SCALE, KV_INPUTS, LoopPlan

HOPPER, BLACKWELL, SHARED = (parts(__package__, name) for name in ("hopper", "blackwell", "shared"))
INSTEAD = "take backend='triton'"
OF_HOPPER = "the Gluon kernel reads pages, and keys that may never have been written, on Hopper alone"
OF_BORDER = ("told", "cleaned")  # barriers of partial tiles whose values may never have been written
OF_SLOT = ("k_full", "k_free", "v_full", "v_free")  # barriers of a slot of the rings on Hopper
PART = 64  # columns of the sums that a warp group reads from tensor memory at once
SHIFT = 8  # of 8 bits, weights are 2**8 times as large
ORDER = (2, 4, 2), (1, 0, 2)  # of 16 keys: (shape, order of axes) by which weights of 8 bits, and values, are reordered
TINY = 1e-30  # the least factor of a product
DEPTH = 32  # head dims of keys that a product of 8 bits takes at once
SLACK = 8  # a weight may be 2**8: sums are rescaled where a score exceeds the maximum so far by more
# Cycles of a scheduler for an element of each thread of a warp, by the compiled kernels of Triton 3.6 and 3.9. They are
# those of a full tile without a score mod, those that the polynomial adds, and those of one exp2 or tanh.
ISSUE, ALU, MORE_ISSUE, MORE_ALU, MUFU = 4, 2, 5, 4, 8
OF_USE = {  # lines of the module's head that not every kernel needs, and the text of a kernel that does
    "import triton": "triton.knobs",
    "from triton import language as tl": "tl.",
    "from triton.experimental.gluon.language.nvidia import blackwell": "seen_as(",
    "columns_of = blackwell.tensor_memory_descriptor": "seen_as(",
    'seen_as = columns_of.reinterpret if hasattr(columns_of, "reinterpret") else columns_of._reinterpret': "seen_as(",
    'group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier': "group_barrier()",
    "tiles_of = gl.shared_memory_descriptor": "tiles_as(",
    'tiles_as = tiles_of.reinterpret if hasattr(tiles_of, "reinterpret") else tiles_of._reinterpret': "tiles_as(",
}
# 2**x for -0.5 <= x <= 0.5: the polynomial of this degree with the least relative error, 1.5e-7, given that 2**0 is 1.
EXP2 = (1.0, 0.6931469, 0.24022119, 0.05550713, 0.009675541, 0.0013276471)
*REST, LAST = EXP2
FUNCTIONS = {  # that not every kernel needs
    "sigmoid": """def sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))""",
    "exp2_polynomial": f"""def exp2_polynomial(x):
    \"\"\"2**x on the FMA units instead of MUFU: relative error at most 2.5e-7, and 0 below -126.5.\"\"\"
    x = gl.maximum(x, -127.0, propagate_nan=tl.PropagateNan.ALL)
    # Floats of this size are whole numbers: the sum rounds x. Its low bits are the exponent of `whole`.
    biased = x + 12583039.0  # 1.5 * 2**23 + 127
    rest = x - (biased - 12583039.0)
    whole = (biased.to(gl.int32, bitcast=True) << 23).to(gl.float32, bitcast=True)
    return whole * ({" + rest * (".join(map(str, REST))} + rest * {LAST}{")" * len(REST)}""",
}


def emit(plan: LoopPlan, target: Target, dims: Dims, optional: OptionalArrays = NO_ARRAYS) -> str:
    """The text of the forward's module: `emit(plan, target, Dims(128, 128, "bfloat16", group=4))`; the same input gives
    the same text. A LoweringError has a reason of `features.GLUON`."""
    if why := missing(GLUON, plan, dims, dims.dtype):
        raise LoweringError(f"{why}\n  {INSTEAD}")
    if plan.unwritten and architecture_of(target.arch).products != "wgmma":
        raise LoweringError(f"{OF_HOPPER}\n  {INSTEAD}")
    if dims.dtype == FP8 and (why := refused(plan, target.arch, dims)):
        raise LoweringError(why)
    groups, rows = groups_of(target.arch, dims.head_dim, dims.v_dim)
    if target.block_q != groups * rows or target.block_k not in (32, 64, 128):
        tile = f"{target.block_q} x {target.block_k}"
        raise LoweringError(f"the Gluon kernel tiles {groups * rows} queries and 32, 64 or 128 keys, not {tile}")
    if target.num_stages < 2 and architecture_of(target.arch).products == "tcgen05":
        raise LoweringError(f"the Gluon kernel for {target.arch} holds two tiles or more in its ring, not one")
    kernel = GluonForward(plan, target, dims, optional).forward()
    return translated(module("Attention forward", plan, dims, [kernel], SHARED["module"]))


def refused(plan: LoopPlan, arch: str, dims: Dims) -> str:
    """A reason why no kernel computes a call with queries of 8 bits; "" where one does."""
    if architecture_of(arch).products != "wgmma":
        return ONLY_HOPPER[FP8].format(dtype=FP8)
    if dims.head_dim % DEPTH:
        return (
            f"kernels with q of {FP8} take head sizes that are multiples of {DEPTH}, not {dims.head_dim}\n"
            "  pad q and k with zeros, or cast q to bfloat16"
        )
    return ""


def groups_of(arch: str, head_dim: int, v_dim: int) -> tuple[int, int]:
    """(warp groups that compute, queries of each). Tensor memory has 512 columns: for 128 queries, sums take a column
    for each dim of the head, and scores a column for each key of a tile."""
    known = architecture_of(arch)
    return 2 if known.products == "wgmma" or max(head_dim, v_dim) <= 128 else 1, known.rows


def widths_of(arch: str, dim: int) -> tuple[int, ...]:
    """The widths of the parts of a head, powers of two: one part, or on Hopper two where a head exceeds 128.

    >>> widths_of("sm_90", 192), widths_of("sm_90", 160), widths_of("sm_90", 96), widths_of("sm_100", 192)
    ((128, 64), (128, 32), (128,), (256,))
    """
    return widths(dim) if dim > 128 and architecture_of(arch).products == "wgmma" else (padded(dim),)


def added(head: tuple[int, ...], values: tuple[int, ...]) -> list[int]:
    """The widths of the results' parts that need shared memory: others replace the part of the queries as wide.

    >>> added((128, 64), (128, 64)), added((128, 64), (128,)), added((128,), (64,))
    ([0, 0], [0], [64])
    """
    return [0 if head[i : i + 1] == (width,) else width for i, width in enumerate(values)]


def tokens_of(block_k: int, page: int) -> int:
    """The keys of a tile that one copy loads: those of a tile that certainly lie in one page, all without pages.

    >>> tokens_of(128, 0), tokens_of(128, 16), tokens_of(64, 48), tokens_of(64, 256)
    (128, 16, 16, 64)
    """
    return math.gcd(page, block_k)


def bytes_of(arrays: Sequence[str], times: str) -> str:
    """The bytes of a tile of the arrays, whose blocks are loaded so many times."""
    total = " + ".join(f"{x}.block_type.nbytes" for x in arrays)
    return f"({total}){times}" if times and len(arrays) > 1 else f"{total}{times}"


def translated(text: str) -> str:
    """A kernel's text with Triton's names turned into Gluon's."""
    # Gluon has no PropagateNan
    source = re.sub(r"\btl\.(?!PropagateNan)", "gl.", text).replace("@triton.jit", "@gluon.jit")
    source = source.replace("gl.sigmoid(", "sigmoid(")  # Gluon has no sigmoid
    head, gap, rest = source.partition("\n\n\n@gluon.jit")
    used = [text for name, text in FUNCTIONS.items() if re.search(rf"\b{name}\(", rest)]
    source = gap.join([head, *(f"\n{text}" for text in used)]) + gap + rest
    for line, use in OF_USE.items():
        source = source if use in source else source.replace(f"{line}\n", "")
    return source


class GluonForward(Writer):
    """Writes the functions of the forward: `produce`, `consume`, on Blackwell `multiply`, which issues the products,
    and the kernel that starts them."""

    features = GLUON

    def __init__(self, plan: LoopPlan, target: Target, dims: Dims, optional: OptionalArrays) -> None:
        self.eight, self.target = dims.dtype == FP8, target
        self.factors: list[Expr] = []  # of the product, where there is no other score mod
        self.optional, self.blackwell = optional, architecture_of(target.arch).products == "tcgen05"
        self.keep_mask = [] if plan.keep_mask is None else [expr.machine(plan.keep_mask)]
        self.groups, self.queries = groups_of(target.arch, dims.head_dim, dims.v_dim)
        head, values = (widths_of(target.arch, d) for d in (dims.head_dim, dims.v_dim))
        self.head = parts_of(dims.head_dim, head, "d", "DIM", "HEAD_DIM")
        self.values = parts_of(dims.v_dim, values, "e", "DIM_V", "V_DIM")
        self.added = [*values] if self.eight else added(head, values)  # results have more bits than queries
        self.sources = {t.name: t.source for t in plan.tables}
        self.scales = [] if plan.value_scale is None else [expr.machine(plan.value_scale)]
        factor = self._factor(plan) if self.eight else None
        if factor is not None:
            plan, self.factors = replace(plan, score=None), [expr.machine(factor)]
        # a vector of a tile's diagonals would take shared memory of both warp groups
        self.paged = plan.pages is not None
        self.unwritten = plan.mask is not None and plan.unwritten  # keys in a partial tile may be so
        self.tokens = tokens_of(target.block_k, plan.page)
        traits = KernelTraits(gathers=False)
        traits = replace(traits, numbers=(*traits.numbers, "pool")) if self.paged else traits
        more = [*self.keep_mask, *self.scales, *self.factors]
        super().__init__(plan, dims, target, traits, more)

    def forward(self) -> TritonKernel:
        # in addition to the four of the first group: four of the second, if there is one, one that loads, one that
        # multiplies
        extra = 4 * self.groups - 2 if self.blackwell else 5
        launch = (
            f"attention_forward: grid (q tiles, heads, batch), tiles of {self.target.block_q} queries by "
            f"{self.target.block_k} keys in {self.target.num_stages} stages, "
            f"num_warps=4 and {extra} warps more."
        )
        part = (BLACKWELL if self.blackwell else HOPPER)["kernel"]
        return TritonKernel(self.traits.name, self.filled(part, self.holes()), launch)

    def _factor(self, plan: LoopPlan) -> Expr | None:
        """The scales of queries and keys, where the score is their product and those of keys are known once a tile."""
        score = plan.score
        if score is None or score.op != "mul" or SCORE not in score.args:
            return None
        factor = score.args[1] if score.args[0] is SCORE else score.args[0]
        for e in walk(factor):
            scale = e.op == "lookup" and self.sources.get(e.name) in KV_INPUTS
            if e.type is FLOAT and not scale and e.op != "mul":
                return None
        factor = substitute(self.rewritten(factor), {var("q"): Q_ROW})
        return factor if "k" not in uses(factor) else None

    def rewritten(self, e: Expr) -> Expr:
        """A score mod whose scales of keys are read once a tile, where a tile is in one block of keys."""
        if not self.eight:
            return e
        reads = [n for n in walk(e) if n.op == "lookup" and self.sources.get(n.name) == K_SCALE]
        once = [n for n in reads if once_a_tile(n, self.target.block_k)]
        return substitute(e, {n: substitute(n, {var("k"): K_TILE}) for n in once})

    def _of_scales(self, written: set[str]) -> dict[str, Any]:
        """The holes of 8 bits, and of scales, in a tile."""
        unit = self.units()["unit"]
        holes: dict[str, Any] = {"factors": [], "unit_of_rows": unit, "less": "", "in_order": []}
        if not self.eight:
            return holes
        (halves, quarters, pairs), axes = ORDER
        order = ", ".join(str(2 + i) for i in axes)
        holes["less"] = f" - {SHIFT}.0"
        holes["in_order"] = [
            f"p = p.reshape([HALF, BLOCK_K // 16, {halves}, {quarters}, {pairs}])  # in the order of the values' keys",
            f"p = p.permute((0, 1, {order})).reshape([HALF, BLOCK_K])",
        ]
        k_tile = [f"k_tile = {self.plus_origin('k', 'tile * BLOCK_K')}"]
        holes["factors"] = k_tile * any(K_TILE.name in uses(r) for r in self.full)
        if self.factors:
            lines = [x for at in (COLUMN, COLUMN | ROW) for x in self.lines(self.factors, at, written)]
            # -inf times 0 is no number
            product = f"{unit} * {self.value(self.factors[0])}"
            factor = f"factor = tl.maximum({product}, {TINY}, propagate_nan=tl.PropagateNan.ALL)"
            holes["factors"] = [*holes["factors"], *lines, factor]
            by_row = Q_ROW.name in uses(self.factors[0])
            holes |= {"unit": "factor", "unit_of_rows": "factor[:, None]" if by_row else "factor"}
        return holes

    def holes(self) -> dict[str, Any]:
        common, closed = super().holes(), self.closed_form()
        self.hoisted = set()  # lines so far are in the kernel, the next ones in `consume`, which computes them again
        optional, padded_v = self.optional, padded(self.dims.v_dim)
        results = [("Top", optional.row_max), ("Low", optional.lse_residual), ("Sinks", optional.sinks)]
        pieces = pieces_of(self.target.block_k, self.dims, self.keep_mask)
        # products of 8 bits with short heads take less time than groups would wait for their turns
        turns = not (self.eight and max(self.dims.head_dim, self.dims.v_dim) <= 128)
        barriers: dict[str, int | str] = {
            "q_full": self.groups,
            **({"turns": self.groups} if turns else {}),
            **(dict.fromkeys(OF_BORDER, 1) if self.unwritten else {}),
            **dict.fromkeys(OF_SLOT, "STAGES"),
        }
        if self.blackwell:
            barriers = {"q_full": self.groups, "s_full": 2, "o_full": 4 - self.groups, "p_full": 2 * pieces}
            barriers |= {"full": "STAGES", "free": "STAGES"}
        width = min(PART, padded_v)
        few = 32 if self.tabled else 24  # of a thread that loads or multiplies; a loop over records spills with 24
        many = self.target.block_k // self.tokens >= 4
        return {
            **common,
            **closed,
            **self._of_parts(),
            **self._of_pages(),
            "unwritten": self.unwritten,
            "barriers": [{"name": name, "count": count} for name, count in barriers.items()],
            # Two tiles of scores: one of each group, or two of the only one, whose products with keys are a tile ahead.
            "alone": self.groups == 1,
            "buffer": "n % 2" if self.groups == 1 else "half",
            "before": "(n + 1) % 2" if self.groups == 1 else "half",
            "phase": "n // 2 & 1" if self.groups == 1 else "n & 1",
            "phase_before": "(n + 1) // 2 & 1 ^ 1" if self.groups == 1 else "(n - 1) & 1",
            "ring": self.blackwell,
            **self._ring(),
            "pieces": pieces,
            "halved": pieces == 2,
            "groups": self.groups,
            "rows": self.queries,
            "halves": [{"half": half} for half in range(self.groups)],
            "results": "".join(f" {n}," for n, use in results if use),
            **optional.holes,
            "walk": "Spans, Count, entry, records" if self.tabled else "lo, full_lo, full_hi, hi",
            "passed": self._passed(),
            "rows_of_q": [
                *(self.coordinate("q", "start + rows") if "q" in self.used else []),
                *[f"q_row = {self.plus_origin('q', 'start + rows')}"] * (Q_ROW.name in self.used),
            ],
            "eight": self.eight,
            "turns": ", turns" if turns else "",
            "shift": f"{SHIFT}.0",
            "depth": str(DEPTH if self.eight else 16),
            "of_values": f" * {self.value(self.scales[0])}" if self.scales else "",
            "hoisted": self.before_tiles(),
            "tiles": self._tiles_of_blackwell() if self.blackwell else self.tiles(),
            # of the last group, and of the sums that a group reads at once
            "last": self.groups - 1,
            "width": width,
            "parts": padded_v // width,
            "slack": "" if optional.row_max else f" + {SLACK}",
            "warps": str([4] * (self.groups - 1) + [1, 1]),
            "registers": str([264 - few] * (self.groups - 1) + [few, few]),
            # of a thread: copies of many pieces of a tile take more than 24
            "of_half": 232 if many else 240,
            "of_producer": 40 if many else 24,
        }

    def _ring(self) -> dict[str, Any]:
        """The holes of the ring's slots. A slot holds a tile of keys or of values, whichever are wider. The narrower
        ones see it as several of their tiles, and take the first."""
        widths = {"K": padded(self.dims.head_dim), "V": padded(self.dims.v_dim)}
        wide = "K" if widths["K"] >= widths["V"] else "V"
        slots = {x: widths[wide] // width for x, width in widths.items()}
        seen = {
            x: "ring" if n == 1 else f"tiles_as(ring, {x}.dtype, [{n} * STAGES] + {x}.block_type.shape, {x}.layout)"
            for x, n in slots.items()
        }
        at = {x: "slot" if n == 1 else f"{n} * slot" for x, n in slots.items()}
        loads = [{"of": x, "into": into, "at": at[x]} for x, into in (("K", "keys"), ("V", "values"))]
        return {
            "widest": wide,
            "loads": loads,
            "keys_in": seen["K"],
            "key_at": at["K"],
            "values_in": seen["V"],
            "value_at": at["V"],
        }

    def _of_parts(self) -> dict[str, Any]:
        """The holes of the parts of a head: their descriptors, shared memory and sums."""
        marks = {n: [p.mark for p in self.head] for n in ("Q", "K", "queries", "keys")}

        def names(of: str) -> list[str]:
            return [f"{n}{mark}" for n in of.split() for mark in marks.get(n) or [p.mark for p in self.values]]

        head, values = ([{**fields(p, "mark width"), "first": p.start} for p in of] for of in (self.head, self.values))
        pieces = self.target.block_k // self.tokens
        times = dict.fromkeys("KV", f" * {pieces}") if pieces > 1 else {}
        of_border = ["seen", *OF_BORDER] if self.unwritten else []
        return {
            "head": [{**x, "so_far": "score" if i else "zero, use_acc=False"} for i, x in enumerate(head)],
            "values": [
                {**x, **self._of_values(x["width"], x["first"]), "apart": term, "of_queries": of}
                for x, term, of in zip(values, self.added, [*names("queries"), ""])  # values may have more parts
            ],
            "split": len(head) + len(values) > 2,
            "sums": ", ".join(names("acc")),
            "first_out": names("Out")[0],
            "descriptors": ", ".join(names("Q K V Out")),
            "copied": ", ".join(names("Q K V queries keys values")),
            "memory": ", ".join([*names("Out outs queries keys values"), *of_border]),
            **{f"bytes_of_{n.lower()}": bytes_of(names(n), times.get(n, "")) for n in "QKV"},
        }

    def _of_pages(self) -> dict[str, Any]:
        """The holes about pages: of a tile's keys, as many lie in one page as are loaded at once."""
        pieces, page = self.target.block_k // self.tokens, self.plan.page
        holes: dict[str, Any] = {"paged": self.paged, "divided": pieces > 1}
        if not self.paged:
            return holes
        pages = self.arguments[str(self.plan.pages)]
        return {
            **holes,
            "paging": f"{pages.name}, {pages.sizes[1]}, {', '.join(pages.strides)}, pool",
            "pages": pages.name,
            "pages_size": pages.sizes[1],
            "pages_step": pages.strides[0],
            "pages_stride": pages.strides[1],
            "page": page,
            "page_pieces": pieces,
            "tokens": self.tokens,
            "rows_of_piece": f".slice(piece * {self.tokens}, {self.tokens}, dim=2)" if pieces > 1 else "",
        }

    def _of_values(self, width: str, first: str) -> dict[str, str]:
        """The place of a tile of values in their tensor, and the tile as a product reads it."""
        if self.eight:
            return {
                "place_of_values": f"{first}, tile * BLOCK_K",
                "seen": f"reshape([{width}, BLOCK_K]).permute((1, 0))",
            }
        return {"place_of_values": f"tile * BLOCK_K, {first}", "seen": f"reshape([BLOCK_K, {width}])"}

    def _passed(self) -> list[str]:
        """The arguments of `consume` that its expressions read."""
        origins = [f"{n}_origin" for n in self.origins() if n in "qk"]
        read = [t for t in self.plan.every_table if t.name != self.plan.pages]  # the pages are the producer's
        tables = [n for t in read for n in self.arguments[t.name].all]
        names = [*(n for n in "bh" if n in self.used), *origins, *self.sizes(), *self.slots(), *tables]
        return textwrap.wrap(f"{', '.join(names)},", 100) if names else []

    def tiles(self) -> list[dict[str, Any]]:
        """The holes of a record's first tile and of its two loops."""
        ahead = "gl.where(j < left, lo + j, j - left + full_hi)"
        behind = {"loop": True, "running": len(self.values)}  # products with values run during the softmax
        first = {
            "which": "The first tile, with the mask even where it shows all.",
            "tile": "gl.where(left > 0, lo, gl.where(borders > 0, full_hi, full_lo))",
            "range": "",
        }
        which = "Partial tiles, before and behind the full ones: the mask is a predicate."
        edge = {"which": which, "tile": ahead, "range": "1, borders", **behind}
        which = "Full tiles: every position is visible."
        full = {"which": which, "tile": "j - borders + full_lo", "range": "gl.maximum(borders, 1), hi - lo", **behind}
        return [
            {**first, "loop": False, "running": 0, "border": True, **self.tile("inside"), "positioned": True},
            {**edge, "border": True, **self.tile("inside"), "positioned": True},
            {**full, "border": False, **self.tile("")},
        ]

    def tile(self, inside: str) -> dict[str, Any]:
        written = set(self.hoisted)
        scales = self._of_scales(written)
        holes = self.tile_of_keys(inside, self.keep_mask, written)
        return {
            **scales,
            **holes,
            "positioned": any(uses(r) & {"k", K_TILE.name} for r in (self.positions if inside else self.full)),
            # the ends of rows already stop at the last key
            "bounded": any("inside" in line for line in holes["visible"]),
        }

    def _tiles_of_blackwell(self) -> list[dict[str, Any]]:
        """The holes of a record's two loops."""
        _, edge, full = self.tiles()
        ends = 3 if "least" in self.rows else 2  # instructions of a comparison with the ends of a row, and of a select
        exp2 = architecture_of(self.target.arch).exp2
        edge |= {"range": "borders", "by_polynomial": by_polynomial(self.full, ends + work(self.mask), exp2)}
        full |= {"range": "borders, hi - lo", "by_polynomial": by_polynomial(self.full, 0, exp2)}
        return [edge, full]


def once_a_tile(scale: Expr, keys: int) -> bool:
    """Whether a tile of so many keys has one scale: that of a head, or of a block of keys that is whole tiles."""
    blocks = [n for n in walk(*scale.args) if n.op == "floordiv" and "k" in uses(n)]
    return "k" not in uses(scale) or (bool(blocks) and all(n.args[1].name % keys == 0 for n in blocks))


def pieces_of(keys: int, dims: Dims, keep_mask: Sequence[Expr]) -> int:
    """The pieces in which the weights of a tile are stored. Two help where products take longer than exponentials, with
    128 keys at head sizes past 64, and not where the only group's products are a tile ahead. Dropout is computed for a
    tile at once."""
    widths = padded(dims.head_dim), padded(dims.v_dim)
    return 2 if keys == 128 and widths == (128, 128) and not keep_mask else 1


def by_polynomial(roots: Sequence[Expr], masking: int = 0, exp2: int = MUFU) -> int:
    """The columns of 32 in a tile whose exp2 is a polynomial. With so many, MUFU, which an exp2 of a warp takes for
    `exp2` cycles, is as busy as issue, or as ALU. ALU has the `masking` of partial tiles. The number is even, because
    two columns share their instructions. It is at most half: a tanh of the score mod comes before the maximum, so a
    warp does not overlap it with the polynomial."""
    mufu = exp2 + sum({"exp": exp2, "tanh": MUFU}.get(e.op, 0) for e in of_elements(roots))
    of_issue = (mufu - ISSUE - work(roots) - masking) / (exp2 + MORE_ISSUE)
    of_alu = (mufu - ALU - 2 * masking) / (exp2 + MORE_ALU)
    return 2 * min(8, max(0, round(16 * min(of_issue, of_alu))))


def work(roots: Sequence[Expr]) -> int:
    """Instructions for an element of a tile."""
    return sum(HEAVY.get(e.op, 1) for e in of_elements(roots))


def of_elements(roots: Sequence[Expr]) -> list[Expr]:
    """Nodes that a thread computes for every element of a tile. It has one row, so nodes of a column count as well."""
    return [e for e, level in levels(*roots).items() if level & COLUMN and e.op != "var"]
