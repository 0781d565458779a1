"""Writes the Pallas forward kernel for TPU (Mosaic) of a LoopPlan, as the text of a module."""

from __future__ import annotations

from dataclasses import dataclass

from frisket.dsl.types import FLOAT
from frisket.lowering.kernels.text import parts
from frisket.lowering.plan import Geometry, LoopPlan, Target

from .kernel import TpuKernel
from .walk import TpuOptions

TEXT = parts(__package__, "forward")
LEAST = TEXT["least"].strip()  # what the running maximum starts from


@dataclass(frozen=True)
class ForwardOptions(TpuOptions):
    """The facts of a call that the text of the forward depends on, besides those of the device and the walk."""

    sinks: bool = False  # the call has attention sinks
    kv_8bit: bool = False  # keys and values have 8 bits: they are converted tile by tile
    lse_residual: bool = False  # the rounding error of lse is a result too, which a backward takes


DEFAULTS = ForwardOptions()


def emit(plan: LoopPlan, target: Target, geometry: Geometry, dtype: str, options: ForwardOptions = DEFAULTS) -> str:
    """The source of a module. Its `attention_forward(query, key, value, walk, origin, sizes, slots, tables, sinks)`
    takes JAX arrays [batch, length, heads, dim], or keys in pages [pages, tokens, heads, dim], a `walk.TpuWalk` or
    `walk.TpuSearch`, numbers, and tables in the plan's order. It gives (out, lse, top)."""
    return TpuForward(plan, target, geometry, dtype, options).text()


@dataclass(eq=False)
class TpuForward(TpuKernel):
    """The forward kernel: an online softmax over tiles of keys, or weights and their sums."""

    options: ForwardOptions

    title, entry, template = "Attention forward", "attention_forward", TEXT

    def __post_init__(self) -> None:
        super().__post_init__()
        plan, options, rows = self.plan, self.options, 2 + self.options.lse_residual
        self.unwritten = plan.mask is not None and plan.unwritten
        self.lengths = ["q_len", "kv_len"] if self.unwritten else ["kv_len"]
        self.numbers = ["sinks"] * options.sinks + ["pages"] * bool(plan.pages)
        # more than one page in a tile: each is an operand
        self.parts = max(1, self.target.block_k // plan.page) if plan.pages else 1
        marks = [str(i) for i in range(self.parts)] if self.parts > 1 else [""]
        self.keys, self.values = ([f"{n}{mark}" for mark in marks] for n in "kv")
        self.refs = ["q", *self.keys, *self.values]
        self.operands = ["query", "key, value" if self.parts == 1 else "*[key] * PARTS, *[value] * PARTS"]
        self.in_specs = [self.key_spec(n) for n in ("dim", "v_dim")]
        if options.kv_8bit:
            self.cast = "query = query.astype(Float)"
        if plan.pages:
            self.at_key = TEXT["at_page"]
        if plan.counts:
            self.keeps("count", "(BLOCK_Q, 128)")
        if not plan.weighted:
            self.keeps("top", "(BLOCK_Q, 128)", f"jnp.full(top.{self.holes['shape']}, LEAST, Float)")
        self.keeps("total", "(BLOCK_Q, 128)")
        self.keeps("acc", "(BLOCK_Q, v_dim)")
        self.keeps_inputs()
        self.start += self.turned()
        self.outputs = ["out", "lse", "top", *["low"] * options.lse_residual]
        together = self.holes["together"]
        self.out_specs = [
            f"pl.BlockSpec((1, {together}, BLOCK_Q, v_dim), at_query),",
            f"*[pl.BlockSpec((1, {together}, 1, BLOCK_Q), at_row)] * {rows},",
        ]
        self.out_shapes = [
            "jax.ShapeDtypeStruct((batch, heads, q_len, v_dim), query.dtype),",
            f"*[jax.ShapeDtypeStruct((batch, heads, 1, q_len), Float)] * {rows},",
        ]

    def text(self) -> str:
        plan, sinks, residual = self.plan, self.options.sinks, self.options.lse_residual
        out = f"acc[{self.holes['own']}]{' * wide(shrink, acc.shape[-1])' * sinks}"
        of_row = [] if plan.divide is None else self.coordinate_lines(plan.divide)
        self.finish = self.part(
            "finish",
            weighted=plan.weighted,
            counting=plan.counts,
            divided=plan.divide is not None,
            of_row=of_row,
            divide=self.assigned(plan.divide, "d", "divisor = jnp.broadcast_to({}, whole.shape)"),
            sinks=sinks,
            lse_residual=residual,
            out=out + self.survival(),
        )
        visit = self.part(
            "visit",
            here=self.coordinate_lines(),
            keys=self.together(self.keys),
            values=self.together(self.values),
            products=self.products,
            weighted=plan.weighted,
            counting=plan.counts,
            unwritten=self.unwritten,
            score=self.assigned(plan.score, "y", f"{'p' if plan.weighted else 's'} = jnp.broadcast_to({{}}, s.shape)"),
            counted=self.assigned(plan.counted, "c", "seen = jnp.where({}, seen, 0.0)"),
            seen=self.seen(),
            drop=self.assigned(plan.keep_mask, "z", "p = jnp.where({}, p, 0.0)"),
            # in a tile with the mask a weight may be the scale of a value that was never written
            weigh=self.assigned(
                plan.value_scale,
                "w",
                f"p = p * {{0}} if not partial else jnp.where(p {'!=' if plan.weighted else '>'} 0, p * {{0}}, 0.0)",
            ),
        )
        before = [*self.inputs.before(plan), *["sinks = jnp.asarray(sinks, Float)"] * sinks]
        if plan.pages:
            entries = f"jnp.clip({plan.pages}, 0, key.shape[0] - 1)"
            before.append(f"pages = {entries}  # entries that are not read may be anything")
        dtype = ".astype(dtype)" * (self.dtype == "float16")
        return self.module(
            definitions=[*[LEAST] * (not plan.weighted), *self.paged(), *self.definitions(turns=self.unwritten)],
            visit=visit,
            named=", low" * residual,
            shapes=[f"kv_len, v_dim = {self.kv_len()}, value.shape[3]"],
            before=before,
            found="out, *rows",
            result=f"out.swapaxes(1, 2){dtype}, *(row[:, :, 0] for row in rows)",
        )

    def seen(self) -> list[str]:
        """The lines of the mask."""
        if self.plan.weighted:
            return self.assigned(self.plan.mask, "x", "seen = jnp.where({}, seen, 0.0)")
        if not self.unwritten:
            return self.assigned(self.plan.mask, "x", "s = jnp.where({}, s, -jnp.inf)")
        return [
            *self.assigned(self.plan.mask, "x", "seen = jnp.broadcast_to({}, s.shape)"),
            *self.part("unwritten", weighted=False),
        ]

    def survival(self) -> str:
        """The text that divides by the share of weights that dropout leaves."""
        if self.plan.rate is None:
            return ""
        floating = [s.name for s in self.plan.slots if s.type is FLOAT]
        return f" / (1.0 - floats[{floating.index(self.plan.rate)}])"

    # -- keys and values in pages --

    def paged(self) -> list[str]:
        """The constants of pages, and the function that joins those of a tile."""
        plan = self.plan
        if not plan.pages:
            return []
        rows = min(plan.page, self.target.block_k)
        page = f"PAGE, ROWS = {plan.page}, {rows}  # tokens of a page, and of it in a block"
        if self.parts == 1:
            return [page]
        return [page, f"PARTS = {self.parts}  # pages in a tile of keys", "", "", *self.part("together")]

    def kv_len(self) -> str:
        """The text of the number of keys; the table of pages is as long as a sequence."""
        if not self.plan.pages:
            return "value.shape[1]"
        return f"tables[{[t.name for t in self.plan.tables].index(self.plan.pages)}].shape[1] * PAGE"

    def key_spec(self, width: str) -> str:
        if not self.plan.pages:
            return f"pl.BlockSpec((1, 1, BLOCK_K, {width}), at_key),"
        if self.parts == 1:
            return f"pl.BlockSpec((1, 1, ROWS, {width}), at_page(0)),"
        return f"*(pl.BlockSpec((1, 1, ROWS, {width}), at_page(part)) for part in range(PARTS)),"

    def together(self, names: list[str]) -> str:
        """The text of the keys or values of a tile, in the dtype of the queries."""
        if len(names) > 1:
            return f"together(q_ref.dtype, {', '.join(f'{n}_ref' for n in names)})"
        return f"{names[0]}_ref[0, 0]{'.astype(q_ref.dtype)' * self.options.kv_8bit}"
