"""Hints for words and signs of other libraries and of mathematics: the equivalent text of the language."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

GLYPHS = {
    "≥": ">=", "≤": "<=", "≠": "!=", "∧": "&", "∨": "|", "¬": "~", "⊕": "^", "×": "*", "·": "*", "÷": "/", "−": "-",
    "∞": "inf", "π": "pi", "≪": "<<", "≫": ">>",
}  # fmt: skip
TURNED = {("=", ">"): ">=", ("=", "<"): "<="}  # two signs in the other order
POSITIONS = {
    **dict.fromkeys(("q_idx", "query_idx", "query", "qi", "q_index", "row", "i"), "q"),
    **dict.fromkeys(("kv_idx", "k_idx", "key_idx", "key", "kv", "ki", "kv_index", "col", "j"), "k"),
    **dict.fromkeys(("b_idx", "batch", "batch_idx"), "b"),
    **dict.fromkeys(("h_idx", "head", "head_idx"), "h"),
}
KEYWORDS = {  # of attention elsewhere -> what says it here
    **dict.fromkeys(("is_causal", "causal"), 'write mask="causal"'),
    **dict.fromkeys(("attn_mask", "attention_mask"), 'a dense mask is a table: mask="t[b, h, q, k]", t=...'),
    **dict.fromkeys(("mask_mod", "block_mask"), "give it as mask="),
    **dict.fromkeys(("score_mod",), "give it as score="),
    **dict.fromkeys(("bias", "attn_bias"), 'a bias is a table: score="score + t[b, h, q, k]", t=...'),
    **dict.fromkeys(("dropout_p", "dropout_rate", "dropout_prob"), "write dropout= in frisket.compile or attention"),
    "window_size": 'write mask="flash_window(left, right)"',
    "local_window_size": 'write mask="sliding(left, right)"',
    "sliding_window": 'write mask="sliding_window(w)"',
    **dict.fromkeys(("softcap", "logits_soft_cap", "attn_logits_soft_cap"), 'write score="softcap(50)"'),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), 'write mask="document(off)", off=...'),
    **dict.fromkeys(("softmax_scale", "sm_scale"), "write scale="),
    "alibi_slopes": 'write score="alibi(slopes)", slopes=...',
    "segment_ids": 'write mask="same_by_batch(ids)", ids=...',
}
OF_COMPILE = "mask score scale dropout backend tile engines reorder deterministic enable_gqa".split()
CALL_KEYWORDS = "mask score scale sinks dropout seed backend return_lse return_max origin sizes layout plan".split()
CALLED = [*CALL_KEYWORDS, *"enable_gqa deterministic tile k_scale v_scale pages".split()]


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant; a name that differs only in case is nearest."""
    folded = {n.casefold(): n for n in names}
    return next((folded[n] for n in get_close_matches(name.casefold(), folded, 1, 0.6)), None)


def misnamed(name: str) -> str:
    """The hint for a name that other libraries give a position; empty for any other name.

    >>> misnamed("q_idx")
    'positions are `b`, `h`, `q` and `k`: write `q`'
    """
    return f"positions are `b`, `h`, `q` and `k`: write `{POSITIONS[name]}`" if name in POSITIONS else ""


def keyword(name: str, names: Sequence[str] = (), called: Sequence[str] = CALLED) -> str:
    """The hint for a keyword that neither a call nor a mask knows; empty for keywords without a hint.

    `names` are the parameters of the mask and the score mod, `called` the keywords of the call.

    >>> keyword("is_causal"), keyword("scal"), keyword("docs", ["doc"])
    ('write mask="causal"', 'did you mean the keyword `scale`?', 'did you mean `doc`?')
    >>> keyword("casual"), keyword("casual", called=["causal", "bias"])
    ('write mask="causal"', 'did you mean the keyword `causal`?')
    """
    if called is CALLED and name in OF_COMPILE:
        return f"`{name}=` belongs to `frisket.compile`"
    elsewhere = KEYWORDS if called is CALLED else {}
    if name not in elsewhere and (near := nearest(name, names)):
        return f"did you mean `{near}`?"
    near = next(iter(get_close_matches(name, [*elsewhere, *called], 1, 0.75)), "")
    return elsewhere.get(near) or (near and f"did you mean the keyword `{near}`?")


def dense(kind: str, axes: int) -> str:
    """The hint for a dense mask or bias that is given as an array of `axes` axes."""
    index = {1: "k", 2: "q, k", 3: "h, q, k", 4: "b, h, q, k"}.get(axes, "...")
    text = f"t[{index}]" if kind == "mask" else f"score + t[{index}]"
    return f'an array is a table of the text: frisket.{"mask" if kind == "mask" else "score"}("{text}", t=...)'
