"""Runs a flat planner in C++ on tables of the host."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import BackendError
from frisket.dsl.ir import SIZES
from frisket.dsl.program import entries_of
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.plan import Sizes
from frisket.lowering.planner import cpp as text
from frisket.lowering.planner.planner import Planner
from frisket.runtime.machine import cpp_build as native_build

Array = NDArray[Any]
DTYPES: dict[Any, Any] = {INT: np.int64, FLOAT: np.float64, BOOL: np.bool_}


def spans(
    plan: Planner, at: tuple[Array, ...], sizes: Sizes, values: Mapping[str, Any], q_len: int, kv_len: int,
    block: tuple[int, int], room: int,
) -> tuple[Array, Array, bool]:  # fmt: skip
    """(bounds int32 [slices, rows, R, 4], count int32 [slices, rows], overflow), as of `run.spans`; `values` are
    arrays of the host and numbers by the planner's names."""
    return called(function(plan), plan, at, sizes, values, q_len, kv_len, block, room)


def function(plan: Planner) -> Any:
    """The planner, compiled."""
    run = native_build.library(text.emit(plan)).frisket_plan
    run.restype, run.argtypes = ctypes.c_int64, [ctypes.c_void_p]
    return run


def called(
    run: Any, plan: Planner, at: tuple[Array, ...], sizes: Sizes, values: Mapping[str, Any], q_len: int, kv_len: int,
    block: tuple[int, int], room: int, records: int | None = None,
) -> tuple[Array, Array, bool]:  # fmt: skip
    made = Prepared(run, plan, at, sizes, values, q_len, kv_len, block, room, records)
    return made.bounds, made.count, made({})


class Prepared:
    """A planner and what it reads: called with the addresses of other tables, of the same shapes, it plans again.

    `bounds` int32 [slices, rows, R, 4] and `count` int32 [slices, rows] hold what it wrote last."""

    def __init__(
        self, run: Any, plan: Planner, at: tuple[Array, ...], sizes: Sizes, values: Mapping[str, Any], q_len: int,
        kv_len: int, block: tuple[int, int], room: int, records: int | None = None,
    ) -> None:  # fmt: skip
        bq, bk = block
        records = records or plan.records(-(-kv_len // bk))
        place = [np.ascontiguousarray(x, np.int64).reshape(-1) for x in at]
        self.bounds = np.zeros((len(place[0]), -(-q_len // bq), records, 4), np.int32)
        self.count = np.zeros(self.bounds.shape[:2], np.int32)
        self.run, self.where, self.types = run, text.words(plan), text.table_types(plan)
        word = self.word = np.zeros(self.where[""], np.int64)
        tables = {n: np.ascontiguousarray(entries_of(values[n]), DTYPES[self.types[n]]) for n in plan.tables}
        self.alive = place, tables
        numbers = (len(place[0]), q_len, kv_len, bq, bk, room, records)
        word[: len(text.HEAD)] = [*numbers, *(_address(x) for x in (*place, self.bounds, self.count))]
        for name, size in zip(SIZES, sizes, strict=True):
            word[self.where[name]] = size
        for name, type in plan.scalars.items():
            value = np.asarray(values[name], np.float64 if type is FLOAT else np.int64)
            word[self.where[f"scalar {name}"]] = value.view(np.int64)
        for name, table in tables.items():
            start = self.where[f"table {name}"]
            word[start] = _address(table)
            word[start + 1 : start + 1 + table.ndim] = table.shape
        self.address = _address(word)

    def __call__(self, tables: Mapping[str, int]) -> bool:
        """Plan for other tables. Returns whether some row has more runs than there is room for."""
        for name, address in tables.items():
            self.word[self.where[f"table {name}"]] = address
        self.bounds.fill(0)  # records past `count` are those of an earlier call
        code = self.run(self.address)
        if code == 2:
            raise BackendError("the planner of this mask ran out of memory; free some, or give it shorter tables")
        return bool(code)


def _address(x: Any) -> int:
    return int(x.ctypes.data)
