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


EVERY = range(1 << 20)  # lines of a slot


def meet(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


class Slot:
    """A tile of shared memory: what wrote its lines last, and who has read them since."""

    def __init__(self, name: str, shape: Sequence[int], kind: Kind) -> None:
        self.name, self.kind = name, kind
        self.data = np.full(shape, np.nan, np.float32) if kind.floats else np.zeros(shape, kind.held)
        self.copies: dict[range, int] = {}  # those that filled lines
        self.written: dict[range, tuple[str, int]] = {}  # the partitions that did
        self.reads: list[tuple[range, tuple[str, int]]] = []
        self.reading: list[str] = []
        self.coming: list[range] = []

    @property
    def flat(self) -> np.ndarray:
        """The lines of the buffer: the last axis is along them."""
        return self.data.reshape(-1, self.data.shape[-1] if self.data.ndim > 1 else 1)

    def check_free(self, clock: Clock, what: str, lines: range = EVERY) -> None:
        """Whoever writes must know that the last ones are done."""
        if any(meet(x, lines) for x in self.coming):
            raise FaultError(f"{self.name}: {what} where a copy is still to arrive")
        if self.reading:
            raise FaultError(f"{self.name}: {what} where {self.reading[0]} is reading it")
        late = [event[0] for x, event in self.reads if meet(x, lines) and not clock.knows(event)]
        if late:
            raise FaultError(f"{self.name}: {what} before it is known that {late[0]} has read it")

    def check_written(self, clock: Clock, what: str) -> None:
        """As `check_free`, where what is there may be a product that still runs."""
        self.check_free(clock, what)
        late = [event[0] for event in self.written.values() if not clock.knows(event)]
        if late:
            raise FaultError(f"{self.name}: {what} before it is known that {late[0]} has written")

    def check_full(self, clock: Clock, who: str, lines: range = EVERY) -> None:
        """Whoever reads must know that what is there has arrived."""
        if not any(meet(x, lines) for x in (*self.copies, *self.written)):
            raise FaultError(f"{self.name}: {who} reads what nobody has written")
        copies = {number for x, number in self.copies.items() if meet(x, lines)}
        if any(meet(x, lines) for x in self.coming) or not copies <= clock.copies:
            raise FaultError(f"{self.name}: {who} reads before it is known that the copy has arrived")
        late = [event[0] for x, event in self.written.items() if meet(x, lines) and not clock.knows(event)]
        if late:
            raise FaultError(f"{self.name}: {who} reads before it is known that {late[0]} has written")

    def wrote(self, event: tuple[str, int]) -> None:
        """All of it is what somebody wrote."""
        self.copies, self.written, self.reads = {}, {EVERY: event}, []


class Bank:
    """A tile of tensor memory as bits, half a column of 32 bits each: columns are tracked in groups, because weights
    are written and read in pieces."""

    GROUP = 8  # columns

    def __init__(self, name: str, shape: Sequence[int], kind: Kind) -> None:
        rows, columns = shape[0], shape[1] * kind.bits // 32
        self.name = name
        self.bits = np.full((rows, 2 * columns), 0xFFFF, np.uint16)  # NaN of any kind
        self.groups = [Slot(name, (0,), kind) for _ in range(columns // self.GROUP)]

    def part(self, start: int, stop: int, kind: Kind) -> list[Slot]:
        """The groups of such columns of a kind."""
        first, last = (n * kind.bits / 32 / self.GROUP for n in (start, stop))
        if first != int(first) or last != int(last):
            raise FaultError(f"{self.name} is not read or written from {start} to {stop}, as {kind.name}")
        for x in self.groups:
            x.name = self.name
        return self.groups[int(first) : int(last)]


@dataclass
class View:
    """A slot seen in another shape or order of axes, or some of its lines or columns."""

    slot: Slot
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None
    part: slice = field(default_factory=lambda: slice(None))  # columns of a matrix
    lines: range = EVERY
    window: tuple[slice, ...] = ()  # rows and columns of a matrix whose axes are in another order, to be read

    def slice(self, start: int, length: int, dim: int = 0) -> View:
        """Columns of a matrix, or lines of a tile or vector; of a matrix in another order they are only read."""
        if self.window or not 0 <= start <= start + length <= self.shape[dim]:
            raise FaultError(f"{self.slot.name} has no {start} to {start + length} along axis {dim}")
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        part = slice(start, start + length)
        if self.order is not None:
            window = (slice(None), part) if dim else (part, slice(None))
            return View(self.slot, shape, self.order, window=window)
        if dim == 1 and len(self.shape) == 2:
            return View(self.slot, shape, None, part, self.lines)
        if dim != max(0, len(self.shape) - 2) or math.prod(self.shape[:dim]) != 1:
            raise FaultError(f"{self.slot.name} has its lines along another axis than {dim}")
        first = self.lines.start + start
        return View(self.slot, shape, None, self.part, range(first, first + length))

    @property
    def kind(self) -> Kind:
        return self.slot.kind

    def check_full(self, clock: Clock, who: str) -> None:
        self.slot.check_full(clock, who, self.lines)

    def read_at(self, event: tuple[str, int]) -> None:
        self.slot.reads.append((self.lines, event))

    @property
    def dtype(self) -> Kind:
        return self.slot.kind

    def reshape(self, shape) -> View:
        if self.lines is not EVERY or math.prod(shape) != self.slot.data.size:
            raise FaultError(f"{self.slot.name} is not of the shape {shape}")
        return View(self.slot, tuple(shape))

    def permute(self, order) -> View:
        return View(self.slot, tuple(self.shape[i] for i in order), tuple(order))

    @property
    def held(self) -> np.ndarray:
        """The numbers of a tile in the slot, as lines."""
        return self.slot.flat[self.lines.start : self.lines.stop, self.part]

    @property
    def data(self) -> np.ndarray:
        if self.window:
            assert self.order is not None
            return self.slot.flat.transpose(self.order)[self.window]
        if self.order is None:
            return self.held.reshape(self.shape)
        plain = [self.shape[self.order.index(i)] for i in range(len(self.order))]
        return self.slot.data.reshape(plain).transpose(self.order)

    def load(self, layout) -> Tensor:
        """A read by threads."""
        me = Machine.now.running
        self.slot.check_full(me.clock, me.name, self.lines)
        self.slot.reads.append((self.lines, me.tick()))
        return Tensor(self.data.copy(), self.slot.kind)

    def store(self, value: Tensor) -> None:
        """A write by threads, which copies and products see behind a fence."""
        machine = Machine.now
        me = machine.running
        self.slot.check_free(me.clock, f"{me.name} writes", self.lines)
        if value.kind is not self.slot.kind or value.shape != self.shape:
            raise FaultError(f"{self.slot.name} holds {self.shape} of {self.slot.kind.name}, not {value.shape}")
        self.held[...] = value.data.reshape(self.held.shape)
        if self.lines is EVERY:
            self.slot.wrote(me.tick())
        else:  # the others are as they were
            self.slot.written[self.lines] = me.tick()
            self.slot.reads = [x for x in self.slot.reads if not meet(x[0], self.lines)]
        me.unfenced.append(self.slot)


@dataclass
class Columns:
    """A tile of tensor memory, or columns of it, of the numbers that were written there last."""

    slot: Bank
    shape: tuple[int, ...]
    kind: Kind
    part: slice = field(default_factory=lambda: slice(None))

    def slice(self, start: int, length: int) -> Columns:
        if not 0 <= start <= start + length <= self.shape[1]:
            raise FaultError(f"{self.slot.name} has {self.shape[1]} columns, no {start} to {start + length}")
        start += self.part.start or 0
        return Columns(self.slot, (self.shape[0], length), self.kind, slice(start, start + length))

    def seen_as(self, kind: Kind, shape, layout) -> Columns:
        if math.prod(shape) * kind.bits != math.prod(self.shape) * self.kind.bits:
            raise FaultError(f"{self.slot.name} has another size than {shape} of {kind.name}")
        if (self.part.start or 0) != 0:
            raise FaultError(f"{self.slot.name} is seen as {kind.name} from its first column on")
        return Columns(self.slot, tuple(shape), kind, slice(0, shape[1]))

    @property
    def groups(self) -> list[Slot]:
        start = self.part.start or 0
        return self.slot.part(start, start + self.shape[1], self.kind)

    def check_full(self, clock: Clock, who: str) -> None:
        for x in self.groups:
            x.check_full(clock, who)

    def check_written(self, clock: Clock, what: str) -> None:
        for x in self.groups:
            x.check_written(clock, what)

    def read_at(self, event: tuple[str, int]) -> None:
        for x in self.groups:
            x.reads.append((EVERY, event))

    def written_at(self, event: tuple[str, int]) -> None:
        for x in self.groups:
            x.wrote(event)

    @property
    def _bits(self) -> np.ndarray:
        start, width = self.part.start or 0, self.kind.bits // 16
        return self.slot.bits[:, start * width : (start + self.shape[1]) * width]

    @property
    def data(self) -> np.ndarray:
        for x in self.groups:
            if x.kind is not self.kind:
                raise FaultError(f"{self.slot.name} holds {x.kind.name}, read as {self.kind.name}")
        bits = np.ascontiguousarray(self._bits)
        if self.kind is BF16:
            return (bits.astype(np.uint32) << 16).view(np.float32)
        return bits.view(self.kind.held).astype(np.float32)

    def put(self, values: np.ndarray) -> None:
        for x in self.groups:
            x.kind = self.kind
        if self.kind is BF16:
            self._bits[...] = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16
        else:
            self._bits[...] = np.ascontiguousarray(values.astype(self.kind.held)).view(np.uint16)

    def load(self, layout) -> Tensor:
        me = Machine.now.running
        self.check_full(me.clock, me.name)
        self.read_at(me.tick())
        return Tensor(self.data.copy(), self.kind)

    def store(self, value: Tensor) -> None:
        me = Machine.now.running
        self.check_written(me.clock, f"{me.name} writes")
        if value.kind is not self.kind or value.shape != self.shape:
            raise FaultError(f"{self.slot.name} takes {self.shape} of {self.kind.name}, not {value.shape}")
        self.put(value.data)
        self.written_at(me.tick())


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
            self.items[at] = self.held(f"{self.name}[{at}]", self.shape[1:], self.kind)
        self.items[at].name = f"{self.name}[{at}]"
        return self.view(self.items[at])

    def seen_as(self, kind: Kind, shape: Sequence[int], layout: Any) -> Shared:
        """Slots of several smaller tiles each, of which the first may be taken."""
        each, left = divmod(math.prod(shape) // shape[0] * kind.bits, 8)
        size = math.prod(self.shape) * self.kind.bits // 8
        if left or math.prod(shape) * kind.bits // 8 != size or shape[0] % self.shape[0]:
            raise FaultError(f"{self.name} of {size} bytes is not {shape[0]} times {each}")
        return Smaller(self, kind, shape)

    def held(self, *of: Any) -> Slot:
        return Slot(*of)

    def view(self, slot: Slot) -> Any:
        return View(slot, self.shape[1:])


class Smaller(Shared):
    """An allocation of shared memory seen as smaller tiles."""

    def __init__(self, whole: Shared, kind: Kind, shape: Sequence[int]) -> None:
        super().__init__(kind, shape)
        self.whole = whole

    def index(self, i) -> View:
        at, left = divmod(int(i), self.shape[0] // self.whole.shape[0])
        if left:
            raise FaultError(f"{self.whole.name} has no tile that begins within a slot")
        return View(self.whole.index(at).slot, self.shape[1:])


class TensorMemory(Shared):
    """An allocation of tensor memory."""

    def held(self, *of: Any) -> Bank:
        return Bank(*of)

    def view(self, slot: Bank) -> Columns:
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
        self.adds: list[Callable[[], None]] = []  # to global memory, in any order
        self.begun: deque[Callable[[], None]] = deque()  # products into tensor memory and what tells of them, in order
        self.unit = Clock({f"{name}'s products": 0})
        self.unfenced: list[Slot] = []  # what its threads wrote since the last fence
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
        self.pause: Callable[[], None] = lambda: None  # lets other programs of the GPU go on

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
                self.pause()
                self._go_on()
            for p in self.partitions:
                self.draw.shuffle(p.adds)
                while p.adds:
                    self.pause()
                    p.adds.pop()()
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
        if adding := [p for p in self.partitions if p.adds and self.draw.random() < 0.1]:
            adding[0].adds.pop(self.draw.randrange(len(adding[0].adds)))()
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

    def load(self, view: View, barrier: Barrier, values: np.ndarray, size: int) -> None:
        """Begin a copy into a slot: it arrives when the scheduler says so, and what was there is gone at once."""
        me, slot, lines = self.running, view.slot, view.lines
        slot.check_free(me.clock, f"{me.name} copies to it", lines)
        me.tick()
        self.copies += 1
        number, clock = self.copies, me.clock.copy()
        clock.copies.add(number)
        if view.lines is EVERY and values.size != slot.data.size:  # a tile of a slot of larger ones
            slot.data = np.full(values.shape, np.nan, np.float32)
        view.held[...] = np.nan
        slot.copies = {x: n for x, n in slot.copies.items() if not meet(x, lines)} | {lines: number}
        slot.written = {x: event for x, event in slot.written.items() if not meet(x, lines)}
        slot.reads = [x for x in slot.reads if not meet(x[0], lines)]
        slot.coming.append(lines)

        def arrives() -> None:
            view.held[...] = values.reshape(view.held.shape)
            slot.coming.remove(lines)
            barrier.receive(clock, size)

        self.coming.append(arrives)
        self.switch()

    def store(self, slot: Slot, write: Callable[[np.ndarray], None]) -> None:
        """Begin a copy out of a slot, which `stored` waits for."""
        me = self.running
        slot.check_full(me.clock, f"{me.name}'s copy")
        if any(x is slot for x in me.unfenced):
            raise FaultError(f"{slot.name}: {me.name} copies what it wrote without a fence between")
        slot.reading.append(me.name)
        me.stores.append(slot)
        write(slot.data)

    def add(self, slot: Slot, write: Callable[[np.ndarray], None]) -> None:
        """Begin to add a slot to global memory: `stored` waits until it is read, `written` until it is added, which
        happens when the scheduler says so."""
        me = self.running
        slot.check_full(me.clock, f"{me.name}'s sum")
        slot.reading.append(me.name)
        me.stores.append(slot)
        values = slot.data.copy()
        me.adds.append(lambda: write(values))
        self.switch()

    def written(self) -> None:
        """Wait until all that this partition adds to global memory is added."""
        me = self.running
        if me.stores:
            raise FaultError(f"{me.name} waits for sums that have not been read")
        while me.adds:
            me.adds.pop(0)()

    def stored(self, left: int) -> None:
        me = self.running
        while len(me.stores) > left:
            slot = me.stores.pop(0)
            slot.reading.remove(me.name)
            slot.reads.append((EVERY, me.tick()))

    # -- products -------------------------------------------------------------------------------------

    def product(self, a: Any, b: View, acc: Any, use_acc: bool) -> Product:
        """Begin a product; its operands are read when it is waited for, the latest that they may be."""
        me = self.running
        reads = [x.slot for x in (a, b) if isinstance(x, View)]
        for slot in reads:
            slot.check_full(me.clock, me.name)
            writers = [p.name for p in self.partitions if any(x is slot for x in p.unfenced)]
            if writers:
                raise FaultError(f"{slot.name}: a product reads what {writers[0]} wrote without a fence between")
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
            x.check_full(known, name)
            _ = x.data  # of the kind that is read
        if a.kind is not b.kind:
            raise FaultError(f"a product of {a.kind.name} and {b.kind.name}")
        if use_acc:
            acc.check_full(known, name)
        acc.check_written(known, f"{name} write")
        if a.shape[1] != b.shape[0] or acc.shape != (a.shape[0], b.shape[1]):
            raise FaultError(f"a product of {a.shape} and {b.shape} into {acc.shape}")
        me.unit.ticks[name] += 1
        event = name, me.unit.ticks[name]
        for x in (a, b):
            x.read_at(event)
        acc.written_at(event)

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
                slot.reads.append((EVERY, event))
        self.switch()
        return [usable(x if not isinstance(x, Product) else x.result, "a result") for x in results]


class Programs:
    """Programs of a GPU that run at the same time, `resident` of them: they begin in any order, and whoever goes on is
    drawn, whenever a program's partitions synchronise."""

    polls = 0  # of counters since one was changed

    def __init__(self, seed: int, resident: int) -> None:
        self.draw, self.resident = random.Random(seed), resident
        self.back = threading.Semaphore(0)
        self.stopping = False

    def run(self, programs: Sequence[tuple[Machine, Callable[[], None]]]) -> None:
        Programs.polls = 0
        waiting, active = list(programs), []
        self.draw.shuffle(waiting)
        try:
            while waiting or active:
                while waiting and len(active) < self.resident:
                    active.append(self._begun(*waiting.pop()))
                one = self.draw.choice(active)
                self._go_on(one)
                if one["ended"]:
                    active.remove(one)
                if one["error"] is not None:
                    raise one["error"]
        finally:
            self.stopping = True
            for one in active:
                while not one["ended"]:
                    self._go_on(one)

    def _begun(self, machine: Machine, work: Callable[[], None]) -> dict[str, Any]:
        one = {"machine": machine, "turn": threading.Semaphore(0), "ended": False, "error": None}

        def pause() -> None:
            self.back.release()
            one["turn"].acquire()
            if self.stopping:
                raise Stopped

        def whole() -> None:
            one["turn"].acquire()
            try:
                if not self.stopping:
                    work()
            except Stopped:
                pass
            except BaseException as error:
                one["error"] = error
            one["ended"] = True
            self.back.release()

        machine.pause = pause
        one["thread"] = threading.Thread(target=whole, daemon=True)
        one["thread"].start()
        return one

    def _go_on(self, one: dict[str, Any]) -> None:
        Machine.now = one["machine"]
        one["turn"].release()
        self.back.acquire()


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
