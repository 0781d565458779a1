"""Groups work for batched GEMMs: rows of tiles that may run together, and heads that may run together.

Many masks repeat: a window's rows see equal spans, each one tile along; a prefix's rows see one span. Such rows become
one `RowStep` whose K/V pieces are overlapping views, so that 57,000 small spans are not 57,000 steps of a Python loop.

Threads each run whole blocks with single-threaded torch calls. A block is a dozen short library calls. Spreading each
of them over all cores costs a barrier a call, and one late core (another process is enough) holds up every one of them.
Blocks are independent and need none.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Barrier
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from frisket.grammar.memo import memo
from frisket.lowering.plan import Geometry, Spans

TALL = 512  # queries of a block, where keys do not move with the row


@dataclass(frozen=True)
class KeyPiece:
    """Keys `[start, stop)` of a step's first row, in tokens; `[full_start, full_stop)` needs no mask.
    The next row's piece starts `stride` tokens later."""

    start: int
    full_start: int
    full_stop: int
    stop: int
    stride: int

    @property
    def width(self) -> int:
        return self.stop - self.start

    def of_row(self, row: int) -> KeyPiece:
        """The piece of a later row."""
        by = row * self.stride
        return KeyPiece(self.start + by, self.full_start + by, self.full_stop + by, self.stop + by, self.stride)


@dataclass(frozen=True)
class RowStep:
    """`count` rows of `height` queries from query `start` on, all with the same pieces but for their strides."""

    start: int
    height: int
    count: int
    pieces: tuple[KeyPiece, ...]

    @property
    def width(self) -> int:
        return sum(p.width for p in self.pieces)


@dataclass(frozen=True)
class Heads:
    """`count` key heads of one batch entry from `kv` on, with query heads `[first, last)` of each one's group."""

    batch: int
    kv: int
    count: int
    first: int
    last: int


@dataclass(frozen=True)
class Block:
    """Rows and heads that run as one batch: `[batch, group, height, width]` of scores."""

    heads: Heads
    step: RowStep
    by_row: bool  # the batch axis walks rows; otherwise key heads

    @property
    def batch(self) -> int:
        return self.step.count if self.by_row else self.heads.count

    @property
    def group(self) -> int:
        return self.heads.last - self.heads.first

    @property
    def rows(self) -> int:
        return self.group * self.step.height

    @property
    def cells(self) -> int:
        return self.batch * self.rows * self.step.width

    @property
    def queries(self) -> slice:
        return slice(self.step.start, self.step.start + self.step.height * self.step.count)

    @property
    def place(self) -> tuple[int, slice, slice, slice]:
        """The part of an array [batch, kv_heads, group, q_len, ...] that belongs to the block."""
        m = self.heads
        return m.batch, slice(m.kv, m.kv + m.count), slice(m.first, m.last), self.queries

    def slides(self, piece: KeyPiece) -> bool:
        """Whether all rows see the piece at one distance."""
        return not self.by_row or self.step.count == 1 or piece.stride == self.step.height


def cut(step: RowStep, member: Heads, budget: int) -> Iterator[Block]:
    """Blocks of at most `budget` scores if possible, cut along whichever axis needs fewer of them."""
    group = member.last - member.first
    tall = max(64, min(TALL, budget // (group * max(step.width, 1))))
    if step.count == 1 and step.height > tall:
        for part in shares(step.height, tall):
            yield from cut(replace(step, start=step.start + part.start, height=len(part)), member, budget)
        return
    room = max(1, budget // (group * step.height * max(step.width, 1)))
    by_head = step.count * -(-member.count // min(room, member.count))
    by_row = member.count * -(-step.count // min(room, step.count))
    if by_head <= by_row:
        for i in range(step.count):
            for part in shares(member.count, room):
                some = replace(member, kv=member.kv + part.start, count=len(part))
                yield Block(some, rows_of_step(step, i, 1), by_row=False)
        return
    for part in shares(step.count, room):  # heads inside: they share a mask
        for j in range(member.count):
            one = replace(member, kv=member.kv + j, count=1)
            yield Block(one, rows_of_step(step, part.start, len(part)), by_row=True)


def steps(spans: Spans, slice_: int, geometry: Geometry, block: tuple[int, int]) -> list[RowStep]:
    """The steps of one slice of the span table, in order. A row that sees no key has no pieces."""
    count = spans.count[slice_]
    # tokens of a long call may leave the 32 bits of spans
    tokens = np.minimum(spans.bounds[slice_].astype(np.int64) * block[1], geometry.kv_len)
    tokens[np.arange(tokens.shape[1]) >= count[:, None]] = 0
    bare = tokens[..., 2] <= tokens[..., 1]  # nothing full: say so in one way, all of it behind
    tokens[..., 1:3] = np.where(bare[..., None], tokens[..., :1], tokens[..., 1:3])
    row_steps = []
    for first, last in _runs(tokens, count, geometry.q_len, block[0]):
        start = first * block[0]
        moves = tokens[first + 1] - tokens[first] if last - first > 1 else np.zeros_like(tokens[first])
        records = zip(tokens[first].tolist(), moves[:, 0].tolist())
        pieces = [KeyPiece(lo, full_lo, full_hi, hi, move) for (lo, full_lo, full_hi, hi), move in records if hi > lo]
        height = min(block[0], geometry.q_len - start)
        if last - first > 1 and not moves.any():  # the same keys for all: one taller tile
            row_steps.append(RowStep(start, min(last * block[0], geometry.q_len) - start, 1, tuple(pieces)))
        else:
            row_steps.append(RowStep(start, height, last - first, tuple(pieces)))
    return row_steps


def _runs(tokens: NDArray[np.int64], count: NDArray[np.int32], q_len: int, block_q: int) -> Iterator[tuple[int, int]]:
    """Maximal ranges of rows where each record moves by one constant from row to row."""
    rows = len(count)
    moves = np.diff(tokens, axis=0)
    links = (count[1:] == count[:-1]) & (moves == moves[..., :1]).all((1, 2)) & (moves >= 0).all((1, 2))
    short = rows * block_q > q_len  # the ragged last row has another height, unless nothing moves
    if short and rows > 1:
        links[-1] &= not moves[-1].any()
    same = np.zeros(rows - 1, bool)  # link i continues link i - 1
    same[1:] = links[1:] & links[:-1] & (moves[1:] == moves[:-1]).all((1, 2))
    first = 0
    while first < rows:
        last = first + 1
        if last < rows and links[first]:
            last += 1
            while last < rows and same[last - 1]:
                last += 1
        yield first, last
        first = last


def heads(spans: Spans, geometry: Geometry) -> dict[int, list[Heads]]:
    """The heads that share each slice; a group of query heads stays whole where all of it shares."""
    group = geometry.heads // geometry.kv_heads
    by_slice: dict[int, list[Heads]] = {}
    for b in range(geometry.batch):
        for kv, row in enumerate(spans.slice_of[b].reshape(geometry.kv_heads, group).tolist()):
            cuts = [0, *(i for i in range(1, group) if row[i] != row[i - 1]), group]
            for first, last in itertools.pairwise(cuts):
                known = by_slice.setdefault(row[first], [])
                if known and (a := known[-1]) == Heads(b, kv - a.count, a.count, first, last):
                    known[-1] = Heads(b, a.kv, a.count + 1, first, last)
                else:
                    known.append(Heads(b, kv, 1, first, last))
    return by_slice


def rows_of_step(step: RowStep, by: int, count: int) -> RowStep:
    """A step with rows `[by, by + count)` alone."""
    pieces = tuple(p.of_row(by) for p in step.pieces)
    return replace(step, start=step.start + by * step.height, count=count, pieces=pieces)


def shares(n: int, room: int) -> list[range]:
    parts = -(-n // max(1, min(room, n)))
    return [range(a, b) for a, b in itertools.pairwise([n * i // parts for i in range(parts + 1)])]


def chunks(pieces: tuple[KeyPiece, ...], room: int) -> list[list[KeyPiece]]:
    """Pieces, cut where they are too wide, in lists of at most `room` keys."""
    groups: list[list[KeyPiece]] = [[]]
    left = room
    for p in pieces:
        start = p.start
        while start < p.stop:
            if left <= 0:
                groups.append([])
                left = room
            stop = min(p.stop, start + left)
            lo, hi = (min(max(x, start), stop) for x in (p.full_start, p.full_stop))
            groups[-1].append(KeyPiece(start, lo, hi, stop, p.stride))
            left -= stop - start
            start = stop
    return groups


def triangles(todo: list[RowStep]) -> Iterator[list[RowStep]]:
    """Consecutive rows that share a first key and end in one masked tile, each a tile further down; others alone."""
    i = 0
    while i < len(todo):
        j = i
        while j < len(todo) and _diagonal(todo[i], todo[j]):
            j += 1
        yield todo[i : max(j, i + 1)]
        i = max(j, i + 1)


def _diagonal(first: RowStep, step: RowStep) -> bool:
    """Whether `step` continues a triangle that begins with `first`."""
    if step.count != 1 or len(step.pieces) != 1 or len(first.pieces) != 1:
        return False
    a, p = first.pieces[0], step.pieces[0]
    down = step.start - first.start
    return p.full_start == p.start == a.start and p.full_stop == a.full_stop + down and p.stop > p.full_stop


def joined(rows: list[RowStep]) -> RowStep:
    """One tall step of the rows of a triangle; keys right of the last diagonal tile are hidden by the mask."""
    first, last = rows[0], rows[-1]
    if len(rows) == 1:
        return first
    height = last.start + last.height - first.start
    stop = min(last.pieces[0].stop, first.pieces[0].full_stop + height)
    return RowStep(first.start, height, 1, (replace(first.pieces[0], stop=stop),))


def partial(p: KeyPiece) -> bool:
    return p.full_start > p.start or p.full_stop < p.stop


T = TypeVar("T")


def spread(run: Callable[[T], None], blocks: list[T]) -> None:
    """Run `run` on every block, the last of the list first, over as many threads as torch would use."""
    import torch

    threads = min(torch.get_num_threads(), len(blocks))
    if threads < 2:
        for block in reversed(blocks):
            run(block)
        return

    inference = torch.is_inference_mode_enabled()  # a mode of this thread: others may not write to what it made

    def drain() -> None:
        with torch.inference_mode() if inference else torch.no_grad():
            while blocks:
                try:
                    block = blocks.pop()
                except IndexError:  # another thread took the last one
                    return
                run(block)

    tasks: list[Future[None]] = []
    with suppress(RuntimeError):  # no thread can be had, or the interpreter ends and starts none
        pool = _pool(torch.get_num_threads(), os.getpid())
        for _ in range(threads):
            tasks.append(pool.submit(drain))
    if not tasks:
        drain()
    for done in tasks:
        done.result()  # raises what the thread raised


@memo(4)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """The pool of threads in which torch starts no threads; threads do not survive a fork, hence `process`."""
    import torch

    together = Barrier(threads)  # every thread takes one of the first tasks
    pool = ThreadPoolExecutor(threads, "frisket")

    def alone() -> None:
        torch.set_num_threads(1)
        together.wait()

    try:
        for ready in [pool.submit(alone) for _ in range(threads)]:
            ready.result()
    except RuntimeError:  # one could not be started: the others do not wait for it
        together.abort()
        raise
    torch.set_num_threads(threads)  # torch keeps the last number for threads yet to come: put it back
    return pool
