"""Questions about masks, answered exactly or not at all."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """Truthy or falsy; `witness` is the (b, h, q, k) that shows why, None where no position can."""

    holds: bool
    witness: tuple[int, int, int, int | None] | None = None

    def __bool__(self) -> bool:
        return self.holds
