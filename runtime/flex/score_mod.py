"""Score mods of torch: traced once, kept, and known again when they come with other tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ref

from torch import Tensor

from frisket.dsl import ir
from frisket.dsl.errors import TraceError
from frisket.dsl.from_python.trace import trace
from frisket.dsl.types import FLOAT
from frisket.grammar.memo import Memo
from frisket.runtime.calls.arrays import version_of
from frisket.runtime.machine.parameters import names_of
from frisket.runtime.masks.mask import ScoreMod
from frisket.runtime.masks.mask import score as written

from .errors import ScoreModError
from .function_state import state_of
from .live_mask import LiveMask, fresh, of_bound

KEPT = 128  # score mods, and what there is of one


class Watched:
    """A tensor as it was: whether another is the same one, unwritten. It is not kept alive."""

    def __init__(self, x: Tensor) -> None:
        self.ref, self.version = ref(x), version_of(x)

    def is_still(self, x: Tensor | None) -> bool:
        return x is not None and self.ref() is x and version_of(x) == self.version


@dataclass(frozen=True, eq=False)
class Scored:
    """A score mod, traced. `places` say which of the function's tensors a name is; `live` has the values of the other
    names. `read` are tensors whose values the trace looked at, or whose place is not known."""

    live: LiveMask
    places: Mapping[str, int]
    read: tuple[tuple[int | None, Watched], ...]
    source: Any  # of the user's, which a key may name by its id

    def holds(self, tensors: list[Tensor]) -> bool:
        return all(x.is_still(x.ref() if at is None else tensors[at]) for at, x in self.read)


_scored = Memo("runtime.flex.score_mod.scored", KEPT)


def scored(score_mod: Any) -> tuple[Scored, Mapping[str, Tensor]]:
    """The score mod as it was traced before, if that still holds, and its tensors as they are now."""
    state: Any
    tensors: list[Tensor]
    if isinstance(score_mod, str | ScoreMod | ir.Expr):
        state, tensors = (score_mod if isinstance(score_mod, str) else id(score_mod)), []
    else:
        state, tensors = state_of(score_mod) or (None, [])
    found = None if state is None else _scored.get(state)
    if found is None or not found.holds(tensors):
        found = _traced_over(score_mod, tensors)
        if state is not None:
            _scored.put(state, found)
    return found, {**found.live.tensors, **{n: tensors[i] for n, i in found.places.items()}}


def _traced_over(score_mod: Any, tensors: list[Tensor]) -> Scored:
    live, read = traced(score_mod)
    place = {id(x): i for i, x in enumerate(tensors)}
    places = {n: place[id(x)] for n, x in live.tensors.items() if id(x) in place}
    others = LiveMask(live.expr, {n: x for n, x in live.values.items() if n not in places})
    looked = {id(x): x for x in (*read, *others.tensors.values())}
    watched = tuple((place.get(i), Watched(x)) for i, x in looked.items())
    return Scored(others, places, watched, score_mod if isinstance(score_mod, ScoreMod | ir.Expr) else None)


def traced(score_mod: Any, valueless: bool = False) -> tuple[LiveMask, tuple[Tensor, ...]]:
    """A score mod as an expression over its own tensors, and the tensors whose values went into it."""
    if isinstance(score_mod, str | ScoreMod | ir.Expr):
        return of_bound(written(score_mod)), ()
    try:
        found = trace(score_mod, "score", valueless=valueless, by_place=True)
    except TraceError as error:
        raise ScoreModError(str(error)) from error
    if found.result is not FLOAT:
        raise ScoreModError(
            "score_mod returns an Int\n  it returns a Float: the score, or what was made of it; `x.float()` is one too"
        )
    if not found.scored:
        raise ScoreModError(
            "score_mod takes no score\n  it is score_mod(score, b, h, q_idx, kv_idx); a function of four that hides "
            "positions is a mask_mod, for create_block_mask"
        )
    return LiveMask(found.expr, found.tables), found.read


def apart(mod: LiveMask, visible: LiveMask | None) -> tuple[LiveMask, dict[str, str]]:
    """The score mod with names that the mask does not have, and which were changed to what."""
    names: dict[str, str] = {}
    mine, theirs = set(names_of(mod.expr)), set() if visible is None else set(visible.values)
    taken = mine | theirs
    for name in sorted(mine & theirs):
        names[name] = fresh(name, taken)
        taken.add(names[name])
    if not names:
        return mod, names
    return LiveMask(ir.renamed(mod.expr, names), {names.get(n, n): x for n, x in mod.values.items()}), names
