"""A check that all processes of `jax.distributed` make the same call: programs that differ wait without end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
from jax._src import distributed  # the store that jax.distributed keeps its own state in

from frisket.dsl.errors import PeerError

PATIENCE = 300  # seconds, as jax.distributed waits for processes to come
_met: set[str] = set()


def agree(call: Mapping[str, str]) -> None:
    """Compare what a call is made of with the other processes, the first time that this one is at such a call. Raises
    `PeerError` that names processes and what differs, or one that does not come."""
    if jax.process_count() == 1:
        return
    text = json.dumps(call, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()
    if key in _met:
        return
    mine, room = jax.process_index(), f"frisket/attend/{len(_met)}"
    _met.add(key)
    store: Any = distributed.global_state.client
    store.key_value_set(f"{room}/{mine}", text)
    others = range(1, jax.process_count()) if mine == 0 else [0]  # all with process 0: as many messages as processes
    wrong = []
    for process in others:
        theirs = json.loads(_of(store, f"{room}/{process}", process))
        wrong += [
            f"process {process} has another {n} than process {mine}:\n    {theirs.get(n)}\n    {call[n]}"
            for n in call
            if theirs.get(n) != call[n]
        ]
    if wrong:
        raise PeerError("processes call attend with different things\n  " + "\n  ".join(wrong))


def _of(store: Any, key: str, process: int) -> str:
    try:
        found: str = store.blocking_key_value_get(key, PATIENCE * 1000)
        return found
    except jax.errors.JaxRuntimeError as error:
        raise PeerError(
            f"process {process} has not come to this call of attend within {PATIENCE} s\n"
            "  it has died, is at other work, or has another program"
        ) from error
