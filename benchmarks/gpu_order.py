"""The rows of gpu.py in the order of their value, for machines that are there for minutes."""

from __future__ import annotations

import re

from gpu_parts import PARTS
from gpu_scale import Scale

ORDER = (  # part, a regular expression of its rows
    ("smoke", r".*"),
    ("first", r"frisket, .*"),
    ("speed", r".*, GQA \d+"),
    # the fused backward of Gluon against float64, then against the pair of kernels and cuDNN
    ("right", r"gluon, (full|causal|prefix\(p\)|window\(w\)|same\(t\)|causal_document\(off\)|softcap\(c\)|alibi), .*"),
    ("speed", r"backward: (causal|full|window 1024), D (128|64)"),
    ("right", r"cudnn, .*, shared heads.*"),  # lets calls with shared heads take cuDNN by themselves
    ("speed", r"(forward|backward): (causal|full), D (192|192/128|160|96)"),
    ("speed", r".*, transposed"),  # what cuDNN costs on the arrays of most models
    ("speed", r"(forward|backward): causal, D 512"),
    ("orders", r".*"),
    ("serving", r".*(int8|float8).*|MLA .*|shared prefix, .*|chunk .*"),
    ("eight", r"right: .*|speed: (causal|full), .*"),
    ("graphs", r".*"),
    ("steps", r".*"),
    ("right", r"flash, .*"),  # FlashAttention 4, where it is installed
)
ROUNDS, MINUTES = 9, 8.0


def ordered(scale: Scale) -> list[tuple[str, str]]:
    """(part, row) of the list."""
    return [(part, row) for part, rows in ORDER for row in PARTS[part].rows(scale) if re.fullmatch(rows, row)]
