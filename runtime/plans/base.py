"""CallPlan: what calls ask of a plan, whether its values are numbers of the host or live on a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from frisket.dsl.ir import Expr
from frisket.lowering.plan import Origin, Sizes
from frisket.runtime.calls.program import CallProgram
from frisket.runtime.calls.stored_kv import Stored


class CallPlan(Protocol):
    """Tables and layout of a mask and a score mod for given lengths; `Plan` and `FlatPlan` are both."""

    on_device: bool
    given: dict[str, Any]  # values that live elsewhere, and are no part of it
    ready: dict[Any, Any]  # the calls that were prepared with it
    shown: set[Any]  # targets whose stages FRISKET_SHOW has printed

    @property
    def q_len(self) -> int: ...
    @property
    def kv_len(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def origin(self) -> Origin: ...
    @property
    def sizes(self) -> Sizes | None: ...
    @property
    def dropout(self) -> bool: ...
    @property
    def by_table(self) -> bool: ...
    @property
    def common(self) -> Any: ...
    @property
    def narrow(self) -> bool: ...
    @property
    def planner(self) -> str: ...
    @property
    def program(self) -> CallProgram: ...
    @property
    def host_program(self) -> CallProgram: ...
    @property
    def simplified(self) -> tuple[Expr | None, Expr | None]: ...
    @property
    def scalars(self) -> Mapping[str, Any]: ...

    def work(self, block: tuple[int, int], proofs: bool = False) -> Any:
        """The loop plan, spans, slots and tables for tiles of `block`."""

    def rows(self, block: tuple[int, int]) -> Any:
        """Records of key tiles per row of query tiles."""

    def columns(self, block: tuple[int, int]) -> Any:
        """Records of query tiles per row of key tiles."""

    def again(self, values: dict[str, Any]) -> CallPlan:
        """The plan for other values of what lives elsewhere."""

    def stored_as(self, how: Stored | None) -> CallPlan:
        """The plan for keys and values that are stored so."""
