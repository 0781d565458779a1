"""The part of gpu.py that times steps of serving: a few queries of every sequence over a long cache, of bfloat16 or of
8 bits with scales, in one piece or in pages; one and four queries of multi-head latent attention (MLA); sequences that
share a prefix; and parts of prompts over pages, by Gluon's and by Triton's forward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from gpu_masks import contests, flex
from gpu_scale import Call, Entrants, Measure, Scale, copying, drawn, one_after_another, shares, watched

import frisket as fk
from frisket.caches import PagePool
from frisket.caches.torch import PagedKVCache
from frisket.runtime.caches import torch_cascade

CACHES = ((1, 8192), (1, 131072), (8, 32768), (32, 8192))  # sequences, tokens of each
PREFIXES = ((8, 8192), (32, 8192), (8, 32768))  # sequences, tokens of the prefix that they share
STORED = ("bfloat16", "int8", "float8_e4m3fn")
QUERIES, PAGES = (1, 4, 16), (0, 64)
DRAFTS = 4  # queries of a step of MLA, besides one
HEADS, KV_HEADS, DIM = 64, 8, 128
CHUNKS, CHUNK_PAGES = (512, 2048), (16, 128)  # queries, and tokens of a page
CHUNKED = ((1, 32768), (4, 32768))  # sequences, tokens of each
LATENT, LATENT_V, LATENT_HEADS = 576, 512, (16, 128)  # one key head; values are the first numbers of keys
BOUND = 0.02  # of the largest number of a result


def rows(scale: Scale) -> list[str]:
    steps = [
        f"{n} queries, {dtype}, {f'pages of {page}' if page else 'one piece'}" for page in PAGES for dtype in STORED
        for n in QUERIES
    ]  # fmt: skip
    shared = [f"shared prefix, {dtype}" for dtype in STORED[:2]]
    latents = [f"MLA {LATENT}/{LATENT_V}, {heads} heads" for heads in LATENT_HEADS]
    chunks = [f"chunk of {n}, pages of {page}" for n in CHUNKS for page in CHUNK_PAGES]
    return [*steps, *latents, *(f"{row}, {DRAFTS} queries" for row in latents), *shared, *chunks]


def serving(row: str, scale: Scale) -> Measure:
    """Microseconds, and the bytes of keys, values, scales and page numbers that a step must read in that time, as a
    share of the rate at which the device copies memory."""
    steps = {}
    caches = PREFIXES if row.startswith("shared prefix") else CHUNKED if row.startswith("chunk") else CACHES
    for batch, length in ((2, 96) if caches is PREFIXES else (1, 96),) if scale.dry else caches:
        name = f"{batch} x {length}"
        if steps and scale.deadline.passed(name):
            break
        if row.startswith("MLA"):
            heads = 4 if scale.dry else int(row.split(", ")[1].split()[0])
            steps[name] = latent(heads, DRAFTS if row.endswith("queries") else 1, batch, length, scale)
        elif row.startswith("shared prefix"):
            steps[name] = prefix(row.split(", ")[1], batch, length, scale)
        elif row.startswith("chunk"):
            queries, page = (int(part.split()[-1]) for part in row.split(", "))
            steps[name] = chunk(*((40, 16) if scale.dry else (queries, page)), batch, length, scale)
        else:
            queries, dtype, kind = row.split(", ")
            page = 0 if kind == "one piece" else 16 if scale.dry else int(kind.split()[-1])
            steps[name] = step(int(queries.split()[0]), dtype, page, batch, length, scale)
    copy, copied = copying(scale)

    def measure(calls: dict[str, Call], read: int) -> Measure:
        timed = {n: torch.no_grad()(call) for n, call in {**calls, "copy": copy}.items()}
        return lambda: watched(timed, scale, partial(shares, read=read, copied=copied))

    return lambda: one_after_another({n: measure(*of_step) for n, of_step in steps.items()}, scale)


def chunk(queries: int, page: int, batch: int, length: int, scale: Scale) -> tuple[dict[str, Call], int]:
    """A part of a prompt of every sequence, over keys in pages, by each of two kernels, which have to agree; keys,
    values and page numbers have to be read once."""
    heads, kv_heads, dim = (4, 2, 16) if scale.dry else (HEADS, KV_HEADS, DIM)
    (q,) = drawn(batch, heads, queries, 1, dim, scale)[:1]
    k, v = (numbers((batch * length // page, kv_heads, page, dim), scale.dtype, scale) for _ in "kv")
    pages = torch.randperm(len(k), device=scale.device).reshape(batch, -1).int()
    entrants = Entrants(scale)
    with torch.no_grad():
        for name in ("triton", "gluon"):
            att = fk.compile("causal", backend=name)
            call = partial(att, q, k, v, origin=(0, 0, length - queries, 0), pages=pages)
            entrants.enter(f"frisket, {name}", lambda call=call: call, close)
        if scale.dry:  # the scores of a whole chunk fill a GPU's memory
            close(entrants.result[:1], dense(q, k, v, pages=pages))
    if scale.device == "cuda":
        torch.cuda.empty_cache()
    return entrants.calls, sum(x.numel() * x.element_size() for x in (k, v, pages))


def latent(heads: int, queries: int, batch: int, length: int, scale: Scale) -> tuple[dict[str, Call], int]:
    """A step of MLA: every query head reads the one key head, and values are a view of keys. The peer is two products
    with all scores in memory; keys have to be read once."""
    q, k, _ = drawn(batch, heads, queries, length, LATENT, scale, 1)
    v = k[..., :LATENT_V]
    att = fk.compile("causal", backend="triton")
    last = length - queries + torch.arange(queries, device=q.device).repeat(heads)
    hidden = torch.arange(length, device=q.device) > last[:, None]

    def products() -> Any:
        scores = q.flatten(1, 2)[:, None] @ k.transpose(2, 3) * LATENT**-0.5  # [batch, 1, heads * queries, length]
        if queries > 1:
            scores = scores.masked_fill(hidden, -torch.inf)
        weights = torch.softmax(scores, 3, dtype=torch.float32).to(v.dtype)
        return (weights @ v).unflatten(2, (heads, queries))[:, 0]

    entrants = Entrants(scale)
    with torch.no_grad():
        entrants.enter("frisket", lambda: partial(att, q, k, v, origin=(0, 0, length - queries, 0)))
        entrants.enter("two products", lambda: products, close)
    if scale.device == "cuda":
        torch.cuda.empty_cache()
    return entrants.calls, k.numel() * k.element_size()


def prefix(dtype: str, batch: int, length: int, scale: Scale) -> tuple[dict[str, Call], int]:
    """A step of sequences that share a prefix of `length` tokens and have some of their own, by a cache in pages: all
    in one call, and the prefix read once. The bytes are those of a prefix that is read once."""
    heads, kv_heads, dim, page, own = (4, 2, 16, 16, 32) if scale.dry else (HEADS, KV_HEADS, DIM, 64, 1024)
    pages = length // page + batch * (own // page)
    pool = PagePool(pages, page)
    stored = scale.dtype if dtype == "bfloat16" else getattr(torch, dtype)
    sizes: Any = (pages, page, batch, (length + own) // page, kv_heads, dim)
    cache = PagedKVCache.create(*sizes, dtype=stored, device=scale.device)
    pool.allocate("prefix", length)
    for b in range(batch):
        pool.fork("prefix", b)
    pool.free("prefix")
    copies = pool.append(dict.fromkeys(range(batch), own))
    cache.seat(pool, range(batch), 0, copies)  # every token counts as stored
    for x in (cache.k, cache.v):
        x.copy_(numbers(tuple(x.shape), stored, scale))
    for scales in (cache.k_scale, cache.v_scale):
        if scales is not None:
            scales.uniform_(0, 0.01)
    q = drawn(batch, heads, 1, 1, dim, scale)[0]
    att = fk.compile("causal", backend="triton")
    torch_cascade.GPU_BYTES = torch_cascade.CPU_BYTES = 0  # both are timed, whichever calls take by themselves
    entrants = Entrants(scale)
    with torch.no_grad():
        entrants.enter("one call", lambda: partial(cache.attend, att, q))
        entrants.enter("cascade", lambda: partial(cache.attend, att, q, cascade=True))
    return entrants.calls, 2 * pages * page * kv_heads * dim * cache.k.element_size()


def step(queries: int, dtype: str, page: int, batch: int, length: int, scale: Scale) -> tuple[dict[str, Call], int]:
    """The contestants of a step, whose first call is compared with dense attention, and the bytes it must read."""
    heads, kv_heads, dim = (4, 2, 16) if scale.dry else (HEADS, KV_HEADS, DIM)
    q = drawn(1, heads, queries, 1, dim, scale)[0].expand(batch, -1, -1, -1).contiguous()
    shape = (batch * length // page, kv_heads, page, dim) if page else (batch, kv_heads, length, dim)
    of_8_bits, more = dtype != "bfloat16", {}
    stored = getattr(torch, dtype) if of_8_bits else scale.dtype
    k, v = (numbers(shape, stored, scale) for _ in "kv")
    if of_8_bits:
        more = {name: torch.rand(shape[:3], device=scale.device) / 100 for name in ("k_scale", "v_scale")}
    if page:
        more["pages"] = torch.randperm(shape[0], device=scale.device).reshape(batch, -1).int()
    att = fk.compile("causal", backend="triton")
    call = partial(att, q, k, v, origin=(0, 0, length - queries, 0), **more)
    own: dict[str, Call] = {"frisket": call}
    with torch.no_grad():
        close(call()[:1], dense(q, k, v, **more))
        if not of_8_bits and not page:
            case = contests(length, heads, scale.device)["causal"]
            first = length - queries
            moved = type(case)(case.mask, lambda b, h, q, k: q + first >= k)
            own["flex"] = flex(moved, (q, k, v), not scale.dry)
            own["flex"]()
    if scale.device == "cuda":
        torch.cuda.empty_cache()  # other rows wait beside this one
    kept = sum(x.numel() * x.element_size() for x in (k, v, *more.values()))
    return own, kept


def close(result: torch.Tensor, want: torch.Tensor) -> None:
    """Raise where a result differs by more than BOUND."""
    error = float((result.float() - want.float()).abs().max() / want.abs().max())
    if not error <= BOUND:
        raise AssertionError(f"the largest error is {error:.3g} of the largest number")


def numbers(shape: tuple[int, ...], dtype: torch.dtype, scale: Scale) -> torch.Tensor:
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, dtype=dtype, device=scale.device)
    return torch.randn(shape, device=scale.device, dtype=torch.float16).to(dtype)


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_scale: Any = None, v_scale: Any = None, pages: Any = None
) -> torch.Tensor:
    """The first sequence's result in float32: keys and values are unpacked, and every score is in memory."""

    def whole(x: torch.Tensor, by: Any) -> torch.Tensor:
        if pages is not None:
            x, by = x[pages[0].long()], None if by is None else by[pages[0].long()]
            x = x.transpose(0, 1).flatten(1, 2)
            by = None if by is None else by.transpose(0, 1).flatten(1, 2)
        else:
            x, by = x[0], None if by is None else by[0]
        return x.float() if by is None else x.float() * by[..., None]

    keys, values = whole(k, k_scale), whole(v, v_scale)
    rows = q[0].float().unflatten(0, (len(keys), -1))  # [key heads, heads of each, queries, dim]
    score = rows @ keys[:, None].transpose(2, 3) * q.shape[3] ** -0.5
    at = torch.arange(keys.shape[1], device=q.device)
    last = keys.shape[1] - q.shape[2] + torch.arange(q.shape[2], device=q.device)
    weights = torch.softmax(score.masked_fill(at > last[:, None], -torch.inf), 3)
    return (weights @ values[:, None]).flatten(0, 1)
