"""Report: a result and its gradients beside the float64 interpreter and beside dense attention in the same dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import MismatchError
from frisket.dsl.ir import Expr
from frisket.lowering import dense
from frisket.lowering.plan import Geometry

from .bind import Subject
from .frameworks import Arrays, rounding, to_numpy, turn

Array = NDArray[Any]
FLOOR = 1e-6


@dataclass(frozen=True)
class Report:
    """Largest absolute errors against the float64 interpreter: of the result, and of dense attention done in the
    dtype of the arrays. NaN counts as infinitely wrong, except where the interpreter has NaN too.

    `gradients` has both errors for "dq", "dk", "dv", "dsinks" and "d" with the name of each table and scalar that is
    differentiated, where gradients were asked for; they are sums over rows of any number, so their errors are parts
    of the largest entry where that is above 1. Dense attention is taken to be no better at sinks, tables and scalars,
    which have few entries, than at q, k and v.
    """

    out: float
    lse: float
    dense_out: float
    dense_lse: float
    dtype: str
    gradients: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        pairs = [(self.out, self.dense_out), (self.lse, self.dense_lse), *self.gradients.values()]
        return all(ours <= 2 * plain + FLOOR for ours, plain in pairs)

    def __str__(self) -> str:
        errors = {"out": (self.out, self.dense_out), "lse": (self.lse, self.dense_lse), **self.gradients}
        text = ", ".join(f"{name} {ours:.1e} (dense {plain:.1e})" for name, (ours, plain) in errors.items())
        return f"{self.dtype}: {text}, against the float64 interpreter"

    def require(self) -> None:
        """Raise `MismatchError` unless the result is good."""
        if not self.good:
            raise MismatchError(
                f"{self}\n  the error may be twice that of dense attention plus {FLOOR:g}; this is a bug of frisket: "
                "please report the mask and the shapes"
            )


@dataclass(frozen=True)
class Cotangents:
    """What gradients are compared for: `dout` as out, `dlse` [batch, heads, q_len], and the gradients that came of
    them: "q", "k", "v", "sinks" and the names of tables and scalars; all of the framework, in the layout of the
    call. None where there was none."""

    dout: Any
    dlse: Any
    found: Mapping[str, Any]


def compared(
    given: Arrays, g: Geometry, what: Subject, out: Array, lse: Array, *, sinks: Any = None, kept: Expr | None = None,
    rate: float = 0.0, params: Mapping[str, Any] | None = None, cotangents: Cotangents | None = None,
) -> Report:  # fmt: skip
    """The report of a result `out` [batch, heads, q_len, v_dim], `lse`, for the arrays it came from; `params` are
    values of names that only `kept` has."""
    arrays = [turn(to_numpy(x), given.layout, "bhsd") for x in (given.q, given.k, given.v)]
    arguments: tuple[Any, ...] = (*arrays, *what.exprs)
    options: dict[str, Any] = {
        "scale": g.scale, "params": {**what.scalars, **(params or {})}, "tables": what.tables, "origin": g.origin,
        "sizes": g.full, "sinks": None if sinks is None else to_numpy(sinks), "kept": kept, "rate": rate,
    }  # fmt: skip
    in_dtype = _rounded(given)
    want, want_lse = dense.attention(*arguments, **options)
    plain, plain_lse = dense.attention(*arguments, **options, rounded=in_dtype)
    gradients: dict[str, tuple[float, float]] = {}
    if cotangents is not None:
        dout = turn(to_numpy(cotangents.dout), given.layout, "bhsd")
        dlse = None if cotangents.dlse is None else to_numpy(cotangents.dlse)
        arguments += (dout, dlse)
        exact, rough = (dense.gradients(*arguments, **options, rounded=r) for r in (dense.exactly, in_dtype))
        gradients = _gradient_errors(cotangents.found, exact, rough, given.layout)
    return Report(
        _error(out, want), _error(lse, want_lse), _error(plain, want), _error(plain_lse, want_lse), given.dtype,
        gradients,
    )  # fmt: skip


def _gradient_errors(
    found: Mapping[str, Any], exact: dict[str, Any], rough: dict[str, Any], layout: str
) -> dict[str, tuple[float, float]]:
    errors = {}
    for name, x in found.items():
        if name in ("q", "k", "v", "sinks"):
            want, plain = exact[f"d{name}"], rough[f"d{name}"]
        else:
            zero = np.zeros(np.shape(to_numpy(x)))
            want, plain = (
                {**some["dtables"], **some["dscalars"]}.get(name, zero) for some in (exact, rough)
            )  # fmt: skip
        got = to_numpy(x) if name not in ("q", "k", "v") else turn(to_numpy(x), layout, "bhsd")
        size = max(1.0, float(np.abs(want).max(initial=0.0, where=np.isfinite(want))))
        errors[f"d{name}"] = _error(got, want) / size, _error(plain, want) / size
    usual = max((plain for name, (_, plain) in errors.items() if name in ("dq", "dk", "dv")), default=0.0)
    # a sum with one entry may be right by luck: of those dense attention is as wrong as of the others
    return {n: (ours, plain if n in ("dq", "dk", "dv") else max(plain, usual)) for n, (ours, plain) in errors.items()}


def _rounded(given: Arrays) -> Callable[[Any], Array]:
    """Rounds to the dtype of the arrays; halves are kept as float32, as sums of theirs are."""
    if given.dtype == "float64":
        return dense.exactly
    half = rounding(given.q)
    if given.dtype == "float32":
        return lambda x: np.asarray(x, np.float32)
    return lambda x: np.asarray(half(np.asarray(x)), np.float32)


def differentiated(
    framework: str, run: Callable[[dict[str, Any]], tuple[Any, Any]], inputs: Mapping[str, Any]
) -> tuple[Any, Any, Cotangents]:
    """(out, lse, Cotangents) of `run`, which takes `inputs` by name ("q", "k", "v", "sinks", tables) and gives
    (out, lse): the framework's own differentiation, for random cotangents."""
    random = np.random.default_rng(0)

    def draw(x: Any) -> Array:
        return random.standard_normal(tuple(x.shape))

    if framework == "torch":
        import torch

        leaves = {n: x.detach().clone().requires_grad_() for n, x in inputs.items()}
        out, lse = run(leaves)
        to_out, to_lse = (torch.from_numpy(draw(x)).to(x) for x in (out, lse))
        grads = torch.autograd.grad([out, lse], list(leaves.values()), [to_out, to_lse], allow_unused=True)
        found = {n: torch.zeros_like(x) if d is None else d for (n, x), d in zip(leaves.items(), grads, strict=True)}
        return out.detach(), lse.detach(), Cotangents(to_out, to_lse, found)
    import jax

    (out, lse), pullback = jax.vjp(run, dict(inputs))
    dout, dlse = (jax.numpy.asarray(draw(x), x.dtype) for x in (out, lse))
    return out, lse, Cotangents(dout, dlse, pullback((dout, dlse))[0])


def _error(got: Array, want: Array) -> float:
    with np.errstate(all="ignore"):
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        off = np.where(same, 0.0, np.abs(got - want))
    return float(np.where(np.isnan(off), np.inf, off).max(initial=0.0))
