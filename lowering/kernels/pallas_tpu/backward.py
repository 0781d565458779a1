"""Writes the Pallas kernels of the backward for TPU (Mosaic) of a LoopPlan, by the formulas of `lowering.derive`.

`attention_dq` owns rows of query tiles and walks tiles of keys. `attention_dkv` owns rows of key tiles of a key head
and walks tiles of queries, head after head of the group. Both compute the scores again: seven products instead of
five, but no two rows add to one entry, and results repeat bit for bit.

Sums of captured gradients (`derive.Gradient`) come along: "head" and "row" as sums over keys, "diagonal" as sums along
k - q, both from `attention_dq`. Those by "column" come as sums over queries from `attention_dkv`. A gradient by
position, "scatter", has a separate kernel: `attention_terms` writes what each position adds.

A module holds one kernel, as tiles differ from kernel to kernel.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from frisket.dsl.ir import Expr, build, lit, param
from frisket.dsl.show import show
from frisket.dsl.types import FLOAT
from frisket.lowering.derive import Gradient, backward_of, captured
from frisket.lowering.kernels.text import parts
from frisket.lowering.plan import Geometry, LoopPlan, Slot, TableUse, Target

from .kernel import READERS, TpuKernel
from .walk import TpuOptions

TEXT = parts(__package__, "backward")
LARGEST = 512  # a side of a tile unless tiles are named
ONE = lit(1.0)
ATOMS = r"[\w.]+(\[[\w., ]+\])?"
LINES = "lines = (q_tiles * BLOCK_Q + k_tiles * BLOCK_K) // 128  # of sums by distance"
DEFAULTS = TpuOptions()


@dataclass(frozen=True)
class Source:
    """A module, and the names of its results: "q", "k", "v", or the number of a gradient."""

    text: str
    entry: str
    results: tuple[str | int, ...]


def emit(plan: LoopPlan, target: Target, geometry: Geometry, dtype: str, grad_names: Collection[str]) -> str:
    """The text of all backward kernels, to read: for the gradients of "q", "k", "v" and of the plan's names in
    `grad_names`."""
    target = with_tiles(target)
    kinds = TpuQueryGradients, TpuKeyGradients
    sources = [gradients_kernel(kind, plan, target, geometry, dtype, grad_names) for kind in kinds]
    numbers = [i for i, g in captured(plan, grad_names) if g.over == "scatter"]
    sources += [terms(plan, target, geometry, dtype, i) for i in numbers]
    return "\n\n".join(s.text for s in sources if s is not None)


def with_tiles(target: Target) -> Target:
    """The target with tiles for each kernel: the forward's, as far as a backward's fit together, where no
    tiles are given; a backward holds three times as many."""
    block_q, block_k = min(target.block_q, LARGEST), min(target.block_k, LARGEST)
    defaults = replace(target, block_q=block_q, block_k=block_k, dq=None, dkv=None, decode=None)
    return replace(target, dq=target.dq or defaults, dkv=target.dkv or defaults)


def gradients_kernel(
    kind: type[TpuGradients],
    plan: LoopPlan,
    target: Target,
    geometry: Geometry,
    dtype: str,
    grad_names: Collection[str],
    options: TpuOptions = DEFAULTS,
) -> Source | None:
    """The kernel that owns rows of query tiles or of key tiles; None where no gradient of it is wanted."""
    mine = {i: g for i, g in captured(plan, grad_names) if g.over in kind.over}
    arrays = kind.names & set(grad_names)
    tiles = (target.dq if kind.down == "q" else target.dkv) or target
    return kind(plan, tiles, geometry, dtype, options, mine, arrays).source() if mine or arrays else None


def terms(
    plan: LoopPlan, target: Target, geometry: Geometry, dtype: str, n: int, options: TpuOptions = DEFAULTS
) -> Source:
    """The kernel of the shares of all positions in the gradient of this number."""
    gradients = {n: backward_of(plan).gradients[n]}
    return TpuTerms(plan, target.dq or target, geometry, dtype, options, gradients).source()


@dataclass(eq=False)
class TpuGradients(TpuKernel):
    """A kernel that computes the scores of a tile again, and their cotangents. `work` of a subclass declares what it
    keeps and gives, and has the lines behind them."""

    gradients: Mapping[int, Gradient]
    grads: Collection[str] = ()

    arrays = ("query", "key", "value", "dout")
    template = TEXT
    names: ClassVar[frozenset[str]] = frozenset()  # of the arrays and
    over: ClassVar[frozenset[str]] = frozenset()  # of the sums whose gradients it gives

    def __post_init__(self) -> None:
        plan, derived, scored = self.plan, backward_of(self.plan), bool({"q", "k"} & set(self.grads))
        self.slope = derived.slope if scored else None
        self.inner = scored or bool(self.gradients)  # whether dm is wanted; for dv alone p suffices
        # a full tile has no empty row: its scores are -inf only where a score mod makes them so
        self.careful = derived.guard or (plan.guard and plan.score is not None)
        # the cotangent of a weight is read off no weight
        self.modified = None if plan.weighted and "v" not in self.grads else plan.score
        self.survivor = build("div", ONE, build("sub", ONE, param(plan.rate, FLOAT))) if plan.rate else None
        super().__post_init__()
        self.keeps_inputs()
        self.refs = ["q", "k", *["v"] * self.inner, "dout", "of_rows"]
        self.operands = ["query", "key", *["value"] * self.inner, "dout", "of_rows"]
        together = self.holes["together"]
        self.in_specs = [
            "pl.BlockSpec((1, 1, BLOCK_K, dim), at_key),",
            *["pl.BlockSpec((1, 1, BLOCK_K, v_dim), at_key),"] * self.inner,
            f"pl.BlockSpec((1, {together}, BLOCK_Q, v_dim), at_query),",
            f"pl.BlockSpec((1, {together}, 2, BLOCK_Q), along(at_query)),",
        ]
        self.cast_back = "{}.swapaxes(1, 2)" + ".astype(dtype)" * (self.dtype == "float16")
        self.functions: list[str] = []
        self.results: dict[str | int, tuple[str, str]] = {}  # what a caller gets, and its description

    def roots(self) -> Sequence[Expr | None]:
        weights = [g.weight for g in self.gradients.values()]
        return [self.plan.mask, self.modified, self.slope, self.plan.keep_mask, self.survivor, *weights]

    def gives(self, result: str | int, name: str, spec: str, shape: str, shown: str, description: str) -> None:
        """Declare a result: an array `name` by `spec`, of `shape` and dtype, which a caller gets as `shown` with it for
        {}."""
        self.outputs.append(name)
        self.out_specs.append(f"pl.BlockSpec({spec}),")
        self.out_shapes.append(f"jax.ShapeDtypeStruct({shape}),")
        self.results[result] = shown.format(f"found[{len(self.results)}]"), description

    def needs(self, *functions: str) -> None:
        self.functions += [f for f in functions if f not in self.functions]

    def read(self, gradient: Gradient) -> str:
        """The text `bias[h, q - k]`, or the name of a slot, as the user writes it."""
        values: list[TableUse | Slot] = [*self.plan.tables, *self.plan.slots]
        sources = {x.name: str(x.source) for x in values}
        index = ", ".join(show(i, known=set(sources)) for i in gradient.index)
        return f"{sources[gradient.source]}[{index}]" if index else sources[gradient.source]

    def tile(self) -> list[str]:
        """The lines from two tiles to their p and, where they are wanted, dv and dm."""
        plan, survivors = self.plan, list[str]()
        if plan.keep_mask is not None and self.survivor is not None:
            (draws, survives), (others, survivor) = self.value(plan.keep_mask, "w"), self.value(self.survivor, "u")
            survivors = [*draws, *others, f"kept = jnp.where({survives}, {survivor}, 0.0)"]
        score = self.assigned(self.modified, "y", "m = jnp.broadcast_to({}, s.shape)")
        score = score if score or plan.weighted else ["m = s"]
        form = "seen = jnp.where({}, seen, 0.0)" if plan.weighted else "m = jnp.where({}, m, -jnp.inf)"
        hide = self.assigned(plan.mask, "x", form)
        flags = {"down": self.down == "q", "careful": self.careful, "inner": self.inner, "dv": "v" in self.grads}
        flags |= {"weighted": plan.weighted}
        factors = {"scale": "" if self.products else " * SCALE", "kept": " * kept" if survivors else ""}
        lines = {"here": self.coordinate_lines(), "score": score, "hide": hide, "survivors": survivors}
        return self.part("tile", **flags, **factors, **lines)

    def times(self, name: str, factor: Expr | None, temporary: str = "z") -> tuple[list[str], str]:
        """The (lines, text) of dm times a factor, 0 at hidden positions: 0 times NaN or infinity is NaN."""
        if factor is None or factor is ONE:
            return [], "dm"
        lines, value = self.value(factor, temporary)
        select = f"{name} = jnp.where({'seen' if self.plan.weighted else 'p'} == 0, 0, {name})"
        product = f"{name} = dm * {value if re.fullmatch(ATOMS, value) else f'({value})'}"
        careful = self.careful and not self.plan.weighted  # a full tile has no hidden pair
        return [*lines, product, *([select] if careful else ["if partial:", f"    {select}"])], name

    def work(self) -> list[str]:
        """Declare the arrays that the kernel keeps and gives, and write the work on a pair of tiles."""
        raise NotImplementedError

    def source(self) -> Source:
        visit = self.work()
        shown, descriptions = zip(*self.results.values(), strict=True)
        functions = [line for text in self.functions for line in f"\n\n{text.strip()}".splitlines()]
        arguments = [*(f"*, {n}" for n in self.zeros), *["fold=1"] * (self.down == "k"), "interpret=False"]
        text = self.module(
            definitions="\n".join([*self.definitions(), *functions]).strip("\n").splitlines(),
            visit=visit,
            arguments=", ".join(arguments),
            results=[*descriptions],
            shapes=["kv_len, kv_heads, v_dim = value.shape[1:]"],
            before=[*self.inputs.before(self.plan), *[LINES] * bool(self.clear)],
            found="found",
            result=f"[{', '.join(shown)}]",
        )
        return Source(text, self.entry, tuple(self.results))


class TpuQueryGradients(TpuGradients):
    """The kernel of dq, sums over keys, and sums by distance."""

    title, entry = "Gradients by query of attention", "attention_dq"
    names, over = frozenset("q"), frozenset({"head", "row", "diagonal"})

    def keeps_rows(self) -> None:
        """Keep lse and delta, upright, and values of the queries of a row of tiles."""
        self.needs(READERS["upright"], READERS["wide"])
        self.start += self.turned()
        for i, name in enumerate(("lse", "delta")):
            self.keeps(name, "(BLOCK_Q, 128)", f"upright(of_rows_ref[0, {self.holes['part']}, {i}:{i + 1}])")

    def work(self) -> list[str]:
        self.keeps_rows()
        lines = self.tile()
        index, part, together = (self.holes[n] for n in ("own", "part", "together"))
        if "q" in self.grads:
            self.keeps("dq", "(BLOCK_Q, dim)")
            spec, shape = f"(1, {together}, BLOCK_Q, dim), at_query", "(batch, heads, q_len, dim), query.dtype"
            self.gives("q", "dq", spec, shape, self.cast_back, "dq [batch, q_len, heads, dim]")
            self.finish.append(f"dq_ref[0, {part}] = (dq[{index}] * SCALE).astype(dq_ref.dtype)")
            self.needs(TEXT["finite"])  # a tile with the mask may have keys behind the last one, which may be NaN
            assignments, ds = self.times("ds", self.slope)
            keys = "keys = finite(k_ref[0, 0]) if partial else k_ref[0, 0]"
            lines += [*assignments, keys, f"dq[{index}] += rows_by_columns({ds}, keys)"]
        for i, g in self.gradients.items():
            assignments, added = self.times(f"d{i}", g.weight, f"g{i}_")
            lines += [*assignments, *(self.distance(i, added) if g.over == "diagonal" else self.sum(i, added))]
        return lines

    def sum(self, i: int, added: str) -> list[str]:
        what, by_head = self.read(self.gradients[i]), self.gradients[i].over == "head"
        self.keeps(f"sum{i}", "(BLOCK_Q, 1)")
        spec, shape = "(1, 1, 1, BLOCK_Q), along(at_query)", "(batch, heads, 1, q_len), Float"
        over = "queries and keys [batch, heads]" if by_head else "keys [batch, heads, q_len]"
        shown, description = "{}[:, :, 0]" + ".sum(-1)" * by_head, f"that of {what} summed over {over}"
        self.gives(i, f"sum{i}", spec, shape, shown, description)
        self.finish.append(f"sum{i}_ref[0, 0] = laid(sum{i}[...])")
        self.needs(TEXT["laid"])
        return [f"sum{i}[...] += {added}.sum(axis=1, keepdims=True)"]

    def distance(self, i: int, added: str) -> list[str]:
        spec, shape = "(1, 1, lines, 128), lambda b, h, *_: (b, h, 0, 0)", "(batch, heads, lines, 128), Float"
        shown, what = "by_difference({}, q_len, kv_len)", self.read(self.gradients[i])
        description = f"that of {what} summed by distance [batch, heads, q_len + kv_len - 1]"
        self.gives(i, f"sum{i}", spec, shape, shown, description)
        self.clear.append(f"sum{i}_ref[0, 0] = jnp.zeros(sum{i}_ref.shape[2:], Float)")
        self.needs(TEXT["by_distance"], TEXT["by_difference"])
        self.lengths = [*dict.fromkeys((*self.lengths, "q_tiles"))]
        return [*self.part("present", added=added), *self.part("distance", name=f"sum{i}")]


class TpuTerms(TpuQueryGradients):
    """The kernel of the shares of single positions in a gradient."""

    title, entry = "A captured gradient by position", "attention_terms"

    def work(self) -> list[str]:
        self.keeps_rows()
        self.zeros = ("zeros",)
        ((i, g),) = self.gradients.items()
        description = f"what positions add to that of {self.read(g)}, in whole tiles [batch, heads, .., ..]"
        spec = "(1, 1, BLOCK_Q, BLOCK_K), lambda *at: place(*at)"
        self.gives(i, "terms", spec, "zeros.shape, Float", "{}", description)
        self.start.append("terms_ref[0, 0] = jnp.zeros((BLOCK_Q, BLOCK_K), Float)")  # where the row visits nothing
        assignments, added = self.times("ds", g.weight)
        return [*self.tile(), *assignments, *self.part("present", added=added), "terms_ref[0, 0] = present"]


class TpuKeyGradients(TpuGradients):
    """The kernel of dk, dv, and sums over queries."""

    title, entry, down = "Gradients by key of attention", "attention_dkv", "k"
    names, over = frozenset("kv"), frozenset({"column"})

    def work(self) -> list[str]:
        turned = self.turned()
        self.start += [] if self.group > 1 else turned
        for name, width in (("k", "dim"), ("v", "v_dim")):
            if name in self.grads:
                self.keeps(f"d{name}", f"(BLOCK_K, {width})")
                spec, shape = f"(1, 1, BLOCK_K, {width}), at_key", f"(batch, kv_heads, kv_len, {width}), query.dtype"
                self.gives(name, f"d{name}", spec, shape, self.cast_back, f"d{name} [batch, kv_len, kv_heads, {width}]")
        lines = [*turned, *self.tile()] if self.group > 1 else self.tile()  # the head may be another one
        if "v" in self.grads:
            self.finish.append("dv_ref[0, 0] = dv[...].astype(dv_ref.dtype)")
        if "k" in self.grads:
            self.needs(TEXT["finite"])
            assignments, ds = self.times("ds", self.slope)
            queries = "queries = finite(q_ref[0, 0]) if partial else q_ref[0, 0]"
            lines += [*assignments, queries, f"dk[...] += rows_by_columns({ds}, queries)"]
            self.finish.append("dk_ref[0, 0] = (dk[...] * SCALE).astype(dk_ref.dtype)")
        for i, g in self.gradients.items():
            lines += self.sum(i, g)
        return lines

    def sum(self, i: int, gradient: Gradient) -> list[str]:
        self.keeps(f"sum{i}", "(GROUP, BLOCK_K, 1)")
        spec, shape = "(1, 1, GROUP, BLOCK_K), along(at_key)", "(batch, kv_heads, GROUP, kv_len), Float"
        description = f"that of {self.read(gradient)} summed over queries [batch, heads, kv_len]"
        self.gives(i, f"sum{i}", spec, shape, "{}.reshape(batch, heads, kv_len)", description)
        self.finish += ["for i in range(GROUP):", f"    sum{i}_ref[0, 0, i : i + 1] = laid(sum{i}[i])"]
        self.needs(TEXT["laid"])
        assignments, added = self.times(f"d{i}", gradient.weight, f"g{i}_")
        return [*assignments, f"sum{i}[{self.holes['of_group']}] += {added}.sum(axis=1, keepdims=True)"]
