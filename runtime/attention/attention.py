"""Attention: what users hold and call."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial, wraps
from typing import Any, Literal, TypeVar, overload

import numpy as np

from frisket.dsl.errors import LoweringError, ParameterError, ShapeError
from frisket.dsl.from_python.closure import RAW, read_again
from frisket.dsl.ir import names_of
from frisket.dsl.notebook import table
from frisket.dsl.program import outside_transforms, unwrapped
from frisket.grammar.memo import memo, remember
from frisket.lowering.dtypes import DOUBLE, FP8
from frisket.lowering.plan import NOWHERE, PAGES, Geometry, Origin, Problem, Sizes
from frisket.lowering.simplify import ProgramExprs
from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.backends.base import RECORDS
from frisket.runtime.backends.base import named as backend_named
from frisket.runtime.backends.engines.proof import engines_for, engines_text
from frisket.runtime.backends.registry import check_name, choose, library, printed, quickest, target_of
from frisket.runtime.backends.stages import CompileRecord, PlanCompilation, Stages, new_history, records
from frisket.runtime.calls import arrays as call_arrays
from frisket.runtime.calls.arrays import Array, Arrays, Stored
from frisket.runtime.calls.options import (
    CALLS,
    CallArgs,
    Options,
    call_values,
    check_aligned,
    register,
    seed_of,
    sinks_of,
)
from frisket.runtime.calls.program import CallProgram, check_order, check_used, remap_positions
from frisket.runtime.jax.attend import attend as attend_jax
from frisket.runtime.jax.attend import quickest_of
from frisket.runtime.machine.caller import counting
from frisket.runtime.machine.parameters import blank, is_tensor, kind_of, learns, part_of_expression, summary, traced
from frisket.runtime.machine.settings import Settings
from frisket.runtime.plans.device import CallPlan, CheckedCall, FlatPlan, device_plan, results, split_host_device
from frisket.runtime.plans.empty import check_bound, nothing
from frisket.runtime.plans.host import Plan
from frisket.runtime.torch.jagged import Pattern, is_jagged, rewritten
from frisket.runtime.torch.jagged import attend as jagged_attend
from frisket.runtime.torch.spec import history_of, spec_of

from .report import Report, interpreted, learned_values, report, report_gradients, report_later
from .statistics import Statistics, Wanted
from .weighted import Sums, average, check_sums, check_weighted, no_sums, summed, weighted_results

Method = TypeVar("Method", bound=Callable[..., Any])
KEPT = 32  # attentions that one was made into: places it was moved to, arrays that were replaced


def of_now(method: Method) -> Method:
    """A method of the attention over the arrays that its functions would read now."""

    @wraps(method)
    def method_of_now(self: Attention, *args: Any, **keywords: Any) -> Any:
        return method(self.now(keywords) if self.rereads else self, *args, **keywords)

    return method_of_now  # type: ignore[return-value]


class Attention:
    """Attention under a mask and a score mod; made by `frisket.compile`.

    >>> import frisket as fk
    >>> att = fk.compile("causal & window(256)")
    >>> att
    Attention(mask = causal & window(256))
    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 2, 64, 16)
    >>> att(q, k, v).shape, att.check(q, k, v).good
    (torch.Size([1, 2, 64, 16]), True)
    >>> plan = att.plan(64, 64, batch=1, heads=2)  # once for all layers
    >>> torch.equal(att(q, k, v, plan=plan), att(q, k, v))
    True
    >>> "def attention_forward" in att.source("triton", q_len=64)
    True
    >>> print(att.stages(q_len=64).simplified)
    mask = q >= k & q - k <= 255

    Call it on torch tensors `[batch, heads, length, head_dim]` or JAX arrays `[batch, length, heads, head_dim]`. Equal
    programs and options make equal attentions. Tables are compared by their entries, torch tensors that are learned,
    captured or sinks by identity.
    """

    __name__ = "attention"  # torch.vmap and functools.wraps ask functions for it

    def __init__(self, program: CallProgram, options: Options | None = None) -> None:
        self.program, self.options = program, options or Options()
        # key of a call -> its `PreparedCall`, or `ChangingTables`; key of a plan -> the plan
        self.calls: dict[Any, Any] = {}
        self.shards: dict[Any, Any] = {}  # of calls over several ranks: their agreement, and prepared steps
        self.history: deque[Any] = new_history()  # of calls that were prepared, for `records`
        self._views: dict[Any, Any] = {}  # attentions that `at` made, by its texts, `jagged`, and `now`
        torch = sys.modules.get("torch")
        if hasattr(torch, "compile"):  # imported, and whole: the first call does not wait for the modules that run it
            operators_of("torch")
        self.captured = program.captured
        self.traced = {n: x for n, x in self.captured.items() if traced(x)}  # by JAX, of functions
        learned = {n: x for n, x in self.captured.items() if learns(x)}
        flowing = {n: x for n, x in learned.items() if n in program.learnable}
        self.spec = spec_of(program, self.options, flowing)
        self.paths = program.origin.paths
        if unreachable := [n for n, paths in self.paths.items() if not paths]:
            raise ParameterError(
                f"`{unreachable[0]}` is learned, and frisket cannot tell where its function reads it: a tensor that "
                f"replaces it would be missed\n  give it to the call under this name: att(q, k, v, ...), or read it "
                "as an attribute or an entry"
            )
        # without a name: no table holds them, the expression does
        inside = [("", x, paths) for p in program.parts for x, paths in p.origin.inside]
        self._flowing = [(n, x, self.paths.get(n)) for n, x in flowing.items()]
        self._copied = [(n, self.captured[n], paths) for n, paths in self.paths.items() if n not in flowing] + inside
        self._tables, self._shared = program.tables, call_arrays.shared(program.tables)
        self.rereads = program.rereads
        # Dynamo reads it, and enters no cached property
        self._learnable = program.learnable if self.rereads else frozenset()
        program.origin.follow_copies(type(self))
        if not self.rereads:  # else `__getattr__` reads them at each access
            self.learned: dict[str, Any] = flowing
            self.constants: dict[str, Any] = {**self._tables, **flowing}
            self.inputs: dict[str, Any] = {**self._shared, **flowing}  # of graphs that Dynamo makes
        both = program.exprs.parts
        # each call is prepared again then: `refuse_ambiguous` raises only where gradients are enabled
        self.ambiguous = any(all(n in names_of(e) for e in both) for n in learned.keys() - flowing)

    @cached_property
    def identity(self) -> tuple[Any, ...]:
        """The program and the options, without variables of flax that a function captured: those are leaves of their
        module, and no trace of JAX reads them. Tensors of torch are the same objects, and so is what is read again."""
        ways = {n: [path.from_object() for path in paths] for n, paths in self.paths.items()}
        leaves = {n for n, paths in ways.items() if all(path.steps[-1:] == ((True, RAW),) for path in paths)}
        objects = tuple(
            (n, id(x), *((id(path.root), path.steps) for path in ways.get(n, ())))
            for n, x in self.captured.items()
            if n not in leaves and (n in ways or learns(x) or traced(x))
        )
        return self.program.without(leaves), self.options, objects

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is type(self) and other.identity == self.identity)

    def __hash__(self) -> int:
        return hash(self.program.exprs)  # equality compares tables; a digest of all entries is too much for a hash

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles hold the program and the options; a copy prepares its calls again."""
        return blank, (type(self),), (self.program, self.options)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        type(self).__init__(self, *state)

    def __getattr__(self, name: str) -> Any:
        """`learned`, `constants` and `inputs` of an attention whose functions captured arrays: the arrays that these
        functions would read now. Other attentions have them as attributes."""
        if name not in ("learned", "constants", "inputs"):
            raise AttributeError(f"an attention has no `{name}`")  # without keywords, which Dynamo does not know
        learned = {n: read_again(n, paths) if paths else x for n, x, paths in self._flowing}
        if name == "learned":
            return learned
        replaced = {}
        for n, x, paths in self._copied:
            if (y := read_again(n, paths)) is not x or (n in self._learnable and learns(y)):
                if not n:
                    raise ParameterError(part_of_expression(paths[0]))
                replaced[n] = y
        return {**(self._tables if name == "constants" else self._shared), **replaced, **learned}

    def now(self, but: Collection[str] = ()) -> Attention:
        """Attention over the arrays that its functions would read now: this one, unless an array was replaced. Learned
        tensors are read by each call of either. Arrays in `but` stay: a call brings them.

        >>> import torch, frisket as fk
        >>> def same(layer):
        ...     return lambda q, k: layer.doc[q] == layer.doc[k]
        >>> layer = torch.nn.Module()
        >>> layer.doc = torch.tensor([0, 0, 1])
        >>> att = fk.compile(same(layer))
        >>> layer.doc = torch.tensor([0, 1, 1])
        >>> att.now().mask.dense(1, 3).astype(int)
        array([[[[1, 0, 0]]]])
        """
        arrays = [(n, old, read_again(n, paths)) for n, old, paths in self._copied if n not in but]
        # attention that has copies gives no gradient to an array that requires one since
        learned = [n for n, _, x in arrays if n in self._learnable and learns(x)]
        if not learned and all(x is old for _, old, x in arrays):
            return self
        key = ("now", *((n, id(x)) for n, _, x in arrays), *learned)
        entry: tuple[Attention, Any] | None = self._views.get(key)
        if entry is None:
            stay = {*but, *(n for n, *_ in self._flowing)}
            program, is_traced = self.program.changed(lambda p: p.now(stay)), any(traced(x) for *_, x in arrays)
            same = program.parts == self.program.parts and not (is_traced or learned)
            entry = self if same else self._over(program), arrays  # equal entries: the calls that are prepared stay
            if not is_traced:
                remember(self._views, key, entry, KEPT)  # with the arrays: no other array has their id then
        return entry[0]

    def _over(self, program: CallProgram) -> Attention:
        """Another program with the same options."""
        return self._logs(type(self)(program, *self.__reduce__()[2][1:]))

    @cached_property
    def in_copy(self) -> Attention:
        """The attention in a copy of the module that its functions read: reading those arrays is an error."""
        return self._over(self.program.changed(lambda p: p.in_copy)) if self.program.origin.reads_module else self

    def _logs(self, other: Attention) -> Attention:
        """`other`, whose records of `compiled` are this attention's too."""
        other.history = self.history
        return other

    @cached_property
    def scaled(self) -> tuple[Attention, str]:
        """Attention that takes the factor of scores as a parameter of its calls, and the name of that parameter."""
        program, name = self.program.scaled()
        return self._over(program), name

    def _check_current(self, plan: CallPlan) -> None:
        """Raise where a plan holds an array that the attention's function captured, and another is there now, or
        holds a copy of a tensor that requires a gradient since."""
        for n, x in plan.captured.items():
            replaced = read_again(n, self.paths[n]) is not x
            if not replaced and (n not in self._learnable or n in plan.device_values or not learns(x)):
                continue
            why = "has been replaced" if replaced else "requires a gradient"
            raise ParameterError(f"the plan holds `{self.paths[n][0]}`, which {why} since\n  make another with `plan`")

    def with_total(self, q: Any, k: Any, v: Any, **call: Any) -> tuple[Any, Any]:
        """(out, total) of a weighted call, outside of graphs. `call` has the other fields of `CallArgs`."""
        return rows_of(self, CallArgs(q, k, v, **call))[:2]

    @cached_property
    def undivided(self) -> Attention:
        """Attention whose rows `sums_of` takes, to undo their division."""
        return self._over(replace(self.program, divide=average()))

    @property
    def mask(self) -> Any:
        """The `frisket.Mask`, or None."""
        return self.program.mask

    @property
    def score(self) -> Any:
        """The `frisket.ScoreMod`, or None."""
        return self.program.score

    def __repr__(self) -> str:
        return f"Attention({'; '.join(str(self.program).splitlines()) or 'everything visible'})"

    def _repr_html_(self) -> str:
        what = [(part.what, str(part)) for part in (self.mask, self.score) if part is not None]
        values = [(n, summary(x)) for n, x in {**self.program.scalars, **self.constants}.items()]
        return table([*(what or [("mask", "everything visible")]), *values, *self.options.chosen()])

    # -- running ----------------------------------------------------------------------------------

    # return types, for type checkers: `keywords` are the other ones of the method below
    @overload
    def __call__(self, q: Array, k: Any, v: Any, *, return_max: bool, **keywords: Any) -> Any: ...
    @overload
    def __call__(
        self, q: Array, k: Any, v: Any, *, return_sums: Literal[True], **keywords: Any
    ) -> tuple[Array, Sums]: ...
    @overload
    def __call__(
        self, q: Array, k: Any, v: Any, *, return_lse: Literal[True], **keywords: Any
    ) -> tuple[Array, Array]: ...
    @overload
    def __call__(self, q: Array, k: Any, v: Any, *, return_lse: Literal[False] = ..., **keywords: Any) -> Array: ...
    @overload
    def __call__(self, q: Array, k: Any, v: Any, *, return_lse: bool, **keywords: Any) -> Any: ...
    def __call__(
        self, q: Any, k: Any, v: Any, *, plan: CallPlan | None = None, seed: Any = None, sinks: Any = None,
        return_lse: bool = False, return_max: bool = False, origin: Origin | None = None, sizes: Sizes | None = None,
        layout: str | None = None, axes: str | None = None, q_scale: Any = None, k_scale: Any = None,
        v_scale: Any = None, pages: Any = None, return_sums: bool = False, **params: Any,
    ) -> Any:  # fmt: skip
        """`att(q, k, v)`; `(out, lse)` with return_lse, `(out, max)` with return_max, `(out, lse, max)` with both.

        >>> import torch, frisket as fk
        >>> q, k, v = torch.randn(3, 1, 2, 64, 16)
        >>> out, lse = fk.compile("causal & same(doc)")(q, k, v, doc=torch.arange(64) // 16, return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([1, 2, 64, 16]), torch.Size([1, 2, 64]))

        - out: [batch, heads, q_len, v_dim] for torch, [batch, q_len, heads, v_dim] for JAX, zeros where a query sees
          nothing.
        - lse [batch, heads, q_len]: the natural log of what the softmax divides by.
        - max [batch, heads, q_len]: the largest visible score of a query after the score mod, without sinks.
        - `(out, sums)` with return_sums, of programs with a weight: `Sums` of each row, which `frisket.merge_sums`
          adds to those of other keys. Arrays of float16 are computed in float32 then.

        lse and max are float32, float64 with float64, and -inf where a query sees nothing. Gradients flow from out
        and lse to q, k, v, sinks and the Float parameters that only the score mod reads.

        - `params`: values of scalars and tables: those without a value, or other values for this call.
        - `plan`: a plan that `att.plan` made for these lengths.
        - `origin`, `sizes`: (b, h, q, k) where the arrays begin in the whole problem, and its lengths.
        - `sinks`: sink logits, [heads] or one number: extra logits in the softmax of every query, without a value
          vector. (Sink tokens are a mask: `sinks(n)` shows the first n tokens to every query.)
        - `seed`: 0 <= seed < 2**31, of dropout. Equal seeds drop the same positions of the whole problem on every
          backend. Without a seed torch draws one from its default generator; JAX needs one. Dropout that is not 0 is
          always applied: there is no training mode.
        - `axes`: the axis order of q, k, v and out, "bhsd" or "bshd"; the framework's unless given. `layout` is its
          older name.
        - `k_scale`, `v_scale`: keys and values may be int8, float8_e4m3fn or float8_e5m2, with q in any floating dtype.
          The scales, float32 with all axes of k and v but the last, multiply them: one number for a token and head.
        - `q_scale`: q, k and v may all be float8_e4m3fn, which is experimental and for Hopper alone; out is bfloat16.
          Each of the three scales, float32 [batch, heads], multiplies a head. q_scale and k_scale may scale blocks of
          1, 2, 4, 8, ... tokens instead, with the axes of q and k: [batch, heads, blocks]. No scale is negative.
        - `pages`: int32 [batch, pages of a sequence]. k and v are pools then: torch [pages, kv_heads, tokens, dim], JAX
          [pages, tokens, kv_heads, dim], with a multiple of 16 tokens in a page. Key i of batch entry b is token i %
          tokens of page pages[b, i // tokens]. A page number outside the pool is read as the nearest page. Where
          queries see its keys, `check` and FRISKET_CHECK=1 refuse it, and a page that a sequence has twice.

        Hidden entries of stored k, v and scales may hold anything. Other values of scales and pages neither plan nor
        compile again. Calls on stored keys have no gradients.
        """
        if self.rereads:
            if plan is not None:
                self._check_current(plan)
            if not call_arrays.in_graph(q):  # a graph reads the arrays again by `inputs` or `constants`
                self = self.now(params)
        if k_scale is not None or v_scale is not None or pages is not None or q_scale is not None:
            params |= (kv_inputs := call_arrays.kv_inputs_of(k_scale, v_scale, pages, q_scale))
            if not call_arrays.in_graph(q):
                call_arrays.refuse_name_clash({call_arrays.WORDS[n]: x for n, x in kv_inputs.items()}, self.program)
        # a call without the keyword enters no function for it
        if axes is not None:
            layout = call_arrays.axis_order(layout, axes)
        of_call: Callable[..., Any] = results
        if return_sums is not False:
            check_sums(self.program.weight, return_sums, plan, return_lse, return_max)
        # weights have a total in place of lse, and no sinks
        if self.program.weight is not None:
            check_weighted(self.program.exprs, sinks, return_lse, return_max)
            of_call = weighted_results
        if params or isinstance(sinks, list | tuple):  # lists may hold tracers, and tensors that learn
            sinks, params = call_values(q, sinks, params)
        # half the time of CallArgs(...), which every call would notice
        args = q, k, v, plan, seed, sinks, return_max or return_sums, origin, sizes, layout, params
        request = tuple.__new__(CallArgs, args)
        tensors = (q, k, v, sinks, *params.values()) if params else (q, k, v, sinks)
        logits = self.options.sinks
        if call_arrays.in_graph(*tensors) or (logits is not None and call_arrays.in_graph(q, logits)):
            if is_jagged(q):
                if return_sums:
                    raise no_sums("nested tensors")
                return of_call(jagged_attend(self, request), return_lse, return_max)
            from frisket.runtime.torch import graph  # imports torch

            if return_sums:
                return graph.sums(self, request)
            return of_call(graph.attend(self, request, return_lse or return_max), return_lse, return_max)
        if return_sums:
            return summed(self, request, rows_of)
        if isinstance(q, getattr(sys.modules.get("torch"), "Tensor", ())):
            outputs = operators_of("torch").attend(self, request, False, return_lse)
        elif call_arrays.symbolic(q, k, v, *params.values()):  # a Proxy has no framework
            from frisket.runtime.torch.graph import record

            return record(self, request, return_lse)
        else:
            outputs = attend_jax(self, request)
        return of_call(outputs, return_lse, return_max) if return_lse or return_max else outputs[0]

    def check_if_asked(self, call: CheckedCall, results: tuple[Any, Any, Any]) -> None:
        """Compare a call's results with the interpreter's, where FRISKET_CHECK=1."""
        if call.geometry.is_empty or not Settings.read().check:
            return
        if traced(results[0]):
            report_later(call, *results[:2])  # numbers come when the compiled function runs
        else:
            report(self._as_run(call), *results[:2]).require()

    def _as_run(self, call: CheckedCall) -> CheckedCall:
        """`call`, by the engine that runs it: dense attention to compare with rounds what that engine rounds."""
        proof = operators_of("torch").engine_call(call, self.options) if call.arrays.framework == "torch" else None
        return call if proof is None else replace(call, backend=proof.backend)  # engines round scores, too

    def call(self, request: CallArgs) -> CheckedCall:
        """A call, checked; `run` runs it."""
        q, k, v, plan, seed, sinks, top, origin, sizes, layout, params = request
        kv_inputs, params = call_arrays.split_kv_args(params) if params else ({}, {})
        # arrays of numpy become JAX's where anything of the call is
        if any(isinstance(x, np.ndarray) for x in (q, k, v)):
            q, k, v = call_arrays.all_of_jax(q, k, v, self._frameworks(request))
        arrays = call_arrays.arrays(q, k, v, layout, pages=kv_inputs.get(PAGES))
        if plan is None:
            geometry = arrays.geometry(self.options.scale, self.options.enable_gqa, origin, sizes, kv_inputs)
        else:
            geometry = self._planned_geometry(arrays, plan, origin, sizes, kv_inputs)
        # a layout that is named is meant, and the lengths of a plan tell it; tokens are mostly more than heads
        if layout is None and plan is None and geometry.q_len < geometry.kv_heads and not geometry.is_empty:
            check_order(arrays, geometry, self.program, params)
        how, kv_inputs = call_arrays.kv_format(arrays, geometry, kv_inputs) if kv_inputs else (None, kv_inputs)
        if plan is not None:
            self._check_plan(plan, params, arrays.framework)
            plan = plan.stored_as(how)
        invariant = self.options.tuning.invariant
        backend = choose(self.options.backend, arrays.framework, arrays.device, arrays.dtype, invariant)
        # kernels of the CPU find the parts in keys that begin between two of them, but not in pages
        if invariant and (PAGES in kv_inputs or not RECORDS[backend].any_origin):
            check_aligned(geometry.origin)
        rate, sinks = self.options.dropout, self.options.sinks if sinks is None else sinks
        seed = seed_of(seed, rate, arrays.framework) if rate else None
        if sinks is not None:
            sinks = sinks_of(sinks, geometry.heads, arrays.framework, arrays.dtype, getattr(arrays.q, "device", None))
        if arrays.framework == "torch" and (params or self.captured):
            operators_of("torch").refuse_ambiguous(self.program, {**self.captured, **params})
        if geometry.is_empty:
            check_used(params, self.program.names)  # a plan would have checked both
            check_bound(self.program, {**self.constants, **self.traced, **params})
        elif plan is None:
            host: dict[str, Any] = {}
            device_values: dict[str, Any] = {}
            if params or self.captured:
                host, device_values = split_host_device(params, None, self.program.learnable, arrays.framework)
                # JAX reads copies of torch's tensors
                captured = {**(self.learned if arrays.framework == "torch" else {}), **self.traced}
                device_values = {**{n: x for n, x in captured.items() if n not in params}, **device_values}
            double = self.program.weight is not None and arrays.dtype == DOUBLE
            plan = self._cached_plan(geometry, host, device_values, how, double)
        # an empty call has no plan
        return CheckedCall(arrays, geometry, plan, backend, rate, seed, sinks, top, kv_inputs)

    def _choose(self, framework: str, device: str, dtype: str = "") -> str:
        """The backend of a call on such arrays."""
        return choose(self.options.backend, framework, device, dtype, self.options.tuning.invariant)

    def run(self, call: CheckedCall) -> tuple[Any, Any, Any]:
        """(out, lse, top) of a call; top may be None where it is not asked for."""
        if call.geometry.is_empty:
            return nothing(call)
        if RECORDS[call.backend].oracle:
            return interpreted(call)
        return operators_of(call.arrays.framework).execute(call, self)  # type: ignore[no-any-return]

    def _frameworks(self, request: CallArgs) -> Iterator[str | None]:
        """The frameworks of a call's arrays other than q, k and v, and that of a backend that takes one alone."""
        record = RECORDS.get(self.options.backend or "")
        if record is not None and len(record.frameworks) == 1:
            yield record.frameworks[0]
        params = {**self.captured, **getattr(request.plan, "device_values", request.params)}
        yield from map(call_arrays.framework_of, (request.sinks, request.seed, self.options.sinks, *params.values()))

    def _planned_geometry(
        self,
        arrays: Arrays,
        plan: Any,
        origin: Origin | None,
        sizes: Sizes | None,
        scaled: Mapping[str, Any] = call_arrays.NO_SCALES,
    ) -> Geometry:
        """The geometry of a call with a plan, which is for these lengths."""
        if not isinstance(plan, Plan | FlatPlan):
            raise ParameterError(f"plan is {plan!r}; `plan` of an attention makes one")
        if origin is not None or sizes is not None:
            raise ParameterError("the plan has its origin and sizes already; give them to `plan`")
        g = arrays.geometry(self.options.scale, self.options.enable_gqa, plan.origin, plan.sizes, scaled)
        have, want = (g.batch, g.heads, g.q_len, g.kv_len), (plan.batch, plan.heads, plan.q_len, plan.kv_len)
        if have != want:
            turned = want == (g.batch, g.q_len, g.heads, g.kv_heads)
            other = "bhsd" if arrays.layout == "bshd" else "bshd"
            raise ShapeError(
                f"the plan is for (batch, heads, q_len, kv_len) = {want}, the arrays have {have}; "
                + (f'axes="{other}" reads them so' if turned else "make a plan for these lengths")
            )
        return g

    def check_planned(self, request: CallArgs) -> None:
        """Raise where a plan is for another call, or a parameter is given that the plan holds."""
        kv_inputs, params = call_arrays.split_kv_args(request.params)
        arrays = call_arrays.arrays(*request[:3], request.layout, pages=kv_inputs.get(PAGES))
        self._planned_geometry(arrays, request.plan, request.origin, request.sizes)
        self._check_plan(request.plan, params, arrays.framework)

    def _check_plan(self, plan: CallPlan, params: dict[str, Any], framework: str) -> None:
        for n, x in plan.device_values.items():
            if framework == "torch" and call_arrays.framework_of(x) == "jax":
                raise ParameterError(f"the plan holds `{n}`, an array of JAX\n  give `plan` one of torch or of numpy")
        if params:
            raise ParameterError(f"the plan holds the values of all parameters; give `{next(iter(params))}` to `plan`")
        program, remedy = plan.host_program, "make it with this attention's own `plan`"
        # not the values: a plan may hold others than the attention, which `plan` has bound
        if program.exprs != self.program.exprs or program.positions != self.program.positions:
            text = str(program).replace("\n", "\n  ") or "everything visible"
            raise ParameterError(f"the plan is for another mask or score mod:\n  {text}\n  {remedy}")
        if plan.dropout != bool(self.options.dropout):
            have, want = ("with", "without") if plan.dropout else ("without", "with")
            raise ParameterError(f"the plan is for attention {have} dropout, this one is {want}\n  {remedy}")

    def _cached_plan(
        self, g: Geometry, host: dict[str, Any], device_values: dict[str, Any], how: Stored | None = None,
        double: bool = False,
    ) -> CallPlan:  # fmt: skip
        """A plan; its part that does not depend on the tables of this step is remembered."""
        # `work` knows plans with tables of the host by their entries, and a check tests the tables of each call
        numbers = all(type(x) in (bool, int, float) for x in host.values()) if host else True
        if not numbers or any(isinstance(x, np.ndarray) for x in g.origin) or Settings.read().check:
            return self._new_plan(g, host, device_values, None, how, double)
        scalars = tuple([(n, kind_of(x), x) for n, x in host.items()])  # 1, 1.0 and True are equal as keys
        shapes = [(n, call_arrays.framework_of(x), tuple(x.shape), x.dtype) for n, x in device_values.items()]
        key = "plan", double, g.q_len, g.kv_len, g.batch, g.heads, g.origin, g.sizes, how, scalars, *shapes
        plan: CallPlan | None = self.calls.get(key)
        if plan is None:
            plan = self._new_plan(g, host, device_values, None, how, double)
            # without values: those of a step hold its graph, or its trace
            remember(self.calls, key, plan.with_tables({}) if device_values else plan, CALLS)
        return plan.with_tables(device_values) if device_values else plan

    def _new_plan(
        self, g: Geometry, host: dict[str, Any], device_values: dict[str, Any], block: Any, how: Stored | None = None,
        double: bool = False,
    ) -> CallPlan:  # fmt: skip
        dropout = bool(self.options.dropout)
        program = self.program if how is None else self.program.stored_as(how)
        program = replace(program, double=True) if double else program
        if device_values:
            return device_plan(program, host, device_values, g.problem, block, Settings.read().check, dropout)
        return Plan(program.bind(host) if host else program, g.problem, dropout, partial(engines_text, self.options))

    @counting
    @of_now
    def statistics(
        self, q: Any, k: Any, v: Any, *, columns: bool = False, entropy: bool = False, argmax: bool = False,
        top: int = 0, per: Literal["key", "query"] = "key", lse: Any = None, plan: CallPlan | None = None,
        sinks: Any = None, origin: Origin | None = None, sizes: Sizes | None = None, layout: str | None = None,
        axes: str | None = None, q_scale: Any = None, k_scale: Any = None, v_scale: Any = None, pages: Any = None,
        **params: Any,
    ) -> Statistics:  # fmt: skip
        """Return statistics of the weights of `att(q, k, v)`; only those that are asked for are computed.

        >>> import torch, frisket as fk
        >>> q, k, v = torch.randn(3, 1, 2, 64, 16)
        >>> att = fk.compile("causal & window(8)")
        >>> found = att.statistics(q, k, v, columns=True, entropy=True, argmax=True, top=4)
        >>> found.columns.shape, found.entropy.shape, found.top.shape
        (torch.Size([1, 2, 64]), torch.Size([1, 2, 64]), torch.Size([1, 2, 64, 4]))
        >>> round(found.columns.sum().item()), bool((found.argmax == found.top[..., 0]).all())
        (128, True)
        >>> out, lse = att(q, k, v, return_lse=True)
        >>> torch.allclose(att.statistics(q, k, v, lse=lse, columns=True).columns, found.columns, atol=1e-5)
        True

        - `columns` [batch, kv_heads, kv_len]: the weights of a key, summed over all queries of the query heads that
          read it; with per="query" [batch, heads, kv_len], of each query head alone.
        - `entropy` [batch, heads, q_len]: the sum of -p log p over the weights p of a query, in nats. The weight of a
          sink logit is one of them.
        - `argmax`, `argmax_weight` [batch, heads, q_len]: the place in k of the key with the largest score, and its
          weight. Of equal scores the first one counts. Sink logits do not take part.
        - `top`, `top_weight` [batch, heads, q_len, n]: place and weight of the n = `top` largest, the largest first.

        Weights are those of the softmax, before dropout. A query that sees no key has the entropy 0, the key -1 and the
        weight 0; so do entries of `top` behind the last visible key. Heads stand before lengths in JAX too.

        Numbers are float32, float64 with float64. Gradients flow from them to q, k, sinks, and Float parameters that
        only the score mod reads. One row of tiles is held at a time, in gradients too, never the scores of all pairs.

        - `lse` [batch, heads, q_len]: what a call with return_lse=True gave. Weights are exp(score - lse) then: of an
          lse of `merge`, weights among the keys of all parts. Columns take less time with it. Gradients flow through
          it: give it as it came, not detached.
        - Other keywords are those of a call. v has no influence.

        With a `weight` in place of the softmax there are columns and argmax, of weights divided by the divisor. The
        argmax is the key with the largest positive weight, and -1 where none is positive.

        Raises `ParameterError` in graphs of torch (torch.compile, torch.func), and where a softmax is missing.
        """
        layout = call_arrays.axis_order(layout, axes)
        # before "no statistic is asked for": a misspelled keyword is the reason
        check_used(params, self.program.names, ("columns", "entropy", "argmax", "top", "per", "lse"))
        chosen = Wanted.of(columns, entropy, argmax, top, per)
        if self.program.weight is not None and (entropy or top or lse is not None or sinks is not None):
            text = "entropy, top, lse and sinks belong to a softmax, and this program has a weight\n"
            raise ParameterError(f"{text}  ask for columns and argmax alone")
        params |= call_arrays.kv_inputs_of(k_scale, v_scale, pages, q_scale)
        sinks, params = call_values(q, sinks, params)
        # an lse of another call, or of `merge`, may have any shape
        if lse is not None:
            chosen.check_lse(lse, q, layout)
        # the seed of an attention with dropout: any, since weights are those before dropout
        request = CallArgs(q, k, v, plan, 0, sinks, False, origin, sizes, layout, params)
        if isinstance(q, getattr(sys.modules.get("torch"), "Tensor", ())):
            from frisket.runtime.torch.statistics import statistics as of_torch

            return of_torch(self._unordered, request, lse, chosen)
        from frisket.runtime.jax.statistics import statistics as of_jax

        return of_jax(self._unordered, request, lse, chosen)

    @cached_property
    def _unordered(self) -> Attention:
        """The attention that reads arrays as they are, by a backend with tiles."""
        record = RECORDS.get(self.options.backend or "")
        oracle = record is not None and record.oracle
        if type(self) is Attention and not oracle:
            return self
        return self._logs(Attention(self.program, replace(self.options, backend=None) if oracle else self.options))

    @counting
    @usual_promotion()
    @of_now
    def plan(
        self, q_len: int, kv_len: int, batch: int = 1, heads: int = 1, *, origin: Origin = NOWHERE,
        sizes: Sizes | None = None, flat: bool | None = None, **params: Any,
    ) -> CallPlan:  # fmt: skip
        """Build tables and layout once, for any number of calls with these lengths.

        >>> import frisket as fk
        >>> fk.compile("causal & same(doc)").plan(64, 64, heads=2, doc=[0] * 40 + [1] * 24).work((16, 16)).layout.counts
        Counts(empty=16, partial=14, full=2)

        Tables that are traced (under `jax.jit`) or live on an accelerator (torch) are planned on their device, with
        fixed shapes and no copy. `flat=True` does so for any table of a framework, and `flat=False` copies tables to
        the host. A plan holds Float tables that only the score mod reads as they are, and gradients flow to them.
        """
        if np.iterable(origin) and any(map(traced, origin)):
            raise ParameterError("origin is traced by JAX, and a plan takes one that is known: give it to a call")
        # lengths are checked before values, and lists become tuples
        place = Problem.of(q_len, kv_len, batch, heads, origin, sizes)
        # a plan is for any head_dim and kv_heads, which decide no more than the tiles that are guessed: the usual ones
        g = Geometry(batch, heads, heads, q_len, kv_len, 64, 64, 1.0, place.origin, place.sizes)
        host, device_values = split_host_device(call_values(None, None, params)[1], flat, self.program.learnable)
        captured = {**self.learned, **self.traced}
        device_values = {**{n: x for n, x in captured.items() if n not in params}, **device_values}
        x = next(iter(device_values.values()), None)
        framework = call_arrays.framework_of(x) or "torch"
        backend = self._choose(framework, call_arrays.device_of(x, framework)) if device_values else ""
        if device_values and RECORDS[backend].loads:  # planned by the call, whose tiles are known
            plan = self._cached_plan(g, host, device_values)
        else:
            block = self._flat_block(backend, x, g) if device_values else None
            plan = self._new_plan(g, host, device_values, block)
        if self.rereads:
            # one may be replaced later
            plan.captured = {n: read_again(n, paths) for n, paths in self.paths.items() if n not in params}
        return plan

    def _flat_block(self, backend: str, x: Any, g: Geometry) -> tuple[int, int]:
        """The tiles a call is likely to have; another size is planned when it is met."""
        dtype = "bfloat16" if RECORDS[backend].accelerated else "float32"  # calls there are mostly of 16 bits
        target = target_of(backend, g, dtype, self.options, device=getattr(x, "device", None))
        return target.block_q, target.block_k

    def at(self, **coordinates: Any) -> Attention:
        """Attention with this mask for arrays that hold positions in another order: `att.at(q="q + start[b]",
        k="pos[k]")`.

        >>> import frisket as fk
        >>> fk.compile("causal").at(q="q + start[b]")
        Attention(mask = causal(q = q + start[b]))

        Place q of the arrays holds the token at the position that the text gives. Mask, score mod and dropout read
        positions. So the result equals that of arrays that are put in order, attended, and put back.

        - Keywords b, h, q and k are texts or Ints. Other keywords are values of names in the texts. A call may give
          them too, such as a traced table: `att(q, k, v, start=start)`.
        - `origin` moves places, and the texts then read the moved places.
        - `sizes` gives the lengths of the problem where they are not those of the arrays.
        """
        texts = tuple(coordinates.items())
        if not all(isinstance(x, str | int) for _, x in texts):  # entries of arrays are no part of a key
            return self._logs(Attention(remap_positions(self.program, coordinates), self.options))
        att: Attention | None = self._views.get(texts)
        if att is None:
            att = self._logs(Attention(remap_positions(self.program, coordinates), self.options))
            remember(self._views, texts, att, KEPT)  # other numbers at every step
        return att

    def jagged(self, pattern: Pattern) -> tuple[Attention, tuple[str | None, ...], str | None]:
        """The attention for packed rows of nested tensors, the names of the tables it takes, and the name of the number
        of sequences where the text reads that number."""
        entry: tuple[Attention, tuple[str | None, ...], str | None] | None = self._views.get(("jagged", pattern))
        if entry is None:
            program, names, number = rewritten(self.program, pattern)
            entry = self._views["jagged", pattern] = self._logs(Attention(program, self.options)), names.tables, number
        return entry

    def jagged_names(self, pattern: Pattern, spec: str) -> tuple[tuple[str | None, ...], str | None, str]:
        """The part of `jagged` that a graph holds: names, and the attention as a text. A graph guards `spec`."""
        att, names, number = self.jagged(pattern)
        return names, number, att.spec

    jagged_names._dynamo_marked_constant = True  # type: ignore[attr-defined]  # runs while a graph is made, not in it

    # -- looking ----------------------------------------------------------------------------------

    def compiled(self) -> tuple[CompileRecord, ...]:
        """Return records of why calls compiled: the last 256 calls that were not prepared before, and as many of graphs
        of torch, which equal attentions share.

        >>> import torch, frisket as fk
        >>> att = fk.compile("causal", backend="aten")
        >>> for length in (64, 64, 96):
        ...     out = att(*torch.ones(3, 1, 2, length, 16))
        >>> [record.new for record in att.compiled()[1:]]
        [('q_len', 'kv_len')]
        """
        return (*sorted(records(self.history) + records(history_of(self.spec)), key=lambda record: record.at),)

    @counting
    def source(self, backend: str, *shape: Any, **sizes: Any) -> str:
        """The kernel's text: `att.source("triton", q_len=4096, kv_len=4096, heads=8, head_dim=64)`.

        Takes q, k and v instead of sizes too. `dtype` is "float32" unless given.
        """
        check_name(backend)
        name = backend_named(backend, "torch").name
        if name not in (texts := printed()):
            raise LoweringError(
                f"backend {backend!r} runs library calls and has no kernel text; there is text for {', '.join(texts)}"
            )
        return self.stages(*shape, backend=name, **sizes).source

    @counting
    @of_now
    def stages(
        self, q: Any = None, k: Any = None, v: Any = None, *, q_len: int = 4096, kv_len: int | None = None,
        batch: int = 1, heads: int = 1, kv_heads: int | None = None, head_dim: int = 64, v_dim: int | None = None,
        dtype: str = "float32", backend: str | None = None, origin: Origin = NOWHERE, sizes: Sizes | None = None,
        layout: str | None = None, axes: str | None = None, arch: str | None = None, q_scale: Any = None,
        k_scale: Any = None, v_scale: Any = None, pages: Any = None, **params: Any,
    ) -> Stages:  # fmt: skip
        """The stages of the mask and score mod on the way to a kernel, a printable field each. Triton's tiles are for
        `arch`, say "sm_90" or "gfx942", or this machine's GPU. q, k, v, scales and pages: how keys are stored."""
        layout = call_arrays.axis_order(layout, axes)
        program, kv_inputs = self.program.bind(params), call_arrays.kv_inputs_of(k_scale, v_scale, pages, q_scale)
        if kv_inputs and q is None:
            raise ParameterError("scales and pages are those of q, k and v: give them, too")
        if q is not None:
            arrays = call_arrays.arrays(q, k, v, layout, pages=pages)
            g = arrays.geometry(self.options.scale, self.options.enable_gqa, origin, sizes, kv_inputs)
            program = program.stored_as(call_arrays.kv_format(arrays, g, kv_inputs)[0])
            dtype = arrays.dtype
            eight = dtype if dtype == FP8 else ""  # few backends take it
            name = backend or self._choose(arrays.framework, arrays.device, eight)
        else:
            kv_len = q_len if kv_len is None else kv_len
            factor = head_dim**-0.5 if self.options.scale is None else self.options.scale
            g = Geometry(
                batch, heads, kv_heads or heads, q_len, kv_len, head_dim, v_dim or head_dim, factor, origin, sizes
            )
            name = backend or self.options.backend or Settings.read().backend or library("torch")
        check_name(name)
        name = backend_named(name, "torch").name
        plan = Plan(program, g.problem, bool(self.options.dropout), partial(engines_text, self.options))
        sinks = self.options.sinks is not None
        where = ("torch", "") if q is None else (arrays.framework, arrays.device)
        # generated kernels that this call names are asked for, as those of the options
        named = backend is not None and not RECORDS[name].is_engine
        chosen = None if named else engines_for(plan, g, dtype, *where, name, self.options)
        if chosen is not None and chosen.proof is not None:
            name = chosen.proof.backend
        elif backend is None and where[0] == "torch":
            name = quickest(name, plan, g, dtype, self.options)
        elif backend is None:
            name = quickest_of(name, plan, g, dtype, self.options)
        options = replace(self.options, backend=backend or self.options.backend)
        compilation = PlanCompilation(
            plan, name, g, dtype, options, arch=arch, sinks=sinks, learned=self.learned,
            framework=where[0], engines="" if chosen is None else str(chosen),
            as_written=ProgramExprs(*(getattr(p, "shown", None) for p in program.every_part)),
        )  # fmt: skip
        chose = backend or self.options.backend or Settings.read().backend
        return (compilation if q is None or chose else compilation.now()).stages()

    # -- checking ---------------------------------------------------------------------------------

    @counting
    @usual_promotion()
    @outside_transforms()
    def check(
        self, q: Any, k: Any, v: Any, *, plan: CallPlan | None = None, seed: Any = None, sinks: Any = None,
        gradients: bool = True, origin: Origin | None = None, sizes: Sizes | None = None, layout: str | None = None,
        axes: str | None = None, q_scale: Any = None, k_scale: Any = None, v_scale: Any = None, pages: Any = None,
        **params: Any,
    ) -> Report:  # fmt: skip
        """Compare a call and its gradients, for random cotangents, with the float64 reference. Gradients are of q, k,
        v, sinks, and, without a plan, of the Float parameters that only the score mod reads. Raises `MismatchError`
        when an error is more than twice that of dense attention in the same dtype, plus 1e-6."""
        layout = call_arrays.axis_order(layout, axes)
        if self.rereads:  # inside the pullback of a check no variable of flax can be read
            self = self._over(self.program.fixed())
        sinks, params = call_values(q, sinks, params)
        kv_inputs = call_arrays.kv_inputs_of(*map(unwrapped, (k_scale, v_scale, pages, q_scale)))
        q, k, v, seed, sinks, *values = map(unwrapped, (q, k, v, seed, sinks, *params.values()))
        params = dict(zip(params, values, strict=True))
        # stored keys are for the forward alone, and so are queries of 8 bits
        gradients &= not kv_inputs and k.dtype == q.dtype and not str(q.dtype).endswith(FP8)
        params |= learned_values(self.program, q, params) if gradients and plan is None else {}
        call = self.call(CallArgs(q, k, v, plan, seed, sinks, False, origin, sizes, layout, {**params, **kv_inputs}))
        if gradients and RECORDS[call.backend].has_gradients(call.arrays.framework):
            how: dict[str, Any] = {"plan": plan, "origin": origin, "sizes": sizes, "layout": layout}
            attend: Callable[..., Any] = partial(self, return_lse=True, **how)
            if self.program.weight is not None:

                def with_total(q: Any, k: Any, v: Any, seed: Any = None, **params: Any) -> Any:
                    return self.with_total(q, k, v, seed=seed, params=params, **how)

                attend = with_total
            outcome = report_gradients(attend, self._as_run(call), params)
        else:
            outcome = report(self._as_run(call), *self.run(call)[:2])
        outcome.require()
        return outcome


def rows_of(att: Attention, request: CallArgs) -> tuple[Any, Any, Any]:
    """(out, total, count) of a weighted call, outside of graphs; count where `divide` reads it, else any array."""
    now = att.now(request.params) if att.rereads else att
    if is_tensor(request.q):
        return operators_of("torch").attend(now, request, False, True)  # type: ignore[no-any-return]
    return attend_jax(now, request)


@memo(2)
def operators_of(framework: str) -> Any:
    """The module that runs checked calls: the one place where a framework is chosen."""
    if framework == "torch":
        from frisket.runtime.torch import op as torch_op

        return torch_op
    from frisket.runtime.jax import op as jax_op

    return jax_op


register("program", Attention)
