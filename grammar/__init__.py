"""The grammar of the language: mask.lark to read, mask.json (LALR tables made by build.py) to parse with."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import memo


@dataclass(frozen=True)
class Tables:
    """The LALR tables that a parser runs on: see `build.tables` for the meaning of states and rules."""

    tokens: re.Pattern[str]
    words: frozenset[str]
    start: int
    end: int
    rules: list[tuple[str, int, str | None]]
    states: list[dict[str, int]]


@memo.memo(group="once")
def load() -> Tables:
    """The LALR tables, read once: about 1 ms, against 40 ms to build them from the grammar."""
    data: dict[str, Any] = json.loads((Path(__file__).parent / "mask.json").read_text(encoding="utf-8"))
    words = frozenset(s for s in data["signs"] if s.isalpha())
    # FLOAT before INT: the longer reading of `1.5` wins; signs come longest first
    patterns = [f"(?P<{name}>{data['patterns'][name]})" for name in sorted(data["patterns"])]
    signs = "|".join(re.escape(s) for s in data["signs"] if s not in words)
    return Tables(
        tokens=re.compile("|".join([*patterns, f"(?P<sign>{signs})"])),
        words=words,
        start=data["start"],
        end=data["end"],
        rules=[(origin, size, action) for origin, size, action in data["rules"]],
        states=data["states"],
    )
