"""Run by test_triton_binding.py without an interpreter: kernels are chosen as on a GPU and launched into nothing."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import contextmanager
from threading import current_thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
from support.lowering.device_tables import Watch
from support.triton import null as triton_null
from triton.compiler.errors import CompilationError

import frisket as fk
from frisket.dsl.errors import BackendError, ShapeError
from frisket.runtime.backends import triton as backend
from frisket.runtime.backends.triton import ahead, tiles
from frisket.runtime.backends.triton import grids as triton_grids
from frisket.runtime.backends.triton import launch as triton_launch
from frisket.runtime.calls import arrays as frameworks
from frisket.runtime.calls.options import CallArgs
from frisket.runtime.torch import op as torch_op
from frisket.runtime.torch.ready import PreparedCall

triton_null.install(watch=True)
backend._on_torch = lambda: ""
BIAS = "param bias: float[_, _]\nscore = score + bias[h, k]"
KERNELS = {"attention_forward", "attention_delta", "attention_dq", "attention_dkv"}


def arrays(s=512, b=1, h=4, hkv=2, d=64, dtype=torch.bfloat16):
    return [torch.zeros(b, n, s, d, dtype=dtype, requires_grad=True) for n in (h, hkv, hkv)]


def compiled(run, *given, **more):
    """The kernels that a call had Triton compile."""
    before = len(triton_null.compiled)
    run(*given, **more)
    return triton_null.compiled[before:]


def train(att, given, **more):
    att(*given, **more).sum().backward()


# -- what compiles ------------------------------------------------------------------------------------------------


def test_lengths_batches_and_heads_compile_nothing():
    att = fk.compile("causal & window(1000)", BIAS, backend="triton")
    bias = {"bias": torch.zeros(8, 2048)}
    assert set(compiled(train, att, arrays(), **bias)) == KERNELS
    for shape in ((640, 1, 4, 2), (777, 1, 4, 2), (1000, 3, 4, 2), (1024, 2, 8, 4)):
        given = {"bias": torch.zeros(8, shape[0])}
        assert compiled(train, att, arrays(*shape), **given) == []


def test_windows_inside_a_class_compile_nothing():
    first = compiled(train, fk.compile("causal & window(300)", backend="triton"), arrays())
    assert set(first) == KERNELS
    for w in (301, 500, 640):
        assert compiled(train, fk.compile(f"causal & window({w})", backend="triton"), arrays()) == []
    other = compiled(train, fk.compile("causal & window(w)", w=2000, backend="triton"), arrays())
    assert "attention_forward" in other  # another class has other tiles


def test_documents_compile_nothing():
    att = fk.compile("causal & same(doc)", backend="triton")
    assert set(compiled(train, att, arrays(), doc=np.arange(512) // 100)) == KERNELS
    for s, n in ((512, 3), (512, 512), (700, 41)):
        assert compiled(train, att, arrays(s), doc=np.arange(s) // n) == []


def test_steps_of_decoding_compile_nothing():
    att = fk.compile("causal & window(200)", backend="triton")
    _, k, v = (x.detach() for x in arrays(1024))

    def step(at):
        q = torch.zeros(1, 4, 1, 64, dtype=k.dtype)
        att(q, k, v, origin=(0, 0, at, 0), sizes=(1, 4, 1024, 1024))

    assert compiled(step, 5)
    assert compiled(lambda: [step(at) for at in (6, 100, 800, 1023)]) == []


def test_new_dtypes_and_head_sizes_recompile_once():
    att = fk.compile("causal & q % 7 < 5", backend="triton")
    for more in ({}, {"d": 128}, {"dtype": torch.float16}, {"h": 6}):
        assert set(compiled(train, att, arrays(**more))) == KERNELS
        assert compiled(train, att, arrays(**more)) == []


@pytest.mark.parametrize("learned", [False, True])
def test_long_rows_are_launched_in_parts(learned, monkeypatch):
    """Forward, dq and dkv, each with the launch that combines parts; a learned table leaves the rows to the host."""
    monkeypatch.setattr(triton_grids, "INTERPRETED", 132)
    att = fk.compile("abs(q - k) <= 200 | k < 64 | q < 64", BIAS if learned else None, backend="triton")
    more = {"bias": torch.zeros(8, 16384, requires_grad=True)} if learned else {}
    given = arrays(16384, h=8)
    names = ["forward", "combine", "delta", "dq", "dq_sums", "dkv", "dkv_sums"]
    assert sorted(compiled(train, att, given, **more)) == sorted(f"attention_{n}" for n in names)
    triton_null.launched.clear()
    assert compiled(train, att, given, **more) == []
    assert [kernel.name for kernel, *_ in triton_null.launched] == [f"attention_{n}" for n in names]


# -- what compiles together ---------------------------------------------------------------------------------------


def test_kernels_of_a_first_call_compile_together(monkeypatch):
    """No compilation ends before all four have begun, and the backward finds its kernels."""
    together, compile = threading.Barrier(len(KERNELS)), triton.compiler.compile

    def waits(src, **more):
        together.wait(20)
        return compile(src, **more)

    monkeypatch.setattr(ahead, "_processors", lambda: len(KERNELS))
    monkeypatch.setattr(triton.compiler, "compile", waits)
    att, given = fk.compile("causal & q % 5 < 4", backend="triton"), arrays()
    out = []
    assert set(compiled(lambda: out.append(att(*given)))) == KERNELS
    assert compiled(lambda: out[0].backward(torch.ones_like(out[0]))) == []
    assert compiled(train, att, arrays(640)) == []


@pytest.mark.parametrize("name", ["table", "scalar", "sinks", "dropout"])
def test_gradients_of_what_is_learned_compile_with_the_forward(name):
    mask, score, given, options = CALLS[name]
    att = fk.compile(f"{mask} & q % 9 < 7", score, backend="triton", **options)
    given = {n: x.requires_grad_() for n, x in given.items()}
    given |= {"seed": 3} if options else {}
    out = []
    assert set(compiled(lambda: out.append(att(*arrays(), **given)))) >= KERNELS
    assert compiled(lambda: out[0].sum().backward()) == []


def test_only_gradients_that_are_wanted_are_compiled():
    att = fk.compile("causal & q % 11 < 7", backend="triton")
    q, k, v = arrays()
    with torch.no_grad():
        assert compiled(att, q, k, v) == ["attention_forward"]
    assert set(compiled(att, q, k.detach(), v.detach())) == {"attention_forward", "attention_delta", "attention_dq"}


def test_a_single_processor_compiles_kernels_at_their_launch(monkeypatch):
    monkeypatch.setattr(ahead, "_processors", lambda: 1)
    out, att = [], fk.compile("causal & q % 13 < 7", backend="triton")
    assert compiled(lambda: out.append(att(*arrays()))) == ["attention_forward"]
    assert set(compiled(lambda: out[0].sum().backward())) == KERNELS - {"attention_forward"}


@pytest.mark.parametrize("kind", [CompilationError, RuntimeError])
def test_kernels_that_do_not_compile_raise_at_their_launch(kind, monkeypatch):
    compile = triton.compiler.compile

    def refuses(src, **more):
        if src.name == "attention_dq":
            raise (
                CompilationError("x = y", None, "y is not defined")
                if kind is CompilationError
                else kind("PassManager::run failed")
            )
        return compile(src, **more)

    monkeypatch.setattr(triton.compiler, "compile", refuses)
    out = fk.compile(f"causal & q % 17 < {7 + (kind is RuntimeError)}", backend="triton")(*arrays())
    with pytest.raises(BackendError, match=r"Triton cannot compile attention_dq in tiles of .*\n  give another tile"):
        out.sum().backward()


# -- which kernel runs ----------------------------------------------------------------------------------------------


def odd(x):
    """The array from an address that 16 does not divide."""
    whole = torch.zeros(x.numel() + 1, dtype=x.dtype)
    return whole[1:].view(x.shape)


def padded(x):
    """The array with strides that 16 does not divide."""
    return torch.zeros(*x.shape[:-1], x.shape[-1] + 1, dtype=x.dtype)[..., :-1]


LOOKS = {
    "contiguous": lambda x: x,
    "odd": odd,
    "padded": padded,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "dim first": lambda x: x.mT.contiguous().mT,
    "expanded": lambda x: x[:, :1].expand(x.shape),
}


def test_prepared_launch_takes_the_kernel_of_triton(monkeypatch):
    """For every look of q, k, v and a table: the launch laid out beforehand has the kernel and the arguments of the
    one by Triton's own way."""
    att = fk.compile("causal", BIAS, backend="triton")
    q, k, v = (x.detach() for x in arrays(64))
    bias = torch.zeros(4, 64)
    cases = [(f(q), k, v, bias) for f in LOOKS.values()] + [(q, f(k), f(v), bias) for f in LOOKS.values()]
    cases += [(q, k, v, f(bias[None, None])[0, 0]) for f in (odd, padded)]
    cases += [(q, k, v, bias.to(torch.bfloat16))]
    for case in cases:
        att(*case[:3], bias=case[3])
    for case in cases:
        found = []
        for known in (True, False):
            if not known:
                monkeypatch.setattr(triton_launch.Launch, "_run", _by_triton)
            triton_null.launched.clear()
            att(*case[:3], bias=case[3])
            ((kernel, grid, _, arguments),) = triton_null.launched
            found.append((kernel, grid, [_place(x) for x in arguments]))
            monkeypatch.undo()
        (kernel, grid, laid_out), (chosen, other, arguments) = found
        assert kernel is chosen
        assert grid == other
        told = zip(kernel.src.fn.arg_names, laid_out, arguments, strict=True)
        assert {n for n, a, b in told if a != b} <= {"Out", "Lse"}  # which are made anew


def _by_triton(self, values, tensors):
    self._first(object(), values, (*tensors, *values.tensors))


def _place(x):
    if hasattr(x, "base"):  # a tensor descriptor, as Triton's launcher reads it
        return x.base.data_ptr(), [*x.shape], [*x.strides], x.padding, getattr(x, "round_f32_to_tf32", False)
    return x.data_ptr() if hasattr(x, "data_ptr") else x


def test_tensor_descriptors_are_for_strides_that_they_may_have():
    """16-bit arrays of strides that 16 bytes divide, from addresses that they divide; everything else by pointers."""
    att = fk.compile("causal & window(99)", backend="triton")
    given = [x.detach() for x in arrays(64)]
    one = [torch.zeros(1, 1, 64, 64, dtype=torch.float16).as_strided((1, 1, 64, 64), (3, 5, 64, 1))] * 3
    described = {"contiguous": True, "transposed": True, "odd": False, "padded": False, "dim first": False,
                 "expanded": False}  # fmt: skip
    for name, look in LOOKS.items():
        assert _described(att, [look(x) for x in given]) is described[name]
    assert _described(att, one)  # the stride of an axis of one entry is no stride
    assert not _described(att, [x.float() for x in given])
    assert not _described(fk.compile("causal", backend="triton"), [x.detach() for x in arrays(d=96)])  # in two parts


def _described(att, given):
    triton_null.launched.clear()
    att(*given)
    ((kernel, _, _, arguments),) = triton_null.launched
    kinds = [type(x).__name__ == "TensorDescriptor" for x in arguments[:3]]
    assert kinds == [kernel.src.signature[n].startswith("tensordesc") for n in "QKV"]
    return all(kinds)


def test_launcher_reads_a_warm_descriptor_like_a_new_one(monkeypatch):
    """By the code of Triton's that fills the descriptors of a launch, of either version."""
    from triton.backends.nvidia import driver

    x = torch.zeros(2, 3, 40, 64, dtype=torch.float16)
    filled = []
    utils = SimpleNamespace()
    for n in ("fill_tma_descriptor", "fill_tma_descriptor_tiled"):
        setattr(utils, n, lambda *given: filled.append(given) or "a map")
    monkeypatch.setattr(triton.runtime.driver.active, "utils", utils, raising=False)
    own = triton_launch.descriptor(x, (1, 1, 32, 64))
    warm = triton_launch.WarmDescriptor(own.shape, own.strides, x.data_ptr())
    meta = {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [1, 1, 32, 64], "fp4_padded": False}
    rest = () if triton.__version__ < "3.9" else (None,)
    assert driver.make_tensordesc_arg(own, meta, *rest) == driver.make_tensordesc_arg(warm, meta, *rest)
    assert filled[0] == filled[1]
    assert filled[0][0] == x.data_ptr()


def test_triton_launches_on_the_current_stream(monkeypatch):
    att, given = fk.compile("causal", backend="triton"), arrays(64)
    for stream in (3, 5, 3):
        monkeypatch.setattr(triton_null, "stream", stream)
        triton_null.launched.clear()
        train(att, given)
        assert {at for _, _, at, _ in triton_null.launched} == {stream}


def test_triton_launches_on_the_device_of_the_arrays(monkeypatch):
    """Kernels of another device than the current one run with theirs as the current one."""
    current, ran = [0], []

    class Device:
        def __init__(self, device):
            self.index = device.index

        def __enter__(self):
            current.append(self.index)

        def __exit__(self, *_):
            current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(triton_launch.Launch, "_run", lambda self, *given: ran.append(current[-1]))
    att = fk.compile("causal", backend="triton")
    q, k, v = (x.detach() for x in arrays(64))
    att(q, k, v)
    (ready,) = (x for x in att.calls.values() if isinstance(x, PreparedCall))
    x = ready.inputs
    (calls,) = triton_launch.bound(x.plan, x.spans, x.geometry, x.target, q, k).launches.values()
    (launch,) = calls.launches
    for index in (0, 1):
        monkeypatch.setattr(launch, "device", torch.device("cuda", index))
        att(q, k, v)
    assert (ran, current) == ([0, 0, 1], [0])


# -- what a warm call does ------------------------------------------------------------------------------------------


class Reads(Watch):
    """Refuses what waits for a device to answer."""

    WAIT = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "item")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name in self.WAIT:
            raise AssertionError(f"a warm call runs {name}")
        return func(*args, **(kwargs or {}))


CALLS = {
    "documents": ("causal & same(doc)", None, {}, {}),
    "table": ("causal", BIAS, {"bias": torch.zeros(4, 512)}, {}),
    "scalar": ("causal", "param c: float\nscore = c * tanh(score / c)", {"c": torch.tensor(3.0)}, {}),
    "sinks": ("causal", None, {"sinks": torch.zeros(4)}, {}),
    "one sink": ("causal", None, {"sinks": 0.5}, {}),
    "dropout": ("causal", None, {}, {"dropout": 0.2}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_reads_nothing_back(name, monkeypatch):
    mask, score, given, options = CALLS[name]
    att = fk.compile(mask, score, backend="triton", **options)
    given = {n: x.requires_grad_() if hasattr(x, "requires_grad_") else x for n, x in given.items()}
    if name == "documents":
        given = {"plan": att.plan(512, 512, 1, 4, doc=torch.arange(512) // 100, flat=True)}
    if name == "dropout":
        given = {"seed": 3}
    leaves = arrays()
    cotangent = torch.zeros_like(leaves[0])
    torch.autograd.grad(att(*leaves, **given), leaves, cotangent)

    def refused(*args, **kwargs):
        raise AssertionError("a warm call takes values to the host, or from it")

    for owner, names in ((torch, ("from_numpy", "tensor", "as_tensor")), (torch.Tensor, ("numpy", "tolist", "cpu"))):
        for n in names:
            monkeypatch.setattr(owner, n, refused)
    with Reads():
        torch.autograd.grad(att(*leaves, **given), leaves, cotangent)


# -- what stays ------------------------------------------------------------------------------------------------------


def test_seeds_leave_nothing_behind():
    """What is kept of a gradient by position is kept once, not for every seed."""
    att = fk.compile("causal", "score + bias[(q * k) % 8, h]", backend="triton", dropout=0.1)
    bias, given = torch.zeros(8, 4, requires_grad=True), arrays(64)
    sizes = []
    for seed in range(3):
        train(att, given, bias=bias, seed=seed)
        kinds = [x for x in gc.get_objects() if isinstance(x, triton_launch.LaunchContext)]
        sizes.append((sum(len(b.launches) for b in kinds), sum(len(b.planes) for b in kinds)))
    assert sizes[0] == sizes[1] == sizes[2]
    assert sizes[0][1] > 0


def test_layouts_of_steps_leave_nothing_behind():
    """Launches serve the plans of all steps, and hold the spans of none."""
    att = fk.compile("causal & same(doc)", backend="triton")
    q, k, v = (x.detach() for x in arrays(64))
    plan = att.plan(64, 64, 1, 4, doc=torch.arange(64) // 20, flat=True)
    att(q, k, v, plan=plan)
    bounds = [weakref.ref(made[0]) for made in plan.spans_by_tile.values()]
    assert bounds
    del plan
    triton_null.launched.clear()
    gc.collect()
    assert [x() for x in bounds] == [None] * len(bounds)


def test_triton_tiles_beyond_shared_memory_are_refused(monkeypatch):
    def refused(self):
        raise triton.OutOfResources(393216, 232448, "shared memory")

    monkeypatch.setattr(triton_null._Kernel, "run", property(refused))
    att = fk.compile("causal & window(77)", tile=(128, 128), backend="triton")
    said = "attention_forward takes 393216 bytes of shared memory in tiles of 128 queries x 128 keys"
    for _ in range(2):
        with pytest.raises(BackendError, match=f"{said}.*; this GPU has 232448\n  leave out `tile`"):
            att(*(x.detach() for x in arrays(d=256)))


class Small:
    """A GPU with so many bytes of shared memory, as Triton's launcher sees it: kernels that take more are refused."""

    def __init__(self, limit, monkeypatch, only=""):
        self.limit, self.refused, self.only = limit, [], only
        monkeypatch.setattr(triton_null._Kernel, "run", property(self.run))

    def run(self, kernel):
        constants = {kernel.src.fn.arg_names[at[0]]: x for at, x in kernel.src.constants.items() if len(at) == 1}
        part = kernel.name.removeprefix("attention_")
        if "BLOCK_K" in constants and part != "delta" and self.only in part:
            own, walked = constants["BLOCK_Q"], constants["BLOCK_K"]
            sides = (walked, own) if part in ("dkv", "dv") else (own, walked)
            size = "forward" if part in ("forward", "decode") else part
            required = tiles.shared(size, 128, *sides, kernel.options["num_stages"])
            if required > self.limit:
                self.refused.append(kernel.name)
                raise triton.OutOfResources(required, self.limit, "shared memory")
        return kernel._run


def test_a_kernel_without_room_takes_the_next_smaller_tile(monkeypatch):
    """Tiles are chosen by an estimate; where the compiler's number is larger, the launch fails. Tiles of an H100 on a
    GPU with the memory of an RTX 4090 stand for that."""
    gpu = Small(101_376, monkeypatch)
    att = fk.compile("causal & window(3000)", BIAS, backend="triton")
    for length in (4096, 4224):  # another plan
        triton_null.launched.clear()
        train(att, arrays(length, d=128), bias=torch.zeros(8, length, requires_grad=True))
        assert {x[0].name for x in triton_null.launched} >= KERNELS
        assert gpu.refused.count("attention_forward") == 1
        assert len(gpu.refused) == len(set(gpu.refused))  # once each, and never again
    few = fk.compile("causal & window(2900)", backend="triton")
    q, k, v = (x.detach() for x in arrays(4096, d=128))
    before = list(gpu.refused)
    monkeypatch.setattr(gpu, "limit", 40_000)
    for _ in range(2):
        few(q[:, :, :1], k, v, origin=(0, 0, 4095, 0))
    assert gpu.refused == [*before, "attention_decode"]


@pytest.mark.parametrize(("index", "rank", "kernel"), [("h, q, k", 3, "plane"), ("h, max(q - k, 0)", 2, "diagonal")])
def test_captured_gradients_without_room_take_smaller_tiles(monkeypatch, index, rank, kernel):
    gpu = Small(10_000, monkeypatch, kernel)
    att = fk.compile("causal", f"param t: float[{', '.join('_' * rank)}]\nscore + t[{index}]", backend="triton")
    for _ in range(2):
        triton_null.launched.clear()
        train(att, arrays(64, d=128), t=torch.zeros(4, *[64] * (rank - 1), requires_grad=True))
        assert [x[0].name for x in triton_null.launched].count(f"attention_{kernel}") == 1
    assert gpu.refused == [f"attention_{kernel}"]


def test_tiles_that_nobody_gave_are_not_blamed(monkeypatch):
    Small(10, monkeypatch)
    given = [x.detach() for x in arrays(512, d=128)]
    with pytest.raises(BackendError, match=r"this GPU has 10\n  give a smaller tile: tile=\(64, 32\)"):
        fk.compile("causal & window(311)", backend="triton")(*given)
    with pytest.raises(BackendError, match="leave out `tile` and `kernel_options`"):
        fk.compile("causal & window(312)", tile=(64, 64), backend="triton")(*given)


def test_learned_tables_leave_nothing_behind():
    """A table that is computed in a step is gone with the step, and so is its graph; what calls share is kept."""
    att, parameter = fk.compile("causal", BIAS, backend="triton"), torch.zeros(4, 64, requires_grad=True)

    def step(out):
        bias = parameter * 2
        out(att(*arrays(64), bias=bias))
        triton_null.launched.clear()
        return weakref.ref(bias)

    gc.disable()
    try:
        assert step(lambda out: out.sum().backward())() is None
        with torch.no_grad():
            assert step(id)() is None
    finally:
        gc.enable()
    att = fk.compile("causal & same(doc)", doc=np.arange(64) // 9, backend="triton")
    att(*arrays(64))
    (ready,) = (x for x in att.calls.values() if isinstance(x, PreparedCall))
    x = ready.inputs
    own = triton_launch.bound(x.plan, x.spans, x.geometry, x.target, *arrays(64)[:2])
    assert own.values(x.slots, x.tables) is own.values(x.slots, x.tables)


def test_a_warm_backward_copies_no_origins(monkeypatch):
    """Origins of every batch entry are on the device after the first call."""
    score = "param bias: float[_]\nscore = score + bias[q]"
    att, bias = fk.compile("causal", score, backend="triton"), torch.zeros(256, requires_grad=True)
    place = {"origin": (0, 0, np.array([3, 40]), 0), "sizes": (2, 4, 256, 256)}
    given = arrays(64, b=2)
    call = att.call(CallArgs(*given, **place, params={"bias": bias}))
    ready = torch_op.prepare(call, att.options)
    torch_op.run(call, ready)[0].sum().backward()
    want = bias.grad
    bias.grad = None

    def watched(x, real=torch.as_tensor):
        assert isinstance(x, torch.Tensor), "a warm backward copies from the host"
        return real(x)

    monkeypatch.setattr(torch, "as_tensor", watched)
    torch_op.run(call, ready)[0].sum().backward()
    assert bias.grad.shape == want.shape


def test_copies_serve_every_stream(monkeypatch):
    """The host waits for its copies, on a stream of their own; a captured graph has none."""
    said, threads, capturing = [], [], [False]
    device = SimpleNamespace(type="cuda", index=0)

    class Stream:
        def __init__(self, of):
            self.of = of

    real = torch.Tensor.to

    def to(self, place, *args, non_blocking=False, **kwargs):
        if place is not device:
            return real(self, place, *args, **kwargs)
        said.append(("copied", non_blocking))
        threads.append(current_thread())
        return self

    @contextmanager
    def inside(stream):
        said.append("own stream")
        yield
        said.append("left")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: "current")
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: said.append(stream))
    monkeypatch.setattr(frameworks, "_copies", Stream)
    assert frameworks.uploaded(np.arange(3), device).tolist() == [0, 1, 2]
    assert said == ["own stream", ("copied", False), "left", "current"]
    assert threads[0] is not current_thread()  # whose memory is in the pool of a graph that is warmed up
    capturing[0] = True
    with pytest.raises(BackendError, match="a captured graph cannot copy from the host"):
        frameworks.uploaded(np.arange(3), device)


def test_more_than_a_grid_has():
    q = torch.zeros(65536, 1, 1, 16, dtype=torch.float16)
    for mask in ("causal", "window(5)"):
        att = fk.compile(mask, backend="triton")
        for x, what in ((q, "batch entries"), (q.transpose(0, 1), "heads")):
            with pytest.raises(ShapeError, match=f"at most 65535 {what}, this one 65536\n  give it in parts"):
                att(x, x, x)
        att(*[q[:65535]] * 3)
