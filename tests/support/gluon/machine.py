"""One block of a GPU's threads as far as warp-specialised kernels see it: partitions that run by themselves, mbarriers
with phases, counts and bytes, copies by TMA, products of warp groups and into tensor memory, and memory that holds NaN
until written.

Partitions are threads of which one runs at a time. Wherever they synchronise, a scheduler draws who goes on, a copy
that arrives among them, by a seed: equal seeds give equal runs. What goes wrong is told from the order that barriers
establish, not from the one that was drawn: every partition has a clock of what it knows of the others, an arrival
hands it on, and a wait takes it over. So a slot that is read before its copy is known to have arrived, or overwritten
before its readers are known to have finished, is found in any run. Warps of one partition go together here; the
compiler puts a barrier of theirs before every arrival, which `test_gluon_compiled.py` sees to.
"""

from __future__ import annotations

import math
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .numbers import BF16, F32, Kind, Tensor, rounded


class FaultError(AssertionError):
    """A mistake of a kernel that a GPU might not show."""


class DeadlockError(FaultError):
    """Partitions that wait for each other."""


class Stopped(BaseException):
    """Ends the other partitions after a fault."""


@dataclass
class Clock:
    """The events that are known to have happened: of every partition so many, and these copies."""

    ticks: dict[str, int] = field(default_factory=dict)
    copies: set[int] = field(default_factory=set)

    def join(self, other: Clock) -> None:
        for name, tick in other.ticks.items():
            self.ticks[name] = max(self.ticks.get(name, 0), tick)
        self.copies |= other.copies

    def copy(self) -> Clock:
        return Clock(dict(self.ticks), set(self.copies))

    def knows(self, event: tuple[str, int]) -> bool:
        return self.ticks.get(event[0], 0) >= event[1]


class Barrier:
    """An mbarrier: a phase ends when `count` arrivals and all expected bytes are there."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count
        self.pending, self.bytes, self.done = count, 0, 0
        self.gathered, self.known = Clock(), Clock()  # by arrivals of this phase, by those of phases that ended

    def arrive(self, clock: Clock, count: int = 1) -> None:
        if self.pending < count:
            raise FaultError(f"{self.name}: an arrival too many, phase {self.done} is waiting for none")
        self.pending -= count
        self.gathered.join(clock)
        self._end()

    def expect(self, clock: Clock, size: int) -> None:
        self.bytes += size
        self.arrive(clock)

    def receive(self, clock: Clock, size: int) -> None:
        if size > self.bytes:
            raise FaultError(f"{self.name}: {size} bytes arrive where {self.bytes} are expected")
        self.bytes -= size
        self.gathered.join(clock)
        self._end()

    def _end(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.done = self.count, self.done + 1
            self.known.join(self.gathered)
            self.gathered = Clock()

    def passes(self, parity: int) -> bool:
        return self.done & 1 != parity

    def __str__(self) -> str:
        return f"{self.name} in phase {self.done}, {self.pending} arrivals and {self.bytes} bytes short"


class Slot:
    """A tile of shared memory: what wrote it last, and who has read it since."""

    def __init__(self, name: str, shape: Sequence[int], kind: Kind) -> None:
        self.name, self.kind = name, kind
        self.data = np.full(shape, np.nan, np.float32)
        self.copy: int | None = None  # the copy that filled it
        self.wrote: tuple[str, int] | None = None  # the partition that did
        self.reads: list[tuple[str, int]] = []
        self.reading: list[str] = []
        self.coming = False

    def check_free(self, clock: Clock, what: str) -> None:
        """Whoever writes must know that the last ones are done."""
        if self.coming:
            raise FaultError(f"{self.name}: {what} where a copy is still to arrive")
        if self.reading:
            raise FaultError(f"{self.name}: {what} where {self.reading[0]} is reading it")
        late = [name for name, tick in self.reads if not clock.knows((name, tick))]
        if late:
            raise FaultError(f"{self.name}: {what} before it is known that {late[0]} has read it")

    def check_written(self, clock: Clock, what: str) -> None:
        """As `check_free`, where what is there may be a product that still runs."""
        self.check_free(clock, what)
        if self.wrote is not None and not clock.knows(self.wrote):
            raise FaultError(f"{self.name}: {what} before it is known that {self.wrote[0]} has written")

    def check_full(self, clock: Clock, who: str) -> None:
        """Whoever reads must know that what is there has arrived."""
        if self.copy is None and self.wrote is None:
            raise FaultError(f"{self.name}: {who} reads what nobody has written")
        if self.coming or (self.copy is not None and self.copy not in clock.copies):
            raise FaultError(f"{self.name}: {who} reads before it is known that the copy has arrived")
        if self.wrote is not None and not clock.knows(self.wrote):
            raise FaultError(f"{self.name}: {who} reads before it is known that {self.wrote[0]} has written")


@dataclass
class View:
    """A slot seen in another shape or order of axes."""

    slot: Slot
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None
    part: slice = field(default_factory=lambda: slice(None))

    def slice(self, start: int, length: int, axis: int) -> View:
        """Columns of a matrix, to be written."""
        if axis != 1 or self.order is not None or not 0 <= start <= start + length <= self.shape[1]:
            raise FaultError(f"{self.slot.name} has no columns {start} to {start + length}")
        return View(self.slot, (self.shape[0], length), None, slice(start, start + length))

    def reshape(self, shape) -> View:
        return View(self.slot, tuple(shape))

    def permute(self, order) -> View:
        return View(self.slot, tuple(self.shape[i] for i in order), tuple(order))

    @property
    def data(self) -> np.ndarray:
        if self.order is None:
            return self.slot.data.reshape(self.shape)
        plain = [self.shape[self.order.index(i)] for i in range(len(self.order))]
        return self.slot.data.reshape(plain).transpose(self.order)

    def store(self, value: Tensor) -> None:
        """A write by threads, which copies see behind a fence."""
        machine = Machine.now
        me = machine.running
        self.slot.check_free(me.clock, f"{me.name} writes")
        if value.kind is not self.slot.kind or value.shape != self.shape:
            raise FaultError(f"{self.slot.name} holds {self.shape} of {self.slot.kind.name}, not {value.shape}")
        self.slot.data.reshape(-1, self.slot.data.shape[-1])[:, self.part] = value.data.reshape(-1, self.shape[-1])
        self.slot.copy, self.slot.wrote, self.slot.reads = None, me.tick(), []
        me.fenced = False


@dataclass
class Columns:
    """A tile of tensor memory, or columns of it, of the numbers that were written there last."""

    slot: Slot
    shape: tuple[int, ...]
    kind: Kind
    part: slice = field(default_factory=lambda: slice(None))

    def slice(self, start: int, length: int) -> Columns:
        if not 0 <= start <= start + length <= self.shape[1]:
            raise FaultError(f"{self.slot.name} has {self.shape[1]} columns, no {start} to {start + length}")
        return Columns(self.slot, (self.shape[0], length), self.kind, slice(start, start + length))

    def seen_as(self, kind: Kind, shape, layout) -> Columns:
        if math.prod(shape) * kind.bits != math.prod(self.shape) * self.kind.bits:
            raise FaultError(f"{self.slot.name} has another size than {shape} of {kind.name}")
        return Columns(self.slot, tuple(shape), kind, slice(self.part.start or 0, (self.part.start or 0) + shape[1]))

    @property
    def data(self) -> np.ndarray:
        if self.slot.kind is not self.kind:
            raise FaultError(f"{self.slot.name} holds {self.slot.kind.name}, read as {self.kind.name}")
        return self.slot.data[:, self.part]

    def put(self, values: np.ndarray) -> None:
        if self.slot.kind is not self.kind:
            self.slot.kind, self.slot.data = self.kind, np.full_like(self.slot.data, np.nan)
        self.slot.data[:, self.part] = values

    def load(self, layout) -> Tensor:
        machine = Machine.now
        me = machine.running
        self.slot.check_full(me.clock, me.name)
        self.slot.reads.append(me.tick())
        return Tensor(self.data.copy(), self.kind)

    def store(self, value: Tensor) -> None:
        me = Machine.now.running
        self.slot.check_written(me.clock, f"{me.name} writes")
        if value.kind is not self.kind or value.shape != self.shape:
            raise FaultError(f"{self.slot.name} takes {self.shape} of {self.kind.name}, not {value.shape}")
        self.put(value.data)
        self.slot.wrote, self.slot.reads = me.tick(), []


class Shared:
    """An allocation: slots or barriers along its first axis."""

    def __init__(self, kind: Kind, shape: Sequence[int]) -> None:
        self.name, self.shape, self.kind = "?", tuple(shape), kind
        self.items: list[Any] = [None] * shape[0]

    @property
    def dtype(self) -> Kind:
        return self.kind

    def index(self, i) -> Any:
        at = int(i)
        if not 0 <= at < len(self.items):
            raise FaultError(f"{self.name} has {len(self.items)} entries, no {at}")
        if self.kind.bits == 64:
            return self, at
        if self.items[at] is None:
            self.items[at] = Slot(f"{self.name}[{at}]", self.shape[1:], self.kind)
        self.items[at].name = f"{self.name}[{at}]"
        return self.view(self.items[at])

    def view(self, slot: Slot) -> Any:
        return View(slot, self.shape[1:])


class TensorMemory(Shared):
    """An allocation of tensor memory."""

    def view(self, slot: Slot) -> Columns:
        return Columns(slot, self.shape[1:], self.kind)


@dataclass(eq=False)
class Product:
    """A product that runs by itself, `work` gives its result."""

    work: Callable[[], np.ndarray]
    reads: list[Slot]
    result: Tensor | None = None


class Partition:
    """A partition: a function of the kernel on a thread of its own."""

    def __init__(self, machine: Machine, name: str, work: Callable[[], None]) -> None:
        self.machine, self.name, self.work = machine, name, work
        self.clock, self.count = Clock({name: 0}), 0
        self.products: list[Product] = []
        self.stores: list[Slot] = []
        self.begun: deque[Callable[[], None]] = deque()  # products into tensor memory and what tells of them, in order
        self.unit = Clock({f"{name}'s products": 0})
        self.fenced = True
        self.wanted: tuple[Barrier, int] | None = None
        self.ended, self.error = False, None
        self.turn = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, daemon=True)

    def tick(self) -> tuple[str, int]:
        self.count += 1
        self.clock.ticks[self.name] = self.count
        return self.name, self.count

    def _run(self) -> None:
        self.turn.acquire()
        try:
            if not self.machine.stopping:
                self.work()
                if self.products or self.stores:
                    what = "a product" if self.products else "a copy"
                    raise FaultError(f"{self.name} ends while {what} is under way")
        except Stopped:
            pass
        except BaseException as error:
            self.error = error
        self.ended = True
        self.machine.main.release()

    def switch(self) -> None:
        """Leave it to the scheduler who goes on."""
        self.machine.main.release()
        self.turn.acquire()
        if self.machine.stopping:
            raise Stopped

    @property
    def ready(self) -> bool:
        return not self.ended and (self.wanted is None or self.wanted[0].passes(self.wanted[1]))


class Machine:
    """A block of threads; `now` is the one that runs."""

    now: Machine

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.main = threading.Semaphore(0)
        self.partitions: list[Partition] = []
        self.running: Any = Partition(self, "kernel", lambda: None)
        self.coming: list[Callable[[], None]] = []
        self.copies, self.columns, self.stopping = 0, 0, False
        self.program, self.grid = (0, 0, 0), (1, 1, 1)

    # -- what partitions do ---------------------------------------------------------------------------

    def run(self, functions: Sequence[tuple[str, Callable[[], None]]]) -> None:
        """Run partitions until all have ended; DeadlockError where none can go on."""
        kernel = self.running
        self.partitions = [Partition(self, name, work) for name, work in functions]
        for p in self.partitions:
            p.clock.join(kernel.clock)
            p.thread.start()
        try:
            while not all(p.ended for p in self.partitions):
                self._go_on()
        finally:
            self.stopping = True
            for p in self.partitions:
                while not p.ended:
                    p.turn.release()
                    self.main.acquire()
                p.thread.join()
        if self.coming:
            raise FaultError("the kernel ends while copies are still to arrive")
        if any(p.begun for p in self.partitions):
            raise FaultError("the kernel ends while products are under way")
        self.running = kernel

    def _go_on(self) -> None:
        ready = [p for p in self.partitions if p.ready]
        products = [p for p in self.partitions if p.begun]
        if not ready and not self.coming and not products:
            waits = [f"{p.name} waits for {p.wanted[0]}" for p in self.partitions if not p.ended and p.wanted]
            raise DeadlockError("\n  ".join(["all partitions wait", *waits]))
        who = self.draw.randrange(len(ready) + len(self.coming) + len(products))
        if who >= len(ready) + len(self.coming):
            products[who - len(ready) - len(self.coming)].begun.popleft()()
            return
        if who >= len(ready):
            self.coming.pop(who - len(ready))()
            return
        self.running = ready[who]
        self.running.turn.release()
        self.main.acquire()
        if self.running.error is not None:
            raise self.running.error

    def switch(self) -> None:
        if self.partitions:
            self.running.switch()

    def wait(self, barrier: Barrier, parity: int) -> None:
        me = self.running
        me.wanted = barrier, parity
        if self.partitions:
            me.switch()
        elif not me.ready:
            raise DeadlockError(f"the kernel waits for {barrier}")
        me.wanted = None
        me.clock.join(barrier.known)

    def arrive(self, barrier: Barrier, count: int) -> None:
        self.running.tick()
        barrier.arrive(self.running.clock, count)
        self.switch()

    def expect(self, barrier: Barrier, size: int) -> None:
        self.running.tick()
        barrier.expect(self.running.clock, size)

    def load(self, slot: Slot, barrier: Barrier, values: np.ndarray, size: int) -> None:
        """Begin a copy into a slot: it arrives when the scheduler says so, and what was there is gone at once."""
        me = self.running
        slot.check_free(me.clock, f"{me.name} copies to it")
        me.tick()
        self.copies += 1
        number, clock = self.copies, me.clock.copy()
        clock.copies.add(number)
        slot.data[...] = np.nan
        slot.copy, slot.wrote, slot.reads, slot.coming = number, None, [], True

        def arrives() -> None:
            slot.data[...] = values
            slot.coming = False
            barrier.receive(clock, size)

        self.coming.append(arrives)
        self.switch()

    def store(self, slot: Slot, write: Callable[[np.ndarray], None]) -> None:
        """Begin a copy out of a slot, which `stored` waits for."""
        me = self.running
        slot.check_full(me.clock, f"{me.name}'s copy")
        if not me.fenced:
            raise FaultError(f"{slot.name}: {me.name} copies what it wrote without a fence between")
        slot.reading.append(me.name)
        me.stores.append(slot)
        write(slot.data)

    def stored(self, left: int) -> None:
        me = self.running
        while len(me.stores) > left:
            slot = me.stores.pop(0)
            slot.reading.remove(me.name)
            slot.reads.append(me.tick())

    # -- products -------------------------------------------------------------------------------------

    def product(self, a: Any, b: View, acc: Any, use_acc: bool) -> Product:
        """Begin a product; its operands are read when it is waited for, the latest that they may be."""
        me = self.running
        reads = [x.slot for x in (a, b) if isinstance(x, View)]
        for slot in reads:
            slot.check_full(me.clock, me.name)
            slot.reading.append(me.name)
        before = usable(acc, "an accumulator", running=self.running.products)
        if not isinstance(a, View):
            a = usable(a, "an operand")

        def work() -> np.ndarray:
            found = np.asarray(a.data, np.float32) @ np.asarray(b.data, np.float32)
            if not use_acc:
                return found
            return found + (before.result.data if isinstance(before, Product) else before.data)

        made = Product(work, reads)
        me.products.append(made)
        self.switch()
        return made

    def begin(self, a: Any, b: View, acc: Columns, use_acc: bool) -> None:
        """Begin a product into tensor memory. Those of a partition run one after the other, as the tensor cores take
        them; others know that one has run from a barrier that is told by `commit`."""
        me = self.running
        name = f"{me.name}'s products"
        known = me.clock.copy()
        known.join(me.unit)
        for x in (a, b):
            x.slot.check_full(known, name)
            _ = x.data  # of the kind that is read
        if a.slot.kind is not b.slot.kind:
            raise FaultError(f"a product of {a.slot.kind.name} and {b.slot.kind.name}")
        if use_acc:
            acc.slot.check_full(known, name)
        acc.slot.check_written(known, f"{name} write")
        if a.shape[1] != b.shape[0] or acc.shape != (a.shape[0], b.shape[1]):
            raise FaultError(f"a product of {a.shape} and {b.shape} into {acc.shape}")
        me.unit.ticks[name] += 1
        event = name, me.unit.ticks[name]
        for x in (a, b):
            x.slot.reads.append(event)
        acc.slot.wrote, acc.slot.reads = event, []

        def runs() -> None:
            found = np.asarray(a.data, np.float32) @ np.asarray(b.data, np.float32)
            acc.put(acc.data + found if use_acc else found)

        me.begun.append(runs)
        self.switch()

    def commit(self, barrier: Barrier) -> None:
        """Arrive at a barrier when all products that this partition has begun have run."""
        me = self.running
        clock = me.unit.copy()
        me.begun.append(lambda: barrier.arrive(clock))
        self.switch()

    def waited(self, left: int, results: Sequence[Any]) -> list[Tensor]:
        """Wait until no more than `left` products run; the results that are ready then."""
        me = self.running
        while len(me.products) > left:
            done = me.products.pop(0)
            done.result = Tensor(done.work(), F32)
            event = me.tick()
            for slot in done.reads:
                slot.reading.remove(me.name)
                slot.reads.append(event)
        self.switch()
        return [usable(x if not isinstance(x, Product) else x.result, "a result") for x in results]


def usable(x: Any, what: str, running: Sequence[Product] = ()) -> Any:
    """A tensor in registers; a product that still runs is none, unless another one adds to it."""
    if isinstance(x, Product) and any(x is p for p in running):
        return x
    if not isinstance(x, Tensor):
        raise FaultError(f"{what} of a product that has not been waited for")
    return x


def matrix(values: Any, kind: Kind) -> np.ndarray:
    """Numbers of a global array as shared memory holds them."""
    return rounded(np.asarray(values, np.float32), kind) if kind is BF16 else np.asarray(values, np.float32)
