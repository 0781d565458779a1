"""Attention: what users hold and call."""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from frisket.dsl.errors import LoweringError, ParameterError, ShapeError
from frisket.lowering import dense
from frisket.lowering.aten_expr import distance_only
from frisket.lowering.plan import Geometry, LoopPlan, Origin, Sizes, Target
from frisket.lowering.stages import Pair, Stages

from .backends import PRINTED, check_name, choose, target_of
from .bind import Subject, Work, check_tile, subject, work
from .flat_plan import FlatPlan, FlatWork, divided, flat_plan
from .frameworks import NATURAL, Arrays, arrays, framework_of, from_numpy, to_numpy, turn
from .mask import MaskLike, Program, ScoreLike
from .parameters import traced
from .report import Report, compared
from .settings import Settings

NOWHERE: Origin = (0, 0, 0, 0)


@dataclass(frozen=True)
class Options:
    """What `compile` fixes besides the mask and the score mod."""

    scale: float | None = None
    enable_gqa: bool = True
    backend: str | None = None
    tile: tuple[int, int] | None = None


class Plan:
    """Tables and layout of a mask for given lengths, built once: `att.plan(4096, 4096, 1, 8, doc=doc)`.

    Pass it to every layer: `att(q, k, v, plan=plan)`.
    """

    def __init__(
        self, what: Subject, q_len: int, kv_len: int, batch: int, heads: int, origin: Origin, sizes: Sizes | None
    ) -> None:
        self.subject, self.q_len, self.kv_len = what, q_len, kv_len
        self.batch, self.heads, self.origin, self.sizes = batch, heads, origin, sizes
        self._works: dict[tuple[Any, ...], Work] = {}
        self.shown: set[Target] = set()  # what FRISKET_SHOW has printed
        self.narrow = self._narrow()

    def work(self, block: tuple[int, int], proofs: bool = False) -> Work:
        """The compilation for tiles of `block`."""
        if (block, proofs) not in self._works:
            self._works[block, proofs] = work(
                self.subject, self.q_len, self.kv_len, self.batch, self.heads, block, self.origin, self.sizes,
                proofs=proofs,
            )  # fmt: skip
        return self._works[block, proofs]

    def _narrow(self) -> bool:
        """Whether rows see one short run of keys that slides along."""
        made = self.work((128, 128))
        if made.plan.mask is None or not distance_only(made.plan.mask):
            return False
        bounds = made.spans.bounds
        return int((bounds[..., 3] - bounds[..., 0]).sum(-1).max()) <= 4

    def __repr__(self) -> str:
        return f"Plan({self.subject}, {self.q_len} x {self.kv_len}, batch {self.batch}, {self.heads} heads)"


AnyPlan: TypeAlias = "Plan | FlatPlan"


class Attention:
    """Attention under a mask and a score mod; made by `frisket.compile`.

    >>> import frisket as fk
    >>> att = fk.compile("causal & window(256)")
    >>> att
    Attention(mask = q >= k & abs(q - k) < 256)

    Call it on torch tensors `[batch, heads, length, head_dim]` or JAX arrays `[batch, length, heads, head_dim]`.
    """

    def __init__(self, what: Subject, options: Options = Options()) -> None:
        self.subject, self.options = what, options
        self._plans: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()

    @property
    def mask(self) -> Any:
        return self.subject.mask

    @property
    def score(self) -> Any:
        return self.subject.score

    def __repr__(self) -> str:
        return f"Attention({'; '.join(str(self.subject).splitlines()) or 'everything visible'})"

    # -- running ----------------------------------------------------------------------------------

    def __call__(
        self, q: Any, k: Any, v: Any, *, plan: AnyPlan | None = None, return_lse: bool = False,
        origin: Origin | None = None, sizes: Sizes | None = None, layout: str | None = None, **params: Any,
    ) -> Any:  # fmt: skip
        """`att(q, k, v)`, or `(out, lse)` with return_lse; lse is `[batch, heads, q_len]`, natural log.

        `origin` is (b, h, q, k), where the arrays begin in the whole problem, of lengths `sizes`; `params` are
        scalars and tables without a value yet, or to be replaced for this call.
        """
        given = arrays(q, k, v, layout)
        out, lse = self._run(given, plan, origin, sizes, params)
        if Settings.read().check:
            if traced(out):
                self._report_later(given, out, lse, plan, origin, sizes, params)
            else:
                self._report(given, out, lse, plan, origin, sizes, params).require()
        return (out, lse) if return_lse else out

    def _run(
        self, given: Arrays, plan: AnyPlan | None, origin: Origin | None, sizes: Sizes | None, params: dict[str, Any]
    ) -> tuple[Any, Any]:
        geometry = self._geometry(given, plan, origin, sizes)
        if plan is not None and params:
            raise ParameterError(f"the plan holds the values of all parameters; give `{next(iter(params))}` to `plan`")
        if plan is not None:
            made_for = plan.key.what if isinstance(plan, FlatPlan) else plan.subject
            if made_for.exprs != self.subject.exprs:
                raise ParameterError(
                    "the plan is for another mask or score mod:\n  "
                    + (str(made_for).replace("\n", "\n  ") or "everything visible")
                    + "\n  make it with this attention's own `plan`"
                )
        backend = choose(self.options.backend, given.framework, given.device)
        if given.framework == "torch":
            from . import torch_op

            torch_op.refuse_learned({**self.subject.captured, **params})
        plan = plan or self._plan_for(geometry, params)
        if backend == "dense":
            return self._dense(given, geometry, plan.subject)
        target = target_of(backend, geometry, given.dtype, self.options.tile, plan.narrow)
        made = plan.work((target.block_q, target.block_k), proofs=backend in PRINTED)
        if (wanted := Settings.read().show) and target not in plan.shown:
            plan.shown.add(target)
            if isinstance(made, FlatWork):
                assert isinstance(plan, FlatPlan)
                stages = plan.stages(made, target, self._text(made.plan, target, geometry, given.dtype))
            else:
                stages = self._stages(made, target, geometry, given.dtype)
            print("\n\n".join(stages.text(n) for n in wanted), file=sys.stderr)
        natural = NATURAL[given.framework]
        q, k, v = given.turned(natural)
        if given.framework == "torch":
            out, lse = torch_op.forward(made, geometry, q, k, v, target)
        else:
            from . import jax_op

            out, lse, _ = jax_op.forward(
                made.plan, made.spans, geometry, q, k, v, made.slots, made.tables, target, backend
            )
        return turn(out, natural, given.layout), lse

    def _geometry(self, given: Arrays, plan: AnyPlan | None, origin: Origin | None, sizes: Sizes | None) -> Geometry:
        if plan is not None:
            if not isinstance(plan, Plan | FlatPlan):
                raise ParameterError(f"plan is {plan!r}; `plan` of an attention makes one")
            if origin is not None or sizes is not None:
                raise ParameterError("the plan has its origin and sizes already; give them to `plan`")
            origin, sizes = plan.origin, plan.sizes
        g = given.geometry(self.options.scale, self.options.enable_gqa, origin, sizes)
        if plan is not None:
            have = (g.batch, g.heads, g.q_len, g.kv_len)
            made_for = (plan.batch, plan.heads, plan.q_len, plan.kv_len)
            if have != made_for:
                raise ShapeError(
                    f"the plan is for (batch, heads, q_len, kv_len) = {made_for}, the arrays have {have}; make a plan "
                    "for these lengths"
                )
        return g

    def _plan_for(self, g: Geometry, params: dict[str, Any]) -> AnyPlan:
        host, given = divided(params, None)
        if given:
            return flat_plan(
                self.subject, host, given, g.q_len, g.kv_len, g.batch, g.heads, g.origin, g.sizes, None,
                Settings.read().check,
            )  # fmt: skip
        if any(isinstance(x, np.ndarray) for x in g.origin) or params:
            return Plan(self.subject.bind(params), g.q_len, g.kv_len, g.batch, g.heads, g.origin, g.sizes)
        key = (g.q_len, g.kv_len, g.batch, g.heads, g.origin, g.sizes)
        if key not in self._plans:
            self._plans[key] = Plan(self.subject, g.q_len, g.kv_len, g.batch, g.heads, g.origin, g.sizes)
            while len(self._plans) > 32:
                self._plans.popitem(last=False)
        return self._plans[key]

    def plan(
        self, q_len: int, kv_len: int, batch: int = 1, heads: int = 1, *, origin: Origin = NOWHERE,
        sizes: Sizes | None = None, flat: bool | None = None, **params: Any,
    ) -> AnyPlan:  # fmt: skip
        """Tables and layout built once, for any number of calls with these lengths.

        Tables that are traced (under `jax.jit`) or live on an accelerator (torch) are planned where they are, with
        fixed shapes and no copy; `flat=True` asks for that for any table of a framework, `flat=False` copies.
        """
        host, given = divided(params, flat)
        if given:
            block = self._flat_block(given)
            return flat_plan(
                self.subject, host, given, q_len, kv_len, batch, heads, origin, sizes, block, Settings.read().check
            )
        return Plan(self.subject.bind(params), q_len, kv_len, batch, heads, origin, sizes)

    def _flat_block(self, given: dict[str, Any]) -> tuple[int, int]:
        """The tiles a call is likely to have; another size is planned when it is met."""
        x = next(iter(given.values()))
        if framework_of(x) == "jax":
            from .jax_op import TILES

            return self.options.tile or TILES["xla"]
        return self.options.tile or ((128, 32) if x.device.type == "cpu" else (128, 128))

    def _dense(self, given: Arrays, g: Geometry, what: Subject) -> tuple[Any, Any]:
        """The float64 interpreter on the arrays of a framework."""
        out, lse = _oracle(given, g, what)
        out = from_numpy(turn(out, "bhsd", given.layout), given.q)
        return out, from_numpy(lse, given.q, "float64" if given.dtype == "float64" else "float32")

    # -- looking ----------------------------------------------------------------------------------

    def source(self, backend: str, *shape: Any, **sizes: Any) -> str:
        """The kernel's text: `att.source("triton", q_len=4096, kv_len=4096, heads=8, head_dim=64)`.

        Takes q, k and v instead of sizes too. `dtype` is "float32" unless given.
        """
        if backend not in PRINTED:
            check_name(backend)
            raise LoweringError(
                f"backend {backend!r} runs library calls and has no kernel text; there is text for {', '.join(PRINTED)}"
            )
        return self.stages(*shape, backend=backend, **sizes).source

    def stages(
        self, q: Any = None, k: Any = None, v: Any = None, *, q_len: int = 4096, kv_len: int | None = None,
        batch: int = 1, heads: int = 1, kv_heads: int | None = None, head_dim: int = 64, v_dim: int | None = None,
        dtype: str = "float32", backend: str | None = None, origin: Origin = NOWHERE, sizes: Sizes | None = None,
        layout: str | None = None, **params: Any,
    ) -> Stages:  # fmt: skip
        """What becomes of the mask and score mod on the way to a kernel, a printable field per stage."""
        what = self.subject.bind(params)
        if q is not None:
            given = arrays(q, k, v, layout)
            g = given.geometry(self.options.scale, self.options.enable_gqa, origin, sizes)
            name = backend or choose(self.options.backend, given.framework, given.device)
            dtype = given.dtype
        else:
            kv_len = q_len if kv_len is None else kv_len
            factor = self.options.scale or head_dim**-0.5
            g = Geometry(
                batch, heads, kv_heads or heads, q_len, kv_len, head_dim, v_dim or head_dim, factor, origin, sizes
            )
            name = backend or self.options.backend or Settings.read().backend or "aten"
        check_name(name)
        name = "aten" if name == "library" else name
        plan = Plan(what, g.q_len, g.kv_len, g.batch, g.heads, g.origin, g.sizes)
        target = target_of(name, g, dtype, self.options.tile, plan.narrow)
        made = plan.work((target.block_q, target.block_k), proofs=name in PRINTED)
        return self._stages(made, target, g, dtype)

    def _text(self, plan: LoopPlan, target: Target, g: Geometry, dtype: str) -> str:
        if target.backend == "triton":
            from frisket.lowering.emit import triton_forward

            return triton_forward.emit(plan, target, g.head_dim, g.v_dim, dtype, g.heads // g.kv_heads)
        if target.backend == "pallas-tpu":
            from frisket.lowering.emit import pallas_tpu

            return pallas_tpu.emit(plan, target, g, dtype)
        return ""

    def _stages(self, made: Work, target: Target, g: Geometry, dtype: str) -> Stages:
        text = self._text(made.plan, target, g, dtype)
        m, s = made.subject.mask, made.subject.score
        written = Pair(None if m is None else m.expr, None if s is None else s.expr)
        return Stages(
            written, Pair(*made.simplified), made.layout.facts, made.layout, made.plan, target, text, made.rules
        )

    # -- checking ---------------------------------------------------------------------------------

    def check(
        self, q: Any, k: Any, v: Any, *, plan: AnyPlan | None = None, origin: Origin | None = None,
        sizes: Sizes | None = None, layout: str | None = None, **params: Any,
    ) -> Report:  # fmt: skip
        """The call beside the float64 interpreter. Raises `MismatchError` when its error is more than twice that
        of dense attention in the same dtype, plus 1e-6."""
        given = arrays(q, k, v, layout)
        out, lse = self._run(given, plan, origin, sizes, params)
        report = self._report(given, out, lse, plan, origin, sizes, params)
        report.require()
        return report

    def _report(
        self, given: Arrays, out: Any, lse: Any, plan: AnyPlan | None, origin: Origin | None, sizes: Sizes | None,
        params: dict[str, Any],
    ) -> Report:  # fmt: skip
        g = self._geometry(given, plan, origin, sizes)
        what = self.subject.bind(params) if plan is None else plan.subject
        return compared(given, g, what, turn(to_numpy(out), given.layout, "bhsd"), to_numpy(lse))

    def _report_later(
        self, given: Arrays, out: Any, lse: Any, plan: AnyPlan | None, origin: Origin | None, sizes: Sizes | None,
        params: dict[str, Any],
    ) -> None:  # fmt: skip
        """Under `jax.jit`: looks once the values are there, and raises from there."""
        import jax

        g = self._geometry(given, plan, origin, sizes)
        if isinstance(plan, FlatPlan):
            what, values = plan.key.what, plan.given
        else:
            host, values = divided(params, None)
            what = self.subject.without(values).bind(host) if plan is None else plan.subject

        def look(q: Any, k: Any, v: Any, out: Any, lse: Any, values: dict[str, Any]) -> None:
            here = replace(given, q=np.asarray(q), k=np.asarray(k), v=np.asarray(v))
            bound = what.bind({n: np.asarray(x) for n, x in values.items()})
            compared(here, g, bound, turn(to_numpy(out), given.layout, "bhsd"), to_numpy(lse)).require()

        jax.debug.callback(look, given.q, given.k, given.v, out, lse, values)


# -- the doors ------------------------------------------------------------------------------------------


def compile(
    mask: MaskLike | Program | None = None, score: ScoreLike | None = None, scale: float | None = None,
    enable_gqa: bool = True, deterministic: bool = True, dropout: float = 0.0, sinks: Any = None,
    backend: str | None = None, tile: int | tuple[int, int] | None = None, **params: Any,
) -> Attention:  # fmt: skip
    """`compile("causal & window(w)", "softcap(50)", w=256)`: attention to call, plan, print and check.

    `scale` is 1 / sqrt(head_dim) unless given; `backend` one of `frisket.backends()`, "library" or "native";
    `tile` the (queries, keys) of a tile, in tokens.
    """
    _not_yet(dropout=dropout, sinks=sinks)
    check_name(backend)
    return Attention(subject(mask, score, params), Options(scale, enable_gqa, backend, check_tile(tile)))


_compiled: OrderedDict[Any, Attention] = OrderedDict()


def attention(
    q: Any, k: Any, v: Any, mask: MaskLike | Program | None = None, score: ScoreLike | None = None,
    scale: float | None = None, enable_gqa: bool = True, backend: str | None = None, dropout: float = 0.0,
    seed: int | None = None, sinks: Any = None, origin: Origin | None = None, sizes: Sizes | None = None,
    layout: str | None = None, return_lse: bool = False, **params: Any,
) -> Any:  # fmt: skip
    """`attention(q, k, v, "causal & window(w)", w=256)`: one call; equal masks are compiled once."""
    _not_yet(dropout=dropout, sinks=sinks, seed=seed)
    check_name(backend)
    arrays(q, k, v, layout)
    host, device = divided(params, None)
    what = subject(mask, score, host)
    key = (what.mask, what.score, scale, enable_gqa, backend)
    if key not in _compiled:
        _compiled[key] = Attention(what, Options(scale, enable_gqa, backend))
        while len(_compiled) > 128:
            _compiled.popitem(last=False)
    _compiled.move_to_end(key)
    return _compiled[key](q, k, v, origin=origin, sizes=sizes, layout=layout, return_lse=return_lse, **device)


def reference(
    q: Any, k: Any, v: Any, mask: MaskLike | Program | None = None, score: ScoreLike | None = None,
    scale: float | None = None, layout: str | None = None, origin: Origin | None = None, sizes: Sizes | None = None,
    return_lse: bool = False, **params: Any,
) -> Any:  # fmt: skip
    """Dense attention by the float64 interpreter: numpy in and out, in the layout of the arrays."""
    given = arrays(q, k, v, layout, numpy=True)
    what = subject(mask, score, params)
    what.require_bound()
    out, lse = _oracle(given, given.geometry(scale, True, origin, sizes), what)
    out = turn(out, "bhsd", given.layout)
    return (out, lse) if return_lse else out


def _oracle(given: Arrays, g: Geometry, what: Subject) -> tuple[Any, Any]:
    """(out [batch, heads, q_len, v_dim], lse) in float64."""
    what.require_bound()
    q, k, v = (turn(to_numpy(x), given.layout, "bhsd") for x in (given.q, given.k, given.v))
    return dense.attention(
        q, k, v, None if what.mask is None else what.mask.expr, None if what.score is None else what.score.expr,
        scale=g.scale, params=what.scalars, tables=what.tables, origin=g.origin, sizes=g.full,
    )  # fmt: skip


def _not_yet(*, dropout: float, sinks: Any, seed: int | None = None) -> None:
    if dropout:
        raise LoweringError(f"dropout is {dropout}; dropout is not there yet: leave it at 0.0")
    if sinks is not None:
        raise LoweringError("attention sinks are not there yet: leave `sinks` out (`sinks(n)` in a mask is there)")
    if seed is not None:
        raise LoweringError("`seed` belongs to dropout, which is not there yet: leave it out")


__all__ = ["Attention", "Plan", "Report", "attention", "compile", "reference"]
