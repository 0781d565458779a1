"""A score mod and a mask in one attention, with the tensors of this call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from frisket.dsl import ir
from frisket.dsl.types import FLOAT
from frisket.grammar.memo import beside, remember
from frisket.runtime.attention.attention import Attention
from frisket.runtime.attention.entry import attention_for
from frisket.runtime.calls.options import Options
from frisket.runtime.calls.program import joined
from frisket.runtime.calls.request import Request
from frisket.runtime.machine.parameters import as_value, names_of
from frisket.runtime.masks.mask import Mask, ScoreMod, only
from frisket.runtime.torch import op as torch_op

from .checks import check_promises
from .errors import check_lookups
from .kernel_options import Asked
from .live_mask import LiveMask
from .score_mod import KEPT, Scored, Watched, apart

LARGE = 1 << 20  # bytes of tables: an attention over more lives as long as its mask, not for who may come again


def on_device(x: Tensor) -> bool:
    return x.device.type != "cpu"


class FlexPair:
    """The attention of a score mod and a mask, as long as the tables it has copies of stay as they are. Float tensors
    of the score mod are not copied: every call brings them."""

    def __init__(
        self, mod: Scored | None, visible: LiveMask | None, options: Options, tensors: Mapping[str, Tensor]
    ) -> None:
        score, names = (None, {}) if mod is None else apart(mod.live, visible)
        self.renamed = names
        wanted = {} if score is None else names_of(score.expr)
        back = {new: old for old, new in names.items()}
        own = {n: tensors[back.get(n, n)] for n in wanted if back.get(n, n) in tensors}
        self.floats = {n: back.get(n, n) for n, x in own.items() if wanted[n][1] is FLOAT}
        held = {n: x for n, x in own.items() if n not in self.floats}
        self.held: list[tuple[str | None, Watched]] = [(back.get(n, n), Watched(x)) for n, x in held.items()]
        if visible is not None:
            self.held += [(None, Watched(x)) for x in visible.tensors.values()]
            held.update(visible.tensors)
        self.placed = {n: x for n, x in held.items() if x.ndim and on_device(x)}  # planned where they are
        values = {n: as_value(n, x) for n, x in held.items() if n not in self.placed}
        m = None if visible is None else Mask(visible.expr, visible.numbers | only(values, visible.expr))
        s = None if score is None else ScoreMod(score.expr, score.numbers | only(values, score.expr))
        large = sum(x.nbytes for x in values.values() if isinstance(x, np.ndarray)) > LARGE
        self.att: Attention = Attention(joined(m, s), options) if large else attention_for(m, s, options, {})
        self.plans: dict[Any, Any] = {}
        self.checked: set[Any] = set()

    def holds(self, tensors: Mapping[str, Tensor]) -> bool:
        return all(x.is_still(x.ref() if n is None else tensors[n]) for n, x in self.held)

    def check(
        self, query: Tensor, key: Tensor, tensors: Mapping[str, Tensor], asked: Asked, block_mask: Any,
        words: Any = None,
    ) -> None:  # fmt: skip
        """Check once for these lengths, where nothing is on a device. `words` are those of `check_lookups`."""
        place = query.shape[:3], key.shape[2], asked.promises
        if place in self.checked or 0 in query.shape or 0 in key.shape:
            return
        if not self.placed:
            if self.att.score is not None and any(n.op == "lookup" for n in ir.walk(self.att.score.expr)):
                shapes = {n: _shape(n, tensors[own], self.att.score.expr) for n, own in self.floats.items()}
                score = self.att.score.bind(**shapes)
                lookups = score.lookups(
                    query.shape[2], key.shape[2], self.att.mask, batch=query.shape[0], heads=query.shape[1]
                )
                check_lookups(lookups, self.renamed, words)
            check_promises(asked.promises, self.att, block_mask, query, key)
        self.checked.add(place)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, tensors: Mapping[str, Tensor], top: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        params = {n: tensors[own] for n, own in self.floats.items()}
        plan = None
        if self.placed and not params:
            place = query.shape[2], key.shape[2], query.shape[0], query.shape[1]
            if 0 in place:  # no plan, and nothing to plan
                params |= self.placed
            elif place not in self.plans:
                remember(self.plans, place, self.att.plan(*place, flat=True, **self.placed), KEPT)  # type: ignore[arg-type]
            plan = self.plans.get(place)
        elif self.placed:
            params |= self.placed
        found: tuple[Tensor, Tensor, Tensor | None] = torch_op.attend(
            self.att, Request(query, key, value, plan, top=top, layout="bhsd", params=params)
        )
        return found


_PLAIN = Scored(LiveMask(ir.SCORE, {}), {}, (), None)  # neither


def pair_of(mod: Scored | None, visible: LiveMask | None, options: Options, tensors: Mapping[str, Tensor]) -> FlexPair:
    """The attention of both, kept as long as the mask is, or the score mod where there is none."""
    if visible is not None and visible.read:
        _ = visible.versions  # says so where a value that the trace looked at has changed
    kept: dict[Any, FlexPair] = beside(visible or mod or _PLAIN, "pairs", dict)
    key = mod, options
    found = kept.get(key)
    if found is None or not found.holds(tensors):
        found = FlexPair(mod, visible, options, tensors)
        remember(kept, key, found, KEPT)
    return found


def _shape(name: str, x: Tensor, e: ir.Expr) -> Any:
    """A table of zeros of this shape where only the shape matters; the table itself where an index reads it."""
    inside = {n.name for one in ir.walk(e) if one.op == "lookup" for a in one.args for n in ir.walk(a)}
    return x.detach() if name in inside else np.broadcast_to(np.zeros((), np.float32), tuple(x.shape))
