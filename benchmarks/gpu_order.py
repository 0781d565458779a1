"""The rows of gpu.py in the order of their value, for machines that are there for minutes."""

from __future__ import annotations

import re

from gpu_parts import PARTS
from gpu_scale import Scale

ORDER = (  # part, a regular expression of its rows
    ("smoke", r".*"),
    ("speed", r".*, GQA \d+"),
    ("right", r"cudnn, .*, shared heads.*"),  # lets calls with shared heads take cuDNN by themselves
    ("speed", r"(forward|backward): causal, D (192|192/128|96)"),
    ("speed", r"(forward|backward): causal, D 512"),
    ("orders", r".*"),
    ("serving", r".*(int8|float8).*|MLA .*"),
    ("graphs", r".*"),
    ("steps", r".*"),
    ("right", r"flash, .*"),  # FlashAttention 4, where it is installed
)
ROUNDS, MINUTES = 9, 8.0


def ordered(scale: Scale) -> list[tuple[str, str]]:
    """(part, row) of the list."""
    return [(part, row) for part, rows in ORDER for row in PARTS[part].rows(scale) if re.fullmatch(rows, row)]
