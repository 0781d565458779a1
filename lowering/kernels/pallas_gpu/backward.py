"""Writes the backward kernels for Hopper (Pallas, Mosaic GPU) of a LoopPlan, by the formulas of `lowering.derive`.

`attention_dq` owns a tile of queries and walks tiles of keys, `attention_dkv` owns a tile of keys of one key head and
walks tiles of queries. Both read records, so that they load and multiply visible tiles only, and both compute the
scores again: seven products instead of five, but no two programs add to one sum, and results repeat bit for bit.

A program has two warpgroups that compute, each for half of its own tile, and one that reads tiles of the other axis
ahead. Sums stay in registers: dk and dv of 64 keys take (dim + v_dim) / 2 of a thread's, and beyond 256 dims together
they are found by a kernel each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import Expr, lit
from frisket.lowering.derive import backward_of, captured
from frisket.lowering.kernels.features import OVER, PALLAS_GPU, missing
from frisket.lowering.kernels.text import filled
from frisket.lowering.kernels.text import parts as texts
from frisket.lowering.plan import Geometry, LoopPlan, Target

from . import forward as pallas_gpu
from .kernel import BARRIERS, MOST, SHARED, GpuKernel, dims

TEXT = texts(__package__, "backward")
# a factor's positions come in whole swizzles
NARROW = "TILED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))"
GRID = 65_535  # the most programs along the last axis of a GPU's grid


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
            return missing(PALLAS_GPU, needed=[f"gradients by {OVER[gradient.over]}"], source=sources[gradient.source])
    return ""


def emit(
    plan: LoopPlan, target: Target, geometry: Geometry, grad_names: Collection[str], *, interpretable: bool = False
) -> str:
    """The text of one kernel, for the members of "q", tables and slots (`attention_dq`), or of "k" and "v"
    (`attention_dkv`), that are in `grad_names`. `interpretable` text runs in Mosaic GPU's interpreter, which has
    less."""
    # each kernel owns the rows that it sums, so that it needs no atomic sums
    kind = GpuKeyGradients if {"k", "v"} & set(grad_names) else GpuQueryGradients
    return kind(plan, target, geometry, interpretable, frozenset(grad_names)).text()


class GpuGradients(GpuKernel):
    """A kernel that computes the scores of a tile again, and their cotangents."""

    title, does, semantics = "backward", "differentiates", "Lane"
    own_loads: int

    def __init__(
        self, plan: LoopPlan, target: Target, geometry: Geometry, interpretable: bool, grad_names: frozenset[str]
    ) -> None:
        derived = backward_of(plan)
        self.grad_names = grad_names
        self.careful = derived.guard  # 0 * inf is NaN where nothing is seen
        self.slope = derived.slope if {"q", "k"} & grad_names else None
        self.sums = {f"sum{i}": g for i, g in captured(plan, grad_names)} if self.owned == "q" else {}
        weights = [g.weight for g in self.sums.values()]
        super().__init__(
            plan, target, geometry, interpretable, [plan.mask, plan.score, plan.keep_mask, self.slope, *weights]
        )
        check_tile(target, self.own_block, self.across_block, geometry)
        # Products with values start at -delta, which so takes no registers beside them, where nothing is between. Those
        # of scores do not start at -lse: the sum would round them otherwise than the forward's.
        self.starts = self.owned == "k" and plan.score is None and plan.keep_mask is None and geometry.scale > 0

    def vector(self, name: str) -> str:
        """The text of a value per query, over a tile."""
        return f"down({name})" if self.owned == "q" else f"across({name})"

    def weights(self) -> list[str]:
        """The lines of the weights `p`, from the product `s`."""
        # the scale is part of the exponent where no score mod comes between
        score, unit, modified = "s", "SCALE * LOG2E", list[str]()
        if self.plan.score is not None:
            score, unit, modified = "modified", self.unit, self.score("modified")
        elif self.geometry.scale <= 0:  # rounded as the forward does, whose maximum is of scaled scores
            score, unit = "s * SCALE", "LOG2E"
        return filled(
            TEXT["weights"],
            once=self.e.each(self.plan),
            modified=modified,
            exponent=f"{score}, {unit}, {self.vector('lse')}",
            low=self.vector("low"),
            hidden=self.assigned(self.plan.mask, "x", "p = jnp.where({}, p, 0.0)"),
            across=self.across,
            kept=self.assigned(
                self.plan.keep_mask, "r", f"kept = jnp.where({{}}, 1.0 / (1.0 - {self.plan.rate}), 0.0)"
            ),
        ).splitlines()

    def cotangents(self) -> list[str]:
        """The lines of `ds` and sums, from `p` and `dp`."""
        if not (self.sums or {"q", "k"} & self.grad_names):
            return []
        dp = "dp" if self.plan.keep_mask is None else "dp * kept"
        lines = ["dm = p * dp" if self.starts else f"dm = p * ({dp} - {self.vector('delta')})"]
        for name, gradient in self.sums.items():
            assignments, value = self.times(gradient.weight, f"w{name.removeprefix('sum')}_")
            lines += [*assignments, f"{name}_here = ({value}).sum(axis=1)"]
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

    def gradients(
        self,
        kernel: str,
        arrays: dict[str, str],
        scratch: Sequence[str],
        loads: int,
        outputs: Sequence[str],
        vectors: Sequence[str],
        out_types: Sequence[str],
        returned: list[str],
        doc: str,
        **holes: Any,
    ) -> str:
        """The text of the module of a kernel, a part of the template: `arrays` are its operands with the names of their
        references, `scratch` its arrays in shared memory."""
        refs = [*self.operands(), *arrays.values(), *(f"{n}_ref" for n in outputs)]
        refs += [*scratch, "own_ready", "ready", "free", "*", "length"]
        holes |= {f"d{n}": n in self.grad_names for n in "qkv"}
        work = filled(
            TEXT[kernel],
            refs=", ".join(refs),
            once=self.e.once(self.plan),
            weights=self.weights(),
            cotangents=self.cotangents(),
            **holes,
        )
        products = TEXT["products_interpreted" if self.interpretable else "products"]
        ahead = f"tiles(STAGES, {self.across}, {{}}),".format
        return self.module(
            stages(self.geometry, self.own_block, self.across_block),
            "\n\n\n".join(text.strip("\n") for text in (TEXT["loops"], products)),
            work,
            narrow=[NARROW] * (self.across_block == 32),
            arguments=TEXT["arguments"].strip().splitlines(),
            doc=f"{doc}, {TEXT['doc'].strip()}",
            of_rows=TEXT["of_rows"].strip().splitlines(),
            queries="query, dout",
            padded_queries="padded(query, BLOCK_Q), padded(dout, BLOCK_Q)",
            out_types=[f"jax.ShapeDtypeStruct({of})," for of in out_types],
            scratch_types=[
                *("tiles(2, HALF, DIM),", "tiles(2, HALF, DIM_V),", ahead("DIM"), ahead("DIM_V")),
                *(f"plgpu.SMEM({shape}, Float)," for shape in vectors),
                *(f"signals(2, {self.own_loads}),", f"signals(STAGES, {loads}),", "signals(STAGES, 2),"),
            ],
            operands=", ".join([*self.operands(), *arrays]),
            returned=_tuple(returned),
        )


class GpuQueryGradients(GpuGradients):
    """The kernel of dq, and of sums of captured gradients over keys."""

    name, detail, axis, length, walk, own_loads = "attention_dq", ": dq", "head", "kv_len", "GpuWalk.in_order", 2

    def text(self) -> str:
        dq, buffers = "q" in self.grad_names, [f"{n}s" for n in self.sums]
        parts = [f"{n}_here" for n in self.sums]
        arrays = {"query": "q_ref", "key": "k_ref", "value": "v_ref"}
        return self.gradients(
            "queries",
            arrays | {n: f"{n}_ref" for n in ("dout", "lse", "low", "delta")},
            scratch=["query", "dout", "key", "value", *buffers],
            loads=2,
            outputs=["dq"] * dq + buffers,
            vectors=["(2, HALF)"] * len(buffers),
            out_types=["query.shape, query.dtype"] * dq + ["lse.shape, Float"] * len(buffers),
            returned=["found[0][:, :q_len, :, :dim]"] * dq
            + [f"found[{i}][..., :q_len]" for i in range(dq, dq + len(buffers))],
            doc=", ".join(["dq"] * dq + ["sums of captured gradients over keys"] * bool(buffers)),
            found=_tuple(["ds.astype(query.dtype)"] * dq + parts),
            names=_tuple(["ds"] * dq + parts),
            sums=_tuple(["dq"] * dq + [*self.sums]),
            summed=[{"total": n, "buffer": f"{n}s"} for n in self.sums],
            zeros=_tuple(["zeros(HALF, DIM)"] * dq + ["zeros(HALF)"] * len(buffers)),
        )


class GpuKeyGradients(GpuGradients):
    """The kernel of dk and dv. Tiles are [keys, queries]: so neither p nor ds has to be transposed before it is
    multiplied."""

    name, detail, axis, length, walk, owned = "attention_dkv", ": dk and dv", "kv_head", "q_len", "walked", "k"

    def text(self) -> str:
        dk, dv = "k" in self.grad_names, "v" in self.grad_names
        self.own_loads = 1 + dk
        weight = "p" if self.plan.keep_mask is None else "(p * kept)"
        arrays = {"query": "q_ref", "key": "k_ref"} | ({"value": "v_ref"} if dk else {})
        arrays |= {n: f"{n}_ref" for n in ("dout", "lse", "low", *["delta"] * dk)}
        start = ", across(-delta)" * self.starts
        pairs = ["(key.at[wg], query.at[slot])", *[f"(value.at[wg], dout.at[slot]{start})"] * dk]
        dims = ["v_dim"] * dv + ["dim"] * dk
        return self.gradients(
            "keys", arrays, ["key", "value", "query", "dout", "lses", "lows", *["deltas"] * dk], loads=4 + dk,
            outputs=["dv"] * dv + ["dk"] * dk, vectors=["(STAGES, BLOCK_Q)"] * (2 + dk),
            out_types=["value.shape, query.dtype"] * dv + ["key.shape, query.dtype"] * dk,
            returned=[f"found[{i}][:, :kv_len, :, :{n}]" for i, n in enumerate(dims)],
            doc=" and ".join(["dv"] * dv + ["dk"] * dk), products=", ".join(["scores"] + ["inner"] * dk),
            pairs=", ".join(pairs), starts=self.starts,
            found=_tuple([f"{weight}.astype(query.dtype)"] * dv + ["ds.astype(query.dtype)"] * dk),
            names=_tuple(["p"] * dv + ["ds"] * dk), sums=_tuple(["dv"] * dv + ["dk"] * dk),
            factors=", ".join(["(p, dout.at[slot])"] * dv + ["(ds, query.at[slot])"] * dk),
            zeros=_tuple(["zeros(HALF, DIM_V)"] * dv + ["zeros(HALF, DIM)"] * dk),
        )  # fmt: skip


def _tuple(names: list[str]) -> str:
    return f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"
