"""Each recipe equals attention under a dense mask that is written out here; each line of the cheat sheet runs."""

import re
from itertools import chain

import numpy as np
import pytest
from support.pages import DOCS, Block, blocks, frisket, script

import frisket as fk

PAGE = (DOCS / "recipes.md").read_text(encoding="utf-8")
HEAD, *RECIPES = blocks("recipes.md")
Q, K = np.ogrid[:256, :256]
DOC = np.repeat([0, 1, 2], [100, 90, 66])
KINDS = np.repeat([0, 1, 0, 2, 0], [20, 64, 30, 64, 78])
CAUSAL = K <= Q


def rows(*masks):
    """A mask for each row of the batch."""
    return np.stack(masks)[:, None]


def heads(*masks):
    return np.stack(masks)[None]


def first_of_each(doc):
    """A causal window of 64 keys and the first 4 keys, in each document."""
    return CAUSAL & (doc[:, None] == doc) & ((Q - K < 64) | (K - np.searchsorted(doc, doc) < 4))


def natten():
    """Pixel by pixel: 5 of every second row, 3 of every fourth column, moved inside the image."""
    found = np.zeros((256, 256), bool)

    def around(i, size, n, step):
        line = np.arange(i % step, size, step)  # the places of its dilation group
        place = int(np.where(line == i)[0][0])
        start = min(max(place - n // 2, 0), len(line) - n)
        return line[start : start + n]

    for i in range(256):
        for row in around(i // 16, 16, 5, 2):
            found[i, row * 16 + around(i % 16, 16, 3, 4)] = True
    return found


def classed():
    """A class token before 15 × 17 patches: all see it, it sees all, patches see 5 × 5, moved inside the image."""
    found = np.zeros((256, 256), bool)
    found[0] = found[:, 0] = True
    for row, col in np.ndindex(15, 17):
        top, left = min(max(row - 2, 0), 10), min(max(col - 2, 0), 12)
        patches = np.zeros((15, 17), bool)
        patches[top : top + 5, left : left + 5] = True
        found[1 + row * 17 + col, 1:] = patches.ravel()
    return found


def video():
    """16 tokens of text, then 4 frames of 6 × 10 patches that see 3 × 3 × 5, moved inside the video."""
    found = np.zeros((256, 256), bool)
    found[:16] = found[:, :16] = True
    sizes, window = (4, 6, 10), (3, 3, 5)
    for place in np.ndindex(sizes):
        start = [min(max(i - w // 2, 0), n - w) for i, n, w in zip(place, sizes, window, strict=True)]
        patches = np.zeros(sizes, bool)
        patches[tuple(slice(a, a + w) for a, w in zip(start, window, strict=True))] = True
        found[16 + np.ravel_multi_index(place, sizes), 16:] = patches.ravel()
    return found


def swin():
    window = [(row // 4, col // 4) for row, col in np.ndindex(16, 16)]
    return np.array([[a == b for b in window] for a in window])


def diffusion():
    noised_q, noised_k, block_q, block_k = Q < 128, K < 128, Q % 128 // 16, K % 128 // 16
    seen = noised_q & noised_k & (block_q == block_k)
    seen |= noised_q & ~noised_k & (block_q > block_k)
    return seen | ~noised_q & ~noised_k & (block_q >= block_k)


def tree():
    seen, parents = CAUSAL & (K < 250), [-1, 0, 0, 1, 1, 2]
    for draft in range(6):
        node = draft
        while node >= 0:
            seen[250 + draft, 250 + node] = True
            node = parents[node]
    return seen[250:]


# heading -> dense masks, one for each block below it; queries are the last ones where a mask has fewer
DENSE = {
    "Packed pre-training: sequence packing": [CAUSAL & (DOC[:, None] == DOC)],
    "Padding, right and left": [
        rows(CAUSAL, CAUSAL & (K < 180)),
        rows(CAUSAL, CAUSAL & (K >= 76)),
    ],
    "Grouped-query attention (GQA)": [CAUSAL],
    "Sliding window with sinks": [
        CAUSAL & ((Q - K < 64) | (K < 4)),
        first_of_each(DOC),
        rows(first_of_each(np.arange(256) // 100), first_of_each((np.arange(256) >= 64) * 1)),
        rows(*(first_of_each(np.arange(256) // n) for n in (100, 64))),
    ],
    "Prefix LM": [rows(CAUSAL | (K < 40), CAUSAL | (K < 100))],
    "Per-head windows": [heads(*(CAUSAL & (w > Q - K) for w in (16, 32, 64, 256)))],
    "Particles and graphs: neighbours from a table": [
        abs(Q - K) <= 2,
        (np.clip(Q - 8, 0, 239) <= K) & (np.clip(Q - 8, 0, 239) + 16 >= K),
    ],
    "Multimodal prefix": [CAUSAL | (KINDS[:, None] == KINDS) & (KINDS > 0)],
    "NATTEN with dilation": [natten()],
    "Image with class tokens": [classed(), swin()],
    "Text in front of a video": [video()],
    "Block diffusion": [diffusion()],
    "Cross attention": [rows(*(np.broadcast_to(n > K, (64, 256)) for n in (256, 180)))],
    "Chunked prefill": [CAUSAL & (Q - K < 100)],
    "Speculative decoding: trees": [tree()],
    "Streaming with sinks": [
        CAUSAL & ((Q - K < 64) | (K < 4)),
        (CAUSAL & ((Q - K < 64) | (K < 4)))[-1:],
    ],
    "KV cache on JAX": [CAUSAL & (Q - K < 64)],
}


def dense(mask, q, k, v):
    """Attention in float64; a query that sees nothing gives 0."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = np.where(mask, q @ k.swapaxes(2, 3) / q.shape[-1] ** 0.5, -np.inf)
    weights = np.exp(scores - np.where(np.isfinite(top := scores.max(-1, keepdims=True)), top, 0))
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total, total, 1) @ v


def recipes():
    """(heading, number of the block below it, block)."""
    parts = re.split(r"^## (.*)$", PAGE, flags=re.M)[1:]
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        for i, block in enumerate(blocks("recipes.md", text)):
            yield pytest.param(heading, i, block, id=f"{heading}-{i}")


def rotated(x, at):
    """Pairs of numbers as complex ones, turned by angles that grow with the positions `at`."""
    half = x.shape[-1] // 2
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * at[:, None] * 10000.0 ** -(np.arange(half) / half))
    return np.concatenate([pairs.real, pairs.imag], -1)


def ran(heading: str, block: Block):
    """(what a recipe gives, its dense queries, keys and values) in numpy, heads before lengths."""
    names: dict = {}
    HEAD.run(names)
    block.run(names)
    out, q, k, v = (np.asarray(names[name], dtype=float) for name in ("out", "q", "k", "v"))
    if "JAX" in heading:
        out = out.swapaxes(1, 2)
    if "GQA" in heading:
        k, v = k[:, :2], v[:, :2]
    if "rotary" in names:  # the last query's cache holds 68 tokens: four sinks, then the last 64
        places = np.where(np.arange(256) < 4, np.arange(256), np.arange(256) - 188)
        q, k = rotated(q[:, :, -1:], np.array([67])), rotated(k, places)
    return out, q, k, v


def test_recipes_each_have_a_dense_mask():
    assert re.findall(r"^## (.*)$", PAGE, re.M) == [*DENSE]
    assert len(RECIPES) == sum(map(len, DENSE.values()))


@pytest.mark.parametrize(("heading", "number", "block"), recipes())
def test_recipe_equals_attention_under_its_dense_mask(heading, number, block, monkeypatch):
    monkeypatch.setattr("frisket.runtime.torch.decode.MAX_STEP_QUERIES", 0)  # caches take steps without a planner
    out, q, k, v = ran(heading, block)
    mask = DENSE[heading][number]
    q = q[:, :, :64] if heading == "Cross attention" else q[:, :, -mask.shape[-2] :]
    np.testing.assert_allclose(out, dense(mask, q, k, v), atol=2e-5)
    other = mask.copy()
    at = tuple(np.argwhere(mask)[len(np.argwhere(mask)) // 2])
    other[at] = False  # one pair less is seen
    assert np.abs(out - dense(other, q, k, v)).max() > 1e-4


# -- the cheat sheet ------------------------------------------------------------------------------

SHEET = script("cheat_sheet")
OFF = np.array([0, 100, 190, 256])
TABLES = {
    "w": 8, "n": 16, "s": 128, "p": 250, "text": 16, "left": 3, "right": 2, "offset": 1,
    "doc": np.arange(256) // 100, "off": OFF, "lengths": np.array([256, 180]), "prefix": np.array([40, 100]),
    "anc": np.tri(256, 6, dtype=bool), "map": np.ones((2, 4, 4, 4), bool) & np.eye(4, dtype=bool),
    "t": np.arange(256) % 3, "bias": np.zeros((4, 256)),
}  # fmt: skip
BATCHED = {"doc": np.stack([TABLES["doc"], TABLES["doc"]])}


def lines(kind):
    return [code for part in SHEET.SHEET if part.kind == kind for code, _ in part.rows]


def tables_of(code):
    """Values of the parameters of a text; `w[h]` is a table, and ids of batches have two axes."""
    tables = dict(TABLES)
    tables |= BATCHED if "by_batch" in code else {}
    tables |= {"w": np.array([8, 16, 32, 64])} if "w[" in code else {}
    tables |= {"n": 256} if "natten1d" in code else {}
    names = set(re.findall(r"\b[a-z]\w*\b(?!\()", code))
    return {name: value for name, value in tables.items() if name in names}


def test_sheet_page_is_up_to_date():
    assert SHEET.page() == SHEET.PAGE.read_text(encoding="utf-8"), "run: python docs/cheat_sheet.py"
    assert 60 <= sum(len(part.rows) for part in SHEET.SHEET) <= 80
    assert {part.kind for part in SHEET.SHEET} == {"masks", "scores", "python", "shell"}


@pytest.mark.filterwarnings("ignore:`sliding_window")
@pytest.mark.parametrize("code", lines("masks"))
def test_sheet_masks_show_something(code):
    mask = fk.mask(code, **tables_of(code))
    assert 0 < mask.layout(256, 256, batch=2, heads=4).visible_pairs < 2 * 4 * 256 * 256


@pytest.mark.exhaustive
@pytest.mark.parametrize("code", lines("scores"))
def test_sheet_scores_are_read(code):
    import torch

    q = torch.ones(1, 4, 256, 16)
    lines = code if "weight = " in code else f"score = {code}"
    text = f"mask = causal\n{lines}"
    out = fk.attention(q, q, q, text, **tables_of(code))
    assert out.shape == q.shape


@pytest.mark.exhaustive
def test_sheet_calls_run():
    import torch

    from frisket.caches.torch import KVCache, RingKVCache
    from frisket.flex import create_block_mask

    names = {
        "fk": fk, "KVCache": KVCache, "RingKVCache": RingKVCache, "create_block_mask": create_block_mask,
        **dict(zip("qkv", torch.randn(3, 2, 4, 256, 32), strict=True)),
        "doc": torch.from_numpy(TABLES["doc"]), "logits": torch.zeros(4), "tokens": torch.arange(1024)[None],
        "mask_mod": lambda b, h, q, k: q >= k, "near": fk.compile("causal & window(64)"),
    }  # fmt: skip
    for code in lines("python"):
        exec(code, names)
    assert names["report"]
    assert torch.equal(names["same"], names["tokens"])
    assert names["out"].shape == names["q"].shape


@pytest.mark.exhaustive
@pytest.mark.parametrize("code", [x for x in lines("shell") if x.startswith("frisket ") and not x.endswith("explore")])
def test_sheet_commands_end_well(code):
    status, _ = frisket(code.removeprefix("frisket "))
    assert status == 0


def test_settings_of_the_sheet_are_listed():
    page = (DOCS / "command-line.md").read_text(encoding="utf-8")
    for name in re.findall(r"FRISKET_\w+", "\n".join(lines("shell"))):
        assert f"| `{name}` |" in page


@pytest.mark.exhaustive
def test_sheet_is_one_page_of_pdf(tmp_path):
    pytest.importorskip("matplotlib")
    SHEET.draw(tmp_path / "sheet.pdf")
    for pdf in ((tmp_path / "sheet.pdf").read_bytes(), SHEET.PDF.read_bytes()):
        assert pdf.startswith(b"%PDF-")
        assert len(re.findall(rb"/Type /Page\b", pdf)) == 1
        assert len(pdf) < 100_000
    assert all(chain(SHEET.split()))
