"""The native kernels on torch tensors: a call's record filled in and handed over, and the kernels' tiles and texts.

Calls that differ from one in the entries of their arrays alone (`repeat`) change only addresses and strides of its
record.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from frisket.dsl.errors import BackendError
from frisket.dsl.transfer import distance_only
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.grammar.memo import Memo, memo
from frisket.lowering.aten.captured import folded
from frisket.lowering.derive import Gradient, backward_of, norm_width
from frisket.lowering.kernels.cpp.backward import KERNELS
from frisket.lowering.kernels.cpp.call import BEHIND, FIELDS, OFFSET, SHORT, WORDS
from frisket.lowering.kernels.cpp.forward import CppArrays, natural
from frisket.lowering.kernels.cpp.tiles import long_runs, tiles
from frisket.lowering.kernels.cpp.tiles import pays as products_pay
from frisket.lowering.plan import Cotangents, ForwardResults, Geometry, KernelInputs, LoopPlan, Names, TableUse, Target
from frisket.runtime.machine.cpp_build import ONE_THREAD, lacking, library, of_torch
from frisket.runtime.plans.device import Values

Tensor = Any
RECORD = struct.Struct("".join(("d" if f.declaration.startswith("double") else "q") * f.words for f in FIELDS))
HUGE, LARGE = 2 << 20, 4 << 20  # bytes of a huge page, and of a tensor from which it pays
KEPT = 64  # records of calls, with the spans they point to


def forward(
    inputs: KernelInputs, q: Tensor, k: Tensor, v: Tensor, *, top: bool = False, softmax_stats: bool = False
) -> tuple[Any, ...]:
    """(out [batch, heads, q_len, v_dim], lse and top [batch, heads, q_len]) for q [batch, heads, q_len, head_dim] and
    k, v [batch, kv_heads, kv_len, dim] of any strides, in one dtype. k and v may have 8 bits, or be pools [pages,
    kv_heads, page, dim]. lse and top are float32, float64 for float64; without `top` the third result is None. With
    `softmax_stats` a fourth result is what the backward has to know of each row."""
    import torch

    g, kernel_call = inputs.geometry, launch_of(inputs, q.dtype, k.dtype)
    copies: list[Tensor] = []
    pages = k.shape[0] if inputs.plan.pages else 0
    out = torch.empty((g.batch, g.heads, g.q_len, g.v_dim), dtype=q.dtype)
    huge(out)
    lse = torch.empty((g.batch, g.heads, g.q_len), dtype=kernel_call.real)
    peak = torch.empty((g.batch, g.heads, g.q_len), dtype=kernel_call.real) if top else None
    known = torch.empty((*lse.shape, norm_width(q.dtype, g.v_dim)), dtype=kernel_call.real) if softmax_stats else None
    sinks = None if inputs.sinks is None else _real(inputs.sinks, kernel_call.real)
    words = [_at(sinks), lse.data_ptr(), _at(peak), _at(known), 0 if known is None else known.shape[3], 0, pages]
    words += [*_array(q, copies), *_array(k, copies), *_array(v, copies), out.data_ptr(), *out.stride()[:3]]
    kernel_call.call("frisket_forward", inputs, [*words, *_NOTHING])
    return (out, lse, peak, known) if softmax_stats else (out, lse, peak)


def tangent(
    inputs: KernelInputs,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tangents: Sequence[Tensor | None],
    *,
    top: bool = False,
    softmax_stats: bool = False,
) -> tuple[Any, ...]:
    """(out, lse, their tangents, top, softmax_stats), of which the last two may be None, given the tangents of q, k and
    v, some of which may be None. One walk over the tiles computes all of them."""
    import torch

    g, kernel_call = inputs.geometry, launch_of(inputs, q.dtype, k.dtype)
    copies: list[Tensor] = []
    out, dout = (torch.empty((g.batch, g.heads, g.q_len, g.v_dim), dtype=q.dtype) for _ in range(2))
    lse, dlse = (torch.empty((g.batch, g.heads, g.q_len), dtype=kernel_call.real) for _ in range(2))
    peak, known = torch.empty_like(lse) if top else None, None
    if softmax_stats and inputs.target.precision == "ieee":  # a backward would multiply float32 otherwise
        known = lse.new_empty((*lse.shape, norm_width(q.dtype, g.v_dim)))
    for x in (out, dout):
        huge(x)
    sinks = _real(inputs.sinks, kernel_call.real)
    words = [_at(sinks), lse.data_ptr(), _at(peak), _at(known), 0 if known is None else known.shape[3], 0, 0]
    for x in (q, k, v, out, dout, *tangents):
        words += NONE if x is None else _array(x, copies)
    kernel_call.call("frisket_tangent", inputs, [*words, dlse.data_ptr(), 0])
    return out, lse, dout, dlse, peak, known


def backward(
    inputs: KernelInputs, q: Any, k: Any, v: Any, results: ForwardResults, cotangents: Cotangents, *, grad_names: Names
) -> dict[str, Tensor]:
    """The gradients of `grad_names`: "q", "k", "v", and names of tables and slots of the plan, those in float32
    (float64 for float64). Without `softmax_stats` of the forward weights are as exact as a float is at the size of
    lse."""
    import torch

    # the count of a weighted row's keys, which its cotangents know
    lse, softmax_stats = results.lse, None if inputs.plan.weighted else results.softmax_stats
    if results.share is not None and softmax_stats is not None:
        softmax_stats = torch.stack([softmax_stats[..., 0], softmax_stats[..., 1] * results.share], -1)
        # a share of 0 tells the kernel to go by lse: where all weight is on other keys, it must say so too
        lse = lse.masked_fill(softmax_stats[..., 1] == 0, -torch.inf)

    g, slots, tables = inputs.geometry, inputs.slots, inputs.tables
    kernel_call = launch_of(inputs, q.dtype, q.dtype)
    arrays, real = (q, k, v, results.out, cotangents.dout.to(q.dtype)), kernel_call.real
    copies: list[Tensor] = []
    lse, dlse, sinks, softmax_stats = (_real(x, real) for x in (lse, cotangents.dlse, inputs.sinks, softmax_stats))
    grads = {n: torch.empty(s, dtype=q.dtype) for n, s in kernel_call.shapes.items() if n in grad_names}
    for x in grads.values():
        huge(x)
    captured = backward_of(inputs.plan).gradients if len(grad_names) > len(grads) else ()
    sums = [torch.zeros(_shape(x, g, tables), dtype=real) if x.source in grad_names else None for x in captured]
    pointers = (ctypes.c_int64 * len(sums))(*map(_at, sums))
    width = 0 if softmax_stats is None else softmax_stats.shape[3]
    words = [_at(sinks), lse.data_ptr(), 0, _at(softmax_stats), width, 0, 0]
    for x in (*arrays, *map(grads.get, "qkv")):
        words += (0, 0, 0, 0) if x is None else _array(x, copies)
    kernel_call.call("frisket_backward", inputs, [*words, _at(dlse), ctypes.addressof(pointers) if sums else 0])
    if sums:
        summed = [x for x in captured if x.source in grad_names], [x for x in sums if x is not None]
        kernel = kernel_call.kernel
        read = {use.name: kernel.table(use, tables[use.name], dtype) for use, dtype, _ in kernel.tables}
        grads |= folded(*summed, g, slots, read)
    for name in grad_names - grads.keys():  # read by the score mod, and of no influence
        grads[name] = torch.zeros(tables[name].shape if name in tables else (), dtype=real)
    return grads


def columns(inputs: KernelInputs, q: Tensor, k: Tensor, lse: Tensor) -> Tensor:
    """The weights exp(score - lse) of each key, summed over the queries of each head: [batch, heads, kv_len], float32,
    float64 for float64."""
    import torch

    g, kernel_call = inputs.geometry, launch_of(inputs, q.dtype, k.dtype)
    sums = torch.empty((g.batch, g.heads, g.kv_len), dtype=kernel_call.real)
    copies: list[Tensor] = []
    lse = _real(lse, kernel_call.real)
    nothing = (0, 0, 0, 0)
    words = [0, lse.data_ptr(), 0, 0, 0, 0, 0, *_array(q, copies), *_array(k, copies), *5 * nothing]
    words += [sums.data_ptr(), *sums.stride()[:2], 1, 0, 0]
    kernel_call.call("frisket_columns", inputs, words)
    return sums


def lse_of(inputs: KernelInputs, softmax_stats: Tensor, lse: Tensor) -> Tensor:
    """lse in float64, exact to the last bit of the scores, from lse and the forward's `softmax_stats`."""
    import torch

    top, share = softmax_stats[..., 0].double(), softmax_stats[..., 1].double().abs()
    known = share > 1e-30  # below, lse is the sink
    exact = top * (1.0 if natural(inputs) else math.log(2.0)) - share.log()
    return torch.where(known, exact, lse.double())


def build(inputs: KernelInputs, dtype: Any, stored: Any) -> None:
    """Compile the forward kernel of such calls, of q's dtype and that of stored keys. Raises `BuildError`."""
    try:
        launch_of(inputs, dtype, stored).kernel.function("frisket_forward")
    finally:  # two compilers at once in the background
        of_torch()


def target(
    plan: Any, g: Geometry, dtype: str, tile: Any, narrow: bool, exact: bool = False, invariant: bool = False
) -> Target:
    """The tiles of a call, or the caller's, and how float32 is multiplied: `exact`, by vectors alone. Tiles of
    `invariant` calls have as many keys whatever the lengths and the mask are."""
    six = not (exact or invariant) and products_pay(g, dtype, narrow) and not lacking("amx")
    if six and plan is not None:  # do rows see long runs of keys? of masks of q - k alone, `narrow` has told the others
        mask = plan.mask if isinstance(plan, LoopPlan) else plan.simplified.mask
        six = mask is None or distance_only(mask) or long_runs(mask)
    block_q, block_k = tile or tiles(g, dtype, narrow, six)
    if invariant and not tile:
        block_k = tiles(g, dtype, is_local_window=True)[1]
    return Target("cpp", block_q, block_k, precision="bf16x6" if six else "ieee", invariant=invariant)


def call_target(plan: Any, g: Geometry, dtype: str, tile: Any, tuning: Any, device: Any, arch: Any) -> Target:
    """The target of a call of torch."""
    narrow = plan is not None and plan.narrow
    return target(plan, g, dtype, tile, narrow, tuning.precision == "ieee", tuning.invariant)


def text(plan: LoopPlan, target: Target, g: Geometry, dtype: str, sinks: bool = False, *_: Any) -> tuple[str, Target]:
    """The forward kernel's text, and its target."""
    return KERNELS["forward"](plan, target, CppArrays(g.head_dim, g.v_dim, dtype, g.kv_dtype)).source(), target


def ahead(plan: LoopPlan, target: Target, g: Geometry, dtype: str, kind: str, permuted: bool) -> str:
    """The text that calls load whose keys have the dtype of queries. `permuted`: it reads rows by tables."""
    arrays = CppArrays(g.head_dim, g.v_dim, dtype, permuted=permuted)
    return str(KERNELS[kind](plan, target, arrays, named=False).source())


def huge(x: Tensor) -> None:
    """Ask for huge pages under a new torch tensor of `LARGE` bytes or more. A system that has none ignores it.

    In pages of 4 KiB writing to a new tensor of 32 MiB takes four times as long as to one that was written before."""
    if x.nbytes >= LARGE:
        start = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE  # madvise refuses addresses inside a page
        _advise()(start, x.data_ptr() + x.nbytes - start, getattr(mmap, "MADV_HUGEPAGE", 0))


@memo(1)
def _advise() -> Callable[..., Any]:
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # as on every system but Linux
        return lambda *arguments: None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes, madvise.restype = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return madvise


_NOTHING = [0] * (WORDS - OFFSET["dout"])  # words that a forward leaves out


def _real(x: Tensor | None, dtype: Any) -> Any:
    # `resolve_neg`: the memory of a negated view has the other signs
    if x is None or (x.dtype == dtype and x.is_contiguous() and not x.is_neg()):
        return x
    return x.to(dtype).contiguous().resolve_neg()


def _at(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _array(x: Tensor, copies: list[Tensor]) -> tuple[int, int, int, int]:
    """Address and strides; of a copy, kept in `copies`, where a row is not contiguous or a view is negated."""
    batch, head, row, inner = x.stride()
    if inner != 1 or x.is_neg():
        x = x.contiguous().resolve_neg()
        batch, head, row, _ = x.stride()
        copies.append(x)
    return x.data_ptr(), batch, head, row


def _shape(gradient: Gradient, g: Geometry, tables: Values) -> Sequence[int]:
    """The shape of the buffer in which a captured gradient is summed: `derive.Gradient`."""
    if gradient.over == "scatter":
        return tuple(tables[gradient.source].shape)
    ends = {"head": (), "row": (g.q_len,), "column": (g.kv_len,), "diagonal": (g.q_len + g.kv_len - 1,)}
    return (g.batch, g.heads, *ends[gradient.over])


def out_of_memory(name: str) -> BackendError:
    return BackendError(f"{name} ran out of memory; free some, or take backend='aten'")


# -- records ----------------------------------------------------------------------------------------


Stable = tuple[bytes, Any, int]  # content, its home, its address: who holds the tuple keeps the address good


NO_WORDS: Stable = (b"", None, 0)


def _stable(last: Stable, content: bytes) -> Stable:
    """Bytes that a record points to: `last` where they are the same, whatever other threads do."""
    if last[0] == content:
        return last
    home = ctypes.create_string_buffer(content, len(content))
    return content, home, ctypes.addressof(home)


class NativeKernel:
    """A loaded kernel, shared by calls that differ only in lengths and positions."""

    def __init__(
        self, plan: LoopPlan, target: Target, dims: tuple[int, int], dtypes: tuple[Any, Any], permuted: bool
    ) -> None:
        """`dims` are those of a key and of a value, `dtypes` those of queries and of keys."""
        import torch

        dtype, stored = dtypes
        self.real = torch.float64 if dtype == torch.float64 else torch.float32
        names = [str(x).removeprefix("torch.") for x in dtypes]
        self.text = plan, target, CppArrays(*dims, names[0], names[1] if stored != dtype else "", permuted)
        self.functions: dict[str, tuple[Any, struct.Struct, tuple[float, ...]]] = {}
        self.converted: dict[str, tuple[Any, int, Tensor]] = {}
        floats = [s.type is FLOAT for s in plan.slots]
        self.slots = [(s.name, float if f else int) for s, f in zip(plan.slots, floats, strict=True)]
        self.slot_form = "".join("d" if f else "q" for f in floats)
        self.slot_words = self.table_words = NO_WORDS
        dtypes_of = {FLOAT: self.real, BOOL: torch.bool, INT: torch.int64 if plan.int64 else torch.int32}
        self.tables = [(t, dtypes_of[t.type], struct.Struct(f"{1 + 2 * t.rank}q")) for t in plan.tables]

    def function(self, name: str) -> tuple[Any, struct.Struct, tuple[float, ...]]:
        """The kernel, the record of its slots, and the literals that end it."""
        function = self.functions.get(name)
        if function is None:
            emitted = KERNELS[name.removeprefix("frisket_")](*self.text, named=False)
            run, literals = getattr(library(emitted.source()), name), emitted.literals
            # bytes are passed by address: nothing is copied
            run.argtypes, run.restype = [ctypes.c_char_p], ctypes.c_int64
            function = self.functions[name] = run, struct.Struct(self.slot_form + "d" * len(literals)), literals
        return function

    def slots_of(self, name: str, slots: Values) -> tuple[Any, Stable]:
        """The kernel, and the words of its slots."""
        run, record, literals = self.function(name)
        words = _stable(self.slot_words, record.pack(*[kind(slots[n]) for n, kind in self.slots], *literals))
        self.slot_words = words
        return run, words

    def words(self, tables: Values) -> tuple[Stable, list[Tensor]]:
        """The words of its tables, and the tables that these have the addresses of."""
        read = [self.table(use, tables[use.name], dtype) for use, dtype, _ in self.tables]
        packed = [p.pack(x.data_ptr(), *x.shape, *x.stride()) for x, (_, _, p) in zip(read, self.tables, strict=True)]
        self.table_words = words = _stable(self.table_words, b"".join(packed))
        return words, read

    def table(self, use: TableUse, tensor: Tensor, dtype: Any) -> Tensor:
        """A table in the kernel's dtype, negated views resolved; a conversion is kept until its tensor changes."""
        if tensor.dtype == dtype and not tensor.is_neg():
            return tensor
        seen, version, conversion = self.converted.get(use.name, (lambda: None, 0, None))
        # tensors of inference mode count no writes, so a conversion of one may be stale at any call
        if seen() is tensor and not tensor.is_inference() and version == tensor._version:
            return conversion
        conversion = tensor.to(dtype).resolve_neg()
        if not tensor.is_inference():
            # the conversion goes with its tensor: many calls share the kernel, and it stays
            owner = ref(tensor, lambda gone: self._forget(use.name, gone))
            self.converted[use.name] = owner, tensor._version, conversion
        return conversion

    def _forget(self, name: str, owner: Any) -> None:
        """Let the conversion of a tensor go that is no more, unless another took its place."""
        if self.converted.get(name, (None,))[0] is owner:
            self.converted.pop(name, None)


class NativeLaunch:
    """A kernel, and the part of its record that is equal from call to call."""

    def __init__(self, inputs: KernelInputs, dtype: Any, stored: Any) -> None:
        spans, g, target, rows = inputs.spans, inputs.geometry, inputs.target, inputs.rows
        kernel = _kernel(inputs.plan, target, (g.head_dim, g.v_dim), (dtype, stored), rows is not None)
        self.kernel, self.spans, self.geometry, self.real = kernel, spans, g, kernel.real
        origins = [np.array([x] if type(x) is int else x, np.int64).reshape(-1) for x in g.origin[2:]]
        runs = [np.ascontiguousarray(x, np.int32) for x in (spans.bounds, spans.count, spans.slice_of)]
        places = () if rows is None else rows.padded(target.block_k + BEHIND)
        self.alive = origins, runs, places
        self.weight = 4000 + sum(x.nbytes for x in (*runs, *places))  # bytes, by which the memo weighs an entry
        sizes = g.batch, g.heads, g.kv_heads, g.q_len, g.kv_len, g.scale, *g.full, *g.origin[:2]
        self.before = (*sizes, *(x.ctypes.data for x in origins), *(int(len(x) > 1) for x in origins))
        at = [x.ctypes.data for x in places] or (0, 0)
        self.behind = (*(x.ctypes.data for x in runs), *spans.bounds.shape[1:3], target.block_q, *at)

    @property
    def shapes(self) -> dict[str, tuple[int, int, int, int]]:
        g = self.geometry
        keys = g.batch, g.kv_heads, g.kv_len
        return {"q": (g.batch, g.heads, g.q_len, g.head_dim), "k": (*keys, g.head_dim), "v": (*keys, g.v_dim)}

    def call(self, name: str, inputs: KernelInputs, rest: list[int]) -> None:
        """Run a kernel; `rest` are the words from `sinks` on."""
        kernel = self.kernel
        run, values = kernel.slots_of(name, inputs.slots)
        # the record has addresses: conversions that nothing else keeps live here until the kernel has run
        words, _read = kernel.words(inputs.tables) if kernel.tables else (NO_WORDS, [])
        if run(RECORD.pack(*of_torch(), *self.before, values[2], words[2], *self.behind, *rest)):
            raise out_of_memory(name)

    def frozen(self, name: str, slots: Values, tables: Values | None) -> tuple[Any, bytes, Any]:
        """A kernel; the words of its record between `pool` and `sinks`, without tables where they are None; and what
        the words point to."""
        kernel = self.kernel
        run, values = kernel.slots_of(name, slots)
        words, read = (None, ()) if tables is None else kernel.words(tables)
        at = 0 if words is None else words[2]
        record = RECORD.pack(0, 0, 0, *self.before, values[2], at, *self.behind, *[0] * (WORDS - OFFSET["sinks"]))
        # the pool of threads stands before these words, the arrays behind: both differ from call to call
        return run, record[8 * OFFSET["batch"] : 8 * OFFSET["sinks"]], (self, values, words, read)


# by value: calls of other lengths have equal plans, and a text takes a quarter of a first call
_kernel = memo(group="kernels")(NativeKernel)
_launches = Memo("runtime.backends.cpp.torch.NativeLaunch", KEPT, weigh=lambda _, launch, owners: launch.weight)


def launch_of(inputs: KernelInputs, dtype: Any, stored: Any) -> NativeLaunch:
    """The launch of calls with such inputs, of q's dtype and that of stored keys."""
    owners = inputs.plan, inputs.spans, inputs.geometry, inputs.target, inputs.rows
    key = (*map(id, owners), dtype, stored)
    launch: NativeLaunch | None = _launches.get(key)
    return launch or _launches.put(key, NativeLaunch(inputs, dtype, stored), owners)


# -- calls like one before ---------------------------------------------------------------------------

THREADS = struct.Struct("3q")
ADDRESS, TABLES = struct.Struct("q"), 8 * OFFSET["tables"]  # of tables, in bytes
# words from `sinks` to `out`, which a forward fills in, and zeros to the end
ARRAYS = struct.Struct(f"{OFFSET['dout'] - OFFSET['sinks']}q{8 * (WORDS - OFFSET['dout'])}x")
ALL = struct.Struct(f"{WORDS - OFFSET['sinks']}q")  # words from `sinks` to the end
NONE = (0, 0, 0, 0)  # a gradient that is not wanted


class FastPath(NamedTuple):
    """Calls that differ from one in the entries of their arrays alone."""

    fits: Callable[..., bool]  # (q, k, v): whether `forward` reads such arrays where they are
    # (q, k, v, saving, sinks=None, live_tables=()): out, with `saving` (out, lse, softmax_stats). None where arrays
    # must be copied first, or a table of the plan was written to
    forward: Callable[..., Any]
    # ((q, k, v, out, lse, softmax_stats), dout, needed): [dq, dk, dv]. None where no kernel is built yet, or arrays
    # must be copied first
    gradients: Callable[..., Any]
    memory: list[Any]  # the memory that records point to


def repeat(inputs: KernelInputs, dtype: Any, stored: Any, table_names: Sequence[str]) -> FastPath:
    """A forward by q, k and v of these shapes and dtypes, and its gradients. `table_names` are those of each call."""
    import torch

    kernel_call, g = launch_of(inputs, dtype, stored), inputs.geometry
    slots, tables, paged, weighted = inputs.slots, inputs.tables, bool(inputs.plan.pages), inputs.plan.weighted
    size, wide, width = (g.batch, g.heads, g.q_len, g.v_dim), g.head_dim == g.v_dim, norm_width(dtype, g.v_dim)
    pairs = 2 * g.batch * g.heads * g.q_len * g.kv_len
    short = pairs * (g.head_dim + g.v_dim) < SHORT
    short_backward = pairs * (3 * g.head_dim + 2 * g.v_dim) < SHORT
    # looked up once: a call of one token takes 6 microseconds
    alone, empty_like, pack = THREADS.pack(*ONE_THREAD), torch.empty_like, ARRAYS.pack
    large = dtype.itemsize * size[0] * size[1] * size[2] * size[3] >= LARGE
    strides = g.heads * g.q_len * g.v_dim, g.q_len * g.v_dim, g.v_dim
    shapes = (*kernel_call.shapes.values(),)
    steps = [(h * n * dim, n * dim, dim) for _, h, n, dim in shapes]
    # tensors made in inference mode count no writes
    versions = [(x, x._version) for x in tables.values() if not x.is_inference()]
    memory: list[Any] = []
    built: dict[str, tuple[Any, bytes]] = {}  # kernels, and their records

    def kernel(name: str) -> tuple[Any, bytes]:
        if name not in built:
            run, record, pointed = kernel_call.frozen(name, slots, None if table_names else tables)
            memory.append(pointed)
            built[name] = run, record
        return built[name]

    run, record = kernel("frisket_forward")
    head = alone + record

    def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
        readable = q.stride(3) == k.stride(3) == v.stride(3) == 1 and q.data_ptr() and k.data_ptr() and v.data_ptr()
        return bool(readable) and all(x._version == n for x, n in versions)

    def forward(
        q: Tensor, k: Tensor, v: Tensor, saving: bool, sinks: Tensor | None = None, live_tables: Sequence[Tensor] = ()
    ) -> Any:
        (qb, qh, qn, q_step), (kb, kh, kn, k_step), (vb, vh, vn, v_step) = q.stride(), k.stride(), v.stride()
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()  # 0 of zeros that torch has no memory for
        if not (q_step == k_step == v_step == 1 and at_q and at_k and at_v):
            return None
        for x, version in versions:
            if x._version != version:
                return None
        out = empty_like(q) if wide and q.is_contiguous() else q.new_empty(size)
        if large:
            huge(out)
        to_lse = to_count = to_stats = 0
        if saving:
            lse = q.new_empty(size[:3], dtype=kernel_call.real)
            softmax_stats = lse.new_empty(size[:3] if weighted else (*size[:3], width))
            to_lse, to_stats = lse.data_ptr(), softmax_stats.data_ptr()
            if weighted:  # the count of keys is in the place of the largest score
                to_count, to_stats = to_stats, 0
        rows = (
            0 if sinks is None else sinks.data_ptr(),
            to_lse,
            to_count,
            to_stats,
            width,
            0,
            k.shape[0] if paged else 0,
        )
        keys = at_k, kb, kh, kn, at_v, vb, vh, vn
        arrays = pack(*rows, at_q, qb, qh, qn, *keys, out.data_ptr(), *strides)
        common = head if short else THREADS.pack(*of_torch()) + record
        if table_names:
            words = kernel_call.kernel.words({**tables, **dict(zip(table_names, live_tables, strict=True))})
            common = common[:TABLES] + ADDRESS.pack(words[0][2]) + common[TABLES + ADDRESS.size :]
        if run(common + arrays):
            raise out_of_memory("frisket_forward")
        return (out, lse, softmax_stats) if saving else out

    def gradients(saved: tuple[Tensor, ...], dout: Tensor, needed: Sequence[bool]) -> list[Tensor | None] | None:
        q, k, v, out, lse, softmax_stats = saved
        # the cotangents of weighted rows are no kernel's
        if weighted or "frisket_backward" not in kernel_call.kernel.functions:
            return None
        run, record = kernel("frisket_backward")
        if not all(x.dtype == kernel_call.real and x.is_contiguous() for x in (lse, softmax_stats)):
            return None
        words = [0, lse.data_ptr(), 0, softmax_stats.data_ptr(), softmax_stats.shape[3], 0, 0]
        for x in (q, k, v, out, dout):
            *x_strides, step = x.stride()
            # a zero tensor has no memory to point to
            if step != 1 or x.dtype != dtype or x.is_neg() or x._is_zerotensor():
                return None
            words += (x.data_ptr(), *x_strides)
        grads: list[Tensor | None] = []
        for x, shape, x_steps, need in zip((q, k, v), shapes, steps, needed):
            grad = None
            if need:
                grad = empty_like(x) if x.is_contiguous() else x.new_empty(shape)
                huge(grad)
            grads.append(grad)
            words += NONE if grad is None else (grad.data_ptr(), *x_steps)
        if run((alone if short_backward else THREADS.pack(*of_torch())) + record + ALL.pack(*words, 0, 0)):
            raise out_of_memory("frisket_backward")
        return grads

    return FastPath(fits, forward, gradients, memory)
