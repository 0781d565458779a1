"""Warnings that a process gives once, at the line of the user's code."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Hashable

INSIDE = frozenset({"frisket", "jax", "jaxlib", "torch", "contextlib"})
SAID: set[Hashable] = set()


def warn_once(text: str, about: Hashable = None) -> None:
    """Warn at the caller outside of frisket and what calls it back, the first time for each text, or each `about`."""
    key = text if about is None else about
    if key in SAID:
        return
    SAID.add(key)  # before the warning, which may be an error
    # `skip_file_prefixes` is of Python 3.12
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
