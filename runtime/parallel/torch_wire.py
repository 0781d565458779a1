"""The steps of a rank, messages between the ranks of a process group, the errors of ranks that fail. Imports torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from threading import Thread
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from frisket.dsl.errors import PeerError

from .deal import Deal, Variant

_SHOWN = 160  # bytes of what a rank says of one thing
_SAID = 32 + _SHOWN
_ASKING = 2  # seconds
_AGREEING = 1  # the tag of these messages: no other message can be taken for one of them
_agreed: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


class Wire:
    """The ranks of a group, as `torch.distributed` has them: gloo, NCCL."""

    def __init__(self, group: Any = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise PeerError(
                "there is no process group: call torch.distributed.init_process_group() in every process, as under "
                "torchrun"
            )
        self.group: Any = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise PeerError("this process is not in the group")
        self.together = dist.get_backend(self.group) == "nccl"  # which fuses the messages of a batch

    def start(
        self, go: Iterable[tuple[int, Tensor]], come: Iterable[tuple[int, Tensor]], tag: int = 0
    ) -> Callable[[], None]:
        """Post messages to and from ranks of the group. The function that is returned waits for them."""
        ops = [("send to", rank, self._op(dist.isend, x, rank, tag)) for rank, x in go]
        ops += [("hear from", rank, self._op(dist.irecv, x, rank, tag)) for rank, x in come]
        batches = [ops] if self.together and ops else [[op] for op in ops]
        posted: list[tuple[Any, list[Any]]] = []
        for batch in batches:
            with self._naming(batch):
                posted += [(work, batch) for work in dist.batch_isend_irecv([op for *_, op in batch])]

        def wait() -> None:
            for work, batch in posted:
                with self._naming(batch):
                    work.wait()

        return wait

    def add(self, x: Tensor) -> None:
        """`x` becomes its sum over all ranks."""
        with self._naming([("add gradients with", r, None) for r in range(self.size) if r != self.rank]):
            dist.all_reduce(x, group=self.group)

    def _op(self, what: Any, x: Tensor, rank: int, tag: int) -> Any:
        return dist.P2POp(what, x, group=self.group, group_peer=rank, tag=tag)

    @contextmanager
    def _naming(self, ops: list[Any]) -> Any:
        """Names the ranks of `ops` in errors of the backend, which name an address at most."""
        try:
            yield
        except RuntimeError as error:  # dist.DistBackendError is one
            verb, peers = ops[0][0], sorted({rank for _, rank, _ in ops})
            said = f"rank {self.rank} waited to {verb} {ranks(peers)}"
            first = self._first(said)
            why = f"{'it has' if len(peers) == 1 else 'one of them has'} ended, or has not reached this call in time"
            before = [] if first == said else [f"before that, {first}"]
            raise PeerError(
                "\n  ".join([said, f"{why} (the timeout of the process group)", *before, str(error).splitlines()[0]])
            ) from error

    def _first(self, mine: str) -> str:
        """The message of the first rank to fail: other ranks fail because they miss it. It is asked for in a thread,
        since the rank that keeps the store may be lost."""
        found: list[str] = []

        def ask() -> None:
            with suppress(RuntimeError):
                found.append(self.group.get_group_store().compare_set("frisket: first to fail", "", mine).decode())

        asking = Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_ASKING)
        return found[0] if found else mine

    def agree(self, own: Mapping[str, str], device: Any) -> None:
        """Raise `PeerError` in every rank unless all give the same texts; texts that agreed are not sent again."""
        key = _hash("\n".join(f"{n}: {x}" for n, x in own.items())).hex()
        known = _agreed.setdefault(self.group, set())
        if key in known or self.size == 1:
            return
        mine = b"".join(_hash(x) + x.encode()[:_SHOWN].ljust(_SHOWN, b"\0") for x in own.values())
        out = torch.from_numpy(np.frombuffer(mine, np.uint8).copy()).to(device)
        every = {r: torch.empty_like(out) for r in range(self.size) if r != self.rank}
        self.start([(r, out) for r in every], every.items(), tag=_AGREEING)()
        texts = {r: bytes(x.cpu().numpy()) for r, x in every.items()} | {self.rank: mine}
        for i, name in enumerate(own):
            found: dict[bytes, list[int]] = {}
            for r in range(self.size):
                found.setdefault(texts[r][i * _SAID : (i + 1) * _SAID], []).append(r)
            if len(found) > 1:
                what = "\n".join(f"  {ranks(rs)}: {_shown(x)}" for x, rs in found.items())
                raise PeerError(f"the ranks differ in {name}\n{what}\n  every rank makes the same call")
        known.add(key)


def ranks(which: list[int]) -> str:
    """ "rank 2", "ranks 0, 1 and 3"."""
    *most, last = map(str, which)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _shown(said: bytes) -> str:
    text = said[32:].rstrip(b"\0").decode(errors="ignore")
    return text if len(text.encode()) < _SHOWN - 3 else f"{text[: _SHOWN - 24]}... ({said[:4].hex()})"


Message = tuple[int, int, int]  # (rank, start, stop): a rank, and a range of the sender's places


@dataclass(frozen=True)
class RankStep:
    """One call of a kernel, and the messages for it."""

    come: tuple[Message, ...]  # the keys to get from each rank; this rank's own need no message
    go: tuple[Message, ...]  # this rank's keys to send, with the rank that gets them
    parts: tuple[tuple[int, int, int], ...]  # the kernel's keys, (index in `come`, start, stop), by ascending position
    keys: NDArray[np.int32]  # the positions of the kernel's keys


def steps(deal: Deal, rank: int, variant: Variant) -> tuple[RankStep, ...]:
    """ "ring": the rank's own keys, then those of the rank one before, two before, ... as far as they are needed;
    "all-gather": all of them at once. Steps without a message stay: two ranks send keys one way and gradients the
    other, and both do so in one order only where steps have the same numbers."""
    needs = deal.needs.tolist()
    ways = [((rank - i) % deal.ranks, (rank + i) % deal.ranks) for i in range(deal.ranks)]
    rounds = [[way] for way in ways] if variant == "ring" else [ways]
    out = []
    for round in rounds:
        come = tuple((s, a, b) for s, _ in round for a, b in [needs[rank][s]] if b)
        go = tuple((t, a, b) for _, t in round for a, b in [needs[t][rank]] if b and t != rank)
        out.append(RankStep(come, go, *_in_order(deal, come)))
    return tuple(out)


def _in_order(deal: Deal, come: tuple[Message, ...]) -> tuple[Any, Any]:
    found = []
    for i, (rank, lo, hi) in enumerate(come):
        at = deal.positions(rank)[lo:hi]
        if len(come) == 1:
            return ((0, 0, hi - lo),), at
        cuts = [0, *(np.flatnonzero(np.diff(at) != 1) + 1).tolist(), hi - lo]
        found += [(int(at[a]), i, a, b) for a, b in pairwise(cuts)]
    found.sort()
    keys = [deal.positions(come[i][0])[come[i][1] + a : come[i][1] + b] for _, i, a, b in found]
    return tuple(part for _, *part in found), np.concatenate(keys) if keys else np.zeros(0, np.int32)


def start(positions: NDArray[np.int32]) -> int | None:
    """The first of some positions, if each is one more than the one before."""
    return int(positions[0]) if int(positions[-1]) - int(positions[0]) == len(positions) - 1 else None
