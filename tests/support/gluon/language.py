"""An interpreter of the subset of Gluon that our kernels are written in: the text of a module is executed with these
functions in the place of Triton's, a program at a time, each on a `Machine`.

`kernels(source)` gives the functions of a text, `kernel[grid](*arguments)` runs one; `SEED` is what schedules are drawn
from. Names are those of Triton 3.6 or of later versions, as `LATE` says.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from .machine import (
    Barrier,
    Columns,
    DeadlockError,
    FaultError,
    Machine,
    Programs,
    Shared,
    TensorMemory,
    View,
    matrix,
)
from .numbers import E4M3, F32, I32, KINDS, Kind, Pointer, Tensor, common, kind_in_torch, pair, tensor

SEED, LATE = 0, True
RESIDENT = 1  # programs that run at the same time
MOST_POLLS = 20_000  # of counters that nobody changes


class Block:
    """The block of a tensor descriptor."""

    def __init__(self, shape: list[int], kind: Kind) -> None:
        self.shape, self.nbytes = list(shape), math.prod(shape) * kind.bits // 8


class Descriptor:
    """A tensor that TMA copies blocks of: what is outside reads as zero, and is not written."""

    def __init__(self, host: Any) -> None:
        self.base, self.dtype = host.base, kind_in_torch(host.base.dtype)
        self.block_type, self.layout = Block(host.block_shape, self.dtype), host.layout
        steps = [step for step, size in zip(host.strides, host.shape, strict=True) if size > 1]
        if list(host.shape) != list(host.base.shape) or steps != [
            step for step, size in zip(host.base.stride(), host.shape, strict=True) if size > 1
        ]:
            raise FaultError("a descriptor of another shape than its tensor")

    def _part(self, at) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        outer, inner = [], []
        for start, width, size in zip(map(int, at), self.block_type.shape, self.base.shape, strict=True):
            lo, hi = min(max(start, 0), size), max(min(start + width, size), 0)
            outer.append(slice(lo, max(hi, lo)))
            inner.append(slice(lo - start, max(hi, lo) - start))
        return tuple(outer), tuple(inner)

    def load(self, at) -> np.ndarray:
        found = np.zeros(self.block_type.shape, np.float32)
        outer, inner = self._part(at)
        found[inner] = self.base.detach()[outer].float().numpy()
        return found

    def add(self, at, values: np.ndarray) -> None:
        outer, inner = self._part(at)
        self.base[outer] += torch.as_tensor(np.ascontiguousarray(values[inner])).to(self.base.dtype)

    def store(self, at, values: np.ndarray) -> None:
        outer, inner = self._part(at)
        self.base[outer] = torch.as_tensor(np.ascontiguousarray(values[inner])).to(self.base.dtype)


class InterpretedFunction:
    """A function under `gluon.jit`: a kernel where it is launched, otherwise a function."""

    def __init__(self, function: Any) -> None:
        self.function, self.arg_names = function, list(inspect.signature(function).parameters)
        self.__name__ = function.__name__
        self.runs = 0

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __getitem__(self, grid):
        def launch(*arguments: Any, num_warps: int = 4, **options: Any) -> None:
            if num_warps != 4:
                raise FaultError("the first partition is a warp group of 4 warps")
            constants = {
                n for n, p in inspect.signature(self.function).parameters.items() if "constexpr" in str(p.annotation)
            }
            given = [x if n in constants else argument(x) for n, x in zip(self.arg_names, arguments, strict=True)]
            programs = []
            for z in range(grid[2]):
                for y in range(grid[1]):
                    for x in range(grid[0]):
                        machine = Machine(hash((SEED, x, y, z)))
                        machine.program, machine.grid = (x, y, z), grid
                        programs.append((machine, lambda: self.function(*given)))
            self.runs += len(programs)
            if RESIDENT > 1:
                Programs(SEED, RESIDENT).run(programs)
                return
            Programs.polls = 0
            for Machine.now, work in programs:
                work()

        return launch


def argument(x: Any) -> Any:
    """What a launcher makes of an argument."""
    if isinstance(x, torch.Tensor):
        return Pointer.to_tensor(x)
    if hasattr(x, "block_shape"):
        return Descriptor(x)
    return tensor(x)


# -- gluon.language -----------------------------------------------------------------------------------


def allocate_shared_memory(kind: Kind, shape, layout) -> Shared:
    return Shared(kind, shape)


def blocked(size, threads, warps, order) -> None:
    if math.prod(threads) != 32 or math.prod(warps) != 4 or len({len(x) for x in (size, threads, warps, order)}) > 1:
        raise FaultError(f"{threads} threads of {warps} warps are no warp group")
    if sorted(order) != list(range(len(order))) or any(n & (n - 1) or n < 1 for n in size):
        raise FaultError(f"a layout of {size} entries in the order {order}")


def of_products(version, *, warps_per_cta, instr_shape) -> None:
    rows, columns, steps = instr_shape
    if version != [3, 0] or math.prod(warps_per_cta) != 4 or rows != 16 or steps not in (16, 32) or columns % 8:
        raise FaultError(f"products {instr_shape} of {warps_per_cta} warps are none of a Hopper's warp group")
    return steps


def dot_operand(index: int, steps: int | None, width: int) -> None:
    if steps is not None and (index, width) != (0, steps // 8):
        raise FaultError(f"a register of the left operand has {steps // 8} numbers, not {width}")


def sliced(axis, parent) -> None:
    if axis not in (0, 1):
        raise FaultError(f"a tile has no axis {axis}")


def tensor_memory_layout(block, *, col_stride) -> None:
    if block[0] not in (64, 128) or col_stride != 1:
        raise FaultError(f"tensor memory has no blocks of {block}, {col_stride} columns apart")


def warp_specialize(functions, warps, registers) -> None:
    if len(functions) != len(warps) + 1 or len(warps) != len(registers):
        raise FaultError("a partition without warps or registers")
    if any(n % 8 or not 24 <= n <= 256 for n in registers):
        raise FaultError(f"a warp has 24 to 256 registers a thread, in steps of 8, and not {registers}")
    for name, x in inspect.currentframe().f_back.f_locals.items():
        if isinstance(x, Shared) and x.name == "?":
            x.name = name
            for i, item in enumerate(x.items):
                if isinstance(item, Barrier):
                    item.name = f"{name}[{i}]"
    named = [f"{function.__name__}{i}" for i, (function, _) in enumerate(functions)]
    work = [lambda f=function, a=arguments: f(*a) for function, arguments in functions]
    Machine.now.run(list(zip(named, work, strict=True)))


def extremum(work):
    def found(a, b, propagate_nan=None):
        x, y, kind = pair(a, b)
        if propagate_nan and kind.floats:
            return Tensor((np.minimum if work is np.fmin else np.maximum)(x, y), kind)
        return Tensor(work(x, y), kind)

    return found


def elementwise(work):
    def found(x):
        x = tensor(x)
        with np.errstate(all="ignore"):
            return Tensor(work(x.data.astype(np.float32)), F32) if x.kind.floats else Tensor(work(x.data), x.kind)

    return found


def where(seen, a, b) -> Tensor:
    seen = tensor(seen)
    x, y = tensor(a, b if isinstance(b, Tensor) else None), tensor(b, a if isinstance(a, Tensor) else None)
    kind = common(x, y)
    return Tensor(np.where(seen.data, x.data.astype(kind.held), y.data.astype(kind.held)), kind)


def cast(x, kind: Kind) -> Tensor:
    return tensor(x).to(kind)


def broadcast(a, b) -> tuple[Tensor, Tensor]:
    x, y = tensor(a), tensor(b)
    left, right = np.broadcast_arrays(x.data, y.data)
    return Tensor(left, x.kind), Tensor(right, y.kind)


def reduction(work):
    def found(x: Tensor, axis: int) -> Tensor:
        return Tensor(work(x.data, axis), x.kind)

    return found


def reduce(x: Tensor, axis: int, combine: InterpretedFunction) -> Tensor:
    parts = [Tensor(part, x.kind) for part in np.moveaxis(x.data, axis, 0)]
    return functools.reduce(combine, parts)


def erf(x: np.ndarray) -> np.ndarray:
    return torch.erf(torch.as_tensor(np.asarray(x))).numpy()


def full(shape, value, kind: Kind, layout) -> Tensor:
    return Tensor(np.full(shape, value), kind)


def arange(start: int, end: int, layout=None) -> Tensor:
    return Tensor(np.arange(start, end), I32)


def plus(a, b, sanitize_overflow=True) -> Tensor:
    return tensor(a, b) + b


def times(a, b, sanitize_overflow=True) -> Tensor:
    return tensor(a, b) * b


def load(pointer: Pointer, mask=None, other=None) -> Tensor:
    return pointer.load(mask, other)


def store(pointer: Pointer, value, mask=None) -> None:
    pointer.store(value, mask)


def cdiv(a, b) -> Tensor:
    return (tensor(a) + b - 1) // b


def atomic_add(pointer: Pointer, value, sem="acq_rel", scope="gpu") -> Tensor:
    """Adds to a counter. Adding 0 asks for it: DeadlockError where all ask and nobody changes any."""
    before = pointer.load()
    pointer.store(before + value)
    Programs.polls = Programs.polls + 1 if int(tensor(value).data) == 0 else 0
    if Programs.polls > MOST_POLLS:
        raise DeadlockError("programs wait for a counter that no other changes")
    Machine.now.switch()
    return before


def inline_asm(text, constraints, arguments, *, dtype, is_pure, pack) -> None:
    if "cp.async.bulk.wait_group 0" not in text:
        raise FaultError(f"no instruction that is known: {text}")
    Machine.now.written()


gl = SimpleNamespace(
    **{n: KINDS[n] for n in KINDS}, constexpr=lambda x: x,
    allocate_shared_memory=allocate_shared_memory, warp_specialize=warp_specialize, load=load, store=store, cdiv=cdiv,
    arange=arange, full=full, where=where, cast=cast, broadcast=broadcast, add=plus, mul=times,
    maximum=extremum(np.fmax), minimum=extremum(np.fmin), max=reduction(np.fmax.reduce), min=reduction(np.fmin.reduce),
    sum=reduction(lambda x, axis: x.sum(axis, dtype=x.dtype)), static_range=range, reduce=reduce,
    convert_layout=lambda x, layout: x, program_id=lambda axis: Tensor(Machine.now.program[axis], I32),
    num_programs=lambda axis: Tensor(Machine.now.grid[axis], I32),
    NVMMADistributedLayout=of_products, BlockedLayout=blocked, SwizzledSharedLayout=lambda *of_layout: None,
    NVMMASharedLayout=SimpleNamespace(get_default_for=lambda shape, kind: None),
    SliceLayout=sliced, DotOperandLayout=dot_operand,
    exp=elementwise(np.exp), exp2=elementwise(np.exp2), log=elementwise(np.log), log2=elementwise(np.log2),
    sin=elementwise(np.sin), cos=elementwise(np.cos), sqrt_rn=elementwise(np.sqrt), erf=elementwise(erf),
    rsqrt=elementwise(lambda x: 1 / np.sqrt(x)), floor=elementwise(np.floor), abs=elementwise(np.abs),
    div_rn=lambda a, b: tensor(a, b) / b, atomic_add=atomic_add, inline_asm_elementwise=inline_asm,
)  # fmt: skip
gluon = SimpleNamespace(jit=lambda f=None, **more: InterpretedFunction(f) if f else InterpretedFunction)
triton = SimpleNamespace(knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=True)), jit=gluon.jit)
tl = SimpleNamespace(**vars(gl), PropagateNan=SimpleNamespace(ALL=True))  # small kernels of a module are Triton's
gluon_core = SimpleNamespace(builtin=lambda f: f)


# -- nvidia.hopper ------------------------------------------------------------------------------------


def init(place, count: int) -> None:
    barriers, i = place
    barriers.items[i] = Barrier(f"{barriers.name}[{i}]", count)


def barrier_of(place) -> Barrier:
    barriers, i = place
    if barriers.items[i] is None:
        raise FaultError(f"{barriers.name}[{i}] has no count yet")
    return barriers.items[i]


def async_load(descriptor: Descriptor, at, place, view: View) -> None:
    values = matrix(descriptor.load(at), descriptor.dtype)
    if list(view.shape) != descriptor.block_type.shape or view.slot.kind is not descriptor.dtype:
        raise FaultError(f"a block of {descriptor.block_type.shape} does not fit into {view.slot.name}")
    Machine.now.load(view, barrier_of(place), values, descriptor.block_type.nbytes)


def async_store(descriptor: Descriptor, at, view: View) -> None:
    Machine.now.store(view.slot, lambda data: descriptor.store(at, data))


def async_add(descriptor: Descriptor, at, view: View) -> None:
    if descriptor.dtype is not F32 or list(view.shape) != descriptor.block_type.shape:
        raise FaultError(f"TMA adds no {list(view.shape)} to blocks of {descriptor.block_type.shape}")
    Machine.now.add(view.slot, lambda values: descriptor.add(at, values))


def warpgroup_mma(a, b, acc, *, use_acc=True, is_async=False):
    if E4M3 in (a.dtype, b.dtype):
        if a.dtype is not b.dtype:
            raise FaultError(f"a product of {a.dtype.name} and {b.dtype.name}")
        if b.order != (1, 0) or (isinstance(a, View) and a.order is not None):
            raise FaultError("operands of 8 bits lie along the summed axis in shared memory")
    made = Machine.now.product(a, b, acc, use_acc)
    return made if is_async else Machine.now.waited(0, [made])[0]


def warpgroup_mma_wait(left: int, results):
    found = Machine.now.waited(left, results)
    return found[0] if len(found) == 1 else tuple(found)


def fence_async_shared() -> None:
    Machine.now.running.unfenced.clear()


mbarrier = SimpleNamespace(
    MBarrierLayout=lambda: None, init=init,
    wait=lambda place, parity: Machine.now.wait(barrier_of(place), int(parity)),
    arrive=lambda place, *, count=1: Machine.now.arrive(barrier_of(place), count),
    expect=lambda place, size: Machine.now.expect(barrier_of(place), size),
)  # fmt: skip
hopper = SimpleNamespace(
    warpgroup_mma=warpgroup_mma, warpgroup_mma_wait=warpgroup_mma_wait, fence_async_shared=fence_async_shared
)


# -- nvidia.blackwell ---------------------------------------------------------------------------------


def allocate_tensor_memory(kind: Kind, shape, layout) -> TensorMemory:
    made = TensorMemory(kind, shape)
    Machine.now.columns += math.prod(shape) // 128 * kind.bits // 32
    if Machine.now.columns > 512:
        raise FaultError(f"{Machine.now.columns} columns of tensor memory, which has 512")
    return made


def tcgen05_mma(a, b, acc, *, use_acc=True) -> None:
    Machine.now.begin(a, b, acc, use_acc)


def tcgen05_commit(place) -> None:
    Machine.now.commit(barrier_of(place))


blackwell = SimpleNamespace(
    allocate_tensor_memory=allocate_tensor_memory, tcgen05_mma=tcgen05_mma, tcgen05_commit=tcgen05_commit,
    TensorMemoryLayout=tensor_memory_layout,
)  # fmt: skip


def kernels(source: str) -> dict[str, Any]:
    """The functions of a module's text."""
    names = ("async_load", "async_store") if LATE else ("async_copy_global_to_shared", "async_copy_shared_to_global")
    known = dict(zip(names, (async_load, async_store), strict=True))
    known |= {"async_atomic_add": async_add} if LATE else {}  # else the module has its own
    tma = SimpleNamespace(**known, store_wait=lambda left: Machine.now.stored(left))
    language = SimpleNamespace(**vars(gl), **{"barrier" if LATE else "thread_barrier": lambda: Machine.now.switch()})
    seen_as = "reinterpret" if LATE else "_reinterpret"
    blackwell.tensor_memory_descriptor = SimpleNamespace(**{seen_as: Columns.seen_as})
    language.shared_memory_descriptor = SimpleNamespace(**{seen_as: Shared.seen_as})
    names = {
        "triton": triton,
        "gl": language,
        "gluon": gluon,
        "hopper": hopper,
        "blackwell": blackwell,
        "mbarrier": mbarrier,
        "tma": tma,
        "tl": tl,
        "gluon_core": gluon_core,
    }
    text, count = re.subn(r"(?m)^(from|import) triton.*$", "", source)
    assert count >= 4, "the text imports Gluon"
    exec(compile(text, "<a Gluon module>", "exec"), names)
    if "reduce_tile" in names and not LATE:
        names["add_tile"] = async_add
    return {n: x for n, x in names.items() if isinstance(x, InterpretedFunction)}
