"""Context parallel attention on torch tensors: ranks send or gather keys, and merge results by lse. Of programs with a
weight they add up the sums of rows. Imports torch.

The steps of a rank, messages between the ranks of a process group and the errors of ranks that fail are a `Wire`'s.
The backward computes weights from the lse of all keys (as in ring attention, H. Liu et al., arXiv 2310.01889): keys
and values are sent again, and their gradients are sent back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from threading import Thread
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from frisket.dsl.errors import BackwardError, ParameterError, PeerError, ShapeError
from frisket.dsl.ir import uses
from frisket.lowering.dtypes import accumulate
from frisket.lowering.plan import Cotangents, ForwardResults
from frisket.runtime.attention.attention import Attention
from frisket.runtime.attention.weighted import Sums, check_weighted, divided, problem_of, sums_of, weighted_results
from frisket.runtime.calls.arrays import recorded, version_of
from frisket.runtime.calls.options import CallArgs, refuse_parts, seed_of, sinks_of
from frisket.runtime.machine.parameters import check_plain, digest
from frisket.runtime.torch.autograd import dsinks, has_tangents, written_out
from frisket.runtime.torch.op import cast, kept_ready
from frisket.runtime.torch.ready import PreparedCall

from .deal import Deal, Variant, check_variant
from .shards import check_covered, check_names

_SHOWN = 160  # bytes of what a rank says of one thing
_ENTRY_BYTES = 32 + _SHOWN
_ASKING = 2  # seconds
_AGREEING = 1  # the tag of these messages: no other message can be taken for one of them
Tensors = Iterable[tuple[int, Tensor]]  # with the rank that each goes to or comes from
_agreed: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


class Wire:
    """The ranks of a group, as `torch.distributed` has them: gloo, NCCL."""

    def __init__(self, group: Any = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            text = "there is no process group: call torch.distributed.init_process_group() in every process, as under "
            raise PeerError(f"{text}torchrun")
        self.group: Any = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise PeerError("this process is not in the group")
        self.together = dist.get_backend(self.group) == "nccl"  # which fuses the messages of a batch

    def start(self, go: Tensors, come: Tensors, tag: int = 0) -> Callable[[], None]:
        """Post messages to and from ranks of the group. The function that is returned waits for them."""
        ops = [("send to", rank, self._op(dist.isend, x, rank, tag)) for rank, x in go]
        ops += [("hear from", rank, self._op(dist.irecv, x, rank, tag)) for rank, x in come]
        # NCCL fuses a batch; gloo's messages are posted one by one, so that an error names one rank
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
            message = f"rank {self.rank} waited to {verb} {ranks(peers)}"
            first = self._first(message)
            why = f"{'it has' if len(peers) == 1 else 'one of them has'} ended, or has not reached this call in time"
            before = [] if first == message else [f"before that, {first}"]
            reasons = f"{why} (the timeout of the process group)", *before, str(error).splitlines()[0]
            raise PeerError("\n  ".join((message, *reasons))) from error

    def _first(self, mine: str) -> str:
        """The message of the first rank to fail: other ranks fail because they miss it. It is asked for in a thread,
        since the rank that keeps the store may be lost."""
        messages: list[str] = []

        def ask() -> None:
            with suppress(RuntimeError):
                messages.append(self.group.get_group_store().compare_set("frisket: first to fail", "", mine).decode())

        asking = Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_ASKING)
        return messages[0] if messages else mine

    def agree(self, call: Mapping[str, str], device: Any) -> None:
        """Raise `PeerError` in every rank unless all give the same texts; texts that agreed are not sent again."""
        key = _hash("\n".join(f"{n}: {x}" for n, x in call.items())).hex()
        known = _agreed.setdefault(self.group, set())
        if key in known or self.size == 1:
            return
        # entries of one length: a rank does not know how long the texts of others are
        mine = b"".join(_hash(x) + x.encode()[:_SHOWN].ljust(_SHOWN, b"\0") for x in call.values())
        # a copy, as from_numpy warns of read-only memory
        out = torch.from_numpy(np.frombuffer(mine, np.uint8).copy()).to(device)
        every = {r: torch.empty_like(out) for r in range(self.size) if r != self.rank}
        self.start([(r, out) for r in every], every.items(), tag=_AGREEING)()
        texts = {r: bytes(x.cpu().numpy()) for r, x in every.items()} | {self.rank: mine}
        for i, name in enumerate(call):
            groups: dict[bytes, list[int]] = {}
            for r in range(self.size):
                groups.setdefault(texts[r][i * _ENTRY_BYTES : (i + 1) * _ENTRY_BYTES], []).append(r)
            if len(groups) > 1:
                what = "\n".join(f"  {ranks(rs)}: {_shown(x)}" for x, rs in groups.items())
                raise PeerError(f"the ranks differ in {name}\n{what}\n  every rank makes the same call")
        known.add(key)


def ranks(which: list[int]) -> str:
    """ "rank 2", "ranks 0, 1 and 3"."""
    *most, last = map(str, which)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _shown(entry: bytes) -> str:
    text = entry[32:].rstrip(b"\0").decode(errors="ignore")
    return text if len(text.encode()) < _SHOWN - 3 else f"{text[: _SHOWN - 24]}... ({entry[:4].hex()})"


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
        come = tuple((s, a, b) for s, _ in round for a, b in [needs[rank][s]] if b)  # (0, 0) where no key is read
        go = tuple((t, a, b) for _, t in round for a, b in [needs[t][rank]] if b and t != rank)
        out.append(RankStep(come, go, *_in_order(deal, come)))
    return tuple(out)


def _in_order(deal: Deal, come: tuple[Message, ...]) -> tuple[Any, Any]:
    runs = []
    for i, (rank, lo, hi) in enumerate(come):
        at = deal.positions(rank)[lo:hi]
        if len(come) == 1:  # the keys of one rank ascend already
            return ((0, 0, hi - lo),), at
        cuts = [0, *(np.flatnonzero(np.diff(at) != 1) + 1).tolist(), hi - lo]
        runs += [(int(at[a]), i, a, b) for a, b in pairwise(cuts)]
    runs.sort()
    keys = [deal.positions(come[i][0])[come[i][1] + a : come[i][1] + b] for _, i, a, b in runs]
    return tuple(part for _, *part in runs), np.concatenate(keys) if keys else np.zeros(0, np.int32)


def start(positions: NDArray[np.int32]) -> int | None:
    """The first of some positions, if each is one more than the one before."""
    return int(positions[0]) if int(positions[-1]) - int(positions[0]) == len(positions) - 1 else None


Sizes = tuple[int, int]
KEPT = 256


def attend(
    att: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    deal: Deal,
    variant: Variant = "ring",
    group: Any = None,
    seed: Any = None,
    sinks: Any = None,
    return_lse: bool = False,
    origin: Sizes = (0, 0),
    sizes: Sizes | None = None,
    split: Mapping[str, int] | None = None,
    **params: Any,
) -> Any:
    """`fk.parallel.attend(att, q, k, v, deal=deal)` in every rank of `group`: the rank's shard of `att` of all tokens.

    q [batch, heads, deal.shard, head_dim], k and v with key heads, are what `deal.permute(x, 2)` has for this rank.
    So is the result, 0 on padding, and lse [batch, heads, deal.shard] with `return_lse`, -inf there. Every rank of
    the group makes the same call; `deal` belongs to the attention's mask, `deal.under(mask)` of another layer's.

    `variant` "ring" computes on the keys of one rank while it receives those of the next. "all-gather" first gathers
    all keys that the rank needs, and runs one kernel. Both send only the keys that `deal.needs` names.
    `params` are the same in every rank: scalars and tables of whole sequences, in the order of positions. Those in
    `split`, {"doc": 1}, are this rank's shard along that axis, distributed as q is, and are gathered. Gradients
    flow to q, k, v, sinks and Float parameters of the score mod; sinks and whole parameters get sums over the ranks.
    `origin` is where batch and heads of this call begin in a problem of `sizes` (B, H), under tensor parallelism for
    example. With dropout every rank gives the same `seed`.

    Raises `PeerError` where ranks differ in their calls, at the first such call, and where a rank does not answer
    within the timeout of the group. `ShapeError` and `ParameterError` for what does not fit the deal.
    """
    refuse_parts(att.options, "context parallelism")
    if recorded():
        text = "messages between ranks are no part of a graph that make_fx or torch.jit.trace records\n  record "
        raise ParameterError(f"{text}what is before and behind context parallel attention, and call it in between")
    if torch._C._functorch.maybe_current_level() is not None or has_tangents(q, k, v, sinks, *params.values()):
        text = "context parallelism has first gradients in reverse, and neither tangents nor transforms of torch.func\n"
        raise BackwardError(f"{text}  take `backward` or torch.autograd.grad, or call the attention on all tokens")
    wire = Wire(group)
    q, k, v = cast(q, k, v)
    _check(q, k, v, deal, wire, variant)
    seed = seed_of(seed, att.options.dropout, "torch")
    sinks = att.options.sinks if sinks is None else sinks
    if att.program.weight is not None:
        check_weighted(att.program.exprs, sinks, return_lse, False)
    if sinks is not None:
        sinks = sinks_of(sinks, q.shape[1], "torch", accumulate(q.dtype), q.device)
    _agree(wire, att, (q, k, v), deal, (variant, sizes), params, sinks)
    for name, axis in (split or {}).items():
        if name not in params:
            raise ParameterError(f"`{name}` is in `split` and is not given")
        if not isinstance(axis, int):
            raise ParameterError(f"`{name}` is split along {axis!r}; that is one of its axes: split={{{name!r}: 0}}")
        mine = torch.as_tensor(params[name], device=q.device)
        params[name] = _Gather.apply(wire, deal, axis, mine)  # type: ignore[no-untyped-call]
    batch, heads = sizes = sizes or (origin[0] + q.shape[0], origin[1] + q.shape[1])
    _check_mask(att, deal, batch, heads, params)
    learned = {n: x for n, x in {**att.learned, **params}.items() if isinstance(x, Tensor) and x.is_floating_point()}
    learned = {n: x for n, x in learned.items() if n in att.program.learnable}
    flowing = [x for x in (sinks, *learned.values()) if x is not None]
    if flowing:
        shared = iter(_Shared.apply(wire, *flowing))  # type: ignore[no-untyped-call]
        sinks = None if sinks is None else next(shared)
        learned = dict(zip(learned, shared, strict=True))
    real_tokens = int(deal.held[wire.rank])
    fixed = {n: x for n, x in params.items() if n not in learned}
    qkv = [x[:, :, :real_tokens] for x in (q, k, v)]  # padding is no query and no key
    # parts of weighted rows are sums, which are divided behind the last step
    run = att if att.program.weight is None else att.undivided
    read, of_steps = ({n: x for n, x in y.items() if n in run.program.names} for y in (learned, fixed))
    all_steps = steps(deal, wire.rank, variant)
    job = RingJob(run, wire, deal, variant, all_steps, seed, origin, sizes, of_steps, tuple(read))
    if att.program.weight is None:
        out, lse = _RingFunction.apply(job, *qkv, sinks, *read.values())  # type: ignore[no-untyped-call]
    else:
        sums = Sums(*_RingOfSums.apply(job, *qkv, *read.values()))  # type: ignore[no-untyped-call]
        out = _divided(att, job, sums, {**fixed, **learned}, q.dtype)
        lse = weighted_results((out, sums.total), True, False)[1] if return_lse else sums.total
    if real_tokens < deal.shard:
        out = pad(out, (0, 0, 0, deal.shard - real_tokens))
        lse = pad(lse, (0, deal.shard - real_tokens), value=-torch.inf)
    return (out, lse) if return_lse else out


def _divided(att: Attention, job: RingJob, sums: Sums, params: Mapping[str, Any], dtype: Any) -> Tensor:
    """The rows of this rank, by their sums over the keys of all ranks."""
    problem = problem_of(sums.total, (*job.origin, 0, 0), (*job.sizes, job.deal.length, job.deal.length))
    divide, values = att.program.divide, {**att.program.scalars, **att.constants, **params}
    # a deal scatters the tokens of a rank: places in the array are no positions
    if divide is not None and "q" in uses(divide.expr):
        values["dealt_q"] = job.deal.positions(job.wire.rank)[: problem.q_len]
        divide = divide.at(q="dealt_q[q]", dealt_q=values["dealt_q"])
    return divided(sums, divide, values, "bhsd", problem, dtype)  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class RingJob:
    """One call of one rank, without its tensors."""

    att: Attention
    wire: Wire
    deal: Deal
    variant: Variant
    steps: tuple[RankStep, ...]
    seed: Any
    origin: Sizes  # the first batch entry and head of the call
    sizes: Sizes  # batch entries and heads of the whole problem
    params: Mapping[str, Any]  # that no gradient flows to
    learned: tuple[str, ...]  # names of the parameters that gradients flow to

    def ready(self, i: int, q: Tensor, k: Tensor, v: Tensor, values: Mapping[str, Tensor]) -> PreparedCall:
        """The prepared call of step i: the crop of its queries and keys, positions as numbers where they follow one
        another and as tables where they do not."""
        at = self.deal.positions(self.wire.rank)[: q.shape[2]]
        first = start(at), start(self.steps[i].keys)
        plain = first[0] is not None and first[1] is not None
        shards = self.att.shards
        # consecutive positions are numbers of the call, so that all such steps share an attention
        where = "plain" if plain else (self.deal.digest, self.wire.rank, self.variant, i)
        if where not in shards:
            # sinks are one more part of the softmax, counted at the end
            bare = Attention(self.att.program, replace(self.att.options, sinks=None))
            tables = {"dealt_q": at, "dealt_k": self.steps[i].keys}
            shards[where] = bare if plain else bare.at(q="dealt_q[q]", k="dealt_k[k]", **tables)
            while len(shards) > KEPT:  # a deal for every step's documents
                shards.pop(next(n for n in shards if isinstance(n, tuple)))
        origin = (*self.origin, *first) if plain else (*self.origin, 0, 0)
        sizes = (*self.sizes, self.deal.length, self.deal.length)
        request = CallArgs(q, k, v, seed=self.seed, origin=origin, sizes=sizes, params={**self.params, **values})
        return kept_ready(shards[where], request).generated  # engines do not return what parts of the keys need

    def keys(self, k: Tensor, v: Tensor) -> Generator[Any, None, None]:
        """(number, k, v) of every step in turn; the keys and values of the next step arrive meanwhile."""
        underway = self._start(0, k, v)
        for i in range(len(self.steps)):
            messages, wait = underway
            wait()
            if i + 1 < len(self.steps):
                underway = self._start(i + 1, k, v)  # posted before this step computes
            try:
                if self.steps[i].come:
                    pairs = [_unpacked(x, k, v) for x in messages]
                    yield i, *(_parts(xs, self.steps[i]) for xs in zip(*pairs, strict=True))
                else:
                    yield i, None, None
            except GeneratorExit:  # an error of this step: no later message may be taken for one that is underway
                underway[1]()
                raise

    def _start(self, i: int, k: Tensor, v: Tensor) -> tuple[list[Any], Callable[[], None]]:
        step, mine = self.steps[i], self.wire.rank
        go = [(t, _packed(k[:, :, a:b], v[:, :, a:b])) for t, a, b in step.go]
        width = k.shape[3] + v.shape[3]
        messages: list[Any] = []
        for s, a, b in step.come:
            if s == mine:
                messages.append((k[:, :, a:b], v[:, :, a:b]))
            else:
                messages.append(k.new_empty(k.shape[0] * k.shape[1] * (b - a) * width))
        come = [(s, x) for (s, *_), x in zip(step.come, messages, strict=True) if s != mine]
        return messages, self.wire.start(go, come)


def _packed(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.reshape(-1), v.reshape(-1)])  # one message for both


def _unpacked(x: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of one message, of the batch, heads and sizes of `k` and `v`."""
    if isinstance(x, tuple):
        return x
    batch, heads, _, dim = k.shape
    n = x.numel() // (batch * heads * (dim + v.shape[3]))
    first, second = torch.split(x, [batch * heads * n * dim, batch * heads * n * v.shape[3]])
    return first.view(batch, heads, n, dim), second.view(batch, heads, n, v.shape[3])


def _parts(tensors: tuple[Tensor, ...], step: RankStep) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([tensors[i][:, :, a:b] for i, a, b in step.parts], 2)


class _RingFunction(torch.autograd.Function):
    """(out, lse) of (job, q, k, v, sinks, *values): tokens of this rank, without padding. Rows are merged by lse in
    float64: by a float of 1e5 weights would be wrong in the third digit."""

    @staticmethod
    def forward(ctx: Any, job: RingJob, q: Tensor, k: Tensor, v: Tensor, sinks: Any, *values: Tensor) -> Any:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float64)
        if sinks is not None:
            lse = torch.maximum(lse, sinks[:, None].double())
        named = dict(zip(job.learned, values, strict=True))
        ctx.ready, rows_by_step = [None] * len(job.steps), {}
        with closing(job.keys(k, v)) as brought:
            for i, keys, vals in brought:
                if keys is None:
                    continue
                ready = ctx.ready[i] = job.ready(i, q, keys, vals, named)
                operands = q, keys, vals, None, *(named[n] for _, n in ready.kv_inputs)
                mine, *rows = ready.run_part(job.seed, *operands)
                rows_by_step[i] = rows
                both = torch.logaddexp(lse, rows[0])
                out = _share(lse, both).to(wide).unsqueeze(-1) * out
                # what a row without keys in this step holds may be NaN
                seen = torch.where(rows[0].unsqueeze(-1) == -torch.inf, 0.0, mine.to(wide))
                out += seen * _share(rows[0], both).to(wide).unsqueeze(-1)
                lse = both
        rounded_lse = lse.to(wide)
        # a large lse in float32 is too coarse for weights: the backward reads the rest of it
        lse_residual = torch.where(lse == -torch.inf, 0.0, lse - rounded_lse).to(wide)
        residuals: list[Any] = [None if sinks is None else _share(sinks[:, None].double(), lse).to(wide)]
        for i in range(len(job.steps)):  # (softmax_stats of rows, the share of their weights that a step has)
            its, softmax_stats = rows_by_step.get(i, (None, None))
            by_lse = its is not None and ctx.ready[i].stats_kind == "lse_residual"
            residuals += [lse_residual if by_lse else softmax_stats, None if its is None else _share(its, lse).to(wide)]
        ctx.job = job
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, rounded_lse, sinks, *values, *residuals)
        ctx.set_materialize_grads(False)  # an unused result has None, not zeros that would be read
        return out, rounded_lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        job, needed = ctx.job, ctx.needs_input_grad[1:]
        q, k, v, out, lse, sinks, *values = ctx.saved_tensors
        values, (of_sinks, *residuals) = values[: len(job.learned)], values[len(job.learned) :]
        # expanded zeros have no memory
        dout, dlse = out.new_zeros(()).expand(out.shape) if dout is None else written_out(dout), written_out(dlse)
        inputs = {"q": q, "k": k, "v": v, "sinks": sinks, **dict(zip(job.learned, values, strict=True))}
        targets = {n for n, need in zip(inputs, needed, strict=True) if need}
        # gradients of keys and values are one message
        if targets & {"k", "v"}:
            targets |= {"k", "v"}
        sums = {n: torch.zeros_like(x, dtype=lse.dtype) for n, x in inputs.items() if n in targets}
        if "sinks" in targets:
            sums["sinks"] = dsinks(of_sinks, out, lse, dout, dlse)

        def gradients(i: int, names: frozenset[str], keys: Tensor, vals: Tensor) -> dict[str, Tensor]:
            ready = ctx.ready[i]
            softmax_stats, share = residuals[2 * i : 2 * i + 2]
            saved = q, keys, vals, None, out, lse, softmax_stats, *(inputs[n] for _, n in ready.kv_inputs)
            return ready.gradients(job.seed, names, saved, dout, dlse, share)  # type: ignore[no-any-return]

        _add_gradients(job, ctx.ready, (k, v), sums, gradients)
        pairs = zip(inputs.items(), needed, strict=True)
        return None, *(sums[n].to(x.dtype) if need else None for (n, x), need in pairs)


class _RingOfSums(torch.autograd.Function):
    """(numerator, total, count) of (job, q, k, v, *values): `Sums` of this rank's rows over the keys of all ranks."""

    @staticmethod
    def forward(ctx: Any, job: RingJob, q: Tensor, k: Tensor, v: Tensor, *values: Tensor) -> Any:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        named = dict(zip(job.learned, values, strict=True))
        sums = [q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide), *q.new_zeros((2, *q.shape[:3]), dtype=wide)]
        ctx.ready = [None] * len(job.steps)
        with closing(job.keys(k, v)) as brought:
            for i, keys, vals in brought:
                if keys is None:
                    continue
                mine, keys, vals = (_summable(x) for x in (q, keys, vals))
                ready = ctx.ready[i] = job.ready(i, mine, keys, vals, named)
                rows = ready.run(job.seed, True, mine, keys, vals, None, *(named[n] for _, n in ready.kv_inputs))
                for whole, part in zip(sums, sums_of(rows, "bhsd"), strict=True):
                    whole += part
        ctx.job = job
        ctx.save_for_backward(q, k, v, *values)
        ctx.mark_non_differentiable(sums[2])
        ctx.set_materialize_grads(False)
        return tuple(sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dnumerator: Any, dtotal: Any, *_: Any) -> Any:
        job, needed = ctx.job, ctx.needs_input_grad[1:]
        q, k, v, *values = ctx.saved_tensors
        inputs = {"q": q, "k": k, "v": v, **dict(zip(job.learned, values, strict=True))}
        targets = {n for n, need in zip(inputs, needed, strict=True) if need}
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        rows, narrow = q.shape[:3], _summable(q)
        zeros = q.new_zeros((), dtype=wide)
        dnumerator = zeros.expand(*rows, v.shape[3]) if dnumerator is None else dnumerator
        dnumerator = dnumerator.to(narrow.dtype).contiguous()
        dtotal = (zeros.expand(rows) if dtotal is None else dtotal).contiguous()
        # gradients of keys and values are one message
        if targets & {"k", "v"}:
            targets |= {"k", "v"}
        sums = {n: torch.zeros_like(x, dtype=wide) for n, x in inputs.items() if n in targets}

        def gradients(i: int, names: frozenset[str], keys: Tensor, vals: Tensor) -> dict[str, Tensor]:
            ready = ctx.ready[i]
            arrays = narrow, _summable(keys), _summable(vals), *(inputs[n] for _, n in ready.kv_inputs)
            # kernels read the shapes of results alone
            results, cotangents = (kind(dnumerator, dtotal) for kind in (ForwardResults, Cotangents))
            return ready.gradients_of_sums(job.seed, names, arrays, results, cotangents)  # type: ignore[no-any-return]

        _add_gradients(job, ctx.ready, (k, v), sums, gradients)
        pairs = zip(inputs.items(), needed, strict=True)
        return None, *(sums[n].to(x.dtype) if need else None for (n, x), need in pairs)


def _add_gradients(
    job: RingJob,
    ready_by_step: Sequence[Any],
    kv: tuple[Tensor, Tensor],
    sums: dict[str, Tensor],
    gradients: Callable[[int, frozenset[str], Tensor, Tensor], dict[str, Tensor]],
) -> None:
    """Add the gradients of all steps to `sums`, by name, and send those of keys and values to their ranks. `gradients`
    computes the ones of these names in a step, from its keys and values."""
    home: list[Callable[[], None]] = []
    for i, keys, vals in job.keys(*kv):
        grads: dict[str, Tensor] = {}
        # None: no query of this rank sees a key of that step
        if keys is not None:
            inputs = ready_by_step[i].kv_inputs
            learned = {n for n, source in inputs if source in sums}
            grads = gradients(i, frozenset(sums.keys() & {"q", "k", "v"} | learned), keys, vals)
            for name, source in (("q", "q"), *inputs):
                if name in grads:
                    sums[source] += grads[name]
        if "k" in sums:
            # the messages of the step before have come while this one computed
            for wait in home:
                wait()
            home = [_send_back(job.wire, job.steps[i], grads, *kv, sums)]
    for wait in home:
        wait()


def _summable(x: Tensor) -> Tensor:
    """Arrays whose sums of rows have the range of float32."""
    return x.float() if x.dtype == torch.float16 else x


def _share(lse: Tensor, whole: Tensor) -> Tensor:
    """The weight of the keys with this `lse` as a share of the weight of all keys, whose lse is `whole`."""
    return torch.where(lse == -torch.inf, 0.0, torch.exp(lse - whole))


def _send_back(
    wire: Wire, step: RankStep, grads: Mapping[str, Tensor], k: Tensor, v: Tensor, sums: dict[str, Tensor]
) -> Callable[[], None]:
    """Send back the gradients of keys that came in `step`. The result waits for the gradients of keys that went, and
    adds them to `sums`."""
    several = len(step.come) > 1
    if several:
        grads_by_message = [[k.new_zeros(*x.shape[:2], b - a, x.shape[3]) for x in (k, v)] for _, a, b in step.come]
    else:
        grads_by_message = [[grads["k"], grads["v"]]] if step.come else []
    at = 0
    for i, a, b in step.parts if several else ():
        for mine, name in zip(grads_by_message[i], "kv", strict=True):
            mine[:, :, a:b] = grads[name][:, :, at : at + b - a]
        at += b - a
    go = []
    for (s, a, b), (dk, dv) in zip(step.come, grads_by_message, strict=True):
        if s == wire.rank:
            sums["k"][:, :, a:b] += dk
            sums["v"][:, :, a:b] += dv
        else:
            # in the item size of the keys, as `Deal.bytes` counts
            go.append((s, _packed(dk.to(k.dtype), dv.to(k.dtype))))
    width = k.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3])
    come = [(t, k.new_empty(width * (b - a))) for t, a, b in step.go]
    wait = wire.start(go, come)

    def done() -> None:
        wait()
        for (_, a, b), (_, x) in zip(step.go, come, strict=True):
            dk, dv = _unpacked(x, k, v)
            sums["k"][:, :, a:b] += dk
            sums["v"][:, :, a:b] += dv

    return done


class _Shared(torch.autograd.Function):
    """Tensors that every rank has, as they are; their gradients are sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, wire: Wire, *tensors: Tensor) -> Any:
        ctx.wire = wire
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        grads = [g for g, need in zip(cotangents, ctx.needs_input_grad[1:], strict=True) if need]
        # one message for all, and sums in float32 at least
        flat = [g.reshape(-1).to(torch.float64 if g.dtype == torch.float64 else torch.float32) for g in grads]
        whole = torch.cat(flat)
        ctx.wire.add(whole)
        parts = iter(torch.split(whole, [g.numel() for g in grads]))
        needed = zip(cotangents, ctx.needs_input_grad[1:], strict=True)
        return None, *(next(parts).view(g.shape).to(g.dtype) if need else None for g, need in needed)


class _Gather(torch.autograd.Function):
    """A table in the order of positions, from every rank's shard of it along `axis`."""

    @staticmethod
    def forward(ctx: Any, wire: Wire, deal: Deal, axis: int, mine: Tensor) -> Tensor:
        if not -mine.ndim <= axis < mine.ndim or mine.shape[axis] != deal.shard:
            text = f"a split table is {tuple(mine.shape)}; along axis {axis} it has this rank's {deal.shard} places"
            raise ShapeError(text)
        ctx.what = wire, deal, axis
        mine = mine.contiguous().resolve_neg()  # messages are bytes, and a lazy negation is not in them
        every = [torch.empty_like(mine) if r != wire.rank else mine for r in range(wire.size)]
        others = [r for r in range(wire.size) if r != wire.rank]
        wire.start([(r, mine) for r in others], [(r, every[r]) for r in others])()
        return deal.unpermute(torch.cat(every, axis), axis)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, whole: Tensor) -> Any:  # the sum over ranks already, by _Shared
        wire, deal, axis = ctx.what
        return None, None, None, deal.permute(whole, axis).tensor_split(wire.size, axis)[wire.rank]


# -- checks -------------------------------------------------------------------------------------------


def _check(q: Tensor, k: Tensor, v: Tensor, deal: Deal, wire: Wire, variant: Variant) -> None:
    check_variant(variant)
    if deal.ranks != wire.size:
        text = f"the deal is for {deal.ranks} ranks, the group has {wire.size}: deal(mask, length, {wire.size})"
        raise ShapeError(text)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_plain(name, x)
        if x.ndim != 4 or x.shape[2] != deal.shard:
            text = f"{name} is {tuple(x.shape)}; it is (batch, heads, {deal.shard}, dim), this rank's part of "
            raise ShapeError(f"{text}deal.permute({name}, 2)")
    if not q.dtype == k.dtype == v.dtype:
        raise ShapeError(f"q, k and v are {q.dtype}, {k.dtype}, {v.dtype}; context parallel takes one dtype")


def _check_mask(att: Attention, deal: Deal, batch: int, heads: int, params: Mapping[str, Any]) -> None:
    """Refuse a mask that shows more than the deal's: ranks send keys by the deal's mask, and some would be missing."""
    mine = att.program.mask
    values = {} if mine is None else {n: x for n, x in params.items() if n in mine.unbound or n in mine.params}
    versions = ((n, x if isinstance(x, int | float) else version_of(x)) for n, x in values.items())
    marks = [("", (batch, heads)), *versions]
    shards = att.shards
    known = shards.get("mask")
    if known is not None and known[:2] == (deal, marks) and all(known[2][n] is x for n, x in values.items()):
        return
    program = replace(att.program, mask=None if mine is None else mine.bind(**values))
    check_covered(program, deal, (), batch, heads)
    shards["mask"] = deal, marks, values


def _kind(x: Any) -> str:
    """A description of a value, equal in all ranks: gradients are summed over the ranks."""
    learned = ", learned" if getattr(x, "requires_grad", False) else ""
    return f"{x.dtype}{list(x.shape)}{learned}" if hasattr(x, "shape") else repr(x)


def _agree(
    wire: Wire, att: Attention, qkv: tuple[Tensor, ...], deal: Deal, options: Any, params: Mapping[str, Any], sinks: Any
) -> None:
    """Compare the calls of all ranks, the first time that a call is of this kind; `options` are variant and sizes."""
    (q, k, v), (variant, sizes) = qkv, options
    flows = [x.requires_grad for x in qkv], sinks is not None, torch.is_grad_enabled()
    kinds = {n: _kind(x) for n, x in sorted(params.items())}
    agreed = att.shards.setdefault("agreed", WeakKeyDictionary()).setdefault(wire.group, set())
    key = str((deal.digest, q.shape, k.shape, v.shape, q.dtype, variant, sizes, flows, kinds))
    if key in agreed:  # texts take longer than this
        return
    values = {n: digest(x) for n, x in sorted({**att.program.scalars, **att.program.tables}.items())}
    texts = {
        "the mask": "everything visible" if att.program.mask is None else str(att.program.mask),
        "the score mod": str(att.program.score),
        "the weight": str(att.program.weight),
        "the divisor": str(att.program.divide),
        "the values of their parameters": f"{values} {kinds}",
        "the lengths": f"{deal.length} tokens in tiles of {deal.tile}, shards of {deal.shard}",
        "the mask of the deal": repr(deal.mask),
        "the deal": deal.digest,
        "the shapes of the arrays": f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
        "their dtype": str(q.dtype),
        "the options": f"{variant}, scale {att.options.scale}, dropout {att.options.dropout}, sizes {sizes}",
        "what gradients are asked for": "of q, k, v {}, sinks {}, grad mode {}".format(*flows),
    }
    wire.agree(texts, q.device)
    check_names(att.program, {**att.learned, **params})
    agreed.add(key)
