"""Dataclasses as dicts and as JSON, and the output of attention operators."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from dataclasses import replace as _replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from frisket.dsl.errors import ParameterError

Codec = tuple[Callable[[Any], Any], Callable[[Any], Any]]  # to what JSON has, and back


def array_to_json(x: Any) -> dict[str, Any]:
    held = np.asarray(x)
    return {"dtype": held.dtype.name, "shape": list(held.shape), "base64": base64.b64encode(held.tobytes()).decode()}


def array_from_json(x: Mapping[str, Any]) -> Any:
    flat = np.frombuffer(base64.b64decode(x["base64"]), jnp.dtype(x["dtype"]))
    return jnp.asarray(flat.reshape(x["shape"]))


class Record:
    """A dataclass to and from dicts and JSON; `codecs` says how the fields that JSON has no word for are written."""

    codecs: ClassVar[dict[str, Codec]] = {}

    def replace(self, **changes: Any) -> Self:
        """A copy with other values."""
        self._check(changes)
        return _replace(self, **changes)  # type: ignore[type-var]

    def to_dict(self) -> dict[str, Any]:
        """The values of all fields, as they are."""
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A record from the result of `to_dict`, or some of it: fields that are missing have their defaults."""
        cls._check(values)
        return cls(**values)

    def to_json(self, **kwargs: Any) -> str:
        """A text that `from_json` reads, in another process too; `kwargs` as for `json.dumps`: `indent=2`."""
        return json.dumps({n: self._coded(n, x, 0) for n, x in self.to_dict().items()}, **kwargs)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The record in a text of `to_json`."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError:
            values = None
        if not isinstance(values, dict):
            raise ParameterError(f"this is no {cls.__name__}: {text[:80]!r}")
        cls._check(values)
        return cls(**{n: cls._coded(n, x, 1) for n, x in values.items()})

    @classmethod
    def _coded(cls, name: str, value: Any, way: int) -> Any:
        return cls.codecs[name][way](value) if value is not None and name in cls.codecs else value

    @classmethod
    def _check(cls, values: Mapping[str, Any]) -> None:
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        if unknown := [n for n in values if n not in known]:
            raise ParameterError(f"{cls.__name__} has no field {unknown[0]!r}; it has {', '.join(known)}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class AttentionOutput(Record):
    """`op(q, k, v).attention_outputs`, [batch, length, heads, v_dim]; a pytree.

    `attention_weights` [batch, heads, q_len, kv_len] is None from operators that never make them, as all of frisket's.

    >>> import jax.numpy as jnp
    >>> made = AttentionOutput(attention_outputs=jnp.ones((1, 8, 2, 4)))
    >>> again = AttentionOutput.from_json(made.to_json())
    >>> again.attention_outputs.shape, AttentionOutput.from_dict(made.to_dict()).attention_weights
    ((1, 8, 2, 4), None)
    >>> made.replace(attention_weights=jnp.ones((1, 2, 8, 8))).attention_weights.shape
    (1, 2, 8, 8)
    """

    attention_weights: Any = None
    attention_outputs: Any = None

    codecs: ClassVar[dict[str, Codec]] = dict.fromkeys(
        ("attention_weights", "attention_outputs"), (array_to_json, array_from_json)
    )
