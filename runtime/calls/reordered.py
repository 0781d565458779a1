"""An attention whose arrays hold positions of the problem in another order, or that begin at another position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from frisket.dsl.errors import ParameterError
from frisket.dsl.ir import COORDINATES, renamed, substitute, var
from frisket.runtime.machine.bound import BoundExpr, position
from frisket.runtime.machine.parameters import as_value, digest, names_of

from .program import CallProgram


def moved(program: CallProgram, coordinates: Mapping[str, Any]) -> CallProgram:
    """A program read at other positions: texts or numbers for some of b, h, q and k, and values of names in the texts.
    A name without a value there is that of the mask or the score mod."""
    texts = {n: x for n, x in coordinates.items() if n in COORDINATES}
    if coordinates and not texts:
        raise ParameterError("at() takes coordinates: b, h, q or k, each a text or an int")
    own, taken = {**program.scalars, **program.tables}, set(program.names)
    given = {n: as_value(n, x) for n, x in coordinates.items() if n not in texts}
    found = {n: position(n, x, {**own, **given}) for n, x in texts.items()}
    if unused := [n for n in given if not any(n in names_of(e) for e in found.values())]:
        raise ParameterError(f"`{unused[0]}` is given and no coordinate uses it")
    others: dict[str, str] = {}  # names that mean something else already
    for n in given:
        if n in taken and (n not in own or digest(own[n]) != digest(given[n])):
            others[n] = next(new for i in count(2) if (new := f"{n}_{i}") not in taken | given.keys())
            taken.add(others[n])
    values = {**own, **{others.get(n, n): x for n, x in given.items()}}
    change = {var(n): renamed(e, others) for n, e in found.items()}
    origin = program.origin

    def put(p: Any) -> Any:
        e = substitute(p.expr, change)
        names = names_of(e)
        return type(p)(e, {n: x for n, x in values.items() if n in names}, origin.renamed({n: n for n in names}))

    places = program.places or ()
    places = (*(BoundExpr(var(n)) for n in COORDINATES[: 4 - len(places)]), *places)
    return replace(program, places=places).changed(put)
