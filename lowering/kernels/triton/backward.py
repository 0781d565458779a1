"""Writes the Triton backward kernels of a LoopPlan, by the formulas of `lowering.derive`.

`attention_delta` works out two numbers per query; `attention_dq` owns a tile of queries and walks tiles of keys,
`attention_dkv` owns a tile of keys of one key head and walks tiles of queries. Both work the scores out anew: seven
products where five would do, but no entry is added to by two programs, and results repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from frisket.dsl.errors import LoweringError
from frisket.lowering.plan import LoopPlan, Target

from .cotangents import Cotangents, sums
from .parameters import Parameters
from .writer import Dims, Kernel, Writer, launched, masked, module, wrapped

DELTA = Target("triton", 32, 32, 4, 1)  # of attention_delta, which reads whole rows and waits for memory


def emit(plan: LoopPlan, target: Target, dims: Dims, wanted: Collection[str], *, dlse: bool = True) -> str:
    """`emit(plan, target, Dims(128, 128, "bfloat16"), {"q", "k", "v"})`: the module's text, for the gradients of the
    arrays, tables and slots in `wanted` (plan names), with or without a cotangent of lse; the same input gives the
    same text."""
    return module("Attention backward", plan, dims, kernels(plan, target, dims, wanted, dlse=dlse))


def kernels(plan: LoopPlan, target: Target, dims: Dims, wanted: Collection[str], *, dlse: bool = True) -> list[Kernel]:
    """The kernels that these gradients take. Of `target` their text depends on the order of rows and the precision."""
    if dims.kv_dtype:
        raise LoweringError(
            f"gradients need q, k and v of one dtype, not {dims.dtype} and {dims.kv_dtype}; convert k and v before"
        )
    along = {s.along for s in sums(plan, wanted)}
    found = [delta_kernel(plan, dims, dlse)]
    if "q" in wanted or "q" in along:
        found.append(_Queries(plan, target.dq or target, dims, wanted).kernel())
    if {"k", "v"} & set(wanted) or "k" in along:
        found.append(_Keys(plan, target.dkv or target, dims, wanted).kernel())
    return found


def bare(plan: LoopPlan) -> LoopPlan:
    """The plan of `attention_delta`: rows and nothing else."""
    return replace(plan, mask=None, score=None, bounds=None, kept=None, slots=(), tables=())


def delta_kernel(plan: LoopPlan, dims: Dims, dlse: bool) -> Kernel:
    rows = bare(plan)
    writer = Writer(rows, dims, [], [])
    page, line, e = writer.page, writer.page.line, writer.e
    signature = Parameters(rows, frozenset(), False, False).signature(
        "attention_delta",
        [
            "Out, DOut,  # [batch, heads, q_len, dim], any strides",
            f"Lse, Low,{' DLse,' if dlse else ''}  # float32 [batch, heads, q_len], contiguous",
            f"Lse2, Low2, Delta,  # the same: lse and low in units of log2, and rowsum(dout * out){' - dlse' * dlse}",
        ],
        "og", ["heads", "q_len"], scale=False, tile=["BLOCK_Q"],
    )  # fmt: skip
    with page.block(signature):
        line(
            "head, batch = tl.program_id(1), tl.program_id(2)",
            "start = tl.program_id(0) * BLOCK_Q",
            "rows = tl.arange(0, BLOCK_Q)",
            f"{e} = tl.arange(0, {'DIM' if e == 'd' else 'DIM_V'})",
            "present = start + rows < q_len",
        )
        mask = masked("present[:, None]", writer.value_pad(f"{e}[None, :]"))
        for name, pointer, s in (("out", "Out", "o"), ("dout", "DOut", "g")):
            place = ("batch", "head", "start")
            line(f"{pointer} += " + " + ".join(f"{x}.to(tl.int64) * stride_{s}{x[0]}" for x in place))
            load = f"tl.load({pointer} + rows[:, None] * stride_{s}s + {e}[None, :] * stride_{s}d{mask})"
            line(wrapped(f"{name} = {load}.to(tl.float32)"))
        line("delta = tl.sum(out * dout, 1)", "at = (batch * heads + head).to(tl.int64) * q_len + start + rows")
        if dlse:
            line("delta -= tl.load(DLse + at, mask=present, other=0.0)")
        line("lse = tl.load(Lse + at, mask=present, other=0.0)")
        if plan.guard:
            page.comment("A row that sees nothing has no gradient, whatever comes back.")
            line("empty = lse == -INFINITY")
            line("delta, lse = tl.where(empty, 0.0, delta), tl.where(empty, 0.0, lse)")
        line("low = tl.load(Low + at, mask=present, other=0.0)")
        line("tl.store(Delta + at, delta, mask=present)", "tl.store(Lse2 + at, lse * LOG2E, mask=present)")
        line("tl.store(Low2 + at, low * LOG2E, mask=present)")
    launch = (
        f"attention_delta: grid (query tiles, heads, batch), tiles of {DELTA.block_q} queries, "
        f"num_warps={DELTA.num_warps}."
    )
    return Kernel("attention_delta", str(page), launch)


class _Queries(Cotangents):
    """dq, and sums of captured gradients over keys."""

    def __init__(self, plan: LoopPlan, target: Target, dims: Dims, wanted: Collection[str]) -> None:
        self.dq = "q" in wanted
        summed = [s for s in sums(plan, wanted) if s.along == "q"]
        super().__init__(plan, target, dims, summed, slope=self.dq)

    def kernel(self) -> Kernel:
        line = self.page.line
        signature = self.parameters.signature(
            "attention_dq",
            [
                "Q, K, V, DOut,  # [batch, heads, length, dim], any strides",
                "Lse, Low, Delta,  # float32 [batch, heads, q_len], contiguous: of attention_delta",
                *[f"DQ,  # {self.shape('heads', 'q_len')}, contiguous"] * self.dq,
                *self.pointers(),
            ],
            "qkvg", ["heads", "q_len", "kv_len"],
        )  # fmt: skip
        with self.page.block(signature):
            self._place()
            self.page.blank()
            self.scalars()
            self.hoist()
            self.factors()
            if self.dq:
                line("dq = tl.zeros([BLOCK_Q, DIM], tl.float32)")
            self.zeros()
            with self.records():
                self.tiles()
            self.page.blank()
            if self.dq:
                if self.dims.by_length:
                    line("DQ += ((tl.cast(batch, tl.int64) * q_len + start) * heads + head) * HEAD_DIM")
                    line("out_at = rows[:, None] * (heads * HEAD_DIM) + d[None, :]")
                else:
                    line("DQ += at_q * HEAD_DIM", "out_at = rows[:, None] * HEAD_DIM + d[None, :]")
                line(f"tl.store(DQ + out_at, (dq * scale).to(query.dtype){self.tile_mask('q', 'present', other='')})")
            self.store_sums("at_q + rows", "present")
        return launched("attention_dq", self.page, "(query tiles, heads, batch)", self.target)

    def _place(self) -> None:
        line = self.page.line
        self.own_row()
        line("start = row * BLOCK_Q")
        self.axes()
        kv = "head"
        if self.dims.group > 1:
            line("kv_head = head // GROUP")
            kv = "kv_head"
        self.page.blank()
        self.page.comment("Offsets are 64 bits where they are scalars, 32 within a tile.")
        line(f"Q += {self.offset('q', 'batch', 'head', 'start')}")
        line(f"K += {self.offset('k', 'batch', kv)}", f"V += {self.offset('v', 'batch', kv)}")
        line(f"DOut += {self.offset('g', 'batch', 'head', 'start')}")
        line("at_q = place.to(tl.int64) * q_len + start")
        line(f"key_at = {self.within('k', 'columns')}", f"value_at = {self.within('v', 'columns')}")
        line("present = start + rows < q_len")
        for name, pointer, s in (("query", "Q", "q"), ("dout", "DOut", "g")):
            line(wrapped(f"{name} = tl.load({pointer} + {self.within(s, 'rows')}{self.tile_mask(s, 'present')})"))
        for name in ("lse", "low", "delta"):
            line(f"{name} = tl.load({name.title()} + at_q + rows, mask=present, other=0.0)[:, None]")

    def products(self, inside: str) -> None:
        line = self.page.line
        line("at = tl.cast(tile * BLOCK_K, tl.int64)")
        line(f"keys = tl.load(K + at * stride_ks + key_at{self.tile_mask('k', inside)})")
        line(f"values = tl.load(V + at * stride_vs + value_at{self.tile_mask('v', inside)})")
        self.dot("score", "query", "keys")
        self.dot("dp", "dout", "values")

    def accumulate(self) -> None:
        if self.dq:
            self.page.line(f"dq = tl.dot({self.ds}.to(keys.dtype), keys, dq{self.precision})")


class _Keys(Cotangents):
    """dk, dv, and sums of captured gradients over queries. Tensors are [keys, queries]: so neither p nor ds has to be
    transposed before it is multiplied."""

    def __init__(self, plan: LoopPlan, target: Target, dims: Dims, wanted: Collection[str]) -> None:
        self.dk, self.dv = "k" in wanted, "v" in wanted
        summed = [s for s in sums(plan, wanted) if s.along == "k"]
        super().__init__(plan, target, dims, summed, slope=self.dk, swapped=True)

    def kernel(self) -> Kernel:
        line = self.page.line
        arrays = ["Q, K, V, DOut" if self.inner else "Q, K, DOut"]
        results = ", ".join(n for n, use in (("DK", self.dk), ("DV", self.dv)) if use)
        signature = self.parameters.signature(
            "attention_dkv",
            [
                *(f"{a},  # [batch, heads, length, dim], any strides" for a in arrays),
                f"Lse, Low{', Delta' * self.inner},  # float32 [batch, heads, q_len], contiguous: of attention_delta",
                *[f"{results},  # {self.shape('key heads', 'kv_len')}, contiguous"] * bool(results),
                *self.pointers(),
            ],
            "qkvg" if self.inner else "qkg", ["heads", "q_len", "kv_len"], rows="query",
        )  # fmt: skip
        with self.page.block(signature):
            self._place()
            self.page.blank()
            self.convert(self.parameters.origins(), self.parameters.sizes())
            if "b" in self.used:
                line(f"b = {self.widened('b_origin + batch')}")
            self.factors()
            if self.dk:
                line("dk = tl.zeros([BLOCK_K, DIM], tl.float32)")
            if self.dv:
                line(f"dv = tl.zeros([BLOCK_K, {'DIM' if self.e == 'd' else 'DIM_V'}], tl.float32)")
            with self._heads():
                with self.records():
                    self.tiles()
                if self.sums:
                    self.page.blank()
                    line("at_k = tl.cast(place, tl.int64) * kv_len + start")
                    self.store_sums("at_k + columns", "present")
            self._store()
        return launched("attention_dkv", self.page, "(key tiles, key heads, batch)", self.target, swapped=True)

    def _place(self) -> None:
        line = self.page.line
        if self.dims.group == 1:
            self.own_row()
        else:
            line("kv_head, batch = tl.program_id(1), tl.program_id(2)")
            row = "tl.program_id(0)"
            if self.tabled and self.ordered:
                line("first = tl.load(SliceOf + batch * heads + kv_head * GROUP) * tl.num_programs(0)")
                row = "tl.load(Order + first + tl.program_id(0))  # longest first, by the first head of the group"
            line(f"row = {row}")
        line("start = row * BLOCK_K")
        self.axes()
        self.page.blank()
        self.page.comment("Offsets are 64 bits where they are scalars, 32 within a tile.")
        line(f"Q += {self.offset('q', 'batch')}", f"DOut += {self.offset('g', 'batch')}")
        line(f"K += {self.offset('k', 'batch', self._kv_head, 'start')}")
        if self.inner:
            line(f"V += {self.offset('v', 'batch', self._kv_head, 'start')}")
        line("present = start + columns < kv_len")
        for name, pointer, s in (("keys", "K", "k"), ("values", "V", "v")):
            if s == "k" or self.inner:
                load = f"tl.load({pointer} + {self.within(s, 'columns')}{self.tile_mask(s, 'present')})"
                line(wrapped(f"{name} = {load}"))

    @property
    def _kv_head(self) -> str:
        return "head" if self.dims.group == 1 else "kv_head"

    @contextmanager
    def _heads(self) -> Iterator[None]:
        """The loop over the query heads of the key head, where they are several."""
        if self.dims.group == 1:
            self._head()
            yield
            return
        self.page.blank()
        with self.page.block("for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):"):
            self.page.line("place = batch * heads + head")
            if self.tabled:
                self.page.line("entry = tl.load(SliceOf + place) * tl.num_programs(0) + row")
            self._head()
            yield

    def _head(self) -> None:
        line = self.page.line
        line("queries = Q + tl.cast(head, tl.int64) * stride_qh", "douts = DOut + tl.cast(head, tl.int64) * stride_gh")
        line("at_q = tl.cast(place, tl.int64) * q_len")
        if "h" in self.used:
            self.head_coordinate()
        self.hoist()
        self.zeros()

    def products(self, inside: str) -> None:
        line = self.page.line
        line("at = tl.cast(tile * BLOCK_Q, tl.int64)")
        line(wrapped(f"query = tl.load({self._rows_of('queries', 'q')}{self.tile_mask('q', inside)})"))
        self.dot("score", "keys", "query")
        if self.dv or self.inner:
            line(wrapped(f"dout = tl.load({self._rows_of('douts', 'g')}{self.tile_mask('g', inside)})"))
        if self.inner:
            if self.kept is None:
                self._load("delta", inside)
            self.dot("dp", "values", "dout", "" if self.kept is not None else "-delta")

    def _rows_of(self, pointer: str, letter: str) -> str:
        return f"{pointer} + (at + rows)[:, None] * stride_{letter}s + {self.along(letter)}[None, :] * stride_{letter}d"

    def per_query(self, name: str, visible: str) -> None:
        self._load(name, visible and "inside")

    def _load(self, name: str, inside: str) -> None:
        mask = f", mask={inside}, other=0.0" if inside else ""
        self.page.line(f"{name} = tl.load({name.capitalize()} + at_q + at + rows{mask})[None, :]")

    def accumulate(self) -> None:
        line = self.page.line
        if self.dk:
            line(f"dk = tl.dot({self.ds}.to(query.dtype), query, dk{self.precision})")
        if self.dv:
            p = "p" if self.kept is None else "(p * kept)"
            line(f"dv = tl.dot({p}.to(dout.dtype), dout, dv{self.precision})")

    def _store(self) -> None:
        if not (self.dk or self.dv):
            return
        line = self.page.line
        self.page.blank()
        step = ""
        if self.dims.by_length:
            step = "tl.num_programs(1) * "
            line(f"own = (tl.cast(batch, tl.int64) * kv_len + start) * tl.num_programs(1) + {self._kv_head}")
        else:
            line(f"own = (batch * tl.num_programs(1) + {self._kv_head}).to(tl.int64) * kv_len + start")
        for use, name, value, dim, s in (
            (self.dk, "DK", "(dk * scale)", "HEAD_DIM", "k"), (self.dv, "DV", "dv", self.v, "v"),
        ):  # fmt: skip
            if use:
                rows = f"columns[:, None] * ({step}{dim})" if step else f"columns[:, None] * {dim}"
                line(f"{name} += own * {dim}", f"out_at = {rows} + {self.along(s)}[None, :]")
                line(f"tl.store({name} + out_at, {value}.to(keys.dtype){self.tile_mask(s, 'present', other='')})")
