"""The cheat sheet: `python docs/cheat_sheet.py` writes docs/cheat-sheet.md and docs/assets/cheat-sheet.pdf.

Both come from `SHEET`. The PDF is one page of A4, drawn by matplotlib.
tests/pages/test_recipes.py runs each line of code.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
PAGE, PDF = HERE / "cheat-sheet.md", HERE / "assets" / "cheat-sheet.pdf"


class Part(NamedTuple):
    """Rows (code, what it means) of one kind: masks, scores, weights, python or shell."""

    title: str
    kind: str
    rows: tuple[tuple[str, str], ...]


SHEET = (
    Part("Masks: which keys a query sees", "masks", (
        ("causal", "itself and earlier keys"),
        ("causal & window(w)", "the last w keys, itself included"),
        ("window(w)", "w - 1 keys to each side"),
        ("causal & (window(w) | sinks(4))", "and the first 4 keys"),
        ("causal & same(doc)", "packed documents; doc: [length]"),
        ("causal & same_by_batch(doc)", "doc: [batch, length]"),
        ("document(off, causal & sinks(1))", "a mask in each document; off: cu_seqlens"),
        ("causal & k < lengths[b]", "padding on the right"),
        ("causal & k >= KV_LEN - lengths[b]", "padding on the left, without a cache"),
        ("causal | k < prefix[b]", "prefix LM"),
        ("causal & q - k < w[h]", "a window for each head"),
        ("chunked_causal(n)", "within chunks of n tokens"),
        ("token_types(t)", "text causal, images both ways"),
        ("natten2d(16, 16, 5, 5)", "5 x 5 of an image of 16 x 16"),
        ("block_diffusion(s, n)", "noised half, clean half, blocks of n"),
        ("tree(anc, p)", "drafts behind p tokens"),
        ("topk_tiles(map, 64)", "tiles that a table shows"),
    )),
    Part("Words of a mask", "masks", (
        ("q >= k & q - k < 8", "& | ^ ~ bind looser than comparison"),
        ("0 <= q - k < 4", "comparisons chain"),
        ("q // 16 == k // 16", "// and % round down, as in Python"),
        ("q < text | k < text | natten2d(8, 8, 3, 3, q=q - text, k=k - text)", "text first; another place"),
        ("causal if b == 0 else window(4)", "choice; b and h count in the whole problem"),
        ("k < KV_LEN - Q_LEN + q + 1", "causal from the last key (B, H: sizes)"),
    )),
    Part("Score mods and weights", "scores", (
        ("softcap(50)", "50 * tanh(score / 50)"),
        ("alibi", "ALiBi; also alibi(slopes)"),
        ("score + bias[h, q - k]", "a learned table; gradients reach it"),
        ("score * 0.5 then softcap(20)", "one after another"),
        ("weight = relu(score) ** 2", "in place of exp(score): weight=..."),
        ("weight = relu2\ndivide = max(count, 1)", "in place of the sum: divide=..."),
    )),
    Part("Call: torch [b, h, s, d], JAX [b, s, h, d]", "python", (
        ('out = fk.attention(q, k, v, "causal")', "once; fewer key heads are GQA"),
        ('att = fk.compile("causal & same(doc)", "softcap(50)")', "once for all layers and lengths"),
        ("out = att(q, k, v, doc=doc)", "other tables do not recompile"),
        ("out, lse = att(q, k, v, doc=doc, return_lse=True)", "to merge: fk.merge(...)"),
        ("out = att(q, k, v, doc=doc, sinks=logits)", "a sink logit for each head"),
        ("plan = att.plan(256, 256, batch=2, heads=4, doc=doc)", "one plan for all layers"),
        ("out = att(q, k, v, plan=plan)", "tables are in the plan"),
        ("report = att.check(q, k, v, doc=doc).good", "against a float64 reference"),
    )),
    Part("Look and ask", "python", (
        ('m = fk.mask("causal & window(w)", w=64)', "a mask with its numbers"),
        ("print(m.layout(256, 256, block=32))", "full, partial and empty tiles"),
        ("print(m.layout(256, 256).explain(q=200, k=9))", "the clause that hides a key"),
        ("pairs = m.visible_pairs(10**6, 10**6)", "counted without looking at pairs"),
        ('m.implies("causal", 10**6, 10**6)', "shows no more; also equivalent"),
        ('text = fk.compile(m).source("triton")', "the kernel's text"),
        ('bm = create_block_mask(mask_mod, None, None, 256, 256, device="cpu")', "frisket.flex: torch's API"),
    )),
    Part("Windows of other libraries", "masks", (
        ("sliding_window(w)", "transformers, sliding_window=w"),
        ("flash_window(left, right)", "FlashAttention, window_size"),
        ("gym_sliding_window(w)", "attention-gym: w + 1 keys"),
        ("local(left, right, offset)", "splash attention, LocalMask"),
        ("sliding(left, right)", "jax.nn, local_window_size"),
        ("natten1d(n, w)", "NATTEN: w keys at the ends too"),
    )),
    Part("KV caches", "python", (
        ("cache = KVCache.create(2, capacity=512, kv_heads=4, head_dim=32)", "frisket.caches.torch or .jax"),
        ("out = cache.attention(near, q, k, v)", "store, then attend"),
        ("ring = RingKVCache.create(2, window=64, kv_heads=4, head_dim=32)", "constant memory; sinks=4: first tokens"),
    )),
    Part("Context parallelism", "python", (
        ('deal = fk.parallel.deal("causal", 1024, ranks=8)', "tokens with even work"),
        ("mine = deal.permute(tokens, 1)", "to the order of ranks"),
        ("same = deal.unpermute(mine, 1)", "and back"),
    )),
    Part("Command line", "shell", (
        ("frisket show 'causal & window(64)' --q-len 512", "tiles in a terminal"),
        ("frisket explain 'causal & window(64)' --q-len 512", "facts, costs, rewriting"),
        ("frisket explore", "edit a mask in a browser"),
        ("frisket check 'causal' --q-len 128", "kernels against the reference"),
        ("frisket emit 'causal' --backend triton", "print a kernel"),
        ("frisket doctor", "what runs on this machine"),
        ("FRISKET_SHOW=compiles python train.py", "why did it compile?"),
        ("FRISKET_CHECK=1 python train.py", "check each call"),
    )),
)  # fmt: skip
SPACE = 1.35  # lines of space above a title
NOTE = 0.7  # lines from code to a meaning below it


def page() -> str:
    """The page of the site: a table for each part, in two columns."""
    lines = [
        "# Cheat sheet",
        "",
        "For readers who know frisket and forget how a line is written. After this page you can write it, or print the "
        "[PDF](assets/cheat-sheet.pdf). [How do I …?](how-do-i.md) leads to the explanations.",
        "",
        "<!-- written by docs/cheat_sheet.py -->",
    ]
    for part in SHEET:
        lines += ["", f"## {part.title}", "", "| write | meaning |", "|---|---|"]
        for code, words in part.rows:
            shown = "` `".join(code.replace("|", "\\|").split("\n"))
            lines.append(f"| `{shown}` | {words.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def draw(path: Path) -> None:
    """Write the PDF: three columns, code above its meaning where both are too wide for a line."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    columns = split()
    with mpl.rc_context({"pdf.fonttype": 42, "font.family": "DejaVu Sans", "font.size": 6.6}):
        figure = Figure((11.69, 8.27))
        figure.text(0.02, 0.963, "frisket", size=15, weight="bold", color="#0a4c86")
        figure.text(0.1, 0.965, "attention masks and score mods as text; torch and JAX", size=8, color="#57606a")
        step = 0.925 / max(map(height, columns))
        for i, parts in enumerate(columns):
            x, y = 0.02 + i * 0.327, 0.955
            for part in parts:
                y -= SPACE * step
                figure.text(x, y, part.title, size=8, weight="bold", color="#0a4c86", va="baseline")
                for code, words in part.rows:
                    for line in code.split("\n"):
                        y -= step
                        figure.text(x, y, line, family="DejaVu Sans Mono", size=6.4, va="baseline", parse_math=False)
                    beside = wide(code, words)
                    y -= 0 if beside else NOTE * step
                    figure.text(x + 0.307, y, words, color="#57606a", va="baseline", ha="right", parse_math=False)
        figure.savefig(path, metadata={"CreationDate": None, "Title": "frisket: cheat sheet", "Creator": None})


def wide(code: str, words: str) -> bool:
    """Whether both have room in one line of a column."""
    return 3.9 * len(code.rpartition("\n")[2]) + 3.7 * len(words) < 258  # points


def height(parts: list[Part]) -> float:
    """Lines of a column."""
    rows = [row for part in parts for row in part.rows]
    return SPACE * len(parts) + sum(1 + code.count("\n") + NOTE * (not wide(code, words)) for code, words in rows)


def split() -> list[list[Part]]:
    """The parts in order, in three columns as even as whole parts allow."""
    cuts = combinations(range(1, len(SHEET)), 2)
    return min(
        ([list(SHEET[:a]), list(SHEET[a:b]), list(SHEET[b:])] for a, b in cuts), key=lambda x: max(map(height, x))
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    draw(PDF)
