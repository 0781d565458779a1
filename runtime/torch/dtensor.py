"""The operators of attention on DTensors: batch and heads over the devices of a mesh. Imports torch.distributed.

Every rank computes its own batch entries and heads, at their place in the whole problem. So a mask or score mod
that reads `b` or `h` means those of all ranks. Tables are whole in every rank. Ranks send tensors that are placed
otherwise, and gradients of tensors that all ranks read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from frisket.dsl.errors import ParameterError, ShapeError

from .running import names_of, reserved

Placements = tuple[Any, ...]
AXES = ("batch", "heads", "length", "head_dim")


@dataclass(frozen=True)
class RankPart:
    """The part of a call that one rank computes.

    `first` and `count` are the batch entries and heads of q. `keys` are indices of the heads of k and v that the
    rank reads, among its own heads. None: the rank reads all its heads, in the groups of the whole problem."""

    mesh: Any
    q: Placements
    kv: Placements
    first: tuple[int, int]
    count: tuple[int, int]
    keys: Tensor | None

    @property
    def sums(self) -> Placements:
        """The placements of gradients of tensors that every rank reads: a sum over the ranks that split q."""
        return tuple(Partial() if isinstance(p, Shard) else Replicate() for p in self.q)

    @property
    def kv_sums(self) -> Placements:
        """The placements of the gradients of k and v."""
        return tuple(s if isinstance(p, Replicate) else p for p, s in zip(self.kv, self.sums, strict=True))

    def whole(self, x: Any) -> Any:
        """A table as every rank reads it."""
        return local(x, self.mesh, (Replicate(),) * self.mesh.ndim)

    def heads(self, x: Any) -> Any:
        """Sinks of this rank's heads."""
        return None if x is None else self.whole(x).narrow(0, self.first[1], self.count[1])


def place_of(q: Any, k: Any, v: Any, names: str) -> RankPart:
    """The part of a call for this rank, from the placements of q. Raises `ShapeError` for splits that cannot work."""
    tensors = {"q": q, "k": k, "v": v}
    if any(not isinstance(x, DTensor) for x in tensors.values()):
        kinds = ", ".join(f"{n} is a {type(x).__name__}" for n, x in tensors.items())
        raise ShapeError(f"{kinds}\n  DTensors go with DTensors: distribute_tensor(x, mesh, placements)")
    if any(x.device_mesh != q.device_mesh for x in (k, v)):
        raise ShapeError("q, k and v are on different meshes; distribute them over one")
    if any(reserved(n) for _, n in names_of(names)[1]):
        raise ParameterError(
            "q, k and v are DTensors, and keys are stored in 8 bits or pages\n"
            "  give every rank its own part: q.to_local(), and origin for its first batch entry and head"
        )
    for name, x in tensors.items():
        if any(isinstance(p, Shard) and p.dim % 4 == 2 for p in x.placements):  # a negative axis counts from the last
            raise ShapeError(
                f"{name} is split along its length: {x.placements}\n  ranks then need one another's keys: use "
                "frisket.parallel (deal, attend) for that mesh axis; here batch and heads are split"
            )
    mesh, heads, keys = q.device_mesh, q.shape[1], k.shape[1]
    where = split(q)
    (b, batch), (h, count) = (part(n, axis, mesh, where) for axis, n in enumerate(q.shape[:2]))
    parts = prod(mesh.size(i) for i, p in enumerate(where) if isinstance(p, Shard) and p.dim % 4 == 1)
    even = heads % parts == 0 and keys % parts == 0  # then a rank has whole groups of query heads
    kv = tuple(p if even or p.is_replicate() or p.dim % 4 == 0 else Replicate() for p in where)
    read = None
    if not even:
        # groups are cut: each query head reads a copy of its key head
        read = torch.arange(h, h + count, device=q.device) // max(heads // max(keys, 1), 1)
    return RankPart(mesh, where, kv, (b, h), (batch, count), read)


def split(q: Any) -> Placements:
    """The placements of q that stay: batch and heads, as long as every rank has some."""
    left, placements = list(q.shape[:2]), []
    for i, p in enumerate(q.placements):
        # strided shards are no chunks in order
        axis, size = p.dim % 4 if type(p) is Shard else 4, q.device_mesh.size(i)
        even = axis < 2 and left[axis] % size == 0
        # an uneven split is in order only if it is the first of its axis
        first = axis < 2 and left[axis] == q.shape[axis] and (size - 1) * -(-left[axis] // size) < left[axis]
        placements.append(p if even or first else Replicate())
        if even or first:
            left[axis] = -(-left[axis] // size) if even else 1
    return tuple(placements)


def part(n: int, axis: int, mesh: Any, placements: Placements) -> tuple[int, int]:
    """(start, size) of this rank's part of `n` entries along an axis, in chunks as DTensors have them."""
    start = 0
    for i, p in enumerate(placements):
        if isinstance(p, Shard) and p.dim % 4 == axis:
            each = -(-n // mesh.size(i))
            before = min(mesh.get_local_rank(i) * each, n)
            start, n = start + before, min(each, n - before)
    return start, n


def local(x: Any, mesh: Any, placements: Placements) -> Any:
    """The part of a placed tensor on this rank; one that is no DTensor is whole in every rank."""
    if not isinstance(x, DTensor):
        return x
    if x.device_mesh != mesh:
        raise ShapeError("a table or cotangent is on another mesh than q, k and v; distribute it over theirs")
    # detached: torch 2.11 detaches what requires a gradient in place here, and has no strategy for that
    detached: Any = x.detach()
    return detached.redistribute(mesh, placements).to_local()


def dealt(x: Tensor, like: Any, place: RankPart, have: Placements, shape: Sequence[int]) -> Any:
    """The parts `x` of all ranks as one tensor, placed as `like` is; whole in every rank if `like` is no DTensor."""
    whole = _of_ranks(x.contiguous(), place, have, shape)
    if isinstance(like, DTensor):
        return whole.redistribute(place.mesh, like.placements)
    return whole.redistribute(place.mesh, (Replicate(),) * place.mesh.ndim).to_local()


def placed(
    place: RankPart, q: Any, values: Sequence[Any], numbers: Sequence[Any], names: str, kv_len: int
) -> tuple[list[Any], list[Any], str]:
    """The values of a call of one rank: its place in the whole problem is among them."""
    tensors, ints = [place.whole(x) for x in values], list(numbers)
    at: dict[str, tuple[list[Any], int]] = {}
    places = {"tensor": tensors, "number": ints}
    seen = dict.fromkeys(places, 0)
    for kind, name in names_of(names)[1]:
        if kind in places:
            at[name] = places[kind], seen[kind]
            seen[kind] += 1
    starts = [0, 0, 0, 0]
    if " origin0" in at:
        starts = [entries[i] for entries, i in (at[f" origin{i}"] for i in range(4))]
    if " size0" not in at:  # of the whole problem, by default
        sizes = [s + n for s, n in zip(starts, (*q.shape[:3], kv_len), strict=True)]
        whole = [x if isinstance(x, int | torch.SymInt) else x.max() for x in sizes]  # a vector of origins: the longest
        names += "".join(f",{'tensor' if isinstance(x, Tensor) else 'number'}  size{i}" for i, x in enumerate(whole))
        for x in whole:
            (tensors if isinstance(x, Tensor) else ints).append(x)
    if " origin0" in at:
        for i, more in enumerate(place.first):
            entries, j = at[f" origin{i}"]
            entries[j] = entries[j] + more
    else:
        names += "".join(f",number  origin{i}" for i in range(4))
        ints += [*place.first, 0, 0]
    return tensors, ints, names


def keys_of(place: RankPart, x: Any) -> Any:
    keys: Any = local(x, place.mesh, place.kv)
    return keys if place.keys is None else keys.index_select(1, place.keys)


def _check_tables(q: Any, k: Any, v: Any, sinks: Any, values: Sequence[Any], names: str) -> None:
    """Raises `ParameterError` where a table or the sinks are a DTensor and q, k and v are not."""
    if any(isinstance(x, DTensor) for x in (q, k, v)):
        return
    tables = [name for kind, name in names_of(names)[1] if kind == "tensor"]
    for name, x in (("sinks", sinks), *zip(tables, values, strict=True)):
        if isinstance(x, DTensor):
            raise ParameterError(
                f"`{name}` is a DTensor {x.placements}, and q, k and v are tensors of this rank\n  a parameter under "
                "fully_shard is whole in the forward of its module alone: read it there, at every call; where no "
                f"gradient is needed, give {name}.full_tensor()"
            )


def attend(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`frisket::attend`."""
    q, k, v, sinks, values, numbers, spec, names = args
    _check_tables(q, k, v, sinks, values, names)
    with torch.no_grad():
        place = place_of(q, k, v, names)
        tensors, ints, rank_names = placed(place, q, values, numbers, names, k.shape[2])
        mine = local(q, place.mesh, place.q)
        results = op(mine, keys_of(place, k), keys_of(place, v), place.heads(sinks), tensors, ints, spec, rank_names)
        rows = q.shape[:3]
        shapes = (*rows, v.shape[3]), rows, rows if names_of(names)[0] else (), (*rows, 2)
        return tuple(_of_ranks(x, place, place.q, s) if s else x for x, s in zip(results, shapes, strict=True))


def _of_ranks(x: Tensor, place: RankPart, have: Placements, shape: Sequence[int]) -> Any:
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(x, place.mesh, have, run_check=False, shape=torch.Size(shape), stride=stride)


def attend_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`frisket::attend_backward`."""
    dout, dlse, q, k, v, sinks, values, out, lse, softmax_stats, numbers, spec, names, needed = args
    with torch.no_grad():
        place = place_of(q, k, v, names)
        tensors, ints, rank_names = placed(place, q, values, numbers, names, k.shape[2])
        by_query = dout, dlse, q, out, lse, softmax_stats
        dout, dlse, mine, out, lse, softmax_stats = (local(x, place.mesh, place.q) for x in by_query)
        arrays = mine, keys_of(place, k), keys_of(place, v), place.heads(sinks)
        grads = op(dout, dlse, *arrays, tensors, out, lse, softmax_stats, ints, spec, rank_names, needed)
        inputs = [(i, x) for i, x in enumerate((q, k, v, sinks, *[x for x in values if x.is_floating_point()]))]
        inputs = [(i, x) for (i, x), need in zip(inputs, needed, strict=True) if need]
        return [_gradient(place, i, x, g) for (i, x), g in zip(inputs, grads, strict=True)]


def _gradient(place: RankPart, which: int, like: Any, g: Tensor) -> Any:
    """The gradient of input number `which` (q, k, v, sinks, then tables), placed as that input is."""
    if which == 0:
        return dealt(g, like, place, place.q, like.shape)
    if which in (1, 2):
        if place.keys is not None:
            # query heads of a group add up
            g = g.new_zeros(g.shape[0], like.shape[1], *g.shape[2:]).index_add_(1, place.keys, g)
        return dealt(g, like, place, place.kv_sums, like.shape)
    if which == 3:
        whole = g.new_zeros(like.shape)  # sinks of other heads get nothing from this rank
        whole.narrow(0, place.first[1], place.count[1]).copy_(g)
        g = whole
    return dealt(g, like, place, place.sums, like.shape)


ops = torch.ops.frisket
HANDLERS: dict[Any, Callable[..., Any]] = {ops.attend.default: attend, ops.attend_backward.default: attend_backward}
HANDLERS |= {ops.attend_reads_host.default: attend, ops.attend_backward_reads_host.default: attend_backward}
DTensor._op_dispatcher._custom_op_handlers.update(HANDLERS)
