"""Converts torch callables to Expr: captured tensors become tables and scalars, torch's functions operators.

>>> import torch
>>> from frisket.dsl.show import show
>>> from frisket.dsl.from_python.trace import trace
>>> def alibi(slopes):
...     return lambda score, b, h, q, k: torch.where(q >= k, score + slopes[h] * (k - q), -torch.inf)
>>> slopes = torch.tensor([0.5, 0.25])
>>> traced = trace(alibi(slopes))
>>> show(traced.expr, traced.tables), traced.tables["slopes"] is slopes
('where(q >= k, score + slopes[h] * (k - q), -inf)', True)

Runs under a `TorchFunctionMode`, which sees every call of torch with the caller's line still on the stack. A tensor
that the function made itself is a constant: it is computed at once, and joins the expression as a literal or a table.
Every other tensor is captured: what is done to it becomes part of the expression, so that a learned one keeps its
place in it. Functions without a counterpart are computed at once too, as long as no position enters.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from frisket.dsl import ir
from frisket.dsl.errors import TraceError
from frisket.dsl.evaluate import evaluate
from frisket.dsl.from_python.symbol import Symbol, context, handles, operand, table
from frisket.dsl.from_python.user_line import fail, is_users, user_frame
from frisket.dsl.ir import Named, lit
from frisket.dsl.program import entries_of
from frisket.dsl.types import BOOL, FLOAT, INT, Type
from frisket.grammar.memo import memo

from .scalars import ARRAYS, REDUCTIONS, SCALARS, Function

FUNCTIONS: dict[str, Function] = {**SCALARS, **ARRAYS}

# -- methods and attributes of a symbol -------------------------------------------------------------


METHODS: dict[str, Function] = {
    "size": lambda x, dim=None: x.shape if dim is None else x.shape[dim],
    "dim": lambda x: x.ndim,
    "ndimension": lambda x: x.ndim,
    "numel": lambda x: math.prod(x.shape),
    "nelement": lambda x: math.prod(x.shape),
    "is_floating_point": lambda x: x.expr.type is FLOAT,
    "is_contiguous": lambda x: True,
    "item": lambda x: x._number("`.item()` of a position: it has no value while the function is traced"),
    "tolist": lambda x: x._number("`.tolist()` of a position: it has no value while the function is traced"),
}
ATTRIBUTES = frozenset({"T", "mT"})


def called(name: str, function: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of `function`, with an error for arguments it does not take."""
    try:
        # torch's own code passes None for arguments that are left out
        return function(*args, **{n: v for n, v in kwargs.items() if v is not None})
    except TypeError as error:
        fail(f"`{name}`: {re.sub(r'^[^ ]+[(][)]', f'{name}()', str(error))}")  # by the user's name for it


@handles("__getattr__")
def attribute(x: Symbol, name: str) -> Any:
    """The attribute `x.name` that Symbol itself does not have."""
    if name in ATTRIBUTES:
        return FUNCTIONS[name](x)
    if name in METHODS or name in FUNCTIONS:
        function = METHODS.get(name) or FUNCTIONS[name]
        return lambda *args, **kwargs: called(name, function, (x, *args), kwargs)
    if context.front is not None and not name.startswith("__"):
        return context.front.attribute(x, name)
    raise AttributeError(f"a position has no `{name}`")


RANDOM = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli normal multinomial poisson dropout "
    "alpha_dropout feature_dropout dropout1d dropout2d dropout3d rrelu manual_seed".split()
)
_MADE = ("zeros", "ones", "full", "empty")
FACTORIES = {f"{n}_like": n for n in _MADE} | {f"new_{n}": n for n in (*_MADE, "tensor")}
# Computed at once where no position enters and nothing is learned: a mask does not go through a whole array again.
WHOLE = frozenset("max min prod norm dot vdot inner matmul mv isin".split()) | frozenset(REDUCTIONS)
ADVICE = {
    "argmax": "compute it outside and capture the result",
    "cumsum": "compute it outside and capture the result",
    "nonzero": "it has no fixed size: compute it outside and capture the result",
    "arange": "its length would depend on a position: capture torch.arange(n) for a fixed n",
}


class Front:
    """The torch front end of one trace. `naming` gives a captured tensor its name; `values` are all named tensors,
    `wishes` the names of variables that hold one, by the tensor's id. `read` collects the tensors whose values the
    trace looked at; None: tensors have no values."""

    def __init__(
        self, naming: Callable[[str, Any], str], values: Named, wishes: Mapping[int, str], read: dict[int, Any] | None
    ) -> None:
        self.torch = sys.modules["torch"]
        self.naming, self.values, self.wishes, self.read = naming, values, wishes, read
        self.constants: dict[int, Any] = {}  # tensors that the function made itself, by id
        self.lifted: dict[int, tuple[Any, Symbol]] = {}
        self.offsets: dict[tuple[int, int], tuple[Any, Any]] = {}  # for searchsorted, by the id of a tensor and side
        self.seen: dict[tuple[Any, ...], Any] = {}  # one object for all views of the same elements

    # -- tensors to symbols

    def lift(self, value: Any) -> Symbol | None:
        """The symbol of a tensor; None for anything else."""
        if not isinstance(value, self.torch.Tensor):
            return None
        if id(value) not in self.lifted:
            self.lifted[id(value)] = value, self._symbol(value)  # the tensor too, or its id could be used again
        return self.lifted[id(value)][1]

    def _symbol(self, value: Any) -> Symbol:
        with self.torch._C.DisableTorchFunction():  # looking at a tensor calls torch, which the mode would trace
            wish = self._wish(value)
            type_ = self._type(value, wish)
            shape = tuple(map(int, value.shape))  # one that is open in an exported program becomes this number there
            if not shape and id(value) in self.constants:
                return Symbol(lit(_literal(value)))
            # views of the same elements are one table; tensors of a graph have no address
            place = id(value) if self.read is None else value.data_ptr()
            key = (place, shape, value.stride(), value.dtype, value.requires_grad, value.is_neg())
            name = self.naming(wish, self.seen.setdefault(key, value))
        return table(name, shape, type_) if shape else Symbol(ir.param(name, type_))

    def _type(self, value: Any, name: str) -> Type:
        if value.layout is not self.torch.strided or value.is_nested:
            fail(f"`{name}` is a sparse or nested tensor: capture a dense one, as `x.to_dense()`")
        try:
            readable = not value.is_meta and type(value).__name__ != "FakeTensor" and value.data_ptr() >= 0
        except RuntimeError:  # inside torch.vmap or torch.func
            readable = False
        if not readable and self.read is not None:
            fail(
                f"`{name}` has no values to read: it is a meta or fake tensor, or inside torch.vmap or torch.func\n"
                f'  give it to the call, as a name of the text: frisket.attention(q, k, v, "{name}[q, k]", {name}=...)'
            )
        if value.dtype is self.torch.bool:
            return BOOL
        if value.is_complex() or value.is_quantized:
            fail(f"`{name}` is of {value.dtype}; tables hold bool, int or float")
        return FLOAT if value.is_floating_point() else INT

    def _wish(self, value: Any) -> str:
        """The user's name for a tensor: a variable or an attribute, in the functions that run now."""
        if id(value) in self.wishes:
            return self.wishes[id(value)]
        frame = user_frame()
        while frame is not None and frame.f_globals.get("__name__") != "frisket.dsl.from_python.trace":
            if is_users(frame):
                scopes: list[Mapping[str, Any]] = [
                    frame.f_locals,
                    {n: frame.f_globals.get(n) for n in frame.f_code.co_names},
                ]
                scopes[1:1] = [self._members(x) for x in frame.f_locals.values()]
                for scope in scopes:
                    for name, x in scope.items():
                        if x is value or (isinstance(x, list | tuple) and any(y is value for y in x)):
                            return name
            frame = frame.f_back
        return "table" if value.ndim else "scalar"

    def _members(self, x: Any) -> dict[str, Any]:
        if isinstance(x, self.torch.nn.Module):
            tensors: dict[str, Any] = {**dict(x.named_parameters()), **dict(x.named_buffers())}
            return {**{n.replace(".", "_"): t for n, t in tensors.items()}, **vars(x)}
        if isinstance(x, dict):
            return {str(n): t for n, t in x.items()}
        return {} if isinstance(x, ModuleType) else dict(getattr(x, "__dict__", {}))

    def concrete(self, x: Symbol) -> Any:
        """The tensor of a symbol, or None where its value depends on a position."""
        if self.moves(x):
            return None
        self.looks(self.values.get(n.name) for n in ir.find(x.expr, "lookup", "param", "segment"))
        names = {a.bound: ir.var(f"axis {i}") for i, a in enumerate(x.axes)}
        grid = np.ogrid[tuple(slice(n) for n in x.shape)] if x.axes else ()
        with self.torch._C.DisableTorchFunction():
            tables = {n: entries_of(v) for n, v in self.values.items()}
            env = {**{f"axis {i}": g for i, g in enumerate(grid)}, **tables}
            array = np.broadcast_to(evaluate(ir.substitute(x.expr, names), env, tables), tuple(x.shape))
            # a broadcast array is read-only, and torch warns of that
            return self.torch.from_numpy(array.copy()).to(self.dtype(x))

    def dtype(self, x: Symbol) -> Any:
        return {BOOL: self.torch.bool, INT: self.torch.int64, FLOAT: self.torch.float32}[x.expr.type]

    def attribute(self, x: Symbol, name: str) -> Any:
        """The attribute `x.name` that neither Symbol nor the table of functions has."""
        if name == "dtype":
            return self.dtype(x)
        if name == "device":
            return self.torch.device("cpu")
        if name == "data":
            return self.detach(x)
        if name in ("is_cuda", "is_meta", "is_sparse", "is_nested", "requires_grad"):
            return False
        if name == "detach":
            return lambda: self.detach(x)
        if callable(getattr(self.torch.Tensor, name, None)):
            return lambda *args, **kwargs: self.call(getattr(self.torch.Tensor, name), (x, *args), kwargs)
        raise AttributeError(f"a position has no `{name}`")

    # -- calls

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The answer to `func(*args, **kwargs)`: a symbol, or torch's own result."""
        name = name_of(func)
        inputs = list(_arrays(self.torch, (*args, *kwargs.values())))
        symbols = [x for x in inputs if isinstance(x, Symbol)]
        captured = [x for x in inputs if not isinstance(x, Symbol) and id(x) not in self.constants]
        if name in RANDOM or (name.endswith("_") and name.strip("_") in RANDOM):
            fail(
                f"`torch.{name}` gives other numbers at every call; "
                "in the language it is `random(seed, b, h, q, k)`, or capture a tensor of random numbers"
            )
        if (_in_place(name) or kwargs.get("out") is not None) and (symbols or captured):
            fail(f"`{name}` changes a tensor in place: write the new value, as in `x = x + 1`")
        if name in FACTORIES and symbols:
            return self.factory(name, args, kwargs)
        if name in ("tensor", "as_tensor") and symbols:
            name = "stack" if isinstance(args[0], list | tuple) else "to"  # torch.tensor([q, k]) of positions
        if self.read is None and name == "item" and captured:
            return self.lift(captured[0])  # a number of Python that a graph holds as a tensor
        if name in CONVERSIONS and not symbols:  # Python wants a number, which no expression is
            return self.run(func, args, kwargs)
        # torch.special and torch.linalg have the same functions under longer names
        name = name.strip("_").removeprefix("special_").removeprefix("linalg_")
        if symbols and name in METHODS:
            return called(name, METHODS[name], args, kwargs)
        if name == "detach" and symbols:
            return self.detach(symbols[0])
        if name in ("searchsorted", "bucketize") and symbols:
            order = args if name == "searchsorted" else args[::-1]  # bucketize takes the positions first
            return called(name, self.search, order, kwargs)
        if name in FUNCTIONS and (symbols or captured) and not self._at_once(name, inputs, args):
            return called(name, FUNCTIONS[name], args, kwargs)
        return self.run(func, *self._plain(func, args, kwargs)) if symbols else self.run(func, args, kwargs)

    def _at_once(self, name: str, inputs: list[Any], args: tuple[Any, ...]) -> bool:
        """Whether torch itself computes a call: no position enters, whole arrays are read, or indexed with arrays."""
        if name == "getitem":
            key = args[1] if isinstance(args[1], tuple) else (args[1],)
            arrays = any(isinstance(x, list | self.torch.Tensor) for x in key)
            return arrays and not any(isinstance(x, Symbol) for x in key) and not self.learned(inputs[0])
        return name in WHOLE and not any(self.moves(x) or self.learned(x) for x in inputs)

    @staticmethod
    def moves(x: Any) -> bool:
        """Whether a position enters an argument."""
        return isinstance(x, Symbol) and bool(ir.uses(x.expr))

    def learned(self, x: Any) -> bool:
        if not isinstance(x, Symbol):
            return bool(x.requires_grad)
        leaves = (n.name for n in ir.find(x.expr, "lookup", "param"))
        return any(getattr(self.values.get(n), "requires_grad", False) for n in leaves)

    def factory(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        like, *rest = args
        kwargs = {n: v for n, v in kwargs.items() if n not in ("device", "memory_format", "layout")}
        if name.endswith("_like"):
            rest = [tuple(like.shape), *rest]
        if any(isinstance(x, Symbol) for x in (*rest, *kwargs.values())):
            return next(x for x in (*rest, *kwargs.values()) if isinstance(x, Symbol))
        if name != "new_tensor":
            kwargs.setdefault("dtype", self.dtype(like))
        return self.run(getattr(self.torch, FACTORIES[name]), tuple(rest), kwargs)

    def detach(self, x: Symbol) -> Any:
        if x.expr.type is not FLOAT or not (self.learned(x) or "score" in ir.uses(x.expr)):
            return x
        if self.moves(x):
            fail("`detach` of a value that depends on a position: capture a detached tensor instead")
        return self.concrete(x)

    def search(self, offsets: Any, input: Any, *, right: bool = False, side: str | None = None, **_: Any) -> Any:
        """`torch.searchsorted`: the segment that holds a position, counted from one more at the front. The table gets
        an end on either side, because searchsorted knows places before the first offset and past the last."""
        step = int(not (right or side == "right"))  # an entry is below x where it is not above x - 1
        at = operand(input, "`searchsorted`")
        known = self.concrete(offsets) if isinstance(offsets, Symbol) else offsets
        self.looks([known])
        with self.torch._C.DisableTorchFunction():
            exact = known is not None and known.ndim == 1 and not known.is_floating_point() and at.expr.type is INT
            if not exact or bool((known[1:] < known[:-1]).any()):
                fail("`searchsorted` finds positions in one captured vector of sorted Ints")
            if (id(offsets), step) not in self.offsets:
                far = 2**31 - 1
                if bool((known.abs() >= far).any()):
                    fail("`searchsorted` in offsets of more than 32 bits")
                inner = known.to(self.torch.int32) + step
                ends = inner.new_full((1,), -far), inner.new_full((1,), far)
                self.offsets[id(offsets), step] = offsets, self.torch.cat((ends[0], inner, ends[1]))
            extended = self.offsets[id(offsets), step][1]
            name = self.naming(self._wish(offsets) if offsets is known else "offsets", extended)
        return Symbol(ir.segment(name, at.expr), at.axes)

    def _plain(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Arguments with tensors in place of symbols, where all symbols have values."""

        def one(x: Any) -> Any:
            if isinstance(x, list | tuple):
                return type(x)(one(y) for y in x)
            if not isinstance(x, Symbol):
                return x
            value = self.concrete(x)
            if value is None:
                advice = ADVICE.get(name_of(func))
                name = self.torch.overrides.resolve_name(func) or str(func)
                fail(f"`{name}` of a position has no counterpart in the language" + ((advice and f": {advice}") or ""))
            return value

        return one(args), {n: one(v) for n, v in kwargs.items()}

    def looks(self, tensors: Iterable[Any]) -> None:
        """Record that values of captured tensors decide the result of the trace."""
        for x in tensors:
            if not isinstance(x, self.torch.Tensor):
                continue
            if self.read is None:
                fail(
                    "the function computes with the values of a captured tensor, and a graph of torch does not know "
                    "them yet: compute it outside, and capture the result"
                )
            self.read[id(x)] = x

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of torch itself; a result that depends on no captured tensor is a constant."""
        inputs = list(_arrays(self.torch, (*args, *kwargs.values())))
        if name_of(func) not in METADATA:
            self.looks(x for x in inputs if id(x) not in self.constants)
        result = func(*args, **kwargs)
        if all(id(x) in self.constants for x in inputs):
            self.constants.update({id(x): x for x in _arrays(self.torch, (result,))})
        return result


class TracedAutogradFunction:
    """A torch.autograd.Function during the trace: `apply` runs its forward."""

    def __init__(self, forward: Callable[..., Any], cls: Any) -> None:
        self.forward, self.cls = forward, cls

    def apply(self, *args: Any) -> Any:
        if self.cls.setup_context is not sys.modules["torch"].autograd.Function.setup_context:
            return self.forward(*args)  # the newer form has the context in a separate method
        nothing = "save_for_backward save_for_forward mark_non_differentiable set_materialize_grads mark_dirty".split()
        return self.forward(SimpleNamespace(**dict.fromkeys(nothing, lambda *_: None)), *args)


CUSTOM = {"approx.tanh": "tanh"}  # attention-gym's operator for a faster, less exact tanh


def name_of(func: Any) -> str:
    """The name of a torch function: `where`, `__getitem__`, and `shape` for the getter of an attribute."""
    if type(func).__module__ == "torch._ops":  # torch.ops.library.name, and torch.ops.library.name.overload
        library, name = str(func).split(".")[:2]
        return name if library == "aten" else CUSTOM.get(f"{library}.{name}", str(func))
    name = str(getattr(func, "__name__", func))
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name


METADATA = frozenset(
    "shape size dim ndim dtype device numel nelement layout stride requires_grad is_cuda is_cpu is_sparse is_nested "
    "is_meta is_floating_point is_complex element_size".split()
)
CONVERSIONS = frozenset({"__bool__", "__int__", "__float__", "__index__"})  # Python asks them of a tensor
READERS = frozenset({"__invert__", "__index__", "__int__", "__iter__"})


def _in_place(name: str) -> bool:
    changes = name in ("__setitem__", "__set__", "__delitem__") or (name.startswith("__i") and name not in READERS)
    return changes or (name.endswith("_") and not name.endswith("__"))


def _arrays(torch: Any, values: Any) -> Iterator[Any]:
    """The symbols and tensors among values, and in lists of values."""
    for x in values:
        if isinstance(x, Symbol | torch.Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _arrays(torch, x)


def _literal(value: Any) -> bool | int | float:
    """The number of a constant; a float32 as its shortest decimal, so that torch.tensor(0.1) is 0.1."""
    number = value.item()
    return float(str(np.float32(number))) if str(value.dtype) == "torch.float32" else number


@memo(group="once")
def _mode() -> Any:
    class Mode(sys.modules["torch"].overrides.TorchFunctionMode):  # type: ignore[misc]
        """A torch function mode that sends every call of torch's functions, in this thread, to a Front."""

        def __init__(self, front: Front) -> None:
            super().__init__()
            self.front = front

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self.front.call(func, args, kwargs or {})

    return Mode


@contextmanager
def active(
    naming: Callable[[str, Any], str], values: Named, wishes: Mapping[int, str], read: dict[int, Any] | None
) -> Iterator[None]:
    """Trace torch's functions and captured tensors in this thread, whatever modes the user has on."""
    torch = sys.modules["torch"]
    if read is not None and torch.compiler.is_compiling():
        raise TraceError("a mask is made inside torch.compile: make it outside, and use it there")
    front = Front(naming, values, wishes, read)
    before, context.front = context.front, front
    try:
        with torch.device("cpu"), _mode()(front):  # what the function makes lives here, under any default device
            yield
    finally:
        context.front = before
