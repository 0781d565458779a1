"""Masks and score mods after those of attention-gym, written anew, beside a dense evaluation of the same functions.

Each case is a function as `flex_attention` takes it. torch evaluates it at every pair with `vmap`, and dense attention
in float64 follows; frisket gets the function itself.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest

import frisket as fk
from frisket.flex import and_masks, create_block_mask, flex_attention, noop_mask, or_masks

BATCH, HEADS, LENGTH, SIZE = 2, 4, 48, 8


def over_all_pairs(function, q_len, kv_len, scores=None):
    """What a mask or score mod gives at every [batch, head, query, key]."""
    places = [torch.arange(n) for n in (BATCH, HEADS, q_len, kv_len)]
    inner = function if scores is None else lambda b, h, q, k, s: function(s, b, h, q, k)
    lead = () if scores is None else (0,)
    for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        inner = torch.vmap(inner, in_dims=(*axes, *lead))
    return inner(*places, *(() if scores is None else (scores,)))


def dense(q, k, v, mask=None, score=None):
    """Attention in float64 that writes all pairs out, and the log of the sum of its scores."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if score is not None:
        scores = over_all_pairs(score, q.shape[2], k.shape[2], scores)
    if mask is not None:
        scores = scores.masked_fill(~over_all_pairs(mask, q.shape[2], k.shape[2]), float("-inf"))
    lse = scores.logsumexp(-1)
    weights = torch.where(lse[..., None] == float("-inf"), 0.0, (scores - lse[..., None]).exp())
    return weights @ v, lse


def arrays(q_len=LENGTH, kv_len=LENGTH, kv_heads=2):
    torch.manual_seed(0)
    shapes = (HEADS, q_len), (kv_heads, kv_len), (kv_heads, kv_len)
    return [torch.randn(BATCH, *shape, SIZE, requires_grad=True) for shape in shapes]


def agree(q, k, v, mask=None, score=None, learned=()):
    """Outputs and the gradients of q, k, v and of learned tensors are those of dense attention."""
    block_mask = None
    if mask is not None:
        block_mask = create_block_mask(mask, BATCH, HEADS, q.shape[2], k.shape[2], device="cpu")
    got = flex_attention(q, k, v, score_mod=score, block_mask=block_mask, enable_gqa=True)
    want, _ = dense(q, k, v, mask, score)
    torch.testing.assert_close(got, want.float(), rtol=2e-5, atol=2e-5)
    weights = torch.linspace(-1, 1, SIZE)
    gradients = [torch.autograd.grad((x * weights).sum(), (q, k, v, *learned)) for x in (got, want)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * (1 + float(other.abs().max())))


# -- masks ------------------------------------------------------------------------------------------------------------


def causal(b, h, q, k):
    return q >= k


def window(size):
    return lambda b, h, q, k: (q >= k) & (q - k <= size)


def dilated(size, step):
    def mask(b, h, q, k):
        apart = (q - k).abs()
        return (apart <= size) & (apart % step == 0)

    return mask


def first_and_near(size, first):
    return and_masks(or_masks(lambda b, h, q, k: q - k <= size, lambda b, h, q, k: k < first), causal)


def documents(inner, lengths):
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    start = torch.tensor([0, *lengths]).cumsum(0)

    def mask(b, h, q, k):
        place_q, place_k = q - start[number[q]], k - start[number[k]]
        return (number[q] == number[k]) & inner(b, h, place_q, place_k)

    return mask


def shared_prefixes(lengths, prefix_of):
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    start, of = torch.tensor([0, *lengths]).cumsum(0), torch.tensor(prefix_of)

    def mask(b, h, q, k):
        mine, prefix = number[q], of[number[q]]
        inside = (k >= start[prefix]) & (k < start[prefix + 1])
        return ((k >= start[mine]) & (q >= k)) | ((mine != prefix) & inside)

    return mask


def groups(inner, size):
    return lambda b, h, q, k: (q // size == k // size) & inner(b, h, q % size, k % size)


def by_rows(index, width):
    return index // width, index % width


def by_tiles(index, width, high, wide):
    tile, inside = index // (high * wide), index % (high * wide)
    return tile % (width // wide) * wide + inside % wide, tile // (width // wide) * high + inside // wide


def by_bits(index):
    """The two numbers whose bits alternate in the index."""

    def every_second(x):
        x = x & 0x55555555
        for shift, kept in ((1, 0x33333333), (2, 0x0F0F0F0F), (4, 0x00FF00FF), (8, 0x0000FFFF)):
            x = (x | (x >> shift)) & kept
        return x

    return every_second(index), every_second(index >> 1)


def neighbourhood(place, sides, reach):
    """Keys within `reach` of the query, which moves inwards at the border."""

    def mask(b, h, q, k):
        (q0, q1), (k0, k1) = place(q), place(k)
        mid0, mid1 = q0.clamp(reach, sides[0] - 1 - reach), q1.clamp(reach, sides[1] - 1 - reach)
        return ((mid0 - k0).abs() <= reach) & ((mid1 - k1).abs() <= reach)

    return mask


def sliding_tiles(canvas, kernel, tile, text=0):
    """Tiles of an image or a video that see whole tiles around them; text behind sees all, and is seen."""
    size = 1
    for n in tile:
        size *= n
    counts = [c // t for c, t in zip(canvas, tile, strict=True)]
    kernels = [c // t for c, t in zip(kernel, tile, strict=True)]
    total = size
    for n in counts:
        total *= n

    def axes(index):
        rest, found = index // size, []
        for n in reversed(counts):
            found.append(rest % n)
            rest = rest // n
        return found[::-1]

    def mask(b, h, q, k):
        near = (q < total) & (k < total)
        for at_q, at_k, count, n in zip(axes(q), axes(k), counts, kernels, strict=True):
            before, after = n // 2, n // 2 + n % 2 - 1
            middle = at_q.clamp(before, count - 1 - after)
            near = near & (at_k >= middle - before) & (at_k <= middle + after)
        return near | ((q < total) & (k >= total) & (k < total + text)) | ((q >= total) & (k < total + text))

    return mask


def video_in_space(prompt, frame, wide, sink):
    first = prompt + frame if sink else prompt
    return lambda b, h, q, k: (k < first) | (q < prompt) | ((q - k).abs() < wide)


def video_in_time(prompt, frame, frames, wide):
    def mask(b, h, q, k):
        apart = ((q - prompt) % frame - (k - prompt) % frame).abs()
        return (k < prompt) | (q < prompt) | (apart < wide * frame // frames)

    return mask


def block_diffusion(length, size):
    def mask(b, h, q, k):
        noised_q, noised_k = q < length, k < length
        block_q, block_k = q % length // size, k % length // size
        same = (block_q == block_k) & (noised_q == noised_k)
        return same | ((block_q > block_k) & noised_q & ~noised_k) | ((block_q >= block_k) & ~noised_q & ~noised_k)

    return mask


def everywhere_or_near(size, marked):
    seen = torch.zeros(LENGTH, dtype=torch.bool)
    seen[list(marked)] = True
    return or_masks(lambda b, h, q, k: (q - k).abs() <= size, lambda b, h, q, k: seen[q] | seen[k])


MASKS = {
    "causal": causal,
    "noop": noop_mask,
    "sliding window": window(7),
    "dilated sliding window": dilated(12, 3),
    "sinks and a window": first_and_near(5, 3),
    "prefix": or_masks(lambda b, h, q, k: k < 11, causal),
    "documents, causal": documents(causal, [17, 1, 20, 10]),
    "documents": documents(noop_mask, [5, 30, 13]),
    "documents with prefixes": documents(or_masks(lambda b, h, q, k: k < 3, causal), [17, 11, 20]),
    "shared prefixes": shared_prefixes([12, 6, 6, 9, 8, 7], [0, 0, 0, 3, 3, 3]),
    "groups": groups(causal, 12),
    "neighbours in rows": neighbourhood(lambda i: by_rows(i, 6), (8, 6), 1),
    "neighbours in tiles": neighbourhood(lambda i: by_tiles(i, 6, 2, 3), (6, 8), 1),
    "tiles that slide": sliding_tiles((6, 8), (6, 4), (2, 2)),
    "tiles that slide, and text": sliding_tiles((4, 8), (4, 6), (2, 2), text=16),
    "tiles of a video that slide": sliding_tiles((4, 4, 3), (2, 4, 3), (2, 2, 1)),
    "video, in space": video_in_space(4, 11, 16, sink=False),
    "video, in space, with a sink": video_in_space(4, 11, 12, sink=True),
    "video, in time": video_in_time(4, 11, 4, 2),
    "block diffusion": block_diffusion(24, 4),
    "marked tokens and a window": everywhere_or_near(3, (0, 20)),
}


@pytest.mark.parametrize("name", MASKS)
def test_attention_gym_masks_equal_dense_evaluation(name):
    mask = MASKS[name]
    want = over_all_pairs(mask, LENGTH, LENGTH)
    read = fk.mask(mask).dense(LENGTH, LENGTH, batch=BATCH, heads=HEADS)
    assert torch.equal(torch.from_numpy(read), want.expand(BATCH, HEADS, LENGTH, LENGTH))
    agree(*arrays(), mask=mask)


def test_neighbours_on_a_curve():
    mask = neighbourhood(by_bits, (8, 8), 1)
    agree(*arrays(64, 64), mask=mask)


def test_text_sees_the_images_of_its_interval():
    intervals = torch.tensor([[0, 28], [4, 28], [28, 48]])
    image = torch.repeat_interleave(torch.arange(3), 9)

    def mask(b, h, q, k):
        interval = intervals[image[k]]
        return (q >= interval[0]) & (q < interval[1])

    agree(*arrays(48, 27), mask=mask)


def test_a_tree_of_drafts_sees_its_ancestors():
    parents, prefix = [-1, 0, 1, 1, 3, 3, 0], 9
    seen = torch.eye(7, dtype=torch.bool)
    for node, parent in enumerate(parents[1:], 1):
        seen[node] |= seen[parent]

    def mask(b, h, q, k):
        return (k < prefix) | ((k >= prefix) & seen[q, (k - prefix).clamp(0, 6)])

    agree(*arrays(7, prefix + 7), mask=mask)


def test_sampled_blocks_see_a_prefix_and_themselves():
    prefix, size = 5, 4

    def mask(b, h, q, k):
        behind = k - prefix
        return (k < prefix) | ((k >= prefix) & (q // size == behind // size) & (behind % size <= q % size))

    agree(*arrays(12, 17), mask=mask)


# -- score mods -------------------------------------------------------------------------------------------------------


def alibi(score, b, h, q, k):
    return score + (k - q) * torch.exp2(-(h + 1) * 8.0 / HEADS)


def capped(score, b, h, q, k):
    return 3 * torch.tanh(score / 3)


def sandwich(length, width=16):
    speed = 1 / 10000 ** (2 * torch.arange(width // 2) / width)
    table = ((torch.arange(2 * length - 1) - (length - 1)).abs()[:, None] * speed).cos().sum(-1)
    slope = HEADS / (8.0 * torch.arange(1, HEADS + 1))
    return lambda score, b, h, q, k: score + table[q - k + length - 1] * slope[h]


@pytest.mark.parametrize("mask", [None, causal], ids=["full", "causal"])
@pytest.mark.parametrize(
    "score", [alibi, capped, sandwich(LENGTH)], ids=["alibi", "soft cap", "sinusoids of distances"]
)
def test_a_score_mod(score, mask):
    agree(*arrays(), mask=mask, score=score)


def test_rotary_parts_of_latent_attention():
    torch.manual_seed(1)
    of_query = torch.randn(BATCH, HEADS, LENGTH, 6, requires_grad=True)
    of_key = torch.randn(BATCH, 1, LENGTH, 6, requires_grad=True)

    def score(s, b, h, q, k):
        return s + 0.4 * torch.dot(of_query[b, h, q], of_key[b, h // HEADS, k]).to(s.dtype)

    agree(*arrays(), mask=causal, score=score, learned=(of_query, of_key))


def learned_bias(kind):
    """A score mod with a learned tensor, and the tensor."""
    torch.manual_seed(2)
    shapes = {
        "distance": (LENGTH,), "pair": (LENGTH, LENGTH), "head": (HEADS, LENGTH, LENGTH),
        "batch": (BATCH, HEADS, LENGTH, LENGTH), "factor": (LENGTH,), "near": (9,), "key": (LENGTH,),
        "one of four": (BATCH, HEADS, 4, LENGTH), "moved": (LENGTH,),
    }  # fmt: skip
    t = torch.randn(shapes[kind], requires_grad=True)
    which, moved = torch.tensor(2), torch.randint(0, LENGTH, (LENGTH,))
    return t, {
        "distance": lambda s, b, h, q, k: s + t[(q - k).abs()],
        "pair": lambda s, b, h, q, k: s + t[q, k],
        "head": lambda s, b, h, q, k: s + t[h, q, k],
        "batch": lambda s, b, h, q, k: s + t[b, h, q, k],
        "factor": lambda s, b, h, q, k: s * t[q],
        "near": lambda s, b, h, q, k: s + t[torch.clamp(q - k + 4, 0, 8)],
        "key": lambda s, b, h, q, k: s + t[k],
        "one of four": lambda s, b, h, q, k: s + t[b, h, which, q],
        "moved": lambda s, b, h, q, k: s + t[moved[q]],
    }[kind]


BIASES = ["distance", "pair", "head", "batch", "factor", "near", "key", "one of four", "moved"]


@pytest.mark.parametrize("kind", BIASES)
def test_a_learned_bias(kind):
    table, score = learned_bias(kind)
    agree(*arrays(), score=score, learned=(table,))


def test_distances_in_a_graph_and_the_edges_on_the_way():
    torch.manual_seed(3)
    n, longest = 14, 3
    near = (torch.rand(BATCH, n, n) < 0.2) | torch.eye(n, dtype=torch.bool).roll(1, 1)
    distance = torch.where(near, 1, n)
    distance.diagonal(dim1=-2, dim2=-1).zero_()
    for i in range(n):
        distance = torch.minimum(distance, distance[:, :, i, None] + distance[:, None, i])
    kinds, steps = torch.randint(0, 5, (BATCH, n, n, longest)), distance.clamp(max=longest)
    by_distance = torch.randn(HEADS, longest + 2, requires_grad=True)
    by_edge = torch.randn(HEADS, longest, 5, requires_grad=True)
    capped_distance = distance.clamp(max=longest + 1).int()

    def score(s, b, h, q, k):
        length, total = steps[b, q, k], 0.0
        for i in range(longest):
            total = total + torch.where(length > i, by_edge[h, i, kinds[b, q, k, i]], 0.0)
        return s + by_distance[h, capped_distance[b, q, k]] + total / length.clamp(min=1)

    agree(*arrays(n, n), score=score, learned=(by_distance, by_edge))


@pytest.mark.parametrize("activation", [functional.gelu, functional.relu, torch.sigmoid])
def test_flex_attention_computes_activations_by_its_lse(activation):
    """exp(log(f(s) + 1)) is f(s) + 1, so the sum of rows undoes the softmax."""
    q, k, v = arrays(kv_heads=HEADS)
    score = lambda s, b, h, i, j: torch.log(activation(s) + 1)  # noqa: E731
    out, aux = flex_attention(q, k, v, score_mod=score, return_aux=AuxRequest(lse=True))
    got = out * aux.lse.exp()[..., None] - v.sum(-2, keepdim=True)
    want = activation(q @ k.mT / SIZE**0.5) @ v
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    gradients = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-2)
