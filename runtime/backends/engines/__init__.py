"""Engines: kernels of vendors, which run where a proof says that they compute the call. `proof` decides, and says where
they are faster; engines without windows and documents share the masks here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from frisket.lowering.engines.flags import Flags
from frisket.lowering.engines.forms import NO_CLAUSE
from frisket.lowering.kernels.features import NO_ORDER, ONLY_HOPPER, STORED, Features
from frisket.lowering.plan import Geometry

Tensor = Any
OTHER_MASKS = f"`{{mask}}` {NO_CLAUSE}"
LACKS: Features = {  # of every engine
    **ONLY_HOPPER,
    **NO_ORDER,
    "weights": "pairs weigh what a formula says, and engines have the softmax alone",
    "dropout": "dropout is drawn by position, which generated kernels do",
    "device tables": "tables on a device are not looked at, so nothing is proved of them",
    **dict.fromkeys(STORED, "keys and values are as a cache stores them"),
    "sinks": "sinks are the generated kernels'",
    "max": "the largest score of a row is asked for",
}
SQUARE: Features = {  # of engines without windows and documents
    "documents": "{flags}: {name} has no documents",
    "score mods": "{flags}: {name} has no score mod",
    "distance penalties": "{flags}: {name} has no score mod",
    "windows": "{flags}: {name} has no window",
    "other masks": OTHER_MASKS,
    "origins by batch entry": "{flags}: {name} begins a causal mask at the first query and the first key",
    "empty rows": "{flags}: some query sees no key, and {name} says nothing about its result",
}


@dataclass(frozen=True)
class SquareMask:
    """Keys [start, stop) alone are valid; `causal`: query i sees keys up to start + i."""

    causal: bool
    start: int
    stop: int

    def valid(self, *arrays: Tensor) -> tuple[Tensor, ...]:
        """Keys and values [batch, heads, length, dim] without those that are not valid: views."""
        return tuple(x if self._all(x) else x[:, :, self.start : self.stop] for x in arrays)

    def whole(self, gradient: Tensor, of: Tensor) -> Tensor:
        """The gradient of all keys from that of the valid ones: no query sees the others."""
        if self._all(of):
            return gradient
        padded = gradient.new_zeros(of.shape)
        padded[:, :, self.start : self.stop] = gradient
        return padded

    def _all(self, x: Tensor) -> bool:
        return bool(self.start == 0 and self.stop == x.shape[2])


def square(flags: Flags, geometry: Geometry, name: str, rectangles: bool = True) -> SquareMask | str:
    """The mask of an engine without windows and documents, or why it has none. Without `rectangles` a causal mask has
    as many keys as queries: with more keys, engines differ in where they begin."""
    if flags.documents is not None:
        return SQUARE["documents"].format(flags=flags, name=name)
    if flags.softcap is not None or flags.slopes is not None:
        return SQUARE["score mods"].format(flags=flags, name=name)
    if flags.queries is not None:
        return f"{flags}: {name} has no queries that see nothing"
    left, right = flags.top_left
    start, stop = flags.keys or (0, geometry.kv_len)
    if not all(isinstance(x, int) for x in (start, stop)):
        return f"{flags}: {name} has one length for all batch entries"
    if flags.empty_rows(geometry):
        return SQUARE["empty rows"].format(flags=flags, name=name)
    if left is not None:
        return SQUARE["windows"].format(flags=flags, name=name)
    if right is None:
        return SquareMask(False, start, stop)  # type: ignore[arg-type]
    if not isinstance(right, int) or right != start:
        return SQUARE["origins by batch entry"].format(flags=flags, name=name)
    if not rectangles and stop - start != geometry.q_len:
        return f"{flags}: {name} has a causal mask of as many keys as queries"
    return SquareMask(True, start, stop)  # type: ignore[arg-type]


def gradients(
    run: Callable[..., tuple[Tensor, ...]], mask: SquareMask, qkv: tuple[Tensor, ...], results: Any, cotangents: Any
) -> dict[str, Tensor]:
    """The gradients of q, k and v by an engine's backward, `run(dout, q, keys, values, out, lse)`."""
    (q, k, v), out, dout, dlse = qkv, results.out, cotangents.dout, cotangents.dlse
    if dlse is not None:
        q, k, v, out, dout = with_lse(dlse, q, k, v, out, dout)
    dq, dk, dv = run(dout.contiguous(), q, *mask.valid(k, v), out, results.lse)
    grads = {"q": dq, "k": mask.whole(dk, k), "v": mask.whole(dv, v)}
    return grads if dlse is None else {n: x[..., :-8] for n, x in grads.items()}


def with_lse(dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """q, k, v, out and dout, wider by eight numbers, whose gradients in the first ones are those of out and lse.

    A backward subtracts `sum(dout * out)` of a row from the products of dout and values. One more number, 1 in dout,
    -dlse in out and 0 in the values, subtracts `- dlse` in addition: the gradient of lse by a score is its weight."""
    from torch.nn.functional import pad

    q, k, v, out, dout = (pad(x, (0, 8)) for x in (q, k, v, out, dout))  # engines take head dims in eights
    out[..., -1], dout[..., -1] = -dlse.to(out.dtype), 1
    return q, k, v, out, dout
