"""Writes the backward kernels for Hopper (Pallas, Mosaic GPU) of a LoopPlan, by the formulas of `lowering.derive`.

`attention_dq` owns a tile of queries and walks tiles of keys, `attention_dkv` owns a tile of keys of one key head and
walks tiles of queries. Both read records, so that they load and multiply visible tiles only, and both compute the
scores again: seven products instead of five, but no two programs add to one sum, and results repeat bit for bit.

A program has two warpgroups that compute, each for half of its own tile, and one that reads tiles of the other axis
ahead. Sums stay in registers: dk and dv of 64 keys take (dim + v_dim) / 2 of a thread's, and beyond 256 dims together
they are found by a kernel each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import Expr, lit, walk
from frisket.lowering.derive import backward_of
from frisket.lowering.kernels.pallas_tpu import inputs as pallas_inputs
from frisket.lowering.kernels.text import fields, filled
from frisket.lowering.kernels.text import parts as texts
from frisket.lowering.kernels.triton.backward import sums
from frisket.lowering.plan import Geometry, LoopPlan, Target

from . import forward as pallas_gpu
from .expr import Expressions
from .forward import BARRIERS, INEXACT, MOST, SHARED, dims

TEXT = texts(__package__, "backward")
# a factor's positions come in whole swizzles
NARROW = "TILED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))"
GRID = 65_535  # the most programs along the last axis of a GPU's grid
PER = {"column": "key", "diagonal": "distance of query and key", "scatter": "place that query and key choose together"}


def tiles(geometry: Geometry) -> tuple[tuple[int, int], tuple[int, int]]:
    """Tiles (queries, keys) of attention_dq and attention_dkv: the program's own side is 128, the least of two
    warpgroups, and of the other as much is multiplied at once as registers hold beside the sums."""
    walked = 64 if dims(geometry.head_dim) + dims(geometry.v_dim) <= 256 else 32
    return (128, walked), (walked, 128)


def check_tile(target: Target, owned: int, walked: int, geometry: Geometry) -> None:
    """Raise where a backward kernel for Hopper does not support a tile."""
    if owned not in (128, 256) or walked not in (32, 64, 128):
        raise LoweringError(
            f"of {target.block_q} x {target.block_k}, a program of the backward for Hopper owns 128 or 256 positions "
            "and walks 32, 64 or 128; pass tile=(128, 64)"
        )
    if stages(geometry, owned, walked) < 2:
        raise LoweringError(
            f"a tile of {target.block_q} x {target.block_k} with head dims of {dims(geometry.head_dim)} leaves no "
            "shared memory of a Hopper to read ahead; pass a smaller tile"
        )


def stages(geometry: Geometry, owned: int, walked: int) -> int:
    """The number of tiles of `walked` positions read ahead beside a tile of `owned`."""
    wide = 2 * (dims(geometry.head_dim) + dims(geometry.v_dim))
    return min(MOST, (SHARED - BARRIERS - owned * (wide + 16)) // (walked * (wide + 12)))


def parts(geometry: Geometry, grad_names: Collection[str]) -> list[frozenset[str]]:
    """The outputs of each kernel: dk and dv in one, or apart where registers do not hold both."""
    both = frozenset(grad_names) & {"k", "v"}
    if len(both) == 2 and dims(geometry.head_dim) + dims(geometry.v_dim) > 256:
        return [frozenset("k"), frozenset("v")]
    return [both] if both else []


def refused(
    plan: LoopPlan, geometry: Geometry, dtype: str, shapes: Mapping[str, tuple[int, ...]], grad_names: Collection[str]
) -> str:
    """The reason why no kernels for Hopper compute the gradients of `grad_names`, or nothing. `shapes` are the shapes
    of the plan's tables."""
    if why := pallas_gpu.refused(plan, geometry, dtype, shapes):
        return why
    if geometry.batch > GRID:
        return f"the backward for Hopper has at most {GRID} batch entries, not {geometry.batch}; give it parts of them"
    for gradient in backward_of(plan).gradients:
        if gradient.source in grad_names and gradient.over not in ("head", "row"):
            sources = {t.name: t.source for t in plan.tables} | {s.name: str(s.source) for s in plan.slots}
            values = sources[gradient.source]
            return (
                f"kernels for Hopper sum captured gradients per head and per query; that of `{values}` is one per "
                f'{PER[gradient.over]}; use backend="triton"'
            )
    return ""


def emit(
    plan: LoopPlan, target: Target, geometry: Geometry, grad_names: Collection[str], *, interpretable: bool = False
) -> str:
    """The text of one kernel, for the members of "q", tables and slots (`attention_dq`), or of "k" and "v"
    (`attention_dkv`), that are in `grad_names`. `interpretable` text runs in Mosaic GPU's interpreter, which has
    less."""
    # each kernel owns the rows that it sums, so that it needs no atomic sums
    kind = _GpuKeyGradients if {"k", "v"} & set(grad_names) else _GpuQueryGradients
    return kind(plan, target, geometry, frozenset(grad_names), interpretable).text()


class _GpuKernel:
    """The common base of both backward kernels. The program's own tile lies down, the other axis across."""

    owned: Literal["q", "k"]
    what: str
    name: str
    head: str  # the axis of the grid
    length: str  # of the axis across

    def __init__(
        self, plan: LoopPlan, target: Target, geometry: Geometry, grad_names: frozenset[str], interpretable: bool
    ) -> None:
        derived = backward_of(plan)
        self.plan, self.target, self.geometry, self.grad_names = plan, target, geometry, grad_names
        self.interpretable = interpretable
        self.careful = derived.guard  # 0 * inf is NaN where nothing is seen
        self.slope = derived.slope if {"q", "k"} & grad_names else None
        self.sums = sums(plan, grad_names) if self.owned == "q" else []
        roots = [plan.mask, plan.score, plan.keep_mask, self.slope, *(s.gradient.weight for s in self.sums)]
        used = [e for e in roots if e is not None]
        self.exact = any(n.op in INEXACT for e in used for n in walk(e))  # the machine's own are too rough
        self.e = Expressions(used, down=self.owned, tanh="exact" if self.exact else target.tanh)
        self.inner = bool({"q", "k"} & grad_names) or bool(self.sums)
        # Products with values start at -delta, which so takes no registers beside them, where nothing is between. Those
        # of scores do not start at -lse: the sum would round them otherwise than the forward's.
        self.starts = self.owned == "k" and plan.score is None and plan.keep_mask is None and geometry.scale > 0

    # -- scores ---------------------------------------------------------------------------------------

    def vector(self, name: str) -> str:
        """The text of a value per query, over a tile."""
        return f"down({name})" if self.owned == "q" else f"across({name})"

    def weights(self) -> list[str]:
        """The lines of the weights `p`, from the product `s`."""
        lines = self.e.each(self.plan)
        # the scale is part of the exponent where no score mod comes between
        score, unit = "s", "SCALE * LOG2E"
        if self.plan.score is not None:
            assignments, value = self.e.written(self.plan.score, "y")
            lines += ["s = s * SCALE", *assignments, f"modified = {value}"]
            score, unit = "modified", "LOG2E"
        elif self.geometry.scale <= 0:  # rounded as the forward does, whose maximum is of scaled scores
            score, unit = "s * SCALE", "LOG2E"
        base, low = self.vector("lse"), self.vector("low")
        # low after the difference, which is small: in lse it would be rounded away
        lines.append(f"p = jnp.exp2(exponent({score}, {unit}, {base}) - {low})")
        hidden = []
        if self.plan.mask is not None:
            assignments, value = self.e.written(self.plan.mask, "x")
            hidden = [*assignments, f"p = jnp.where({value}, p, 0.0)"]
        # the axis across, whose last tile may be cut; of the own rows those outside are not stored
        block = "BLOCK_K" if self.owned == "q" else "BLOCK_Q"
        lines += ["if border:", *(f"    {line}" for line in hidden)]
        lines += [f"    if length % {block}:"]
        lines += [f"        p = jnp.where(across(tile * {block} + steps_along(1) < length), p, 0.0)"]
        if self.plan.keep_mask is not None:
            assignments, value = self.e.written(self.plan.keep_mask, "r")
            lines += [*assignments, f"kept = jnp.where({value}, 1.0 / (1.0 - {self.plan.rate}), 0.0)"]
        return lines

    def cotangents(self) -> list[str]:
        """The lines of `ds` and sums, from `p` and `dp`."""
        if not self.inner:
            return []
        dp = "dp" if self.plan.keep_mask is None else "dp * kept"
        lines = ["dm = p * dp" if self.starts else f"dm = p * ({dp} - {self.vector('delta')})"]
        for i, s in enumerate(self.sums):
            assignments, value = self.times(s.gradient.weight, f"w{i}_")
            lines += [*assignments, f"{s.total}_here = ({value}).sum(axis=1)"]
        if self.slope is not None:
            assignments, value = self.times(self.slope, "z")
            lines += [*assignments, f"ds = {value}"]
        elif {"q", "k"} & self.grad_names:
            lines.append("ds = dm")  # a score mod of slope 1, or none
        return lines

    def times(self, factor: Expr, temporary: str) -> tuple[list[str], str]:
        """The text of `dm` times a factor, 0 where p is 0 if the factor may be infinite or NaN there."""
        if factor is lit(1.0):
            return [], "dm"
        assignments, value = self.e.written(factor, temporary)
        return assignments, f"jnp.where(p == 0.0, 0.0, dm * ({value}))" if self.careful else f"dm * ({value})"

    # -- the module -----------------------------------------------------------------------------------

    def filled(self, skeleton: str, **holes: Any) -> str:
        t, g, plan, e = self.target, self.geometry, self.plan, self.e
        holes |= {"weights": self.weights(), "cotangents": self.cotangents()}
        sides = {"BLOCK_Q": t.block_q, "BLOCK_K": t.block_k}
        owned, across = sides if self.owned == "q" else reversed(sides)
        check_tile(t, sides[owned], sides[across], g)
        shared = pallas_gpu.TEXT
        functions = [shared["shared"], shared["interpreted" if self.interpretable else "on_device"]]
        functions += [shared["pairs"] if self.owned == "q" else TEXT["pairs_turned"]] * bool(e.inputs.pairs)
        if e.inputs.distances:
            across_axis = "k" if self.owned == "q" else "q"
            functions += ["\n\n", filled(shared["distances"], down=self.owned, across=across_axis)]
        narrow = [NARROW] if sides[across] == 32 else []
        head = filled(
            TEXT["head"], what=self.what,
            text=[f"#     {line}" for line in (plan.text or "every key").splitlines()],
            block_q=t.block_q, block_k=t.block_k, own=owned, across=across, dim=dims(g.head_dim), dim_v=dims(g.v_dim),
            group=g.heads // g.kv_heads, stages=stages(g, sides[owned], sides[across]), scale=repr(float(g.scale)),
            narrow=narrow, shared="".join(functions).strip("\n").splitlines(),
        )  # fmt: skip
        products = TEXT["products_interpreted"] if self.interpretable else TEXT["products"]
        before = [*pallas_inputs.before(plan, e.inputs), *e.lined()]
        holes |= {f"d{n}": n in self.grad_names for n in "qkv"} | fields(self, "name head length")
        body = filled(
            skeleton + TEXT["call"], once=e.once(plan), before=before, across=across, fast=str(not self.exact), **holes
        )
        sections = [head, products, "\n".join(e.definitions(plan)), body]
        return "\n\n".join(part.strip("\n") + "\n" for part in sections if part)

    def operands(self) -> list[str]:
        return ["slice_of", "order", "count", "records", *self.e.operands(self.plan)]


class _GpuQueryGradients(_GpuKernel):
    """The kernel of dq, and of sums of captured gradients over keys."""

    owned, what, name, head, length = "q", "dq", "attention_dq", "head", "kv_len"

    def text(self) -> str:
        dq = "q" in self.grad_names
        parts = [f"{s.total}_here" for s in self.sums]
        buffers = [s.buffer for s in self.sums]
        refs = [*self.operands(), "q_ref", "k_ref", "v_ref", "dout_ref", "lse_ref", "low_ref", "delta_ref"]
        outs = ["dq_ref"] * dq + [f"{b}_ref" for b in buffers]
        scratch = ["query", "dout", "key", "value", *buffers, "own_ready", "ready", "free"]
        returned = ["found[0][:, :q_len, :, :dim]"] * dq
        returned += [f"found[{i}][..., :q_len]" for i in range(dq, dq + len(buffers))]
        return self.filled(
            TEXT["queries"],
            refs=", ".join([*refs, *outs, *scratch, "*", "length"]),
            found=_tuple(["ds.astype(query.dtype)"] * dq + parts),
            names=_tuple(["ds"] * dq + parts),
            sums=_tuple(["dq"] * dq + [s.total for s in self.sums]),
            summed=[{"total": s.total, "part": f"{s.total}_here", "buffer": s.buffer} for s in self.sums],
            zeros=_tuple(["zeros(HALF, DIM)"] * dq + ["zeros(HALF)"] * len(buffers)),
            doc=", ".join(["dq"] * dq + ["sums of captured gradients over keys"] * bool(buffers)),
            vectors=[{"shape": "(2, HALF)"}] * len(buffers),
            own_loads=2,
            loads=2,
            operands=", ".join([*self.operands(), "query", "key", "value", "dout", "lse", "low", "delta"]),
            returned=_tuple(returned),
        )


class _GpuKeyGradients(_GpuKernel):
    """The kernel of dk and dv. Tiles are [keys, queries]: so neither p nor ds has to be transposed before it is
    multiplied."""

    owned, what, name, head, length = "k", "dk and dv", "attention_dkv", "kv_head", "q_len"

    def text(self) -> str:
        dk, dv = "k" in self.grad_names, "v" in self.grad_names
        weight = "p" if self.plan.keep_mask is None else "(p * kept)"
        arrays = ["query", "key", *["value"] * dk, "dout", "lse", "low", *["delta"] * dk]
        refs_of = {"query": "q_ref", "key": "k_ref", "value": "v_ref"}
        outs = ["dv_ref"] * dv + ["dk_ref"] * dk
        scratch = ["key", "value", "query", "dout", "lses", "lows", *["deltas"] * dk, "own_ready", "ready", "free"]
        factors = ["(p, dout.at[slot])"] * dv + ["(ds, query.at[slot])"] * dk
        start = ", across(-delta)" * self.starts
        pairs = ["(key.at[wg], query.at[slot])", *[f"(value.at[wg], dout.at[slot]{start})"] * dk]
        dims = ["v_dim"] * dv + ["dim"] * dk
        refs = [*self.operands(), *(refs_of.get(n, f"{n}_ref") for n in arrays), *outs, *scratch, "*", "length"]
        return self.filled(
            TEXT["keys"], refs=", ".join(refs), products=", ".join(["scores"] + ["inner"] * dk), pairs=", ".join(pairs),
            starts=self.starts,
            found=_tuple([f"{weight}.astype(query.dtype)"] * dv + ["ds.astype(query.dtype)"] * dk),
            names=_tuple(["p"] * dv + ["ds"] * dk), sums=_tuple(["dv"] * dv + ["dk"] * dk), summed=[],
            factors=", ".join(factors),
            zeros=_tuple(["zeros(HALF, DIM_V)"] * dv + ["zeros(HALF, DIM)"] * dk),
            doc=" and ".join(["dv"] * dv + ["dk"] * dk), vectors=[{"shape": "(STAGES, BLOCK_Q)"}] * (2 + dk),
            own_loads=1 + dk, loads=4 + dk, operands=", ".join([*self.operands(), *arrays]),
            returned=_tuple([f"found[{i}][:, :kv_len, :, :{n}]" for i, n in enumerate(dims)]),
        )  # fmt: skip


def _tuple(names: list[str]) -> str:
    return f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"
