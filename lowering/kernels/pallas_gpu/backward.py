"""Writes the backward kernels for Hopper (Pallas, Mosaic GPU) of a LoopPlan, by the formulas of `lowering.derive`.

`attention_dq` owns a tile of queries and walks tiles of keys, `attention_dkv` owns a tile of keys of one key head and
walks tiles of queries. Both read records, so that they load and multiply visible tiles only. Both compute the
scores again: seven products instead of five, but no two programs add to one sum, and results repeat bit for bit.

A program has two warpgroups that compute, each for half of its tile, and one that reads tiles of the other axis
ahead. Sums stay in registers: dk and dv of 64 keys take (dim + v_dim) / 2 of a thread's. Beyond 256 dims together
they are found by a kernel each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    """Tiles (queries, keys) of attention_dq and attention_dkv. The program's own side is 128, the least of two
    warpgroups, and of the other as much is multiplied at once as registers hold besides the sums."""
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
    """The number of tiles of `walked` positions read ahead with a tile of `owned`."""
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


class GpuOutput(NamedTuple):
    """An output of a kernel: its name, the array it is like, its part without padding, what a tile adds to it, and the
    zeros that its sum starts from."""

    name: str
    like: str
    cut: str
    tile: str
    zeros: str


DQ = GpuOutput("dq", "query", "[:, :q_len, :, :dim]", "ds", "zeros(HALF, DIM)")
DK = GpuOutput("dk", "key", "[:, :kv_len, :, :dim]", "ds", "zeros(HALF, DIM)")
DV = GpuOutput("dv", "value", "[:, :kv_len, :, :v_dim]", "p", "zeros(HALF, DIM_V)")


@dataclass(eq=False)
class GpuGradients(GpuKernel):
    """A kernel that computes the scores of a tile again, and their cotangents."""

    grad_names: frozenset[str]

    title, does, semantics, template = "backward", "differentiates", "Lane", TEXT

    def __post_init__(self) -> None:
        derived = backward_of(self.plan)
        self.careful = derived.guard  # 0 * inf is NaN where nothing is seen
        self.slope = derived.slope if {"q", "k"} & self.grad_names else None
        self.sums = {f"sum{i}": g for i, g in captured(self.plan, self.grad_names)} if self.owned == "q" else {}
        super().__post_init__()
        check_tile(self.target, self.own_block, self.across_block, self.geometry)
        plain = self.plan.score is None and self.plan.keep_mask is None
        # Products with values start at -delta, which so takes no further registers, where nothing is between. Those
        # of scores do not start at -lse: the sum would round them otherwise than the forward's.
        self.starts = self.owned == "k" and plain and self.geometry.scale > 0

    def roots(self) -> Iterable[Expr | None]:
        plan, weights = self.plan, [g.weight for g in self.sums.values()]
        return [plan.mask, plan.score, plan.keep_mask, self.slope, *weights]

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
        survival = f"kept = jnp.where({{}}, 1.0 / (1.0 - {self.plan.rate}), 0.0)"
        lines = {"once": self.e.each(self.plan), "modified": modified}
        lines["hidden"] = self.assigned(self.plan.mask, "x", "p = jnp.where({}, p, 0.0)")
        lines["kept"] = self.assigned(self.plan.keep_mask, "r", survival)
        low, exponent = self.vector("low"), f"{score}, {unit}, {self.vector('lse')}"
        return filled(TEXT["weights"], **lines, exponent=exponent, low=low, across=self.across).splitlines()

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

    def gradients(self, kernel: str, outputs: Sequence[GpuOutput], **holes: Any) -> str:
        """The text of the module of a kernel, a part of the template. `own_loads` and `loads` are the arrays that come
        in for a program and for a step. `vectors` are the shapes of those in shared memory that have a number for each
        query."""
        weight = "p" if self.plan.keep_mask is None else "(p * kept)"
        products = [f"{weight if o.tile == 'p' else o.tile}.astype(query.dtype)" for o in outputs if o.like != "lse"]
        sums = [o for o in outputs if o.like == "lse"]
        holes |= {
            "outputs": [{"like": o.like, "dtype": "Float" if o in sums else "query.dtype"} for o in outputs],
            "refs": ", ".join(f"{o.name}_ref" for o in outputs),
            "found": _tuple([*products, *(o.tile for o in sums)]),
            "names": _tuple([o.tile for o in outputs]),
            "sums": _tuple([o.name.removesuffix("s") for o in outputs]),
            "zeros": _tuple([o.zeros for o in outputs]),
            "returned": _tuple([f"found[{i}]{o.cut}" for i, o in enumerate(outputs)]),
        }
        holes |= {f"d{n}": n in self.grad_names for n in "qkv"}
        holes |= {"weights": self.weights(), "cotangents": self.cotangents()}
        ahead, narrow = stages(self.geometry, self.own_block, self.across_block), [NARROW] * (self.across_block == 32)
        return self.module(kernel, ahead, narrow=narrow, **holes)


class GpuQueryGradients(GpuGradients):
    """The kernel of dq, and of sums of captured gradients over keys."""

    name, detail, axis, length, walk = "attention_dq", ": dq", "head", "kv_len", "GpuWalk.in_order"

    def text(self) -> str:
        outputs, what = ([DQ], ["dq"]) if "q" in self.grad_names else ([], [])
        outputs += [GpuOutput(f"{n}s", "lse", "[..., :q_len]", f"{n}_here", "zeros(HALF)") for n in self.sums]
        what += ["sums of captured gradients over keys"] * bool(self.sums)
        holes = {"own_loads": 2, "loads": 2, "vectors": [{"shape": "(2, HALF)"} for _ in self.sums]}
        holes |= {"what": ", ".join(what), "buffers": "".join(f" {n}s," for n in self.sums)}
        holes |= {"summed": [{"total": n, "buffer": f"{n}s"} for n in self.sums]}
        operands = "query, key, value, dout, lse, low, delta"
        return self.gradients("queries", outputs, operands=operands, **holes)


class GpuKeyGradients(GpuGradients):
    """The kernel of dk and dv. Tiles are [keys, queries]: so neither p nor ds has to be transposed before it is
    multiplied."""

    name, detail, axis, length, walk, owned = "attention_dkv", ": dk and dv", "kv_head", "q_len", "walked", "k"

    def text(self) -> str:
        dk, dv = "k" in self.grad_names, "v" in self.grad_names
        outputs = [DV] * dv + [DK] * dk
        holes = {"own_loads": 1 + dk, "loads": 4 + dk, "vectors": [{"shape": "(STAGES, BLOCK_Q)"}] * (2 + dk)}
        holes |= {"what": " and ".join(o.name for o in outputs), "starts": self.starts}
        holes |= {"v_ref": " v_ref," * dk, "delta_ref": " delta_ref," * dk, "deltas": " deltas," * dk}
        start = ", across(-delta)" * self.starts
        holes |= {
            "operands": f"query, key,{' value,' * dk} dout, lse, low{', delta' * dk}",
            "products": f"scores{', inner' * dk}",
            "pairs": f"(key.at[wg], query.at[slot]){f', (value.at[wg], dout.at[slot]{start})' * dk}",
            "factors": ", ".join(["(p, dout.at[slot])"] * dv + ["(ds, query.at[slot])"] * dk),
        }
        return self.gradients("keys", outputs, **holes)


def _tuple(names: list[str]) -> str:
    return f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"
