"""Every entry of the library with its parameters bound, as a function of the length: `masks(4096)["window(w)"].mask`.

Tables are drawn with a seed and take O(s) memory, except where a mask is a table of all pairs: such a case says so
in `data`, and up to which length it is meant in `limit`. Parameters are made when `.params` is first read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

import frisket as fk

Params = dict[str, Any]
PAIRS = "one number for every query and key"


@dataclass(frozen=True)
class Case:
    """One entry with arguments: `text` reads the names of `params`. Lengths in tokens."""

    text: str
    q_len: int
    kv_len: int
    make: Callable[[], Params] = dict
    batch: int = 1
    heads: int = 1
    data: str = ""  # why parameters or work grow with the square of the length
    limit: int | None = None  # the longest sequence to ask for
    divide: str | None = None  # of a weight

    @cached_property
    def params(self) -> Params:
        return self.make()

    @cached_property
    def mask(self) -> fk.Mask:
        return fk.mask(self.text, **self.params)

    @cached_property
    def score(self) -> fk.ScoreMod:
        return fk.score(self.text, **self.params)

    @cached_property
    def program(self) -> fk.Program:
        """The weight of `text`, and its divisor."""
        return fk.weight(self.text, self.divide, **self.params)

    @property
    def lengths(self) -> dict[str, int]:
        """Arguments of `layout` and `dense`."""
        return {"q_len": self.q_len, "kv_len": self.kv_len, "batch": self.batch, "heads": self.heads}

    @property
    def fits(self) -> bool:
        return self.limit is None or max(self.q_len, self.kv_len) <= self.limit


def masks(s: int) -> dict[str, Case]:
    """Signature -> case of about `s` tokens (at least 32), for every mask of the library."""
    return {**plain(s), **documents(s), **sequences(s), **marked(s), **images(s), **video(s), **tiles(s)}


def plain(s: int) -> dict[str, Case]:
    """Masks that are made of numbers."""
    w, n, longer = max(s // 16, 5), max(s // 32, 4), s + s // 4
    a, z, c, d = s // 8, s // 8 + s // 2, s // 4, s - s // 8

    def case(text: str, kv_len: int = s) -> Case:
        return Case(text, s, kv_len)

    return {
        "full": case("full"),
        "causal": case("causal"),
        "causal(offset)": case(f"causal({s // 4})", longer),
        "bottom_right": case("bottom_right", longer),
        "inverse_causal": case("inverse_causal"),
        "bi_causal": case("bi_causal", longer),
        "block_causal(n)": case(f"block_causal({n})"),
        "mini_causal(n)": case(f"mini_causal({s // 4})"),
        "window(w)": case(f"window({w})"),
        "sliding(left, right)": case(f"sliding({w}, {w // 2})"),
        "sliding_window(w)": case(f"sliding_window({w})"),
        "gym_sliding_window(w)": case(f"gym_sliding_window({w})"),
        "local(left, right, offset)": case(f"local({w}, {w // 2}, {s // 8})", longer),
        "flash_window(left, right)": case(f"flash_window({w}, 0)", longer),
        "outside_window(w)": case(f"outside_window({w})"),
        "streaming(n, w)": case(f"streaming(4, {w})"),
        "dilated(w, g)": case(f"dilated({w}, 3)"),
        "strided(n)": case(f"strided({w})"),
        "prefix(p)": case(f"prefix({s // 4})"),
        "sinks(n)": case("sinks(4)"),
        "prefix_lm(p)": case(f"prefix_lm({s // 4})"),
        "both_prefix(p)": case(f"both_prefix({s // 4})"),
        "chunked(n)": case(f"chunked({s // 4 + 1})"),
        "chunked_causal(n)": case(f"chunked_causal({s // 4 + 1})"),
        "batchify(m, n)": case(f"batchify(sliding(4, 1), {s // 4 + 1})"),
        "block_diagonal(n)": case(f"block_diagonal({s // 5})"),
        "rectangle(q0, q1, k0, k1)": case(f"rectangle({a}, {z}, {c}, {d})"),
        "rectangle_causal(q0, q1, k0, k1)": case(f"rectangle_causal({a}, {z}, {c}, {d})"),
        "rectangle_inverse(q0, q1, k0, k1)": case(f"rectangle_inverse({a}, {z}, {c}, {d})"),
        "rectangle_bi_causal(q0, q1, k0, k1)": case(f"rectangle_bi_causal({a}, {z - s // 4}, {c}, {d})"),
        "random_keep(seed, p)": Case("random_keep(7, 0.2)", s, s, heads=2, data=PAIRS, limit=4096),
        "draft_blocks(p, n)": Case(f"draft_blocks({s - s // 4 * 2}, {s // 4})", s // 4 * 2, s),
        "block_diffusion(s, n)": case(f"block_diffusion({s // 2}, {n})"),
    }


def documents(s: int) -> dict[str, Case]:
    """Masks of packed documents; about 512 tokens each where there are many."""
    off = offsets(s, max(s // 512, 5))
    lengths = np.diff(off)
    rng = np.random.default_rng(1)

    def case(text: str, make: Callable[[], Params], **more: Any) -> Case:
        return Case(text, s, s, make, **more)

    def ids(*heads: int) -> Params:
        seeds = np.arange(math.prod(heads)).reshape(heads)
        cuts = [labels(offsets(s, max(s // 512, 5), 3 + int(x))) for x in seeds.reshape(-1)]
        return {"doc": np.stack(cuts).reshape(*heads, s)}

    def kinds() -> Params:
        inside = np.arange(s) - off[labels(off)]
        middle = (inside * 3 > lengths[labels(off)]) & (inside * 3 < 2 * lengths[labels(off)])
        return {"kind": np.where(middle, 1 + labels(off), 0).astype(np.int32)}

    def prefixes() -> Params:  # half of the document, or more than there is
        longer = np.arange(len(lengths)) % 3 == 2
        return {**packed, "size": np.where(longer, lengths + 3, lengths // 2).astype(np.int32)}

    def prompts() -> Params:  # the first of three documents is the prompt of the next two
        return {"off": off, "prompt": (np.arange(len(lengths)) // 3 * 3).astype(np.int32)}

    def question() -> Params:  # one question of a third, and its answers
        cuts = offsets(s - s // 3, 3, 2)
        return {"seg": np.concatenate([np.zeros(s // 3, np.int32), 1 + labels(cuts)])}

    def rows() -> Params:  # the second row has a document less: its end comes twice
        return {"off": np.stack([off, np.append(off[1:], off[-1]) * (np.arange(len(off)) > 0)])}

    def starts() -> Params:
        doc = ids(2)["doc"]
        return {"doc": doc, "start": np.stack([np.searchsorted(x, x) for x in doc]).astype(np.int32)}

    packed: Params = {"off": off}
    return {
        "prefix_document(off, len)": case("prefix_document(off, size)", prefixes),
        "shared_prefix(off, prompt)": case("shared_prefix(off, prompt)", prompts),
        "same(t)": case("same(doc)", lambda: {"doc": labels(off)}),
        "same_by_batch(t)": case("same_by_batch(doc)", lambda: ids(2), batch=2),
        "same_by_batch(t, start, m)": case("same_by_batch(doc, start, sliding(4, 1) | sinks(2))", starts, batch=2),
        "same_by_head(t)": case("same_by_head(doc)", lambda: ids(2, 2), batch=2, heads=2),
        "document(off)": case("document(off)", lambda: packed),
        "document(off, m)": case("document(off, sliding(4, 1) | sinks(2))", lambda: packed),
        "document_by_batch(off)": case("document_by_batch(off)", rows, batch=2),
        "document_by_batch(off, m)": case("document_by_batch(off, sliding(4, 1) | sinks(2))", rows, batch=2),
        "causal_document(off)": case("causal_document(off)", lambda: packed),
        "causal_blockwise(off)": case("causal_blockwise(off)", lambda: packed),
        "share_question(seg)": case("share_question(seg)", question),
        "token_types(t)": case("token_types(kind)", kinds),
        "eviction(stop)": case(
            "eviction(stop)",
            lambda: {"stop": (np.arange(s) + 1 + rng.geometric(8 / s, s)).astype(np.int32)},
        ),
    }


def sequences(s: int) -> dict[str, Case]:
    """Masks whose queries and keys are cut into sequences of different lengths."""
    n = 6
    rng = np.random.default_rng(2)
    q_lens = np.diff(offsets(s, n, 4))
    k_lens = q_lens + rng.integers(1, s // 8, n)
    slot = int(k_lens.max()) + 3
    gaps = rng.integers(1, s // 16, n)
    starts = np.cumsum(gaps + k_lens) - k_lens
    both: Params = {"qoff": cumulative(q_lens), "koff": cumulative(k_lens)}
    held: Params = {"qoff": cumulative(q_lens), "size": k_lens.astype(np.int32)}

    gappy = int(starts[-1] + k_lens[-1]) + 4

    def spread() -> Params:
        return {**held, "first": starts.astype(np.int32)}

    page = max(s // 16, 4)
    cached = rng.integers(page + 1, 4 * page + 1, 4)  # four sequences of up to four pages, in any order
    asked = np.minimum(cached, s // 4)
    queries = int(asked.sum())

    def pages() -> Params:
        order = np.random.default_rng(5).permutation(16).reshape(4, 4).astype(np.int32)
        return {"qoff": cumulative(asked), "order": order, "size": cached.astype(np.int32)}

    return {
        "block_diagonal(qoff, koff)": Case("block_diagonal(qoff, koff)", s, int(k_lens.sum()), lambda: both),
        "block_diagonal_causal(qoff, koff)": Case(
            "block_diagonal_causal(qoff, koff)", s, int(k_lens.sum()), lambda: both
        ),
        "block_diagonal_bottom_right(qoff, koff)": Case(
            "block_diagonal_bottom_right(qoff, koff)", s, int(k_lens.sum()), lambda: both
        ),
        "block_diagonal_local(qoff, koff, w)": Case(
            f"block_diagonal_local(qoff, koff, {max(s // 16, 5)})", s, int(k_lens.sum()), lambda: both
        ),
        **{
            f"padded_keys{more}(qoff, n, len)": Case(
                f"padded_keys{more}(qoff, {slot}, size)", s, slot * n, lambda: held
            )
            for more in ("", "_causal")
        },
        **{
            f"gappy_keys{more}(qoff, start, len)": Case(f"gappy_keys{more}(qoff, first, size)", s, gappy, spread)
            for more in ("", "_causal")
        },
        **{
            f"paged_keys{more}(qoff, pages, len, t)": Case(
                f"paged_keys{more}(qoff, order, size, {page})", queries, 16 * page, pages
            )
            for more in ("", "_causal")
        },
    }


def marked(s: int) -> dict[str, Case]:
    """Masks that read a mark or a number of each token, and trees."""

    def few(share: float, seed: int) -> Any:
        return np.random.default_rng(seed).random(s) < share

    nodes = min(64, s // 3)

    def ancestors() -> Params:
        rng = np.random.default_rng(5)
        seen = np.eye(nodes, dtype=bool)
        for i in range(2, nodes):  # two roots
            seen[i] |= seen[rng.integers(max(0, i - 6), i)]
        return {"anc": seen}

    sparse = min(8 / s, 0.1)
    return {
        "global_tokens(t)": Case("global_tokens(star)", s, s, lambda: {"star": few(sparse, 6)}),
        "global_window(t, w)": Case(f"global_window(star, {max(s // 16, 4)})", s, s, lambda: {"star": few(sparse, 6)}),
        "padding(len)": Case(
            "padding(size)", s, s, lambda: {"size": np.array([s // 2, s - s // 8], np.int32)}, batch=2
        ),
        "qk_sparse(kept_q, kept_k)": Case(
            "qk_sparse(kept_q, kept_k)", s, s, lambda: {"kept_q": ~few(0.2, 7), "kept_k": ~few(0.2, 8)}
        ),
        "tree(anc, p)": Case(f"tree(anc, {s - nodes})", nodes, s, ancestors),
    }


def images(s: int) -> dict[str, Case]:
    """Neighbourhoods in pictures that are wider than high, `rows` by `cols` pixels."""
    bits = s.bit_length() - 1
    cols = 2 ** (bits // 2 + 1)
    rows = s // cols // 2 * 2
    n = rows * cols
    kr, kc = min(rows // 4 * 2 + 1, 13), min(cols // 4 * 2 + 1, 13)
    tr, tc = (2, 4) if s < 4096 else (8, 16)
    ktr, ktc = (3 if rows // tr > 3 else 1) * tr, (3 if cols // tc > 3 else 1) * tc
    w = max(s // 16, 5) | 1
    text = s // 8
    plane = f"{rows}, {cols}, {kr}, {kc}"
    side = 2 ** (bits // 2)  # of the square that the Z-order curve fills

    def case(text: str, length: int = n) -> Case:
        return Case(text, length, length)

    return {
        "natten1d(size, n)": case(f"natten1d({s}, {w})", s),
        "natten1d(size, n, stride, is_causal)": case(f"natten1d({s}, {w}, {max(w // 2, 2)}, false)", s),
        "natten1d(size, n, dilation, stride, is_causal)": case(f"natten1d({s}, {w}, 3, 2, true)", s),
        "natten2d(rows, cols, kernel_rows, kernel_cols)": case(f"natten2d({plane})"),
        "natten2d(rows, cols, kernel_rows, kernel_cols, dilation_rows, dilation_cols, stride_rows, stride_cols, "
        "causal_rows, causal_cols)": case(
            f"natten2d({rows}, {cols}, {kr}, {kc // 2}, 1, 2, {min(kr, 2)}, 1, true, false)"
        ),
        "tiled_natten(rows, cols, kernel_rows, kernel_cols, tile_rows, tile_cols)": case(
            f"tiled_natten({plane}, {tr}, {tc})"
        ),
        "tiled_natten(rows, cols, kernel_rows, kernel_cols, q_tile_rows, q_tile_cols, k_tile_rows, k_tile_cols)": case(
            f"tiled_natten({plane}, {tr}, {tc}, 2, 2)"
        ),
        "morton(rows, cols, kernel_rows, kernel_cols)": case(
            f"morton({side * 3 // 4}, {side}, {min(kr, side // 4 * 2 + 1)}, {min(kc, side // 4 * 2 + 1)})", side * side
        ),
        "sta2d(rows, cols, kernel_rows, kernel_cols, tile_rows, tile_cols)": case(
            f"sta2d({rows}, {cols}, {ktr}, {ktc}, {tr}, {tc})"
        ),
        "sta2d(rows, cols, kernel_rows, kernel_cols, tile_rows, tile_cols, text)": case(
            f"sta2d({rows}, {cols}, {ktr}, {ktc}, {tr}, {tc}, {text})", n + text
        ),
    }


def video(s: int) -> dict[str, Case]:
    """Neighbourhoods in videos, `frames` of `rows` by `cols`, and text that looks at images."""
    frames = 4 if s < 4096 else 16
    bits = (s // frames).bit_length() - 1
    cols = 2 ** ((bits + 1) // 2)
    rows = s // frames // cols // 2 * 2
    n = frames * rows * cols
    kernel = [min(x // 4 * 2 + 1, 7) for x in (frames, rows, cols)]
    tile = [2, 2, min(cols, 4)]
    near = [(3 if x // t > 3 else 1) * t for x, t in zip((frames, rows, cols), tile)]
    shape = f"{frames}, {rows}, {cols}"
    cubes = f"{shape}, {', '.join(map(str, near))}, {', '.join(map(str, tile))}"
    voxels = f"{shape}, {', '.join(map(str, kernel))}"
    prompt, text = s // 10, s // 8
    place = (s - prompt) // frames

    def flamingo() -> Params:  # four images of a quarter of the keys; each is read by the text up to the next
        ends = offsets(s, 4, 9)
        return {"iv": np.stack([ends[:-1], ends[1:]], 1), "img": (np.arange(s) * 4 // s).astype(np.int32)}

    axes = "frames, rows, cols, kernel_frames, kernel_rows, kernel_cols"
    return {
        f"natten3d({axes})": Case(f"natten3d({voxels})", n, n),
        f"natten3d({axes}, dilation_frames, dilation_rows, dilation_cols, stride_frames, stride_rows, stride_cols, "
        "causal_frames, causal_rows, causal_cols)": Case(
            f"natten3d({shape}, {kernel[0]}, {kernel[1]}, {max(kernel[2] // 2, 1)}, 1, 1, 2, "
            f"1, {min(kernel[1], 2)}, 1, true, false, false)",
            n,
            n,
        ),
        f"sta3d({axes}, tile_frames, tile_rows, tile_cols)": Case(f"sta3d({cubes})", n, n),
        f"sta3d({axes}, tile_frames, tile_rows, tile_cols, text)": Case(f"sta3d({cubes}, {text})", n + text, n + text),
        "svg_spatial(p, t, w)": Case(f"svg_spatial({prompt}, {place}, 1)", s, s),
        "svg_spatial_sink(p, t, w)": Case(f"svg_spatial_sink({prompt}, {place}, 1)", s, s),
        "svg_temporal(p, t, frames, w)": Case(f"svg_temporal({prompt}, {place}, {frames}, 1)", s, s),
        "cross_image(iv, img)": Case("cross_image(iv, img)", s, s, flamingo),
    }


def tiles(s: int) -> dict[str, Case]:
    """Masks whose tiles were chosen by looking at the data."""
    t = 8 if s < 4096 else 128
    n = -(-s // t)

    def chosen() -> Any:
        """Four tiles of keys for each tile of queries, its own among them."""
        found = np.random.default_rng(10).integers(0, n, (1, 2, n, 4), np.int32)
        found[..., 0] = np.arange(n)
        return np.sort(found, -1)

    def listed() -> Params:
        return {"index": chosen()}

    def mapped() -> Params:
        out = np.zeros((1, 2, n, n), bool)
        np.put_along_axis(out, chosen(), True, 3)
        return {"map": out}

    def real() -> Params:
        return {"size": np.random.default_rng(11).integers(t // 2, t + 1, n, np.int32)}

    squares = {"data": "one bit for every pair of tiles", "limit": 2**17, "heads": 2}
    return {
        "topk_tiles(map, t)": Case(f"topk_tiles(map, {t})", s, s, mapped, **squares),
        "topk_tiles(map, t, size)": Case(
            f"topk_tiles(map, {t}, size)", s, s, lambda: mapped() | real(), **squares
        ),
        "topk_indices(index, t)": Case(f"topk_indices(index, {t})", s, s, listed, heads=2),
        "topk_indices(index, t, size)": Case(
            f"topk_indices(index, {t}, size)", s, s, lambda: listed() | real(), heads=2
        ),
    }  # fmt: skip


def mods(s: int) -> dict[str, Case]:
    """Signature -> case of `s` tokens and 4 heads, for every score mod of the library."""

    def normal(*shape: int) -> Any:
        return np.random.default_rng(12).standard_normal(shape).astype(np.float32)

    def hops() -> Any:
        """Distances of the nodes of a ring, far ones alike."""
        apart = np.abs(np.subtract.outer(np.arange(s), np.arange(s)))
        return np.minimum(np.minimum(apart, s - apart), 8)[None].astype(np.int32)

    def paths() -> Params:
        """The kinds of the first three edges on the way from one node of the ring to another."""
        edges = (np.arange(s)[:, None, None] + np.arange(3)) // 5 % 4 + np.zeros((s, 1), int)
        return {"edge": edges[None].astype(np.int32), "size": np.minimum(hops(), 3), "table": normal(4, 3, 4)}

    def buckets() -> Params:
        return {"table": normal(32, 4)}

    def case(text: str, make: Callable[[], Params] = dict, **more: Any) -> Case:
        return Case(text, s, s, make, heads=4, **more)

    return {
        "alibi": case("alibi"),
        "alibi(slopes)": case("alibi(slopes)", lambda: {"slopes": np.exp2(-np.arange(1.0, 5.0)).astype(np.float32)}),
        "relative_bias(table)": case("relative_bias(table)", lambda: {"table": normal(2 * s - 1)}),
        "t5_bias(table, buckets, far)": case("t5_bias(table, 32, 128)", buckets),
        "t5_decoder_bias(table, buckets, far)": case("t5_decoder_bias(table, 32, 128)", buckets),
        "rope_bias(qr, kr, n, c)": case(
            "rope_bias(qr, kr, 4, 0.25)", lambda: {"qr": normal(1, 4, s, 8), "kr": normal(1, 1, s, 8)}
        ),
        "sandwich(rel, c)": case("sandwich(rel, c)", lambda: sinusoids(s)),
        "soft_window(w)": case(f"soft_window({max(s // 8, 4)})"),
        "inverse_distance(e)": case("inverse_distance(0.001)"),
        "softcap(c)": case("softcap(50)"),
        "softcap_fraction(c)": case("softcap_fraction(50)"),
        "sigmoid_gate(g)": case("sigmoid_gate(gate)", lambda: {"gate": normal(4)}),
        "scale_by(t)": case("scale_by(t)", lambda: {"t": np.abs(normal(1, 4))}),
        "activation(f, n)": case("activation(relu(score), 1.0)"),
        "graphormer(dist, table)": case(
            "graphormer(dist, table)", lambda: {"dist": hops(), "table": normal(4, 9)}, data=PAIRS, limit=4096
        ),
        "graphormer_edges(edge, len, table)": case(
            "graphormer_edges(edge, size, table)", paths, data=PAIRS, limit=2048,
        ),
    }  # fmt: skip


def weights(s: int) -> dict[str, Case]:
    """Signature -> case of `s` tokens and 4 heads, for every weight of the library, with the divisor of its paper."""

    def case(text: str, divide: str | None = None, make: Callable[[], Params] = dict) -> Case:
        return Case(text, s, s, make, heads=4, divide=divide)

    def rates() -> Params:
        return {"gamma": (1 - np.exp2(-5.0 - np.arange(4))).astype(np.float32)}

    return {
        "sigmoid_attention(bias)": case("sigmoid_attention(-log(KV_LEN))"),
        "relu2": case("relu2", "count"),
        "retention(gamma)": case("retention(gamma)", "max(abs(total), 1)", rates),
        "polynomial(p)": case("polynomial(4)", "total + 1"),
        "linear": case("linear"),
        "softmax1": case("softmax1", "total + 1"),
    }


# -- tables -----------------------------------------------------------------------------------------


def offsets(s: int, n: int, seed: int = 0) -> Any:
    """int32 [n + 1]: `n` documents of random lengths, none empty, that fill `s` tokens."""
    cuts = np.random.default_rng(seed).choice(np.arange(1, s), n - 1, replace=False)
    return np.concatenate([[0], np.sort(cuts), [s]]).astype(np.int32)


def labels(off: Any) -> Any:
    """int32 [off[-1]]: the document of each token."""
    return np.repeat(np.arange(len(off) - 1), np.diff(off)).astype(np.int32)


def cumulative(lengths: Any) -> Any:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def sinusoids(s: int, width: int = 128) -> Params:
    """The bias of Sandwich by distance, and its factor for each of four heads."""
    speeds = 10000.0 ** (-np.arange(0, width, 2) / width)
    rel = np.zeros(2 * s - 1)
    for f in speeds:  # one at a time: O(s) memory
        rel += np.cos(np.arange(1 - s, s) * f)
    return {"rel": rel.astype(np.float32), "c": (4 / (8.0 * np.arange(1, 5))).astype(np.float32)}
