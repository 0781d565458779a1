"""Tiles as text, a picture for every batch entry and head.

>>> import torch
>>> print(to_string(torch.tensor([[1, 0, 0], [2, 1, 0], [2, 2, 1]], dtype=torch.uint8)))
()
▒▒
██▒▒
████▒▒
<BLANKLINE>
"""

from __future__ import annotations

import math
from itertools import islice, product

import torch
from torch import Tensor
from torch.nn.functional import pad

from frisket.lowering.analysis.tiles import FULL

LEGEND = "█ full, ▒ partial (█ or ▒: every tile of the cell is computed), ░ some of the cell, blank none"


def to_string(kinds: Tensor, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
    """`kinds` uint8 [..., rows, columns]: 0 empty, 1 partial, 2 full. A cell stands for the tiles of a rectangle, as
    many as make the picture fit `grid_size` = (rows, columns); -1 draws every tile."""
    *batch, rows, columns = kinds.shape
    fit = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
    step = tuple(max(1, -(-n // m)) if m > 0 else 1 for n, m in zip((rows, columns), fit, strict=True))
    found = []
    for index in islice(product(*map(range, batch)), limit):
        lines = ["".join(2 * c for c in line) + "\n" for line in _cells(kinds[index], step)]
        found.append(f"{index}\n{''.join(lines)}")
    if math.prod(batch) > limit:
        found += [
            "...",
            "To print out more, set BlockMask.to_string(limit=N)",
            "You can also index (BlockMask[batch, head]) to choose a specific batch or head",
        ]
    return "\n".join(found)


def _cells(kinds: Tensor, step: tuple[int, ...]) -> list[str]:
    """A character for every cell of one picture."""
    kinds = kinds.cpu()
    rows, columns = kinds.shape
    inside = torch.ones_like(kinds)

    def total(x: Tensor) -> Tensor:
        x = pad(x.long(), (0, -columns % step[1], 0, -rows % step[0]))
        return x.view(-1, step[0], x.shape[1] // step[1], step[1]).sum(dim=(1, 3))

    tiles, read, full = total(inside), total(kinds > 0), total(kinds == FULL)
    marks = torch.where(full == tiles, 3, torch.where(read == tiles, 2, (read > 0).long()))
    return ["".join(" ░▒█"[c] for c in line) for line in marks.tolist()]
