"""What the text of a compiled module sends between devices."""

from __future__ import annotations

import re

import numpy as np

ITEM = {"f32": 4, "f64": 8, "bf16": 2, "f16": 2, "s32": 4, "s8": 1, "pred": 1}
COLLECTIVE = re.compile(
    r"= (\w+)\[([\d,]*)\][^ ]* (collective-permute|all-gather|reduce-scatter|all-reduce|all-to-all)(?:-start)?\(.*"
)


def collectives(text: str) -> list[tuple[str, int, str]]:
    """(kind, bytes of the result on a device, the line) of every collective of a module."""
    found = []
    for line in text.splitlines():
        if match := COLLECTIVE.search(line):
            dtype, shape, kind = match.groups()
            size = ITEM[dtype] * int(np.prod([int(n) for n in shape.split(",") if n], dtype=np.int64))
            found.append((kind, size, line))
    left = [x for x in text.splitlines() if re.search(r"\b(collective|all-gather|reduce-scatter|all-reduce)\S*\(", x)]
    assert len(left) == len(found), left  # none in a form that this does not read
    return found


def sent(text: str, ranks: int) -> np.ndarray:
    """Bytes that rank s sends to rank r at [s, r], where all devices are one group."""
    total = np.zeros((ranks, ranks), np.int64)
    for kind, size, line in collectives(text):
        if kind == "collective-permute":
            pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line).group(1)
            for s, r in re.findall(r"\{(\d+),(\d+)", pairs + "}"):
                total[int(s), int(r)] += size
        else:
            total += {"all-gather": size // ranks, "reduce-scatter": size}[kind]
    np.fill_diagonal(total, 0)
    return total
