"""A ring for sliding windows: the last tokens of every sequence, at position modulo size."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from frisket.dsl.errors import ParameterError
from frisket.runtime.attention.attention import Attention
from frisket.runtime.attention.merge import merge

from .checks import check_beside, refuse_tree
from .masks import CHUNK, END, NEW, START, PositionMap, no_room, placed, require_room, ring, ring_before, ring_padded
from .torch_plain import TorchCache, WrittenTokens, counts_of, numbers, quantized


class RingKVCache(TorchCache):
    """The last `window` tokens of every sequence of any length, for masks that see no further back.

    >>> import torch, frisket as fk
    >>> att = fk.compile("causal & window(32)")
    >>> cache = RingKVCache.create(batch=2, window=32, kv_heads=2, head_dim=16)
    >>> q, k, v = (torch.randn(2, heads, 100, 16) for heads in (4, 2, 2))
    >>> out = cache.attention(att, q, k, v)
    >>> cache.lengths.tolist(), cache.k.shape
    ([100, 100], torch.Size([2, 2, 32, 16]))
    >>> q, k, v = (x[:, :, -1:] for x in (q, k, v))
    >>> cache.append(k, v).attend(att, q).shape, cache.known()
    (torch.Size([2, 4, 1, 16]), [101, 101])
    >>> cache.truncate(0).known()  # rows are free for other sequences
    [0, 0]
    >>> cache.extra_repr()
    '2 x 32, kv_heads=2, head_dim=16, float32'
    >>> cache.keep([[0], [0]], drafted=1)
    Traceback (most recent call last):
    frisket.dsl.errors.ParameterError: ...

    As `KVCache`, with the token of position p in slot `p % window`; `lengths` count what has been appended. How far
    back the mask sees is computed from its text, at positions up to 2**20: one that sees more than the ring holds is
    a `ShapeError` with a witness. Masks and score mods that read `Q_LEN` or `KV_LEN` are refused.
    """

    def __init__(
        self, batch: int, window: int, kv_heads: int, head_dim: int, v_dim: int | None = None,
        dtype: torch.dtype | str = torch.float32, device: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(batch, batch, window, kv_heads, head_dim, v_dim, dtype, device)
        self.window = self.slots = window

    @classmethod
    def create(
        cls, batch: int, window: int, kv_heads: int, head_dim: int, v_dim: int | None = None,
        dtype: torch.dtype | str = torch.float32, device: Any = None,
    ) -> Self:  # fmt: skip
        """An empty ring of `window` tokens a sequence; `dtype` as for `KVCache`."""
        return cls(batch, window, kv_heads, head_dim, v_dim, dtype, device)

    def attend(self, att: Attention, q: Tensor, counts: Any = None, *, tree: Any = None, **params: Any) -> Any:
        """Attend like `KVCache.attend`, without trees; `ShapeError` where the last tokens may have overwritten keys
        that they see; `attention` reads these keys first."""
        self._check(att, q, tree, params)
        require_room(att, self.window, q.shape[2], params)
        return self._attend(att, q, counts, None, params)

    def attention(
        self, att: Attention, q: Tensor, k: Tensor, v: Tensor, counts: Any = None, *, tree: Any = None, **params: Any
    ) -> Any:
        """The new tokens appended, and attention of their queries. A chunk may overwrite keys that it sees. Then the
        old ring and the chunk are read separately, and the results are merged."""
        self._check(att, q, tree, params)
        new = self._new(k, v)
        room = not no_room(att, self.window, new, params)
        if counts is not None or not room:
            check_beside(q, k, "bhsd")
        if room:
            return self._store(k, v, new, counts)._attend(att, q, counts, None, params)
        require_room(att, self.window, 0, params)
        number, _ = counts_of([new] * self.batch if counts is None else counts, self.batch, new, self.k.device)
        out, lse = merge(*self._parts(att, q, k, v, number, dict(params)))
        self._store(k, v, new, counts)
        return (out, lse) if params.get("return_lse") else out

    def _parts(
        self, att: Attention, q: Tensor, k: Tensor, v: Tensor, number: Tensor, params: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Attention to what the ring holds, and to the new tokens as it will hold them."""
        if params.get("return_max"):
            raise ParameterError("a chunk longer than the ring has room for is read in two parts; there is no max")
        params["return_lse"] = True
        start = self.lengths.clone()
        old = self._read(placed(att, ring_before(self.window)), q, {START: start, END: start, NEW: number}, params)
        if att.options.sinks is not None or params.get("sinks") is not None:  # they count once
            params["sinks"] = torch.full((q.shape[1],), -torch.inf, device=q.device)
        scales: dict[str, Any] = {}
        if self.k_scale is not None:
            (k, scales["k_scale"]), (v, scales["v_scale"]) = (quantized(x, self.dtype) for x in (k, v))
        else:
            k, v = k.to(self.dtype), v.to(self.dtype)
        params |= {**scales, START: start, END: start + number}
        return old, placed(att, CHUNK)(q, k, v, **params)

    def keep(self, path: Any, drafted: Any, counts: Any = None) -> Self:
        """Refused with a `ParameterError`: drafts overwrite the oldest tokens of a ring."""
        raise ParameterError("a ring has overwritten its oldest tokens with the drafts; take a KVCache")

    def truncate(self, lengths: Any) -> Self:
        """Empty the sequences with 0 in `lengths`; others stay, as a ring has overwritten their old tokens."""
        host_lengths = numbers("lengths", lengths, self.batch)
        known = self.known()
        if (
            host_lengths is None
            or known is None
            or any(0 < n < have for n, have in zip(host_lengths, known, strict=True))
        ):
            raise ParameterError("a ring has overwritten its oldest tokens, and can only be emptied: lengths are 0")
        return super().truncate(lengths)

    # -- how ------------------------------------------------------------------------------------------------

    def _check(self, att: Attention, q: Tensor, tree: Any, params: dict[str, Any]) -> None:
        refuse_tree(tree)
        super()._check(att, q, None, params)

    def _reserve(self, known: list[int], more: list[int]) -> None:
        return  # there is always room

    def _clipped(self, counts: Tensor) -> Tensor:
        return counts

    def _where(self, token: Tensor, real: WrittenTokens | None = None) -> Tensor:
        return super()._where(token % self.window, real)

    def _beside(self, known: list[int], new: int) -> int | None:
        first = super()._beside(known, new)
        return None if first is None or first % self.window + new > self.window else first % self.window

    def _places(self, padded: bool) -> PositionMap:
        return ring_padded(self.window) if padded else ring(self.window)

    def _sizes(self, q: Tensor) -> Any:
        return None
