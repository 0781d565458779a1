"""Statistics of the weights of attention: what a call may ask for, and what it gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.lowering.plan import Geometry
from frisket.runtime.calls.arrays import NATURAL, framework_of
from frisket.runtime.machine.caller import as_int


class Statistics(NamedTuple):
    """The statistics that `Attention.statistics` was asked for; the others are None.

    >>> import torch, frisket as fk
    >>> q, k, v = torch.ones(3, 1, 2, 4, 8)
    >>> results = fk.compile("causal").statistics(q, k, v, entropy=True, argmax=True)
    >>> results.argmax[0, 0].tolist(), results.columns is None
    ([0, 0, 0, 0], True)
    """

    columns: Any = None  # [batch, kv_heads, kv_len]
    entropy: Any = None  # [batch, heads, q_len]
    argmax: Any = None  # [batch, heads, q_len]
    argmax_weight: Any = None  # [batch, heads, q_len]
    top: Any = None  # [batch, heads, q_len, n]
    top_weight: Any = None  # [batch, heads, q_len, n]


class Wanted(NamedTuple):
    """The statistics that a call asks for."""

    columns: bool
    entropy: bool
    argmax: bool
    top: int
    per_query: bool  # whether columns are those of each query head

    @classmethod
    def of(cls, columns: Any, entropy: Any, argmax: Any, top: Any, per: Any) -> Self:
        """Read the keywords of a call; raises `ParameterError` for wrong ones."""
        for name, x in (("columns", columns), ("entropy", entropy), ("argmax", argmax)):
            if not isinstance(x, bool):
                raise ParameterError(f"{name} is {x!r}; it is True or False")
        top = as_int(top)
        if not isinstance(top, int) or isinstance(top, bool) or top < 0:
            raise ParameterError(f"top is {top!r}; it is how many keys to name for each query, 0 or more")
        if per not in ("key", "query"):
            raise ParameterError(f'per is {per!r}; write "key" or "query": columns of key heads or of query heads')
        if not (columns or entropy or argmax or top):
            raise ParameterError(
                "no statistic is asked for; say which: columns=True, entropy=True, argmax=True or top=4"
            )
        return cls(columns, entropy, argmax, top, per == "query")

    @property
    def by_name(self) -> dict[str, Any]:
        """The statistics by name."""
        return {"columns": self.columns, "entropy": self.entropy, "argmax": self.argmax, "top": self.top}

    def check_lse(self, lse: Any, q: Any, layout: str | None) -> None:
        """Raise unless `lse` has an entry for each head and query of q."""
        shape = tuple(getattr(q, "shape", ()))
        heads_first = (layout or NATURAL.get(framework_of(q) or "", "bshd")) == "bhsd"
        rows = shape[:3] if heads_first else (*shape[:1], *shape[2:0:-1])
        # the call says what is wrong with another q
        if len(shape) == 4 and tuple(getattr(lse, "shape", ())) != rows:
            have = f"has the shape {tuple(lse.shape)}" if hasattr(lse, "shape") else f"is a {type(lse).__name__}"
            raise ShapeError(f"lse {have}; it is [batch, heads, q_len] = {list(rows)}, what return_lse=True gives")
        if "float" not in str(lse.dtype):
            raise ParameterError(f"lse has the dtype {lse.dtype}; it has Floats, as return_lse=True gives them")

    def nothing(self, g: Geometry, full: Callable[..., Any], real: Any, int_: Any) -> dict[str, Any]:
        """The results by name of rows that see no key: columns [batch, kv_heads, group, kv_len], others [batch, heads,
        q_len, ...]. `full(shape, value, dtype)` makes an array."""
        rows = g.batch, g.heads, g.q_len
        results = {}
        if self.columns:
            results["columns"] = full((g.batch, g.kv_heads, g.heads // g.kv_heads, g.kv_len), 0, real)
        if self.entropy:
            results["entropy"] = full(rows, 0, real)
        for name, shape in (("argmax", rows), ("top", (*rows, self.top))):
            if self.by_name[name]:
                results |= {name: full(shape, -1, int_), f"{name}_weight": full(shape, 0, real)}
        return results

    def whole(self, results: dict[str, Any]) -> Statistics:
        """The results, columns as they are asked for."""
        columns = results.get("columns")
        if columns is not None:
            batch, heads, group, n = columns.shape
            results["columns"] = columns.reshape(batch, heads * group, n) if self.per_query else columns.sum(2)
        return Statistics(**results)
