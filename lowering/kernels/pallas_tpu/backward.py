"""Writes the Pallas kernels of the backward for TPU (Mosaic) of a LoopPlan, by the formulas of `lowering.derive`.

`attention_dq` owns rows of query tiles and walks tiles of keys; `attention_dkv` owns rows of key tiles of a key head
and walks tiles of queries, head after head of the group. Both compute the scores again: seven products instead of
five, but no two rows add to one entry, and results repeat bit for bit.

Sums of captured gradients (`derive.Gradient`) come along: "head" and "row" as sums over keys, "diagonal" as sums along
k - q, both from `attention_dq`; "column" as sums over queries from `attention_dkv`. A gradient by position, "scatter",
has a kernel of its own: `attention_terms` writes what each position adds.

A module holds one kernel, as each has tiles of its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from textwrap import wrap

from frisket.dsl.ir import Expr, build, lit, param
from frisket.dsl.show import show
from frisket.dsl.types import FLOAT
from frisket.lowering.derive import Gradient, backward_of
from frisket.lowering.kernels.text import filled, parts
from frisket.lowering.plan import Geometry, LoopPlan, Slot, TableUse, Target

from . import inputs as pallas_inputs
from .forward import check, head
from .inputs import Down, TableInputs, place
from .walk import TpuOptions, TpuProgram, locate, names, passed, static_arguments

TEXT = parts(__package__, "backward")
LARGEST = 512  # a side of a tile that nobody asks for
ONE = lit(1.0)
ATOMS = r"[\w.]+(\[[\w., ]+\])?"
LINES = "lines = (q_tiles * BLOCK_Q + k_tiles * BLOCK_K) // 128  # of sums by distance"
DEFAULTS = TpuOptions()
CAST = [
    "dtype = query.dtype  # TPUs compute no float16",
    "query, key, value, dout = (x.astype(Float) for x in (query, key, value, dout))",
]
TOKENS = {"q": "query", "k": "key"}


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
    sources = [dq(plan, target, geometry, dtype, grad_names), dkv(plan, target, geometry, dtype, grad_names)]
    numbers = [i for i, g in captured(plan, grad_names) if g.over == "scatter"]
    sources += [terms(plan, target, geometry, dtype, i) for i in numbers]
    return "\n\n".join(s.text for s in sources if s is not None)


def with_tiles(target: Target) -> Target:
    """The target with tiles for each kernel: the forward's, as far as a backward's fit beside one another, where no
    tiles are given; a backward holds three times as many."""
    block_q, block_k = min(target.block_q, LARGEST), min(target.block_k, LARGEST)
    defaults = replace(target, block_q=block_q, block_k=block_k, dq=None, dkv=None, decode=None)
    return replace(target, dq=target.dq or defaults, dkv=target.dkv or defaults)


def dq(
    plan: LoopPlan,
    target: Target,
    geometry: Geometry,
    dtype: str,
    grad_names: Collection[str],
    options: TpuOptions = DEFAULTS,
) -> Source | None:
    """The kernel that owns rows of query tiles; None where no gradient of it is wanted."""
    mine = {i: g for i, g in captured(plan, grad_names) if g.over in ("head", "row", "diagonal")}
    arrays = {"q"} & set(grad_names)
    if not mine and not arrays:
        return None
    return _TpuQueryGradients(plan, target.dq or target, geometry, dtype, options, mine, arrays).source()


def dkv(
    plan: LoopPlan,
    target: Target,
    geometry: Geometry,
    dtype: str,
    grad_names: Collection[str],
    options: TpuOptions = DEFAULTS,
) -> Source | None:
    """The kernel that owns rows of key tiles; None where no gradient of it is wanted."""
    mine = {i: g for i, g in captured(plan, grad_names) if g.over == "column"}
    arrays = {"k", "v"} & set(grad_names)
    if not mine and not arrays:
        return None
    return _TpuKeyGradients(plan, target.dkv or target, geometry, dtype, options, mine, arrays).source()


def terms(
    plan: LoopPlan, target: Target, geometry: Geometry, dtype: str, n: int, options: TpuOptions = DEFAULTS
) -> Source:
    """The kernel of the shares of all positions in the gradient of this number."""
    gradients = {n: backward_of(plan).gradients[n]}
    return _Terms(plan, target.dq or target, geometry, dtype, options, gradients).source()


def captured(plan: LoopPlan, grad_names: Collection[str]) -> list[tuple[int, Gradient]]:
    """The captured gradients of the tables and slots in `grad_names`, with their numbers."""
    return [(i, g) for i, g in enumerate(backward_of(plan).gradients) if g.source in grad_names]


class _TpuKernel:
    """A Pallas TPU backward kernel. `build` of a subclass says what it keeps and gives, and what a visit does."""

    title = entry = ""
    down: Down = "q"
    zeros: tuple[str, ...] = ()  # operands that the first result begins as

    def __init__(
        self,
        plan: LoopPlan,
        target: Target,
        geometry: Geometry,
        dtype: str,
        options: TpuOptions,
        gradients: Mapping[int, Gradient],
        arrays: Collection[str] = (),
    ) -> None:
        check(plan, target, dtype)
        derived = backward_of(plan)
        self.plan, self.target, self.geometry, self.dtype = plan, target, geometry, dtype
        self.gradients, self.arrays = gradients, arrays
        self.slope = derived.slope if {"q", "k"} & set(arrays) else None
        self.inner = bool({"q", "k"} & set(arrays) or gradients)  # whether dm is wanted; for dv alone p suffices
        # a full tile has no empty row: its scores are -inf only where a score mod makes them so
        self.careful = derived.guard or (plan.guard and plan.score is not None)
        self.group, self.search = geometry.heads // geometry.kv_heads, options.search
        keys = self.down == "k"
        self.program = TpuProgram(self.group if keys else options.program_heads, self.group, keys)
        self.survivor = build("div", ONE, build("sub", ONE, param(plan.rate, FLOAT))) if plan.rate else None
        roots = [
            plan.mask,
            plan.score,
            self.slope,
            plan.keep_mask,
            self.survivor,
            *(g.weight for g in gradients.values()),
        ]
        present = [e for e in roots if e is not None]
        self.inputs: TableInputs = place(present, self.down, options.strided, options.program_heads)
        self.turned = "{}.swapaxes(1, 2)" + (".astype(dtype)" if dtype == "float16" else "")
        self.functions: list[str] = []
        self.scratch: list[str] = []
        self.scratch_shapes: list[str] = []
        self.clear: list[str] = []  # at the first step
        self.start: list[str] = []  # of a row of tiles
        self.finish: list[str] = []
        self.results: list[str | int] = []
        self.outputs: list[str] = []
        self.out_specs: list[str] = []
        self.out_shapes: list[str] = []
        self.shown: list[str] = []
        self.descriptions: list[str] = []

    # -- what its kinds are made of --

    def keeps(self, name: str, shape: str, value: str = "") -> None:
        """Declare a scratch array of a row of tiles, which starts as `value` or 0."""
        self.scratch.append(name)
        holes = self.program.holes
        self.scratch_shapes.append(f"pltpu.VMEM(({holes['shared']}{shape[1:]}, Float),")
        zeros = f"jnp.zeros({name}.{holes['shape']}, Float)"
        self.start.append(f"{name}[{holes['own']}] = {value or zeros}")

    def gives(self, result: str | int, name: str, spec: str, shape: str, shown: str, description: str) -> None:
        """Declare a result: an array `name` by `spec`, of `shape` and dtype, which a caller gets as `shown` with it for
        {}."""
        self.outputs.append(f"{name}_ref")
        self.out_specs.append(f"{spec},")
        self.out_shapes.append(f"jax.ShapeDtypeStruct({shape}),")
        self.shown.append(shown.format(f"found[{len(self.results)}]"))
        self.descriptions.append(description)
        self.results.append(result)

    def needs(self, *functions: str) -> None:
        self.functions += [f for f in functions if f not in self.functions]

    def read(self, gradient: Gradient) -> str:
        """The text `bias[h, q - k]`, or the name of a slot, as the user writes it."""
        values: list[TableUse | Slot] = [*self.plan.tables, *self.plan.slots]
        sources = {x.name: str(x.source) for x in values}
        index = ", ".join(show(i, known=set(sources)) for i in gradient.index)
        return f"{sources[gradient.source]}[{index}]" if index else sources[gradient.source]

    # -- a visit --

    def tile(self, after_p: Collection[str] = ()) -> list[str]:
        """The lines from two tiles to their p, what comes after it, and where they are wanted dm and ds."""
        down = self.down == "q"
        one, two = ("q", "k") if down else ("k", "q")
        names = ("lse", "delta")
        index, part = (self.program.holes[n] for n in ("own", "part"))
        lse, delta = (
            f"wide({n}[{index}], BLOCK_K)" if down else f"of_rows_ref[0, 0, {i}:{i + 1}]" for i, n in enumerate(names)
        )
        refs = {n: f"{n}_ref[0, {part if n in ('q', 'dout') else 0}]" for n in ("q", "k", "v", "dout")}
        lines = [
            *pallas_inputs.coordinate_lines(self.plan, self.inputs),
            f"s = rows_by_rows({refs[one]}, {refs[two]}) * SCALE",
        ]
        lines += self._named("m", "s" if self.plan.score is None else self.plan.score, "y")
        lines += ["if partial:  # the mask", *_indented(self._hide())]
        lines.append(f"p = jnp.exp(m - {lse})")
        select = "p = jnp.where(m == -jnp.inf, 0, p)  # even if lse is NaN"
        lines += [select] if self.careful else ["if partial:", f"    {select}"]
        if self.plan.keep_mask is not None and self.survivor is not None:
            (draws, survives), (_, survivor) = self._value(self.plan.keep_mask, "w"), self._value(self.survivor, "u")
            lines += [*draws, f"kept = jnp.where({survives}, {survivor}, 0.0)"]
        lines += after_p
        if self.inner:
            one, two = ("dout", "v") if down else ("v", "dout")
            lines.append(f"dp = rows_by_rows({refs[one]}, {refs[two]})")
            lines += self._product("dm", "p", f"{'dp' if self.survivor is None else 'dp * kept'} - {delta}")
        return lines

    def times(self, name: str, factor: Expr | None, temporary: str = "z") -> tuple[list[str], str]:
        """The (lines, text) of dm times a factor."""
        if factor is None or factor is ONE:
            return [], "dm"
        lines, value = self._value(factor, temporary)
        return [*lines, *self._product(name, "dm", value)], name

    def _product(self, name: str, one: str, two: str) -> list[str]:
        """A product that is 0 at hidden positions: 0 times NaN or infinity is NaN."""
        select = f"{name} = jnp.where(p == 0, 0, {name})"
        assignment = f"{name} = {one} * {two if re.fullmatch(ATOMS, two) else f'({two})'}"
        return [assignment, select] if self.careful else [assignment, "if partial:", f"    {select}"]

    def _hide(self) -> list[str]:
        """The lines that set m to -inf at hidden positions, positions past the last key or query among them."""
        lines = []
        if self.plan.mask is not None:
            assignments, mask = self._value(self.plan.mask, "x")
            lines += [*assignments, f"m = jnp.where({mask}, m, -jnp.inf)"]
        length, block, along = ("kv_len", "BLOCK_K", "k") if self.down == "q" else ("q_len", "BLOCK_Q", "q")
        return [
            *lines,
            f"if {length} % {block}:  # memory behind the last {TOKENS[along]} may hold anything",
            f"    inside = lax.broadcasted_iota(Int, (1, {block}), 1) < {length} - {along}_tile * {block}",
            "    m = jnp.where(inside, m, -jnp.inf)",
        ]

    def _value(self, root: Expr, temporary: str) -> tuple[list[str], str]:
        return pallas_inputs.in_kernel(root, self.inputs, temporary)

    def _named(self, name: str, value: Expr | str, temporary: str) -> list[str]:
        lines, text = ([], value) if isinstance(value, str) else self._value(value, temporary)
        return [*lines, f"{name} = {text}" if text == "s" else f"{name} = jnp.broadcast_to({text}, s.shape)"]

    # -- the module --

    def build(self) -> list[str]:
        """Declare the arrays that the kernel keeps and gives, and write the work on a pair of tiles."""
        raise NotImplementedError

    def source(self) -> Source:
        visit = self.build()
        plan, inputs, down = self.plan, self.inputs, self.down == "q"
        walk, holes = names(self.search), self.program.holes
        numbers = [*walk, "ints", "q_origin", "k_origin", *pallas_inputs.floats(plan)]
        arrays = {"q": "query", "k": "key"} | ({"v": "value"} if self.inner else {})
        arrays |= {"dout": "dout", "of_rows": "of_rows"}
        blocks = [*inputs.blocks, *self.zeros]
        refs = [*numbers, *(f"{n}_ref" for n in (*inputs.scalars, *arrays, *blocks))]
        prefetched = len(numbers) + len(inputs.scalars)
        static = {"at": "at", "q_len": "q_len", "kv_len": "kv_len"} | ({"q_tiles": "q_tiles"} if self.clear else {})
        static |= {f"{t}_shape": f"{t}.shape" for t in inputs.picked}
        constants, tiles = self.program.constants, ("q_tiles", "k_tiles")[:: 1 if down else -1]
        opening = head(self.title, plan, self.target, self.geometry, self.dtype, inputs.needs_math, constants)
        functions = [line for text in self.functions for line in f"\n\n{text.strip()}".splitlines()]
        text = opening + filled(
            TEXT["skeleton"], **holes, definitions=[*pallas_inputs.definitions(inputs), *functions],
            locate=locate(self.search, self.program.heads, grouped=not down).splitlines(),
            walk=", ".join(walk), tables=len(walk), refs=wrap(f"{', '.join(refs)},", 112),
            outputs=", ".join(self.outputs),
            scratch=", ".join([*inputs.scratch_values.values(), *self.scratch]),
            static=", ".join(static), given=", ".join(f"{n}={x}" for n, x in static.items()),
            sizes=static_arguments(self.search, not down, holes["programs"], *tiles),
            head=self.program.head,
            clear=["", "@pl.when(step == 0)", "def clear():", *_indented(self.clear)] if self.clear else [],
            start=self.start, visit=visit,
            finish=["", "@pl.when(ends)", "def finish():", *_indented(self.finish)] if self.finish else [],
            entry=self.entry,
            arguments=", ".join([*(f"*, {n}" for n in self.zeros), *["fold=1"] * (not down), "interpret=False"]),
            said=self.descriptions, cast=CAST if self.dtype == "float16" else [],
            before=[*pallas_inputs.before(plan, inputs), *[LINES] * bool(self.clear)],
            passed=", ".join(
                [*passed(self.search), *numbers[len(walk) :], *(inputs.picked.get(n, n) for n in inputs.scalars)]
            ),
            number=prefetched,
            of_values=["pl.BlockSpec((1, 1, BLOCK_K, v_dim), at_key),"] if self.inner else [],
            specs=[*pallas_inputs.specs(inputs), *["pl.BlockSpec(memory_space=pl.ANY),"] * len(self.zeros)],
            out_specs=self.out_specs,
            scratch_shapes=[*pallas_inputs.scratch(inputs), *self.scratch_shapes],
            out_shapes=self.out_shapes,
            aliases=[f"input_output_aliases={{{len(refs) - 1}: 0}},"] * len(self.zeros),
            operands=", ".join(["*scalars", *arrays.values(), *blocks]), result=f"[{', '.join(self.shown)}]",
        )  # fmt: skip
        return Source(text, self.entry, tuple(self.results))


class _TpuQueryRows(_TpuKernel):
    """Kernels that own rows of query tiles."""

    def numbers(self) -> None:
        """The lines of lse and delta, upright, and of values of the queries of a row of tiles."""
        self.needs(pallas_inputs.TEXT["upright"], pallas_inputs.TEXT["wide"])
        self.start += pallas_inputs.turned(self.inputs)
        for i, name in enumerate(("lse", "delta")):
            self.keeps(name, "(BLOCK_Q, 128)", f"upright(of_rows_ref[0, {self.program.holes['part']}, {i}:{i + 1}])")

    def present(self, added: str) -> list[str]:
        """The lines that set positions past the last query to 0."""
        return [
            f"present = {added}",
            "if q_len % BLOCK_Q:  # nothing is behind the last query",
            "    inside = lax.broadcasted_iota(Int, (BLOCK_Q, 1), 0) < q_len - q_tile * BLOCK_Q",
            "    present = jnp.where(inside, present, 0)",
        ]


class _TpuQueryGradients(_TpuQueryRows):
    """The kernel of dq, sums over keys, and sums by distance."""

    title = "Gradients by query of attention"
    entry = "attention_dq"

    def build(self) -> list[str]:
        self.numbers()
        lines = self.tile()
        index, part, together = (self.program.holes[n] for n in ("own", "part", "together"))
        if "q" in self.arrays:
            self.keeps("dq", "(BLOCK_Q, dim)")
            spec, shape = (
                f"pl.BlockSpec((1, {together}, BLOCK_Q, dim), at_query)",
                "(batch, heads, q_len, dim), query.dtype",
            )
            self.gives("q", "dq", spec, shape, self.turned, "dq [batch, q_len, heads, dim]")
            self.finish.append(f"dq_ref[0, {part}] = (dq[{index}] * SCALE).astype(dq_ref.dtype)")
            self.needs(TEXT["finite"])  # a tile with the mask may have keys behind the last one, which may be NaN
            assignments, ds = self.times("ds", self.slope)
            keys = "keys = finite(k_ref[0, 0]) if partial else k_ref[0, 0]"
            lines += [*assignments, keys, f"dq[{index}] += rows_by_columns({ds}, keys)"]
        for i, g in self.gradients.items():
            assignments, added = self.times(f"d{i}", g.weight, f"g{i}_")
            lines += [*assignments, *(self._distance(i, added) if g.over == "diagonal" else self._sum(i, added))]
        return lines

    def _sum(self, i: int, added: str) -> list[str]:
        what, by_head = self.read(self.gradients[i]), self.gradients[i].over == "head"
        self.keeps(f"sum{i}", "(BLOCK_Q, 1)")
        spec, shape = "pl.BlockSpec((1, 1, 1, BLOCK_Q), along(at_query))", "(batch, heads, 1, q_len), Float"
        over = "queries and keys [batch, heads]" if by_head else "keys [batch, heads, q_len]"
        description = f"that of {what} summed over {over}"
        self.gives(i, f"sum{i}", spec, shape, "{}[:, :, 0].sum(-1)" if by_head else "{}[:, :, 0]", description)
        self.finish.append(f"sum{i}_ref[0, 0] = laid(sum{i}[...])")
        self.needs(TEXT["laid"])
        return [f"sum{i}[...] += {added}.sum(axis=1, keepdims=True)"]

    def _distance(self, i: int, added: str) -> list[str]:
        what = self.read(self.gradients[i])
        spec = "pl.BlockSpec((1, 1, lines, 128), lambda b, h, *_: (b, h, 0, 0))"
        shown = "by_difference({}, q_len, kv_len)"
        description = f"that of {what} summed by distance [batch, heads, q_len + kv_len - 1]"
        self.gives(i, f"sum{i}", spec, "(batch, heads, lines, 128), Float", shown, description)
        self.clear.append(f"sum{i}_ref[0, 0] = jnp.zeros(sum{i}_ref.shape[2:], Float)")
        self.needs(TEXT["by_distance"], TEXT["by_difference"])
        return [
            *self.present(added),
            "summed = by_distance(present)",
            "line = k_tile * (BLOCK_K // 128) + (q_tiles - 1 - q_tile) * (BLOCK_Q // 128)",
            "for i in range((BLOCK_Q + BLOCK_K) // 128):",
            f"    sum{i}_ref[0, 0, pl.ds(line + i, 1)] += summed[:, 128 * i : 128 * (i + 1)]",
        ]


class _Terms(_TpuQueryRows):
    """The kernel of the shares of single positions in a gradient."""

    title = "A captured gradient by position"
    entry = "attention_terms"
    zeros = ("zeros",)

    def build(self) -> list[str]:
        self.numbers()
        ((i, g),) = self.gradients.items()
        spec = "pl.BlockSpec((1, 1, BLOCK_Q, BLOCK_K), lambda *at: place(*at))"
        description = f"what positions add to that of {self.read(g)}, in whole tiles [batch, heads, .., ..]"
        self.gives(i, "terms", spec, "zeros.shape, Float", "{}", description)
        self.start.append("terms_ref[0, 0] = jnp.zeros((BLOCK_Q, BLOCK_K), Float)")  # where the row visits nothing
        assignments, added = self.times("ds", g.weight)
        return [*self.tile(), *assignments, *self.present(added), "terms_ref[0, 0] = present"]


class _TpuKeyGradients(_TpuKernel):
    """The kernel of dk, dv, and sums over queries."""

    title = "Gradients by key of attention"
    entry = "attention_dkv"
    down = "k"

    def build(self) -> list[str]:
        turned = pallas_inputs.turned(self.inputs)
        lines = turned if self.group > 1 else []  # the head may be another one
        self.start += [] if self.group > 1 else turned
        for name, width in (("k", "dim"), ("v", "v_dim")):
            if name in self.arrays:
                self.keeps(f"d{name}", f"(BLOCK_K, {width})")
                spec = f"pl.BlockSpec((1, 1, BLOCK_K, {width}), at_key)"
                shape = f"(batch, kv_heads, kv_len, {width}), query.dtype"
                self.gives(name, f"d{name}", spec, shape, self.turned, f"d{name} [batch, kv_len, kv_heads, {width}]")
        lines += self.tile(self._dv() if "v" in self.arrays else [])  # p is done with before dp is computed
        if "k" in self.arrays:
            self.needs(TEXT["finite"])
            assignments, ds = self.times("ds", self.slope)
            queries = "queries = finite(q_ref[0, 0]) if partial else q_ref[0, 0]"
            lines += [*assignments, queries, f"dk[...] += rows_by_columns({ds}, queries)"]
            self.finish.append("dk_ref[0, 0] = (dk[...] * SCALE).astype(dk_ref.dtype)")
        for i, g in self.gradients.items():
            lines += self._sum(i, g)
        return lines

    def _dv(self) -> list[str]:
        self.finish.append("dv_ref[0, 0] = dv[...].astype(dv_ref.dtype)")
        return [
            "douts = dout_ref[0, 0]",  # rows behind the last query may hold NaN, and 0 times NaN is NaN
            "if partial and q_len % BLOCK_Q:",
            "    inside = lax.broadcasted_iota(Int, (BLOCK_Q, 1), 0) < q_len - q_tile * BLOCK_Q",
            "    douts = jnp.where(inside, douts, jnp.zeros_like(douts))",
            f"dv[...] += rows_by_columns({'p' if self.survivor is None else 'p * kept'}, douts)",
        ]

    def _sum(self, i: int, gradient: Gradient) -> list[str]:
        self.keeps(f"sum{i}", "(GROUP, BLOCK_K, 1)")
        spec = "pl.BlockSpec((1, 1, GROUP, BLOCK_K), along(at_key))"
        description = f"that of {self.read(gradient)} summed over queries [batch, heads, kv_len]"
        shown = "{}.reshape(batch, heads, kv_len)"
        self.gives(i, f"sum{i}", spec, "(batch, kv_heads, GROUP, kv_len), Float", shown, description)
        self.finish += ["for i in range(GROUP):", f"    sum{i}_ref[0, 0, i : i + 1] = laid(sum{i}[i])"]
        self.needs(TEXT["laid"])
        assignments, added = self.times(f"d{i}", gradient.weight, f"g{i}_")
        head = self.program.holes["of_group"]
        return [*assignments, f"sum{i}[{head}] += {added}.sum(axis=1, keepdims=True)"]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
