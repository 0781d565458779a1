"""The masks and score mods of tests/peers/peers.frisket with their parameters bound, as `cases` binds the library's."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from cases import PAIRS, Case, Params, labels, offsets

from frisket.dsl.library import Entry, read_entries


@cache
def entries() -> dict[str, Entry]:
    """Signature -> entry."""
    path = Path(__file__).resolve().parents[1] / "tests" / "peers" / "peers.frisket"
    return {e.signature: e for e in read_entries(path.read_text(encoding="utf-8"))}


def masks(s: int) -> dict[str, Case]:
    """Signature -> case of `s` tokens, for every mask of the collection."""
    rng = np.random.default_rng(20)
    n, doc = s // 4, labels(offsets(s, 5))

    def bias(*shape: int) -> Params:
        return rng.standard_normal(shape).astype(np.float32)

    calls: dict[str, tuple[str, Params, int, int]] = {  # call, parameters, batch, heads
        "causal_window(w)": (f"({n})", {}, 1, 1),
        "causal_by_batch(off, n)": ("(off, 8)", {"off": np.array([0, 3])}, 2, 1),
        "halved_documents(doc)": ("(doc)", {"doc": doc}, 1, 1),
        "first_queries(n)": (f"({n})", {}, 1, 1),
        "both_ends(a, z)": (f"({n}, {3 * n})", {}, 1, 1),
        "dropped_queries(t)": ("(t)", {"t": rng.random((2, s)) < 0.3}, 2, 1),
        "even_batches": ("", {}, 2, 1),
        "live_batches(id)": ("(id)", {"id": np.array([4, -1])}, 2, 1),
        "open_heads(bias)": ("(bias)", {"bias": np.array([0.5, -0.5])}, 1, 2),
        "positive_sums(x, y)": ("(x, y)", {"x": np.array([0.5, -0.5]), "y": np.array([0.1, 1.0])}, 2, 2),
        "table(t)": ("(t)", {"t": rng.random((1, 2, s, s)) < 0.4}, 1, 2),
        "first_frames(before, moving, frame)": (f"(1, 2, {s // 5})", {}, 1, 1),
        "clamped_documents(doc, n)": ("(doc, 2)", {"doc": doc}, 1, 1),
        "far_back(w)": (f"({n})", {}, 1, 1),
        "late_keys(t)": ("(t)", {"t": rng.integers(0, 2 * s, s)}, 1, 1),
        "window_by_query(w)": ("(w)", {"w": rng.integers(0, n, s)}, 1, 1),
        "padded_dense(len)": ("(size)", {"size": np.array([s // 2, s - 5])}, 2, 1),
        "prefix_by_batch(nb)": ("(nb)", {"nb": np.array([n, 2 * n])}, 2, 1),
        "natten_by_fractions(w, n)": (f"({max(s // 8, 3)}, 3)", {}, 1, 1),
    }
    return _cases(s, calls)


def mods(s: int) -> dict[str, Case]:
    """Signature -> case of `s` tokens, batch 2 and 4 heads, for every score mod of the collection."""
    rng = np.random.default_rng(21)
    doc = labels(offsets(s, 5))

    def t(*shape: int) -> Params:
        return {"t": rng.standard_normal(shape).astype(np.float32)}

    def lines(**lengths: int) -> Params:
        return {name: rng.standard_normal(n).astype(np.float32) for name, n in lengths.items()}

    names = (
        "identity doubled squared swish inverted log_of_positive waves beat head_step quotient distance "
        "causal_distance causal_score inverse_causal_score even_keys size_bias"
    )
    calls: dict[str, tuple[str, Params]] = {name: ("", {}) for name in names.split()}
    calls |= {
        "decoding_window(o, w)": (f"({s // 8}, {s // 4})", {}),
        "by_head(t)": ("(t)", t(4)),
        "three_biases(x, y, z)": ("(x, y, z)", lines(x=s, y=2, z=4)),
        "pair_bias(t)": ("(t)", t(s, s)),
        "batch_bias(t)": ("(t)", t(2, s, s)),
        "full_bias(t)": ("(t)", t(2, 4, s, s)),
        "stacked_bias(t)": ("(t)", t(1, 2, 4, s)),
        "bias_by_distance(t)": ("(t)", t(s)),
        "clamped_bias(t, n)": (f"(t, {s // 8})", t(2 * (s // 8) + 1)),
        "outer_sum(t)": ("(t)", t(s)),
        "turned_bias(t)": ("(t)", t(s, s)),
        "indirect_bias(t, off)": ("(t, off)", t(5) | {"off": doc}),
        "bias_by_sum(t)": ("(t)", t(2 * s)),
        "by_query(t)": ("(t)", t(s)),
        "two_biases(x, y)": ("(x, y)", lines(x=s, y=s)),
        "position_bias(t, n)": (f"(t, {s})", t(2 * s - 1)),
        "row_bias(t, w)": ("(t, 8)", t(4, s, s // 8 + 1)),
        "times(c)": ("(c)", {"c": 0.75}),
        "log_mass(t)": ("(t)", {"t": np.array([2.5], np.float32)}),
        "document_score(t)": ("(t)", {"t": doc}),
        "distance_in_document(t, off)": ("(t, off)", {"t": doc, "off": offsets(s, 5)}),
        "switched_bias(t, on)": ("(t, on)", t(s, s) | {"on": True}),
        "gated_buckets(t, idx, gate, x, y)": (
            "(t, idx, gate, x, y)",
            t(6, 4) | {"idx": rng.integers(0, 6, (s, s))} | lines(gate=4, x=s, y=s),
        ),
        "spatial_decay(m, c)": (
            "(m, c)",
            {"m": rng.standard_normal((s, 3)).astype(np.float32), "c": np.arange(1.0, 5.0)},
        ),
        "checkerboard(c)": ("(c)", {"c": 0.5}),
    }
    return _cases(s, {signature: (*call, 2, 4) for signature, call in calls.items()})


def _cases(s: int, calls: dict[str, tuple[str, Params, int, int]]) -> dict[str, Case]:
    found = {}
    for signature, (arguments, params, batch, heads) in calls.items():
        entry = entries()[signature]
        square = any(np.size(value) >= s * s // 8 for value in params.values())
        found[signature] = Case(
            f"{entry.text}\n{entry.name}{arguments}", s, s, lambda params=params: params, batch, heads,
            PAIRS if square else "", 4096 if square else None,
        )  # fmt: skip
    return found
