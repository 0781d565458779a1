"""The framework of an array, asked without importing one that the caller did not; and the shapes of a call, checked.

A `TokenPermutation` says where arrays hold the queries and keys of an attention in another order. Keys and values may
be as caches store them: in 8 bits, with a scale for every token and head, in pages of a pool.

Scales and pages come with every call, like dropout's seed. What is static of them is a part of the program, so that
kernels read them as they read any table. The scale of a key is in the score, that of a value is `LoopPlan.value_scale`.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ctypes import c_char, string_at
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from hashlib import sha256
from operator import mul
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import BackendError, BackwardError, ParameterError, ShapeError
from frisket.dsl.ir import SCORE, Expr, lookup, substitute, var
from frisket.dsl.program import entries_of
from frisket.dsl.types import FLOAT, INT
from frisket.grammar.memo import memo
from frisket.lowering.dtypes import BYTES, FLOATS, FP8, OPERANDS, SINGLE, accumulate
from frisket.lowering.plan import FIRST, K_SCALE, KV_INPUTS, PAGES, Q_SCALE, V_SCALE, Geometry, Origin, Pages, Sizes
from frisket.runtime.machine.caller import as_int
from frisket.runtime.machine.modules import loaded
from frisket.runtime.machine.parameters import check_plain, learns, traced

Array = TypeVar("Array")  # torch's Tensor or JAX's Array, whichever was brought
LAYOUTS = {"bhsd": "(batch, heads, length, head_dim)", "bshd": "(batch, length, heads, head_dim)"}
HEADS_AXIS = {"bhsd": 1, "bshd": 2}  # the axis of heads
NATURAL = {"torch": "bhsd", "jax": "bshd"}
NO_SCALES: Mapping[str, Any] = MappingProxyType({})
COPIED = 1 << 26  # bytes of a table, at most, that is copied to be compared: no dense mask of 16,384 x 16,384
# in an error; torch's own attention computes both readings alike
UNBATCHED = {("torch", 3): "\n  q[None] has one batch entry, q[:, None] one head; k and v likewise"}
MULTIPLE = 16  # tokens that the length of a page is a multiple of


def framework_of(x: Any) -> str | None:
    """ "torch", "jax", "numpy", or None for anything else."""
    if isinstance(x, getattr(sys.modules.get("torch"), "Tensor", ())):
        return "torch"
    if isinstance(x, getattr(sys.modules.get("jax"), "Array", ())):
        return "jax"
    return "numpy" if isinstance(x, np.ndarray) else None


def in_graph(x: Any, *others: Any) -> bool:
    """Whether someone watches or records what torch does to `x`: then one operator has to stand for a call, for what
    kernels do to memory is not seen. True in torch.compile, torch.export, make_fx, torch.jit.trace, torch.func and
    under every mode of torch's dispatcher, of fake and meta tensors and other subclasses. Also with `others` of
    classes whose tensors may have no memory, such as DTensor."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_compiling():  # first: Dynamo cannot trace what follows
        return True
    # a subclass may have no memory; isinstance would take one for a plain tensor
    if type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter:
        return isinstance(x, torch.Tensor)
    c = torch._C
    if x.is_meta or c._len_torch_dispatch_stack() or c._is_tracing() or c._functorch.maybe_current_level() is not None:
        return True
    # make_fx with pre_dispatch has no mode on the stack
    if c._dispatch_tls_is_dispatch_key_included(c.DispatchKey.PreDispatch):
        return True
    kind = torch.Tensor
    for y in others:
        if y is None or type(y) is kind:  # told apart at once, since every call comes here
            continue
        if isinstance(y, kind) and type(y).__torch_dispatch__ is not kind.__torch_dispatch__:
            return True
    return False


def by_dynamo() -> bool:
    """Whether Dynamo reads the calling code, for torch.compile or a strict torch.export."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_dynamo_compiling())


def recorded() -> bool:
    """Whether make_fx or torch.jit.trace writes down what torch does."""
    # its import takes long; without it nothing is recorded
    torch, proxies = sys.modules["torch"], sys.modules.get("torch.fx.experimental.proxy_tensor")
    return torch._C._is_tracing() or (proxies is not None and proxies.get_proxy_mode() is not None)


def symbolic(*values: Any) -> bool:
    """Whether one of the values is a Proxy of torch.fx.symbolic_trace."""
    fx = sys.modules.get("torch.fx")
    return fx is not None and any(isinstance(x, fx.Proxy) for x in values)


def shared(tables: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Read-only arrays of numpy as tensors of torch over the same memory; without torch, the arrays."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "from_numpy"):  # torch is there, and still being imported
        return dict(tables)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return {n: torch.from_numpy(np.ascontiguousarray(x)) for n, x in tables.items()}


def version_of(x: Any, *, wait: bool = False) -> Any:
    """A key that changes whenever a tensor, an array of numpy or a list was written to. On the host it is the memory
    itself: numpy, DLPack and `.data` write what torch does not count. On a device it is torch's count. Tensors made in
    inference mode have no count: with `wait` they are copied to the host, else their key equals no other."""
    torch = sys.modules["torch"]
    if not isinstance(x, torch.Tensor):
        return np.asarray(x).tobytes()
    if (type(x) is torch.Tensor or type(x) is torch.nn.Parameter) and x.is_cpu and x.layout is torch.strided:
        with suppress(RuntimeError):  # tensors that torch.func wraps have no memory
            if at := x.data_ptr():
                places = zip(x.shape, x.stride())
                # views with holes: the memory from the first entry to the last
                strided = not x.is_contiguous()
                size = x.itemsize * (1 + sum((n - 1) * step for n, step in places)) if strided else x.nbytes
                content = string_at(at, size) if size <= COPIED else sha256((c_char * size).from_address(at)).digest()
                return content, x.dtype, x.shape, x.stride(), x.is_neg()  # `t_()` leaves the memory as it is
    if not x.is_inference():
        return x._version
    return version_of(x.cpu()) if wait and not x.is_cpu else object()  # a new object equals no other


def axis_order(layout: str | None, axes: str | None) -> str | None:
    """The axis order of a call: `axes`, or `layout`, its older name."""
    # equal values are refused too: a call with both was not meant
    if layout is not None and axes is not None:
        raise ParameterError(
            f"layout is {layout!r} and axes is {axes!r}: both name the axis order\n  write axes={axes!r} alone"
        )
    return layout if axes is None else axes


def check_layout(layout: str) -> None:
    if not isinstance(layout, str) or layout not in LAYOUTS:  # a list has no hash
        known = " or ".join(f'"{n}" {shape}' for n, shape in LAYOUTS.items())
        raise ShapeError(f"the axis order is {layout!r}; it is {known}")


@dataclass(frozen=True)
class Arrays:
    """q, k and v of one call, known to fit together; `layout` says where their axes are. With `pages`, the shape of
    their table, k and v are pools: [pages, heads, tokens, dim] where they would be [batch, heads, length, dim].
    `unbatched`: q had no batch axis and got one of length 1, which `as_called` removes from results."""

    q: Any
    k: Any
    v: Any
    framework: str
    layout: str
    dtype: str
    device: str  # "cpu", "cuda", "tpu", ...: where the call runs
    pages: tuple[int, ...] = ()
    unbatched: bool = False
    kv_dtype: str = ""  # of k and v, where it is an 8-bit type and so differs from q's

    def as_called(self, *results: Any) -> tuple[Any, ...]:
        """Results with the axes that the arrays of the call had."""
        return tuple(x if x is None or not self.unbatched else x[0] for x in results)

    @property
    def page(self) -> int:
        """Tokens of a page, 0 where there are none."""
        return _ordered(self.k.shape, self.layout)[2] if self.pages else 0

    @property
    def qkv(self) -> tuple[Any, Any, Any]:
        return self.q, self.k, self.v

    def transposed(self, layout: str) -> tuple[Any, Any, Any]:
        """The arrays with their axes in another order: views in torch and numpy."""
        q, k, v = (turn(x, self.layout, layout) for x in (self.q, self.k, self.v))
        return q, k, v

    def geometry(
        self,
        scale: float | None,
        enable_gqa: bool,
        origin: Origin | None = None,
        sizes: Sizes | None = None,
        scaled: Mapping[str, Any] = NO_SCALES,
    ) -> Geometry:
        """The sizes of the call, or `ShapeError`; `scaled` has the scales that there are."""
        (b, h, s, d), (kb, hkv, n, kd), (vb, hv, vn, dv) = (
            _ordered(x.shape, self.layout) for x in (self.q, self.k, self.v)
        )
        shapes = "".join(f"\n  {name} {tuple(getattr(self, name).shape)}" for name in "qkv")
        shapes += f'\n  read as {LAYOUTS[self.layout]}; axes="bhsd" or "bshd" says otherwise'
        if self.pages:
            (kb, n), (vb, vn) = self._paged(b, (kb, n), (vb, vn), shapes)
        for what, wrong in (
            ("a head size is zero", 0 in (d, kd, dv)),
            (f"q, k and v have {b}, {kb} and {vb} batch entries", not b == kb == vb),
            (f"k and v have {hkv} and {hv} heads", hkv != hv),
            (f"k and v have {n} and {vn} keys", n != vn),
            (f"q and k have head sizes {d} and {kd}", d != kd),
            (f"{h} query heads do not divide among {hkv} key heads", h % hkv != 0 if hkv else h != 0),
            (f"{h} query heads share {hkv} key heads and enable_gqa is False", h != hkv and not enable_gqa),
        ):
            if wrong:
                raise ShapeError(what + shapes)
        start: Origin = (0, 0, 0, 0) if origin is None else origin_of(origin)
        whole: Any = None if sizes is None else tuple(map(as_int, sizes))
        factor = d**-0.5 if scale is None else scale_of(scale, known=True)  # never d = 0, which was refused
        q, k = OPERANDS[self.dtype], OPERANDS[self.kv_dtype or self.dtype]
        v = k
        if scaled:
            # one scale for each token and head, unless queries have 8 bits
            q, k, v = (
                replace(x, scale_block=(self.tokens(name, scaled[name]) or length, width)) if name in scaled else x
                for x, name, length, width in ((q, Q_SCALE, s, d), (k, K_SCALE, n, d), (v, V_SCALE, n, dv))
            )
        return Geometry(b, h, hkv, s, n, d, dv, factor, start, whole, q, k, v)

    def tokens(self, name: str, scale: Any) -> int:
        """The tokens that share a scale, 0 where all of a head do; `ShapeError` for a scale of another shape."""
        array, shape = getattr(self, OF[name]), tuple(scale.shape)
        if self.dtype != FP8:
            if name == Q_SCALE:
                raise ShapeError(f"q_scale is for q of {FP8}, and q is {self.dtype}\n  multiply q by its scale")
            return 1
        batch, heads, length, _ = _ordered(array.shape, self.layout)
        if shape == (batch, heads):
            return 0
        if name == V_SCALE:
            raise ShapeError(
                f"v_scale has the shape {shape}; with q of {FP8} it has one number for every head of v, "
                f"{(batch, heads)}\n  weights are rounded to 8 bits, and summed with values of one scale"
            )
        blocks = shape[3 - HEADS_AXIS[self.layout]] if len(shape) == 3 else 0
        tokens = tokens_of(length, blocks)
        want = (batch, heads, blocks) if self.layout == "bhsd" else (batch, blocks, heads)
        if shape != want or not tokens:
            axes = "[batch, heads, blocks]" if self.layout == "bhsd" else "[batch, blocks, heads]"
            raise ShapeError(
                f"{WORDS[name]} has the shape {shape}; it has one number for every head of {OF[name]}, "
                f"{(batch, heads)}, or {axes} with one for every block of 1, 2, 4, 8, ... tokens: "
                f"{-(-length // 128)} blocks of 128 in {length} tokens"
            )
        return tokens

    def _paged(self, batch: int, k: tuple[int, int], v: tuple[int, int], shapes: str) -> tuple[tuple[int, int], ...]:
        """(batch, keys) of k and of v, for (pages, tokens of a page) of their pools."""
        shapes += f"\n  pages {self.pages}: k and v are pools, [pages, ...] in place of [batch, ...]"
        for what, wrong in (
            ("pages have two axes, [batch, pages of a sequence]", len(self.pages) != 2),
            (f"pages are of {self.pages[0]} sequences, q of {batch}", self.pages[0] != batch),
            ("a sequence has no pages", self.pages[-1] == 0),
            ("the pools of k and v have different pages", k != v),
            (f"a page has {k[1]} tokens, it has a multiple of {MULTIPLE}", k[1] % MULTIPLE != 0),
            ("a pool has no pages", k[0] == 0),
        ):
            if wrong:
                raise ShapeError(what + shapes)
        return ((batch, self.pages[1] * k[1]),) * 2


def arrays(
    q: Any, k: Any, v: Any, layout: str | None = None, *, numpy: bool = False, pages: Any = None, exported: bool = False
) -> Arrays:
    """q, k and v of one framework, device and floating dtype, with four axes each; `numpy` lets numpy in. k and v may
    have 8 bits while q has more; without a scale, 8-bit integers are used as they are. With `exported` batch
    and lengths may be symbols of `jax.export`. Arrays of numpy become JAX's where q, k or v is. Arrays of JAX and numpy
    without a batch axis get one."""
    if layout is not None:
        check_layout(layout)
    frameworks = {n: framework_of(x) for n, x in zip("qkv", (q, k, v))}
    host = {*frameworks.values()} <= {"jax", "numpy"}
    if {*frameworks.values()} == {"jax", "numpy"}:
        q, k, v = all_of_jax(q, k, v)
        frameworks = dict.fromkeys(frameworks, "jax")
    qkv = dict(zip("qkv", (q, k, v)))
    # pools have an axis of pages for that of batches
    bare = [n for n, x in qkv.items() if host and x.ndim == 3 and (n == "q" or pages is None)]
    qkv |= {n: qkv[n][None] for n in bare}
    q, k, v = qkv.values()
    if (strange := next((n for n, f in frameworks.items() if f is None), None)) is not None:
        raise ShapeError(f"{strange} is a {type(qkv[strange]).__name__}; give torch tensors or JAX arrays")
    if len(set(frameworks.values())) > 1:
        which = ", ".join(f"{n} from {f}" for n, f in frameworks.items())
        raise ShapeError(f"q, k and v come from different frameworks: {which}; convert them to one")
    framework = str(frameworks["q"])
    if framework == "numpy" and not numpy:
        raise ShapeError(
            "q, k and v are numpy arrays; give torch tensors (torch.from_numpy(q)) or JAX arrays "
            "(jax.numpy.asarray(q)), or use frisket.reference for numpy"
        )
    if framework == "numpy" and layout is None:
        raise ShapeError('numpy arrays have no usual axis order; give axes="bhsd" or axes="bshd"')
    for name, x in qkv.items():
        if framework == "torch" and (x.is_nested or x.layout is not sys.modules["torch"].strided):
            raise ShapeError(_not_dense(name, x))
        if x.ndim != 4:
            raise ShapeError(
                f"{name} has {x.ndim} axes, shape {tuple(x.shape)}; it needs four: "
                f"{LAYOUTS[layout or NATURAL[framework]]}{UNBATCHED.get((framework, x.ndim), '')}"
            )
        # jax.export may have symbols for batches and lengths alone
        fixed = x.shape if not exported else tuple(x.shape[i] for i in (HEADS_AXIS[layout or NATURAL[framework]], 3))
        if framework == "jax" and not all(isinstance(n, int) for n in fixed):
            raise ShapeError(
                f"{name} has the shape ({', '.join(map(str, x.shape))}); "
                + ("heads and their sizes are numbers" if exported else "tiles are laid out for known lengths")
                + "\n  export one module for each of them, instead of jax.export.symbolic_shape"
            )
    dtypes = {n: str(x.dtype).removeprefix("torch.") for n, x in qkv.items()}
    narrow = dtypes["k"] == dtypes["v"] and dtypes["k"] in BYTES
    if len(set(dtypes.values())) > 1 and not (narrow and dtypes["q"] in FLOATS):
        raise ShapeError(f"q, k and v have dtypes {', '.join(dtypes.values())}; convert them to one")
    if dtypes["q"] not in (*FLOATS, FP8):
        raise ShapeError(f"q, k and v are {dtypes['q']}; attention takes {', '.join(FLOATS)}, or {FP8} for all three")
    if dtypes["q"] == FP8 and pages is not None:
        raise ShapeError(f"q is {FP8}, and no kernel reads pages with such a q; cast q to bfloat16")
    if framework == "torch" and not q.device == k.device == v.device:
        check_devices(q, k, v)
    # traced pages have a shape, too
    table = () if pages is None else tuple(int(n) for n in getattr(pages, "shape", ()))
    if pages is not None and not table:
        raise ShapeError(f"pages are {pages!r}; they are an array int32 [batch, pages of a sequence]")
    order, device = layout or NATURAL[framework], q.device.type if framework == "torch" else device_of(q, framework)
    stored = dtypes["k"] if dtypes["k"] != dtypes["q"] else ""
    return Arrays(q, k, v, framework, order, dtypes["q"], device, table, "q" in bare, stored)


def like_jax(x: Any, *others: Any) -> Any:
    """An array of numpy as JAX's, on the device that one of the `others` is committed to; other arrays as they are."""
    if framework_of(x) != "numpy":
        return x
    import jax.numpy as jnp

    # an array split over devices has no one device, and one that is not committed follows the others
    known = (y for y in others if framework_of(y) == "jax" and not traced(y) and y.committed and len(y.devices()) == 1)
    return jnp.asarray(x, device=next((y.sharding for y in known), None))


def all_of_jax(q: Any, k: Any, v: Any, known: Iterable[str | None] = ("jax",)) -> tuple[Any, Any, Any]:
    """q, k and v as arrays of JAX, where each is one or of numpy, and "jax" is a framework of theirs or a `known` one;
    else as they are."""
    frameworks = {framework_of(x) for x in (q, k, v)}
    if not frameworks <= {"jax", "numpy"} or "jax" not in {*frameworks, *known}:
        return q, k, v
    return like_jax(q, k, v), like_jax(k, q, v), like_jax(v, q, k)


def check_devices(q: Any, k: Any, v: Any) -> None:
    """Raise unless tensors of torch are on one device; meta is one too."""
    devices = {"q": q.device, "k": k.device, "v": v.device}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ShapeError(f"q, k and v are on different devices: {where}; move them to one")


def _not_dense(name: str, x: Any) -> str:
    if x.is_nested:
        return (
            f"{name} is a nested tensor\n  attention takes q, k and v all nested, of layout torch.jagged; all else "
            "takes packed tokens, (1, heads, tokens, dim)"
        )
    return f"{name} is sparse, of layout {x.layout}\n  attention takes dense tensors: {name}.to_dense()"


def turn(x: Any, have: str, want: str) -> Any:
    """`x` with its heads and length axes as `want` has them."""
    return x if have == want else x.swapaxes(1, 2)


def to_numpy(x: Any) -> NDArray[Any]:
    """float64 numpy, whatever the framework."""
    return np.asarray(entries_of(x)).astype(np.float64)


def from_numpy(x: NDArray[Any], like: Any, dtype: str | None = None) -> Any:
    """A numpy array as one of `like`'s framework, on its device, in its dtype or the one named."""
    framework = framework_of(like)
    if framework == "torch":
        torch = sys.modules["torch"]
        kind = like.dtype if dtype is None else getattr(torch, dtype)
        # a copy: numpy's may be read-only
        return torch.from_numpy(np.array(x)).to(device=like.device, dtype=kind)
    if framework == "jax":
        return sys.modules["jax"].numpy.asarray(x, dtype=like.dtype if dtype is None else dtype)
    return x.astype(like.dtype if dtype is None else dtype)


_of_graphs: dict[int, Any] = {}  # what captured graphs need, by id


def uploaded(x: Any, device: Any) -> Any:
    """A numpy array on a device of torch, for calls on any stream: on a GPU it is there when this returns. The copy has
    a separate stream, so that no one waits for the work that others hold."""
    torch = sys.modules["torch"]
    host = torch.from_numpy(np.array(x))
    if device.type == "meta":  # of a call that is laid out and not run
        return torch.empty_like(host, device=device)
    if device.type != "cuda":
        return host.to(device)
    if torch.cuda.is_current_stream_capturing():
        raise BackendError(
            "a captured graph cannot copy from the host, and this call does\n"
            "  run it once before the capture, with the same shapes: what is copied is kept"
        )

    def copied() -> Any:
        with torch.cuda.stream(_copies(device)):
            return host.to(device)  # waits for this stream alone

    # torch warms up CUDA graphs with the memory of this thread in their pool, and what is in the pool goes with them
    with ThreadPoolExecutor(1) as other:
        copy = other.submit(copied).result()
    copy.record_stream(torch.cuda.current_stream(device))  # else its memory may be another tensor's before a kernel ran
    return copy


def capturing(device: Any) -> bool:
    """Whether work that is launched on a device of torch becomes a part of a CUDA graph."""
    return (
        device is not None and device.type == "cuda" and bool(sys.modules["torch"].cuda.is_current_stream_capturing())
    )


def keep_for_graphs(owner: Any) -> None:
    """Keep an object that a captured graph needs, with its copies of the host's arrays, as long as the process runs.
    Replays read memory by its address, and torch does not say when a graph is gone."""
    _of_graphs[id(owner)] = owner


@memo(group="once")
def _copies(device: Any) -> Any:
    return sys.modules["torch"].cuda.Stream(device)


def rounding(like: Any, dtype: str | None = None) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Rounds numpy arrays to the dtype of `like`, or to the one named."""
    return lambda x: to_numpy(from_numpy(x, like, dtype))


def named(n: Any) -> bool:
    """Whether a length is a symbol of `jax.export`, or made of some."""
    return type(n).__name__ == "_DimExpr"  # by name: jax need not be imported


def _ordered(shape: tuple[int, ...], layout: str) -> tuple[int, int, int, int]:
    """(batch, heads, length, dim) of a shape."""
    a, b, c, d = (n if type(n) is int or named(n) else int(n) for n in shape)  # a SymInt or a number of numpy as an int
    return (a, b, c, d) if layout == "bhsd" else (a, c, b, d)


def origin_of(origin: Any) -> Origin:
    """The (b, h, q, k) of a call in ints, q and k also in int64 vectors with one entry per batch."""
    where = tuple(origin) if hasattr(origin, "__len__") else ()
    if len(where) != 4:
        raise ShapeError(f"origin is {origin}\n  it is (b, h, q, k), in global positions")
    return int(_start(where[0])), int(_start(where[1])), _start(where[2]), _start(where[3])


def _start(x: Any) -> Any:
    """An int, or an int64 vector with one entry per batch."""
    if type(x) is int:
        return x
    if not hasattr(x, "dtype"):
        x = as_int(x)
    if traced(x):
        raise ShapeError(
            "origin is traced by jax.jit or another transform, and this takes one that is known\n"
            "  give it to a call of the attention instead: att(q, k, v, origin=...)"
        )
    # a tensor of meta, or a nested one, has no entries to read
    check_plain("origin", x)
    at = np.asarray(entries_of(x))
    if at.dtype.kind not in "iu":
        raise ShapeError(f"origin has {x}\n  it is (b, h, q, k), integers, q and k also one per batch entry")
    return at.astype(np.int64) if at.ndim else int(at)


def constant(x: float) -> float:
    """A number itself. torch.compile makes a symbolic one constant for this function, and refuses to write it out."""
    return math.nextafter(x, x)


def scale_of(scale: Any, name: str = "scale", known: bool = False) -> Any:
    """A scale as a number. Unless it must be `known`, one that is traced or learned is returned as a Float scalar,
    because a number would lose its gradient."""
    if scale is None or (type(scale) in (int, float) and abs(scale) < math.inf):  # Dynamo reads no more of a number
        return scale if scale is None else constant(scale)
    changes = traced(scale) or learns(scale)
    # float() takes both, and neither is meant
    single = not isinstance(scale, bool | str) and tuple(getattr(scale, "shape", ())) == ()
    if changes and single and not known:
        return scale * 1.0 if traced(scale) else scale  # an integer under jax.jit, too
    try:
        factor = float(scale) if single and not changes else math.nan
    except (TypeError, ValueError, RuntimeError):
        factor = math.nan
    if not math.isfinite(factor):
        remedy = "\n  multiply q by a factor that is learned or traced, and give scale=1" if changes and single else ""
        raise ParameterError(f"{name} is {scale!r}; it is one finite number, or an array of one without axes{remedy}")
    return factor


def device_of(x: Any, framework: str) -> str:
    """ "cpu", "cuda", "tpu", ...: where a call on this array runs."""
    if framework == "torch":
        return str(x.device.type)
    return str(sys.modules["jax"].default_backend()) if framework == "jax" else "cpu"


@dataclass(frozen=True, eq=False)
class TokenPermutation:
    """The row of q and of the results for each query, and that of k and v for each key.

    >>> rows = TokenPermutation(np.array([2, 0, 1], np.int32), np.array([1, 0], np.int32))
    >>> rows.back, rows.padded(2)[1]
    (array([1, 2, 0]), array([1, 0, 0, 0], dtype=int32))

    Executors that take `rows` read and write through them; around others, arrays are put in order and back.
    """

    queries: NDArray[np.int32]  # kernels read indices of 32 bits
    keys: NDArray[np.int32]

    @cached_property
    def back(self) -> NDArray[Any]:
        """The query of each row."""
        return np.argsort(self.queries)

    @cached_property
    def keys_back(self) -> NDArray[Any]:
        return np.argsort(self.keys)

    def padded(self, more: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """`queries` and `keys` with the last row `more` times behind it: kernels fetch rows before they read them."""
        # a row that is there, so that no fetch faults
        queries, keys = (np.pad(x, (0, more), mode="edge").astype(np.int32) for x in (self.queries, self.keys))
        return queries, keys


Index = NDArray[np.int64]
TAKES = {"torch": "frisket.runtime.torch.autograd", "jax": "frisket.runtime.jax.call"}


def take(x: Any, index: Index, axis: int, inverse: Index | None = None, scratch: bool = False) -> Any:
    """`x` at `index` along an axis, with gradients; `inverse` undoes `index`. `scratch`: the result stays inside."""
    home = TAKES.get(framework_of(x) or "")  # each imports its framework
    return np.take(x, index, axis=axis) if home is None else loaded(home).take(x, index, axis, inverse, scratch)


# as a call has them
WORDS = {K_SCALE: "k_scale", V_SCALE: "v_scale", PAGES: "pages", Q_SCALE: "q_scale"}
OF = {Q_SCALE: "q", K_SCALE: "k", V_SCALE: "v"}  # the array that a scale multiplies


def tokens_of(length: int, blocks: int) -> int:
    """The power of two that cuts a length into so many blocks; 0 where none does. The last block may be shorter.

    >>> tokens_of(1000, 8), tokens_of(1000, 1000), tokens_of(1000, 7)
    (128, 1, 0)
    """
    if not 0 < blocks <= length:
        return 0
    tokens = 1 << (-(-length // blocks) - 1).bit_length()
    return tokens if -(-length // tokens) == blocks else 0


@dataclass(frozen=True)
class Stored:
    """The static description of stored keys and values. It has which scales there are, tokens of a page (0: no pages),
    the axes of scales, and how many query heads share a key head. Also the b, h and k of the arrays' first entries (k
    None: one for each batch entry). With queries of 8 bits, `tokens` lists the scales: the source of each table, and
    how many tokens share a number, 0 for all of a head. `first_q` is the q of the first query."""

    k_scale: bool
    v_scale: bool
    page: int
    layout: str
    group: int
    first: tuple[int, int, int | None]
    tokens: tuple[tuple[str, int], ...] = ()
    first_q: int = 0

    def scored(self, mod: Expr | None) -> Expr | None:
        """A score mod that takes the score of a stored key, or of a query of 8 bits."""
        scales = [self._shared(n, tokens) for n, tokens in self.tokens if n != V_SCALE]
        scales += [self._scale(K_SCALE)] * self.k_scale
        if not scales:
            return mod
        score = SCORE * reduce(mul, scales)
        return score if mod is None else substitute(mod, {SCORE: score})

    @property
    def value_scale(self) -> Expr | None:
        if self.v_scale:
            return self._scale(V_SCALE)
        return self._shared(V_SCALE, 0) if V_SCALE in dict(self.tokens) else None

    def _shared(self, name: str, tokens: int) -> Expr:
        """The scale of a head, or of a block of its tokens."""
        b, h = (var(n) - start if start else var(n) for n, start in zip("bh", self.first))
        head = h if name == Q_SCALE or self.group == 1 else h // self.group
        if not tokens:
            return lookup(name, (b, head), FLOAT)
        axis, start = ("q", self.first_q) if name == Q_SCALE else ("k", self.first[2] or 0)
        block = (var(axis) - start if start else var(axis)) // tokens
        return lookup(name, (b, head, block) if self.layout == "bhsd" else (b, block, head), FLOAT)

    @property
    def pages(self) -> Pages | None:
        return Pages(PAGES, self.page) if self.page else None

    def _scale(self, name: str) -> Expr:
        """The scale of one stored value: an array as the keys are, without their dim."""
        b, h, k = (var(n) - start if start else var(n) for n, start in zip("bhk", self.first))
        if self.first[2] is None:
            k = k - lookup(FIRST, (b,), INT)
        head = h if self.group == 1 else h // self.group
        if self.page:
            b, k = lookup(PAGES, (b, k // self.page), INT), k % self.page
        return lookup(name, (b, head, k) if self.layout == "bhsd" else (b, k, head), FLOAT)


def kv_inputs_of(k_scale: Any, v_scale: Any, pages: Any, q_scale: Any = None) -> dict[str, Any]:
    """The scales and pages that a call brings, by the sources of their tables."""
    inputs = {K_SCALE: k_scale, V_SCALE: v_scale, PAGES: pages, Q_SCALE: q_scale}
    return {n: x for n, x in inputs.items() if x is not None}


def refuse_name_clash(values: Mapping[str, Any], program: Any) -> None:
    """Refuse one of `values` if a mask or score mod has a parameter of that name."""
    for name, x in values.items():
        if x is not None and any(name in p.unbound for p in program.parts):  # a bound one takes no value of a call
            raise ParameterError(
                f"`{name}` is a parameter of the mask or score mod, and of a call it says how keys are stored\n"
                f"  rename it in the text, for example `my_{name}`, or bind it there: frisket.mask(..., {name}=...)"
            )


def split_kv_args(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the scales and pages among the parameters of a call, the others)."""
    kv_inputs = {n: x for n, x in params.items() if n in KV_INPUTS}
    return kv_inputs, {n: x for n, x in params.items() if n not in kv_inputs} if kv_inputs else dict(params)


def kv_format(arrays: Arrays, g: Geometry, kv_inputs: Mapping[str, Any]) -> tuple[Stored | None, dict[str, Any]]:
    """The static description of a call's scales and pages, and their arrays with the axes of the framework's own
    layout; None without any. `ShapeError` where they do not fit k and v."""
    if not kv_inputs:
        return None, {}
    bare = [n for n, x in kv_inputs.items() if arrays.unbatched and n != PAGES and x.ndim == 2]
    kv_inputs = {n: x[None] if n in bare else x for n, x in kv_inputs.items()}
    if arrays.framework == "jax":
        kv_inputs = {n: like_jax(x, *arrays.qkv) for n, x in kv_inputs.items()}
    for name, x in kv_inputs.items():
        _check(name, x, arrays)
    natural = NATURAL.get(arrays.framework, arrays.layout)
    # one program for both layouts: kernels get arrays in the natural one
    tables = {n: transpose_to(n, x, arrays.layout, natural) for n, x in kv_inputs.items()}
    b, h, q, k = g.origin
    group = g.heads // g.kv_heads
    if arrays.dtype == FP8:
        tokens = tuple((n, arrays.tokens(n, x)) for n, x in kv_inputs.items())
        if any(x for _, x in tokens) and not (isinstance(q, int) and isinstance(k, int)):
            raise ShapeError(
                "origin has an entry for each batch entry, and a scale belongs to a block of tokens\n"
                "  give one scale for every head, or one origin for all batch entries"
            )
        at = (b, h, k, q) if any(x for _, x in tokens) else (b, h, 0, 0)
        return Stored(False, False, 0, natural, group, at[:3], tokens, at[3]), tables
    if not isinstance(k, int):
        tables[FIRST] = from_numpy(np.broadcast_to(k, g.batch), arrays.q, "int32")
    page = arrays.page if PAGES in kv_inputs else 0
    first = b, h, k if isinstance(k, int) else None
    return Stored(K_SCALE in kv_inputs, V_SCALE in kv_inputs, page, natural, group, first), tables


def _check(name: str, x: Any, arrays: Arrays) -> None:
    word = WORDS[name]
    if framework_of(x) != arrays.framework and not hasattr(x, "aval"):
        raise ShapeError(f"{word} is a {type(x).__name__}, q is of {arrays.framework}; convert it")
    dtype = str(x.dtype).removeprefix("torch.")
    if arrays.framework == "torch" and x.device != arrays.q.device:
        raise ShapeError(f"{word} is on {x.device}, q on {arrays.q.device}; move them to one")
    if name == PAGES:
        if dtype != "int32":
            raise ShapeError(
                f"pages are {dtype}; they are int32 [batch, pages of a sequence]: pages{_cast(arrays, 'int32')}"
            )
        return
    if dtype not in (SINGLE, accumulate(arrays.dtype)):  # kernels load no others
        raise ShapeError(f"{word} is {dtype}; it is float32: {word}{_cast(arrays, 'float32')}")
    of = OF[name]
    array = getattr(arrays, of)
    if arrays.dtype != FP8 and tuple(x.shape) != tuple(array.shape[:3]):
        raise ShapeError(
            f"{word} has the shape {tuple(x.shape)}; it has one number for every token and head of {of}, "
            f"{tuple(array.shape[:3])}, the axes of {of} without its last"
        )


def _cast(arrays: Arrays, dtype: str) -> str:
    return f".to(torch.{dtype})" if arrays.framework == "torch" else f'.astype("{dtype}")'


def transpose_to(name: str, x: Any, have: str, want: str) -> Any:
    """A scale with its heads and length axes as `want` has them."""
    return x if name not in OF or have == want or x.ndim == 2 else x.swapaxes(1, 2)


def dequantize_and_gather(arrays: Arrays, kv_inputs: Mapping[str, Any]) -> tuple[NDArray[Any], ...]:
    """q, k and v with scales and pages applied, float64 [batch, heads, length, dim]; `kv_inputs` as of `kv_format`."""
    q, k, v = (turn(to_numpy(x), arrays.layout, "bhsd") for x in arrays.qkv)
    natural = NATURAL.get(arrays.framework, arrays.layout)
    host = {n: to_numpy(transpose_to(n, x, natural, "bhsd")) for n, x in kv_inputs.items()}
    pages = host.get(PAGES)
    if arrays.dtype == FP8:  # a scale for every token
        blocks = {n: (x if x.ndim == 3 else x[..., None], getattr(arrays, OF[n])) for n, x in host.items()}
        host = {n: _of_tokens(x, _ordered(of.shape, arrays.layout)[2]) for n, (x, of) in blocks.items()}
    q = _dequantized(q, host.get(Q_SCALE), None)
    return q, _dequantized(k, host.get(K_SCALE), pages), _dequantized(v, host.get(V_SCALE), pages)


def _of_tokens(scale: NDArray[Any], length: int) -> NDArray[Any]:
    """[batch, heads, length] of scales of blocks, or of one for a head."""
    blocks = scale.shape[2]
    tokens = length if blocks == 1 else tokens_of(length, blocks)
    return np.repeat(scale, tokens, axis=2)[:, :, :length]


def _dequantized(x: NDArray[Any], scale: Any, pages: Any) -> NDArray[Any]:
    x = x if scale is None else x * scale[..., None]
    if pages is None:
        return x
    # as kernels: the nearest page
    gathered = x[np.clip(pages.astype(int), 0, len(x) - 1)]  # [batch, pages of a sequence, heads, tokens, dim]
    batch, n, heads, tokens, dim = gathered.shape
    return np.ascontiguousarray(gathered.swapaxes(1, 2)).reshape(batch, heads, n * tokens, dim)


ALONE = {"torch": "with torch.no_grad():", "jax": "jax.lax.stop_gradient(q), and around what else a gradient flows to"}


def refuse_gradients(kv_dtype: str, kv_inputs: Collection[str], framework: str = "torch") -> None:
    """Raise: a gradient is asked of a call whose keys and values are stored."""
    how = f"of {kv_dtype}" if kv_dtype else "with " + " and ".join(word for n, word in WORDS.items() if n in kv_inputs)
    raise BackwardError(
        f"keys and values {how} are for the forward alone, without gradients\n"
        f"  train with keys and values as they are; for the forward alone write {ALONE[framework]}"
    )
