"""The tables of the masks of reorder.py, for this commit and for earlier ones."""

from __future__ import annotations

from typing import Any

import numpy as np


def tables(mask: str, length: int) -> dict[str, Any]:
    draws = np.random.default_rng(0)
    if "blocks" in mask:
        return {"blocks": draws.random((length // 16, length // 16)) < 0.03}
    return {"doc": draws.permutation(np.arange(length) % 64).astype(np.int32)} if "doc" in mask else {}
