"""The fields that users add to the config of a model or of vLLM."""

from __future__ import annotations

from collections.abc import Iterable

from frisket.dsl.errors import ParameterError, nearest

FIELDS = "frisket_mask", "frisket_score", "frisket_params"


def check_fields(names: Iterable[str], where: str) -> None:
    """Raise `ParameterError` for a name that begins as a field does and is none: configs take any.

    >>> check_fields(["frisket_masks", "dtype"], "config.")
    Traceback (most recent call last):
    frisket.dsl.errors.ParameterError: config.frisket_masks is not read; did you mean `frisket_mask`?
      the fields are frisket_mask, frisket_score, frisket_params
    """
    if wrong := [n for n in names if str(n).startswith("frisket") and n not in FIELDS]:
        near = nearest(wrong[0], FIELDS)
        raise ParameterError(
            f"{where}{wrong[0]} is not read{f'; did you mean `{near}`?' if near else ''}\n"
            f"  the fields are {', '.join(FIELDS)}"
        )
