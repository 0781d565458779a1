"""Errors of ours that are also of the classes torch raises there, so that `except` clauses keep working."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from frisket.dsl import ir
from frisket.dsl.errors import ParameterError, ShapeError, TraceError
from frisket.dsl.show import show
from frisket.lowering.analysis.decide import Lookup


class MaskModError(TraceError, AssertionError, RuntimeError, ValueError):
    """An error for an argument that is no mask_mod; torch raises one of these three, whichever line notices."""


class ListError(ShapeError, AssertionError, RuntimeError):
    """Lists of tiles that do not fit together."""


class LengthError(ShapeError, RuntimeError):
    """Arrays of other lengths than their BlockMask; torch raises a ValueError, from 2.14 on a RuntimeError."""


class PickError(ShapeError, IndexError):
    """An index that picks nothing of a BlockMask."""


class OrderError(ShapeError, NotImplementedError):
    """An explicit order of dQ's sums belongs to the lists it was made for."""


class GatherError(ParameterError, IndexError):
    """A table is read outside its entries where the mask or score mod shows a position."""


class ScoreModError(TraceError, AssertionError, RuntimeError, ValueError):
    """An error for an argument that is no score_mod; torch raises one of these three, whichever line notices."""


class ArrayError(ShapeError, NotImplementedError):
    """Arrays that attention does not take."""


def check_lookups(lookups: Iterable[Lookup], renamed: Mapping[str, str] | None = None, words: Any = None) -> None:
    """Refuse the first lookup that leaves its table, with the position; torch wraps negative indices silently. Of a
    lookup in the user's names and its witness, `words` gives what the user wrote and where it is wrong."""
    for one in lookups:
        if one.proved or one.witness is None or one.value is None or one.node is None:
            continue
        b, h, q, k = one.witness
        node = ir.renamed(one.node, {new: old for old, new in (renamed or {}).items()})
        node, at = words(node, one.witness) if words else (node, f"query {q:,}, key {k:,} (b {b}, h {h})")
        known = [n for kind in ir.free_names(node) for n in kind]
        text, index = show(node, known), show(node.args[one.axis], known)
        negative = one.value < 0
        wraps = ", and torch would read from the end" if negative else ""
        bound = f"{index} >= 0" if negative else f"{index} < {one.size}"
        raise GatherError(
            f"`{text}` reads `{node.name}` at {one.value} on axis {one.axis}, which has entries 0..{one.size - 1}, "
            f"at {at}{wraps}\n"
            f"  hide such positions first, `({bound}) & ...`, or clamp the index: `({index}).clamp(0, {one.size - 1})`"
        )
