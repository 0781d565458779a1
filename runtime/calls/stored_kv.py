"""Keys and values as caches store them: in 8 bits, with a scale for every token and head, in pages of a pool.

Scales and pages come with every call, like dropout's seed; what is static of them is a part of the program, so that
kernels read them as they read any table: the scale of a key is in the score, that of a value is `LoopPlan.weight`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from frisket.dsl.errors import BackwardError, ParameterError, ShapeError
from frisket.dsl.ir import SCORE, Expr, lookup, substitute, var
from frisket.dsl.types import FLOAT, INT
from frisket.lowering.plan import FIRST, K_SCALE, LIVE, PAGES, V_SCALE, Geometry, Pages

from .arrays import NATURAL, Arrays, framework_of, like_jax, to_numpy, turn

if TYPE_CHECKING:
    from numpy.typing import NDArray

WORDS = {K_SCALE: "k_scale", V_SCALE: "v_scale", PAGES: "pages"}  # as a call has them


@dataclass(frozen=True)
class Stored:
    """The static description of stored keys and values: which scales there are, tokens of a page (0: no pages), the
    axes of scales, how many query heads share a key head, and the b, h and k of the arrays' first entries (k None: one
    for each batch entry)."""

    k_scale: bool
    v_scale: bool
    page: int
    layout: str
    group: int
    first: tuple[int, int, int | None]

    def scored(self, mod: Expr | None) -> Expr | None:
        """A score mod that takes the score of a stored key."""
        if not self.k_scale:
            return mod
        score = SCORE * self._scale(K_SCALE)
        return score if mod is None else substitute(mod, {SCORE: score})

    @property
    def weight(self) -> Expr | None:
        return self._scale(V_SCALE) if self.v_scale else None

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


def live_of(k_scale: Any, v_scale: Any, pages: Any) -> dict[str, Any]:
    """The scales and pages that a call brings, by the sources of their tables."""
    given = {K_SCALE: k_scale, V_SCALE: v_scale, PAGES: pages}
    return {n: x for n, x in given.items() if x is not None}


def refuse_taken(values: Mapping[str, Any], program: Any) -> None:
    """Refuse one of `values` if a mask or score mod has a parameter of that name."""
    for name, x in values.items():
        if x is not None and any(name in p.unbound for p in program.parts):
            raise ParameterError(
                f"`{name}` is a parameter of the mask or score mod, and of a call it says how keys are stored\n"
                f"  rename it in the text, for example `my_{name}`, or bind it there: frisket.mask(..., {name}=...)"
            )


def parted(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what is live of the parameters of a call, the others)."""
    live = {n: x for n, x in params.items() if n in LIVE}
    return live, {n: x for n, x in params.items() if n not in live} if live else dict(params)


def stored(arrays: Arrays, g: Geometry, live: Mapping[str, Any]) -> tuple[Stored | None, dict[str, Any]]:
    """The static description of a call's scales and pages, and their arrays with the axes of the framework's own
    layout; None without any. `ShapeError` where they do not fit k and v."""
    if not live:
        return None, {}
    bare = [n for n, x in live.items() if arrays.unbatched and n != PAGES and x.ndim == 2]
    live = {n: x[None] if n in bare else x for n, x in live.items()}
    if arrays.framework == "jax":
        live = {n: like_jax(x, *arrays.qkv) for n, x in live.items()}
    for name, x in live.items():
        _check(name, x, arrays)
    natural = NATURAL.get(arrays.framework, arrays.layout)
    found = {n: turned(n, x, arrays.layout, natural) for n, x in live.items()}
    b, h, _, k = g.origin
    if not isinstance(k, int):
        found[FIRST] = _like(np.broadcast_to(k, g.batch), arrays.q, arrays.framework)
    page = arrays.page if PAGES in live else 0
    first = b, h, k if isinstance(k, int) else None
    return Stored(K_SCALE in live, V_SCALE in live, page, natural, g.heads // g.kv_heads, first), found


def _check(name: str, x: Any, given: Arrays) -> None:
    word, of = WORDS[name], "v" if name == V_SCALE else "k"
    if framework_of(x) != given.framework and not hasattr(x, "aval"):
        raise ShapeError(f"{word} is a {type(x).__name__}, q is of {given.framework}; convert it")
    dtype = str(x.dtype).removeprefix("torch.")
    if given.framework == "torch" and x.device != given.q.device:
        raise ShapeError(f"{word} is on {x.device}, q on {given.q.device}; move them to one")
    if name == PAGES:
        if dtype != "int32":
            raise ShapeError(
                f"pages are {dtype}; they are int32 [batch, pages of a sequence]: pages{_cast(given, 'int32')}"
            )
        return
    if dtype != "float32" and not dtype == given.dtype == "float64":
        raise ShapeError(f"{word} is {dtype}; it is float32: {word}{_cast(given, 'float32')}")
    array = getattr(given, of)
    if tuple(x.shape) != tuple(array.shape[:3]):
        raise ShapeError(
            f"{word} has the shape {tuple(x.shape)}; it has one number for every token and head of {of}, "
            f"{tuple(array.shape[:3])}, the axes of {of} without its last"
        )


def _cast(given: Arrays, dtype: str) -> str:
    return f".to(torch.{dtype})" if given.framework == "torch" else f'.astype("{dtype}")'


def _like(x: NDArray[Any], like: Any, framework: str) -> Any:
    if framework == "torch":
        import torch

        return torch.from_numpy(x.astype(np.int32)).to(like.device)
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(x, "int32")
    return x


def turned(name: str, x: Any, have: str, want: str) -> Any:
    """A scale with its heads and length axes as `want` has them."""
    return x if name not in (K_SCALE, V_SCALE) or have == want else x.swapaxes(1, 2)


def meant(arrays: Arrays, live: Mapping[str, Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """q, k and v with scales and pages applied, float64 [batch, heads, length, dim]; `live` as `stored` gives it."""
    q, k, v = (turn(to_numpy(x), arrays.layout, "bhsd") for x in arrays.qkv)
    natural = NATURAL.get(arrays.framework, arrays.layout)
    told = {n: to_numpy(turned(n, x, natural, "bhsd")) for n, x in live.items()}
    pages = told.get(PAGES)
    return q, _meant(k, told.get(K_SCALE), pages), _meant(v, told.get(V_SCALE), pages)


def _meant(x: NDArray[Any], scale: Any, pages: Any) -> NDArray[Any]:
    x = x if scale is None else x * scale[..., None]
    if pages is None:
        return x
    found = x[np.clip(pages.astype(int), 0, len(x) - 1)]  # [batch, pages of a sequence, heads, tokens, dim]
    batch, n, heads, tokens, dim = found.shape
    return np.ascontiguousarray(found.swapaxes(1, 2)).reshape(batch, heads, n * tokens, dim)


FORWARD_ALONE = {
    "torch": "with torch.no_grad():",
    "jax": "jax.lax.stop_gradient(q), and around what else a gradient flows to",
}


def refuse_gradients(kv_dtype: str, live: Collection[str], framework: str = "torch") -> None:
    """Raise: a gradient is asked of a call whose keys and values are stored."""
    how = f"of {kv_dtype}" if kv_dtype else "with " + " and ".join(word for n, word in WORDS.items() if n in live)
    raise BackwardError(
        f"keys and values {how} are for the forward alone, without gradients\n"
        f"  train with keys and values as they are; for the forward alone write {FORWARD_ALONE[framework]}"
    )
