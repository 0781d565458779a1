"""Flags: what they show every query is what the mask shows, at places with origins and lengths of their own; and
documents whose tables are no documents are refused."""

import re

import cases
import numpy as np
import pytest

import frisket as fk
from frisket.dsl.evaluate import evaluate
from frisket.lowering.dense import coordinates
from frisket.lowering.engines.flags import Flags, flags_of
from frisket.lowering.engines.forms import EngineForm, form_of
from frisket.lowering.pipeline import simplified_program
from frisket.lowering.plan import Geometry, Problem
from frisket.runtime.calls.program import program_of

CASES = {n: c for s in (48, 70) for n, c in ((f"{n}, {s}", c) for n, c in cases.masks(s).items())}
SMALLEST = 22  # masks of the library that are flags for whole sequences


def place(q_len: int, kv_len: int, batch: int = 1, heads: int = 1, **more: object) -> Geometry:
    return Geometry(batch, heads, heads, q_len, kv_len, 16, 16, 0.25, **more)  # type: ignore[arg-type]


def flags(mask: fk.Mask | None, geometry: Geometry, score: fk.ScoreMod | None = None) -> Flags | str:
    program = program_of(mask, score, {})
    fixed = simplified_program(program)
    form = form_of(fixed.simplified)
    return flags_of(form, geometry, program.scalars, program.tables) if isinstance(form, EngineForm) else str(form)


def shown(found: Flags, g: Geometry) -> np.ndarray:
    first, stop = found.visible(g)
    k = np.arange(g.kv_len)
    seen = (k >= first[..., None]) & (k < stop[..., None])
    return np.broadcast_to(seen[:, None], (g.batch, g.heads, g.q_len, g.kv_len))


def dense_at(mask: fk.Mask, g: Geometry) -> np.ndarray:
    """The mask by the interpreter, at positions from the origin on."""
    axes = coordinates(Problem(g.q_len, g.kv_len, g.batch, g.heads))
    env = {n: axes[n] + at for n, at in zip("bhqk", g.origin, strict=True)}
    env |= dict(zip(("B", "H", "Q_LEN", "KV_LEN"), g.full, strict=True)) | mask.scalars
    return np.broadcast_to(evaluate(mask.expr, env, mask.tables), (g.batch, g.heads, g.q_len, g.kv_len))


@pytest.mark.parametrize("name", sorted(CASES))
def test_flags_of_the_library_show_the_mask(name: str) -> None:
    case = CASES[name]
    g = place(case.q_len, case.kv_len, case.batch, case.heads)
    found = flags(case.mask, g)
    if isinstance(found, str):
        return
    dense = case.mask.dense(case.q_len, case.kv_len, case.batch, case.heads)
    np.testing.assert_array_equal(shown(found, g), dense)
    assert found.empty_rows(g) == bool((~dense.any(-1)).any())


def test_how_many_entries_have_flags() -> None:
    found = [flags(c.mask, place(c.q_len, c.kv_len, c.batch, c.heads)) for c in cases.masks(64).values()]
    assert sum(isinstance(f, Flags) for f in found) >= SMALLEST


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    "text",
    ["full", "causal", "bottom_right", "causal & window(w)", "sliding(w, 2)", "local(w, 3, n)", "k < n",
     "q >= k & k < n", "causal & k < n2[b]", "q < n2[b] & k < n2[b] & causal", "causal & chunked(w + 1)", "q == k + 2",
     "q + n2[b] >= k"],
)  # fmt: skip
def test_flags_at_places_of_their_own(text: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    q_len, kv_len = (int(x) for x in draw.integers(1, 24, 2))
    origin = (1, 0, int(draw.integers(0, 12)), int(draw.integers(0, 6)))
    g = place(q_len, kv_len, 2, 2, origin=origin, sizes=(4, 2, 50, 60))
    values: dict[str, object] = {
        "w": int(draw.integers(0, 9)),
        "n": int(draw.integers(-2, 30)),
        "n2": draw.integers(-1, 30, 4),
    }
    mask = fk.mask(text, **{n: x for n, x in values.items() if re.search(rf"\b{n}\b", text)})
    found = flags(mask, g)
    if found == "the keys that queries see are not documents one after another under one window":
        assert "chunked" in text  # cut by the place, two chunks need two alignments
        return
    assert isinstance(found, Flags), found
    np.testing.assert_array_equal(shown(found, g), dense_at(mask, g))


@pytest.mark.parametrize("seed", range(20))
def test_documents_of_random_ids(seed: int) -> None:
    """Ids that stand together are documents; others are refused, whatever the window beside them."""
    draw = np.random.default_rng(seed)
    doc = np.sort(draw.integers(0, 5, (2, 40)), axis=1)
    if seed % 4 == 0:
        doc[1] = draw.permutation(doc[1])
    g = place(40, 40, 2)
    text = ["doc[b, q] == doc[b, k]", "causal & doc[b, q] == doc[b, k]", "window(4) & doc[b, q] == doc[b, k]"][seed % 3]
    mask = fk.mask(text, doc=doc)
    found = flags(mask, g)
    if seed % 4 == 0:
        assert found == "equal values of `doc[b, q]` are not adjacent in batch entry 1: they are no documents"
        return
    assert isinstance(found, Flags), found
    np.testing.assert_array_equal(shown(found, g), mask.dense(40, 40, 2))
    assert found.documents is not None
    assert found.documents.shape[1] - 1 == sum(len(np.unique(row)) for row in doc)


def test_documents_of_a_crop_and_of_a_decode_step() -> None:
    doc = np.repeat([0, 1, 2], [10, 7, 15])
    mask = fk.mask("causal & same(doc)", doc=doc)
    g = place(8, 32, origin=(0, 0, 20, 0), sizes=(1, 1, 32, 32))
    found = flags(mask, g)
    assert isinstance(found, Flags), found
    np.testing.assert_array_equal(shown(found, g), dense_at(mask, g))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("full", "full"), ("causal", "causal"), ("causal & window(256)", "causal, window 255 to the left"),
        ("k < 7", "keys 0 to 7"), ("2 * q >= k", "the keys that queries see are not documents one after another"),
        ("causal & same(doc)", "causal, documents as cu_seqlens of 3 sequences"),
        ("causal & q // 3 % 2 == k // 3 % 2", "equal values of `q // 3 % 2` are not adjacent in batch entry 0"),
    ],
)  # fmt: skip
def test_flags_of_a_mask_print_as_listed(text: str, said: str) -> None:
    mask = fk.mask(text, **({"doc": np.repeat([0, 1, 2], [300, 300, 424])} if "doc" in text else {}))
    assert str(flags(mask, place(1024, 1024))).startswith(said)


def test_scores_have_numbers() -> None:
    slopes = np.array([0.5, 0.25], np.float32)
    found = flags(None, place(4, 4, 1, 2), fk.score("softcap(20) + s[h] * (k - q)", s=slopes))
    assert isinstance(found, Flags)
    assert (found.softcap, found.factor, found.distance) == (20.0, 1.0, "k - q")
    np.testing.assert_array_equal(found.slopes, slopes)
    assert str(found) == "full, soft cap 20, ALiBi slopes"
