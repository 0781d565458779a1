"""Report: a result and its gradients, compared with the float64 reference and dense attention in the same dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import BackendError, MismatchError, ParameterError
from frisket.dsl.notebook import sentence
from frisket.lowering import dense
from frisket.lowering.dtypes import DOUBLE, FP8, HALVES, SINGLE, accumulate, result_of
from frisket.lowering.kernels.features import DENSE
from frisket.lowering.plan import PAGES, RATE, SEED, Geometry, survives
from frisket.runtime.backends.base import RECORDS
from frisket.runtime.calls.arrays import (
    Arrays,
    dequantize_and_gather,
    framework_of,
    from_numpy,
    rounding,
    to_numpy,
    turn,
)
from frisket.runtime.calls.program import CallProgram
from frisket.runtime.machine.parameters import traced
from frisket.runtime.plans.device import CheckedCall, checked_program

Array = NDArray[Any]
FLOOR = 1e-6  # allowed where dense attention happens to be exact
_NO_GRADIENTS: list[dict[str, tuple[float, float]]] = [{}, {}]
# (exact_delta, is_engine) of a backend -> what dense attention rounds where the two are compared
STORED = {(True, False): (), (True, True): (), (False, False): ("out",), (False, True): ("out", "scores")}
SMALL = 1 << 15  # entries of out, from which on errors are those of many numbers


@dataclass(frozen=True, repr=False)
class Report:
    """Largest absolute errors of a result, and of dense attention in the dtype of the arrays, against the float64
    reference. NaN counts as infinitely wrong, except where the reference has NaN too.

    >>> import torch, frisket as fk
    >>> report = fk.compile("causal").check(*torch.randn(3, 1, 2, 64, 16))
    >>> report.good, report.out < 1e-5
    (True, True)
    >>> report.require()  # raises MismatchError where it is not good

    `gradients` has both errors for "dq", "dk", "dv", "dsinks" and "d" with the name of each table and scalar that is
    differentiated, if gradients were checked. Gradients are sums over any number of rows, so where the largest entry is
    above 1 their errors are relative to it. `norms` has root mean squares in place of the largest errors. Sinks, tables
    and scalars have few entries, so dense attention is assumed to be no better at them than at q, k and v.
    """

    out: float
    lse: float
    dense_out: float
    dense_lse: float
    dtype: str
    gradients: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    finite: bool = True  # whether all numbers of q, k and v are
    norms: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether every error is at most twice that of dense attention, plus 1e-6."""
        pairs = [(self.out, self.dense_out), (self.lse, self.dense_lse), *self.gradients.values(), *self.norms.values()]
        return all(ours <= 2 * plain + FLOOR for ours, plain in pairs)

    def __str__(self) -> str:
        errors = {"out": (self.out, self.dense_out), "lse": (self.lse, self.dense_lse), **self.gradients}
        errors |= {f"norm of {name}": x for name, x in self.norms.items() if x[0] > 2 * x[1] + FLOOR}
        text = ", ".join(f"{name} {ours:.1e} (dense {plain:.1e})" for name, (ours, plain) in errors.items())
        return f"{self.dtype}: {text}, against the float64 reference"

    def __repr__(self) -> str:
        return f"{'good' if self.good else 'wrong'}: {self}"

    def _repr_html_(self) -> str:
        return sentence("good" if self.good else "wrong", str(self), good=self.good)

    def require(self) -> None:
        """Raise `MismatchError` unless the result is good."""
        if self.good:
            return
        if not self.finite:
            raise MismatchError(
                f"{self}\n  q, k or v hold NaN or infinity. Results and gradients of other queries and keys of a tile "
                "may then be NaN, as in dense attention, where 0 times NaN is NaN; check finite arrays"
            )
        raise MismatchError(
            f"{self}\n  the error may be twice that of dense attention plus {FLOOR:g}; this is a bug of frisket: "
            "please report the mask and the shapes"
        )


@dataclass(frozen=True)
class CheckedGradients:
    """The cotangents of a check: `dout` as out, `dlse` [batch, heads, q_len], and the gradients that came of them: "q",
    "k", "v", "sinks" and the names of tables and scalars. All are arrays of the framework, in the layout of the call,
    or None."""

    dout: Any
    dlse: Any
    gradients: Mapping[str, Any]


def dense_call(program: CallProgram, g: Geometry, rate: float, seed: Any, sinks: Any) -> dense.DenseCall:
    """The call of the float64 reference that has a program, with dropout at its positions."""
    params, keep_mask = dict(program.scalars), None
    if rate:
        params |= {SEED: int(seed), RATE: rate}
        keep_mask = survives(program.positions)
    sinks = None if sinks is None else to_numpy(sinks)
    return dense.DenseCall(program.exprs, g.scale, params, program.tables, g.problem, sinks, keep_mask, rate)


def report(
    checked: CheckedCall, out: Any, lse: Any, cotangents: CheckedGradients | None = None, program: Any = None
) -> Report:
    """The result of a call compared with the interpreter's, of the call's program unless another is given. A record of
    a backend says what dense attention rounds as its kernels do: "out", from which delta is taken, and "scores"."""
    program = checked.plan.program if program is None else program
    _check_pages(checked, program)
    arrays, record = checked.arrays, RECORDS[checked.backend]
    out, lse = turn(to_numpy(out), arrays.layout, "bhsd"), to_numpy(lse)
    q, k, v = dequantize_and_gather(arrays, checked.kv_inputs)
    call = dense_call(program, checked.geometry, checked.rate, checked.seed, checked.sinks)
    stored = STORED[record.exact_delta, record.is_engine]
    stored = (*stored, "lse") if arrays.dtype == SINGLE else stored  # weights of kernels come of a rounded lse
    rounded, draws = replace(call, rounded=_rounded(arrays), stored=stored), _orders(q, k, out.size)
    want, want_lse = dense.attention(q, k, v, call)
    plain = [dense.attention(*these, v, rounded) for these in draws]
    if arrays.dtype == FP8:  # numbers of 8 bits and their products are exact, and weights are rounded, then out
        half = rounding(arrays.q, result_of(FP8))
        eight = replace(call, weights=dense.in_8_bits)
        plain = [(half(x), y) for x, y in (dense.attention(*these, v, eight) for these in draws)]
    gradients, norms = _NO_GRADIENTS
    if cotangents is not None:
        dout = turn(to_numpy(cotangents.dout), arrays.layout, "bhsd")
        dlse = None if cotangents.dlse is None else to_numpy(cotangents.dlse)
        # gradients of tables, scalars and sinks have no layout
        got = {
            n: turn(to_numpy(x), arrays.layout, "bhsd") if n in ("q", "k", "v") else to_numpy(x)
            for n, x in cotangents.gradients.items()
        }

        def both(these: tuple[Array, Array], *douts: Any) -> list[dict[str, Any]]:
            return [dense.gradients(*these, v, how, *douts) for how in (call, rounded)]

        gradients, norms = _gradient_errors(got, both, draws, dout, dlse)
    unit = 1.0  # of lse: products of 16 bits are exact in float32, so that dense attention errs by less than lse's ulp
    if arrays.dtype in (*HALVES, FP8) and "scores" not in stored:
        unit = max(1.0, float(np.abs(want_lse).max(initial=0.0, where=np.isfinite(want_lse))))
    ours = float(_errors(out, want)[0]), float(_errors(lse, want_lse)[0]) / unit
    theirs = [(float(_errors(x, want)[0]), float(_errors(y, want_lse)[0]) / unit) for x, y in plain]
    return Report(
        *ours,
        max(x for x, _ in theirs),
        max(y for _, y in theirs),
        arrays.dtype,
        gradients,
        all(bool(np.isfinite(x).all()) for x in (q, k, v)),
        norms,
    )


def _orders(q: Array, k: Array, size: int) -> list[tuple[Array, Array]]:
    """q and k, and where out has few entries the same with head dims in other orders. Scores are then summed in another
    order: where a few of them decide, dense attention may be right by luck in one."""
    random = np.random.default_rng(0)
    # of many entries the largest error is no luck, and each order costs a dense attention
    orders = [random.permutation(q.shape[-1]) for _ in range(min(8, SMALL // max(1, size)) - 1)]
    return [(q, k), *((q[..., at], k[..., at]) for at in orders)]


def _gradient_errors(
    got: Mapping[str, Array],
    both: Callable[..., list[dict[str, Any]]],
    draws: list[tuple[Array, Array]],
    dout: Array,
    dlse: Array | None,
) -> list[dict[str, tuple[float, float]]]:
    """Errors of `got` and of dense attention: the largest ones, then root mean squares. `both` gives what is right and
    what dense attention says of one of the `draws`. The first are the arrays of `got`, cotangents of others have other
    signs."""
    random = np.random.default_rng(0)
    ours: dict[str, Array] = {}
    plain = dict.fromkeys(got, np.zeros(2))
    for these in draws:
        exact, rough = both(these, dout, dlse)
        for name, x in got.items():
            want, approximate = (_named(grads, name, x) for grads in (exact, rough))
            size = np.maximum(1.0, _errors(np.where(np.isfinite(want), want, 0.0), np.zeros(())))
            ours.setdefault(name, _errors(x, want) / size)  # the first of the draws has the arrays of `got`
            plain[name] = np.maximum(plain[name], _errors(approximate, want) / size)
        # another sum of the same terms: errors that cancel by luck do not twice
        dout = dout * random.choice((-1.0, 1.0), dout.shape)
        dlse = None if dlse is None else dlse * random.choice((-1.0, 1.0), dlse.shape)
    # few entries, sums of many terms: dense attention may be right by luck
    usual = np.max([plain[n] for n in ("q", "k", "v") if n in plain] or [np.zeros(2)], 0)
    bounds = {n: x if n in ("q", "k", "v") else np.maximum(x, usual) for n, x in plain.items()}
    return [{f"d{n}": (float(ours[n][i]), float(bounds[n][i])) for n in got} for i in range(2)]


def _named(grads: dict[str, Any], name: str, like: Array) -> Array:
    if name in ("q", "k", "v", "sinks"):
        return np.asarray(grads[f"d{name}"])
    return np.asarray({**grads["dtables"], **grads["dscalars"]}.get(name, np.zeros_like(like)))


def _rounded(arrays: Arrays) -> Callable[[Any], Array]:
    """Rounds to the dtype of the arrays; halves are kept as float32, as sums of theirs are."""
    if arrays.dtype == DOUBLE:
        return dense.exactly
    half = rounding(arrays.q)
    if arrays.dtype == SINGLE:
        return lambda x: np.asarray(x, np.float32)
    return lambda x: np.asarray(half(np.asarray(x)), np.float32)


def differentiated(
    framework: str, run: Callable[[dict[str, Any]], tuple[Any, Any]], inputs: Mapping[str, Any]
) -> tuple[Any, Any, CheckedGradients]:
    """(out, lse, CheckedGradients) of `run`, which takes `inputs` by name ("q", "k", "v", "sinks", tables) and gives
    (out, lse): the framework's own differentiation, for random cotangents."""
    random = np.random.default_rng(0)

    def draw(x: Any) -> Array:
        return random.standard_normal(tuple(x.shape))

    if framework == "torch":
        import torch

        # the user's may be one tensor
        leaves = {n: x.detach().clone().requires_grad_() for n, x in inputs.items()}
        out, lse = run(leaves)
        to_out, to_lse = (torch.from_numpy(draw(x)).to(x) for x in (out, lse))
        grads = torch.autograd.grad([out, lse], list(leaves.values()), [to_out, to_lse], allow_unused=True)
        pairs = zip(leaves.items(), grads, strict=True)
        gradients = {n: torch.zeros_like(x) if d is None else d for (n, x), d in pairs}  # a table may be unused
        return out.detach(), lse.detach(), CheckedGradients(to_out, to_lse, gradients)
    import jax

    (out, lse), pullback = jax.vjp(run, dict(inputs))
    dout, dlse = (jax.numpy.asarray(draw(x), x.dtype) for x in (out, lse))
    return out, lse, CheckedGradients(dout, dlse, pullback((dout, dlse))[0])


def _errors(got: Array, want: Array) -> Array:
    """The largest error and the root mean square; NaN is infinitely wrong, unless both are."""
    with np.errstate(all="ignore"):
        same = (got == want) | (np.isnan(got) & np.isnan(want))  # inf - inf is NaN
        off = np.where(same, 0.0, np.abs(got - want))
        off = np.where(np.isnan(off), np.inf, off)
        return np.array([off.max(initial=0.0), np.sqrt(np.square(off).sum() / max(1, off.size))])


def oracle(arrays: Arrays, call: dense.DenseCall, kv_inputs: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """(out [batch, heads, q_len, v_dim], lse, top [batch, heads, q_len]) in float64. Of weighted rows the last two are
    the sum of the weights and the number of visible keys."""
    q, k, v = dequantize_and_gather(arrays, kv_inputs)
    return *dense.attention(q, k, v, call), dense.top(q, k, call)


def interpreted(call: CheckedCall) -> tuple[Any, Any, Any]:
    """The backend "dense": the interpreter on the arrays of a framework."""
    if any(map(traced, call.arrays.qkv)):
        raise BackendError(DENSE["traced arrays"])
    arrays, program = call.arrays, call.plan.program
    program.require_bound()
    reference = dense_call(program, call.geometry, call.rate, call.seed, call.sinks)
    out, *rows = oracle(arrays, reference, call.kv_inputs)
    real = accumulate(arrays.dtype)
    lse, top = (from_numpy(x, arrays.q, real) for x in rows)
    return from_numpy(turn(out, "bhsd", arrays.layout), arrays.q, result_of(arrays.dtype)), lse, top


def _check_pages(call: CheckedCall, program: CallProgram) -> None:
    """Refuse page numbers outside of the pool, and pages that a sequence has twice, where a query sees their keys."""
    if PAGES not in call.kv_inputs:
        return
    g, pages, pool = call.geometry, to_numpy(call.kv_inputs[PAGES]).astype(int).tolist(), call.arrays.k.shape[0]
    env = {**dense.coordinates(g.problem), **program.scalars}
    # pages of which no query sees a key may be anything
    seen = dense.visible(program.exprs.visible, env, program.tables, g.problem.lengths).any((1, 2))
    for b, i in np.argwhere(seen.reshape(g.batch, len(pages[0]), -1).any(-1)).tolist():
        x, earlier = pages[b][i], pages[b][:i]
        if x in earlier or not 0 <= x < pool:
            why = f"as is entry [{b}, {earlier.index(x)}]" if x in earlier else f"and the pool has pages 0..{pool - 1}"
            raise ParameterError(f"`pages` entry [{b}, {i}] is {x}, {why}; queries see keys of that page")


def report_gradients(attend: Callable[..., Any], call: CheckedCall, params: Mapping[str, Any]) -> Report:
    """The result of a call and its gradients compared with the reference's. `attend` gives (out, lse)."""
    learned = {n: x for n, x in params.items() if n in call.plan.program.learnable and framework_of(x)}
    # what the mask reads, too, has no gradient
    fixed = {n: x for n, x in params.items() if n not in learned}
    inputs = {**dict(zip("qkv", call.arrays.qkv)), **learned, **({} if call.sinks is None else {"sinks": call.sinks})}
    results = differentiated(call.arrays.framework, lambda learned: attend(**learned, **fixed, seed=call.seed), inputs)
    return report(call, *results)


def learned_values(program: CallProgram, like: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """The Float parameters that only the score mod reads, as arrays that go with `like`: gradients flow to those."""
    have = {**program.scalars, **program.tables, **params}
    real = accumulate(like.dtype)
    names = [n for n in program.learnable if n in have and n not in ("q", "k", "v")]
    host = {n: framework_of(have[n]) in (None, "numpy") for n in sorted(names)}
    return {n: from_numpy(np.asarray(have[n]), like, real) if x else have[n] for n, x in host.items()}


def report_later(call: CheckedCall, out: Any, lse: Any) -> None:
    """A check under `jax.jit`: the callback compares once the values are there, and raises from there."""
    import jax

    arrays, plan = call.arrays, call.plan

    def look(qkv: Any, out: Any, lse: Any, values: dict[str, Any], seed: Any, sinks: Any, kv_inputs: Any) -> None:
        q, k, v = (np.asarray(x) for x in qkv)
        plain = checked_program(plan, {n: np.asarray(x) for n, x in values.items()})
        checked_call = replace(call, arrays=replace(arrays, q=q, k=k, v=v), seed=seed, sinks=sinks, kv_inputs=kv_inputs)
        report(checked_call, out, lse, program=plain).require()

    # all that is traced is an argument: a closure would hold tracers, without numbers
    traced_values = plan.device_values, call.seed, call.sinks, dict(call.kv_inputs)
    jax.debug.callback(look, arrays.qkv, out, lse, *traced_values)
