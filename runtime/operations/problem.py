"""The keywords of a call of an operator as one mask, one score mod, and values for what they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.runtime.attention.entry import attention_for, stand_in
from frisket.runtime.calls.arrays import framework_of, scale_of
from frisket.runtime.calls.options import Options
from frisket.runtime.calls.program import program_of
from frisket.runtime.machine.parameters import call_value, names_of, refuse_additive, traced
from frisket.runtime.masks.mask import Mask, ScoreMod
from frisket.runtime.masks.mask import mask as as_mask
from frisket.runtime.masks.mask import score as as_score

TABLES = (  # names of what comes as arrays
    "attention_mask", "attention_bias", "query_segment_ids", "key_segment_ids", "query_positions", "key_positions",
)  # fmt: skip


@dataclass(frozen=True)
class OpCall:
    """Attention of one call, beside its q, k and v. `params` are the values of the names without one."""

    mask: Mask | None
    score: ScoreMod | None
    params: dict[str, Any]
    sinks: Any

    def attention(self, options: Options) -> Any:
        """Compiled; equal problems are compiled once."""
        return attention_for(self.mask, self.score, options, self.params)


def problem(
    lengths: tuple[int, int, int, int], mask: Any, score: Any, bias: Any, segment_ids: Any, positions: Any,
    causal: bool, window: Any, scale: Any, soft_cap: Any, softmax_aux: Any, moved: bool, params: Mapping[str, Any],
    called: Sequence[str],
) -> OpCall:  # fmt: skip
    """Lengths are (batch, heads, q_len, kv_len). Where q and k differ in length, and nobody says where the queries
    are, `causal` and `window` have the last query at the last key. `called` are the operator's keywords."""
    values = {n: call_value(n, x) for n, x in params.items()}
    if taken := next((n for n in values if n in TABLES), None):
        raise ParameterError(
            f"`{taken}` is the name of what an operator is given as an array; call the table otherwise"
        )
    tables: dict[str, Any] = {}
    bias = jnp.asarray(bias) if isinstance(bias, list | tuple) else bias
    array = mask if isinstance(mask, np.ndarray) or traced(mask) or framework_of(mask) == "jax" else None
    refuse_additive(array, bias)
    made = program_of(None if array is not None else mask, score, {n: stand_in(x) for n, x in values.items()}, called)
    made = made.without(values)
    masks, flags = [m for m in (made.mask,) if m is not None], _flags(causal, window)
    scores = [s for s in (made.score,) if s is not None]
    if positions is not None:
        at = _by_place(tables, "positions", positions, lengths, moved)
        masks = [m.at(**at) for m in masks]
        scores = [s.at(**at) for s in scores]
        flags = [m.at(**at) for m in flags]
    elif lengths[2] != lengths[3] and not moved:
        flags = [m.at(q=f"q + {lengths[3] - lengths[2]}") for m in flags]
    masks += flags
    if segment_ids is not None:
        at = _by_place(tables, "segment_ids", segment_ids, lengths, moved)
        masks.append(as_mask(f"{at['q']} == {at['k']} & {at['q']} >= 0"))
    if array is not None:
        if array.dtype != bool:
            raise ParameterError(
                f"the mask is an array of {array.dtype}; True is what is seen: mask != 0; or bias=mask"
            )
        masks.append(as_mask(_table(tables, "attention_mask", array, lengths, moved)))
    if not isinstance(scale, float | None):
        scores, values["softmax_scale"] = [as_score("score * softmax_scale"), *scores], scale
    if soft_cap is not None:
        scores.append(as_score("softcap(logits_soft_cap)"))
        values["logits_soft_cap"] = scale_of(soft_cap, "logits_soft_cap")
    if bias is not None:
        scores.append(as_score(f"score + {_table(tables, 'attention_bias', bias, lengths, moved)}"))
    whole, chain = reduce(and_, masks) if masks else None, reduce(ScoreMod.then, scores) if scores else None
    read = {n for x in (whole, chain) if x is not None for n in names_of(x.expr)}
    tables = {n: x for n, x in tables.items() if n in read}  # a mask of keys reads no positions of queries
    return OpCall(whole, chain, {**values, **tables}, _sinks(softmax_aux, lengths[1]))


def _flags(causal: bool, window: Any) -> list[Mask]:
    if not isinstance(causal, bool):
        raise ParameterError(f"causal is {causal!r}; it is True or False")
    found = [as_mask("causal")] if causal else []
    if window is not None:
        sides = window if isinstance(window, tuple | list) else (window, window)
        if len(sides) != 2 or not all(isinstance(n, int | np.integer) for n in sides):
            raise ParameterError(f"sliding_window is {window!r}; it is an int, or (before, after) in tokens")
        if any(n < -1 for n in sides):
            raise ParameterError(f"sliding_window is {window!r}; a side is a number of tokens, or -1 for no limit")
        ends = [f"{distance} <= {n}" for distance, n in zip(("q - k", "k - q"), sides, strict=True) if n >= 0]
        found += [as_mask(" & ".join(ends))] if ends else []
    return found


def _by_place(
    tables: dict[str, Any], what: str, given: Any, lengths: tuple[int, int, int, int], moved: bool
) -> dict[str, str]:
    """Two arrays of integers, of queries and of keys, or one for both: what reads them at q and at k."""
    rows = isinstance(given, list) and any(isinstance(x, list) for x in given)  # one array, [batch, length]
    pair = given if isinstance(given, tuple | list) and len(given) == 2 and not rows else (given, given)
    texts = {}
    for c, side, x, length in zip("qk", ("query", "key"), pair, lengths[2:], strict=True):
        _check_place(f"{side} {what}", moved)
        x, name = jnp.asarray(x) if not isinstance(x, np.ndarray) else x, f"{side}_{what}"
        if x.shape not in ((length,), (1, length), (lengths[0], length)) or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ShapeError(
                f"{what} of {'queries' if c == 'q' else 'keys'} are {x.dtype}{list(x.shape)}; they are integers "
                f"[{lengths[0]}, {length}] or [{length}], of queries and keys in a pair: {what}=(of_q, of_k)"
            )
        tables[name] = x
        texts[c] = f"{name}[{c}]" if x.ndim == 1 else f"{name}[{'b' if x.shape[0] > 1 else '0'}, {c}]"
    return texts


def _table(tables: dict[str, Any], name: str, x: Any, lengths: tuple[int, int, int, int], moved: bool) -> str:
    """A lookup that reads an array [batch, heads, q_len, kv_len], with axes of length 1 for all, [batch, q_len,
    kv_len], or [batch, kv_len], of keys."""
    _check_place(name.replace("_", " "), moved)
    axes = {4: "bhqk", 3: "bqk", 2: "bk"}.get(x.ndim, "")
    wanted = [lengths["bhqk".index(a)] for a in axes]
    if not axes or any(have not in (1, want) for have, want in zip(x.shape, wanted, strict=True)):
        raise ShapeError(
            f"the {name.replace('_', ' ')} is {list(x.shape)} for (batch, heads, q_len, kv_len) = {lengths}; it has "
            "these axes, or batch, q_len and kv_len, or batch and kv_len, each of its length or 1"
        )
    tables[name] = x
    return f"{name}[{', '.join('0' if have == 1 else a for a, have in zip(axes, x.shape, strict=True))}]"


def _check_place(what: str, moved: bool) -> None:
    if moved:
        raise ParameterError(
            f"{what} go by places of the arrays, and `origin` moves those; give positions instead of origin"
        )


def _sinks(x: Any, heads: int) -> Any:
    """Sinks [heads]: several of a head are one, whose weight is theirs together."""
    x = jnp.asarray(x) if isinstance(x, list | tuple) else x
    if x is None or getattr(x, "ndim", 0) < 2:
        return x
    if x.ndim != 2 or x.shape[0] not in (1, heads):
        raise ShapeError(f"softmax_aux is {list(x.shape)}; it is [{heads}], or [{heads}, sinks of a head]")
    return jnp.broadcast_to(jax.nn.logsumexp(jnp.asarray(x, jnp.float32), axis=1), (heads,))
