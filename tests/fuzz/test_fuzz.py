"""A slice of every target, and that a planted fault is found, made small and printed as a test that fails."""

import contextlib
import json
import runpy
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support import cache_model
from support.native.compiler import needs_compiler
from support.tiers import default_only

import frisket as fk
from frisket.dsl.from_jax import scalars as jax_scalars
from frisket.dsl.from_python import numpy_functions
from frisket.dsl.from_torch import callables as torch_callables
from frisket.dsl.ir import lit
from frisket.lowering.simplify import RULES, Simplifier, affine, rules_division
from frisket.runtime.calls.arrays import TokenPermutation
from frisket.runtime.torch import decode

from . import caches, campaign, corpus, front, hostile, kernels, scores, simplified, smaller, targets

# by the name that the modules of this folder import, so that a planted fault reaches what they call
from outside import programs  # isort: skip

Problem, TARGETS, rows = targets.Problem, targets.TARGETS, targets.rows


SLICES = {  # cases of every run, and exhaustive ones behind them
    "meaning": (200, 600), "layout": (20, 120), "canonical": (150, 600), "front": (20, 60), "simplifier": (120, 400),
    "hostile": (100, 300), "answers": (8, 30), "exports": (20, 60), "score": (20, 150), "gradients": (20, 100),
    "weights": (20, 100), "derivatives": (6, 60), "reorder": (15, 60), "kernels": (0, 1), "rows": (0, 1),
    "dropout": (1, 1), "caches": (3, 30), "gluon": (1, 4), "flash": (2, 10), "pallas": (0, 1), "stores": (1, 3),
    "statistics": (10, 100), "select": (10, 100), "invariant": (0, 2),
}  # fmt: skip
MARKS = {"dropout": needs_compiler}
APART = {"triton": (0, 2), "parallel": (0, 1)}  # in processes: Triton interprets, JAX has several devices


def slices(of):
    often = [pytest.param(t, 0, n, id=t, marks=MARKS.get(t, ())) for t, (n, _) in of.items() if n]
    return often + [
        pytest.param(t, n, end, id=f"{t}-more", marks=pytest.mark.exhaustive) for t, (n, end) in of.items() if n < end
    ]


@pytest.mark.parametrize(("target", "start", "end"), slices(SLICES))
def test_slice_of_a_fuzz_target_has_no_failure(target, start, end):
    failures = [failure for i in range(start, end) if (failure := campaign.one(target, 100, i)[1])]
    assert not failures, "\n".join(f["test"] for f in failures)


@pytest.mark.parametrize(("target", "start", "end"), slices(APART))
def test_a_slice_in_its_own_process(target, start, end, tmp_path):
    command = [sys.executable, Path(__file__).parent, target, "--seed", "100", "--cases", str(end)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert f"{end} cases" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("target", [t for t in TARGETS if t not in APART])
def test_an_hour_of_all_targets(target, tmp_path):
    """Five minutes each, and the rest of the hundred cases."""
    end, counts, shown = time.monotonic() + 300, campaign.Counts(), []
    while time.monotonic() < end:
        counts = campaign.run(target, 101, counts.cases + 100, tmp_path / "cases.jsonl", show=shown.append)
    assert not counts.failed, "\n".join(shown)


CORPUS = ["meaning", "layout", "canonical", "answers", "exports", "reorder"]


@pytest.mark.parametrize("target", default_only(CORPUS, "meaning", "layout", "canonical"))
def test_corpus_programs_pass_their_fuzz_target(target):
    programs_of_it = corpus.read()
    assert len(programs_of_it) > 40
    for p in programs_of_it:
        TARGETS[target](p)


def failures_of(target, cases):
    """The first failures, made small, which takes longer than the cases."""
    failures = (failure for i in range(cases) if (failure := campaign.one(target, 0, i)[1]))
    first = list(islice(failures, 4))
    assert first
    return first


WITH_MEANING = ["meaning", "layout", "canonical", "front", "simplifier", "exports", "gradients", "answers"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("target", default_only(WITH_MEANING, "meaning", "layout", "canonical", "simplifier"))
def test_a_wrong_meaning_is_found_and_made_small(target, monkeypatch):
    monkeypatch.setitem(programs.ON_INTS, ">=", np.greater)
    failures = failures_of(target, 40)
    shortest = min((f["test"] for f in failures), key=len)
    assert " >= " in shortest
    assert len(shortest) < {"simplifier": 600}.get(target, 300)
    monkeypatch.undo()  # the test holds what was said to be visible
    names = {"Problem": Problem, "TARGETS": TARGETS, "rows": rows, "np": np}
    exec(shortest, names)
    (test,) = (x for name, x in names.items() if name.startswith("test_"))
    with pytest.raises(AssertionError):
        test()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "target",
    [
        pytest.param(t, marks=pytest.mark.exhaustive if t in ("rows", "kernels") else ())
        for t in TARGETS
        # these read no rows, or, as invariant, compare bits of calls alone
        if t not in {"canonical", "front", "simplifier", "hostile", "score", "caches", "stores", "invariant", *APART}
    ],
)
def test_wrong_rows_of_a_program_fail_the_fuzz_target(target):
    with pytest.raises(AssertionError):
        TARGETS[target](Problem("q >= k", {}, rows("#.#", "##.", "###")))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "table", "key"),
    [("numpy", numpy_functions.UFUNCS, "minimum"),
     pytest.param("torch", torch_callables.FUNCTIONS, "minimum", marks=pytest.mark.exhaustive),
     pytest.param("jax", jax_scalars.SCALARS, "min", marks=pytest.mark.exhaustive)],
)  # fmt: skip
def test_a_fault_of_a_front_end_is_found_and_made_small(name, table, key, monkeypatch):
    monkeypatch.setitem(table, key, table[key.replace("min", "max")])
    failures = failures_of("front", 100)
    assert {f["kind"] for f in failures} <= {f"AssertionError {name}, {x}" for x in ("dense", "canonical")}
    shortest = min((f["test"] for f in failures), key=len)
    assert any(word in shortest for word in ("minimum(", "clip("))  # jnp.clip is traced as a min of a max
    assert len(shortest) < 500


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "part", "wrong"),
    [pytest.param("mod-by-negative", "after", lambda x, n: rules_division.minus(x) % lit(-n.name),
                  marks=pytest.mark.exhaustive),
     ("min-decided", "when", lambda x, y: affine.ordered(y, x))],
)  # fmt: skip
def test_a_fault_of_the_simplifier_is_found_and_made_small(name, part, wrong, monkeypatch):
    rules = tuple(replace(r, **{part: wrong}) if r.name == name else r for r in RULES)
    monkeypatch.setattr(simplified, "simplify", lambda e: Simplifier(rules)(e))
    failures = failures_of("simplifier", 400)
    assert {f["kind"] for f in failures} == {"AssertionError simplified"}
    shortest = min((f["test"] for f in failures), key=len)
    assert {"mod-by-negative": "% (-", "min-decided": "clamp("}[name] in shortest
    assert len(shortest) < 1200  # a table of as many entries as there are positions


def test_points_lie_beyond_the_problem():
    case = programs.make(7)
    at = simplified.points(case)
    assert (at["q"] >= case.q_len).any()
    assert (at["q"] >= at["Q_LEN"]).any()
    assert all((x >= (name in simplified.SIZES)).all() for name, x in at.items() if name not in simplified.NUMBERS)


def test_functions_are_of_all_forms():
    """Each way to write an operator is drawn for each front end."""
    bodies = dict.fromkeys(front.FRONTS, "")
    for i in range(300):
        for name, body in targets.what_of("front", programs.make(i)).functions.items():
            bodies[name] += body
    for name, module in front.MODULES.items():
        for function in {*front.FUNCTIONS.values(), "minimum", "maximum", "where"}:
            assert f"{module}.{function}(" in bodies[name], (name, function)


def test_wrong_mask_of_a_cache_fails_the_fuzz_target(monkeypatch):
    monkeypatch.setitem(caches.MASKS, "causal", lambda q, k: q > k)
    monkeypatch.setattr(decode, "MAX_STEP_QUERIES", 0)  # a step needs no planner to be wrong
    with pytest.raises(AssertionError, match="append: off by"):
        TARGETS["caches"]("causal; append:3,2")


@pytest.mark.exhaustive
def test_wrong_rows_of_an_order_are_found(monkeypatch):
    monkeypatch.setattr(kernels, "TokenPermutation", lambda queries, keys: TokenPermutation(queries, keys[::-1].copy()))
    with pytest.raises(AssertionError, match="native permutation out: off by"):
        TARGETS["rows"](Problem("q >= k", {}, np.tri(9, dtype=bool)[None, None]))


def test_wrong_values_of_a_store_fail_the_fuzz_target(monkeypatch):
    monkeypatch.setattr(cache_model.OfTorch, "stored", lambda self, x: 1.1 * x)
    with pytest.raises(AssertionError):
        TARGETS["stores"]("torch plain float32 1 20")


@pytest.mark.exhaustive
def test_a_wrong_score_is_found_and_made_small(monkeypatch):
    monkeypatch.setitem(scores.NAMES, "tanh", scores.NAMES["sin"])
    failures = failures_of("score", 40)
    shortest = min((f["test"] for f in failures), key=len)
    assert "tanh(" in shortest
    assert len(shortest) < 200


def test_a_foreign_error_of_a_text_is_found_and_made_small(monkeypatch):
    def score(text):
        if "%" in text:
            raise ValueError("a fault")

    monkeypatch.setattr(fk, "score", score)
    failure = next(f for i in range(100) if (f := campaign.one("hostile", 0, i)[1]))
    assert failure["kind"] == "ValueError"
    assert "TARGETS['hostile']('%')" in failure["test"]


def test_a_text_that_takes_too_long_is_found(monkeypatch):
    def score(text):
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))

    monkeypatch.setattr(fk, "score", score)
    monkeypatch.setattr(targets, "SECONDS", 0.2)
    assert targets.trouble("hostile", "causal")[0] == "TooLong"


def test_tiles_of_wrong_spans_are_found():
    found = fk.mask("causal").layout(6, 6, block=(2, 2))
    seen = np.tri(6, dtype=bool)[None, None]
    targets.tiles(found, seen, (2, 2))
    spans = found.transposed.spans
    bounds = spans.bounds.copy()
    bounds[0, 2, 0] = 0  # no query sees the last column
    wrong = SimpleNamespace(bounds=bounds, count=spans.count, slice_of=spans.slice_of)
    with pytest.raises(AssertionError, match="transposed"):
        targets.tiles(WithColumns(found, wrong), seen, (2, 2))


class WithColumns:
    """A layout with other spans of its columns."""

    def __init__(self, layout, spans):
        self.layout, self.transposed = layout, SimpleNamespace(spans=spans)

    def __getattr__(self, name):
        return getattr(self.layout, name)


def test_different_mask_fails_as_a_synonym():
    with pytest.raises(AssertionError, match="synonym"):
        TARGETS["canonical"](Problem("q >= k", {}, rows("#.", "##"), synonym="q > k"))


def test_fuzz_campaign_resumes_where_it_stopped(tmp_path):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    at_once = campaign.run("meaning", 3, 250, whole)
    campaign.run("meaning", 3, 100, parts)
    with parts.open("a") as f:
        f.write('{"target": "meaning", "se')  # killed while it wrote
    again = campaign.run("meaning", 3, 250, parts)
    assert (again.cases, again.failed, again.distinct) == (250, 0, at_once.distinct)
    done = [json.loads(line)["done"] for line in parts.read_text().splitlines()]
    assert done == [100, 200, 250]
    assert [json.loads(line)["done"] for line in whole.read_text().splitlines()] == done
    with pytest.raises(SystemExit, match="seed 3; name another file"):
        campaign.run("meaning", 4, 300, parts)


@pytest.mark.exhaustive
def test_files_of_a_campaign_in_parts_are_joined(tmp_path, capsys, monkeypatch):
    """Distinct cases of two seeds are counted once, and of a seed that two files tell of."""
    files = [tmp_path / name for name in ("one.jsonl", "two.jsonl", "one-again.jsonl")]
    counts = [campaign.run("meaning", seed, n, file) for seed, n, file in zip((3, 4, 3), (200, 150, 100), files)]
    both = counts[0].distinct | counts[1].distinct
    assert max(len(c.distinct) for c in counts) < len(both) < len(counts[0].distinct) + len(counts[1].distinct)
    monkeypatch.setattr(sys, "argv", ["tests/fuzz", "--union", *map(str, files)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert runpy.run_path(str(Path(__file__).with_name("__main__.py")))["main"]() == 0
    *each, union = capsys.readouterr().out.splitlines()
    assert each == [f"{file}: meaning, seed {seed}: {c}" for file, seed, c in zip(files, (3, 4, 3), counts)]
    assert union.startswith(f"union: meaning: 350 cases, {len(both):,} distinct, 0 failed")
    other = tmp_path / "other.jsonl"
    campaign.run("canonical", 3, 100, other)
    with pytest.raises(SystemExit, match=r"other\.jsonl is of target canonical"):
        campaign.union([files[0], other])


def test_failures_are_kept_in_the_file(tmp_path, monkeypatch):
    file = tmp_path / "meaning.jsonl"
    monkeypatch.setitem(programs.ON_INTS, ">=", np.greater)
    shown = []
    counts = campaign.run("meaning", 0, 10, file, show=shown.append)
    assert counts.failed == len(shown) > 0
    assert campaign.read(file, "meaning", 0).failed == counts.failed
    (line,) = map(json.loads, file.read_text().splitlines())
    assert all("def test_meaning_0_" in f["test"] for f in line["failures"])


def test_texts_are_of_all_kinds():
    """Some are accepted, most are refused, and a seed is a text."""
    texts = [hostile.make_text(seed) for seed in range(300)]
    assert texts[:5] == [hostile.make_text(seed) for seed in range(5)]
    accepted = 0
    for text in texts:
        try:
            fk.mask(text)
        except fk.FrisketError:
            continue
        accepted += 1
    assert 30 < accepted < 200, accepted


def test_a_smaller_program_has_the_types_of_the_first():
    case = programs.make(7)
    assert [*smaller.steps(case)]
    for one in smaller.steps(case):
        fk.mask(one.text, **one.bound)


def test_a_definition_that_nobody_calls_is_made_small():
    """Its body reads a table that the case is without, since the mask does not read it."""
    case = programs.make(38)
    assert case.definitions.keys() - smaller.called(case.mask)

    def fails(one):
        return any("flag[" in line for line in one.text.splitlines() if line.startswith("def"))

    assert fails(case)
    less = smaller.smaller_case(case, fails)
    assert len(less.text) < len(case.text) / 2, less.text
    assert smaller.smaller_case(case, lambda one: True).definitions == {}


@pytest.mark.parametrize(("target", "seed", "i"), [("meaning", 3000, 191959), ("flash", 77, 3), ("flash", 77, 65)])
def test_failures_of_earlier_campaigns_stay_fixed(target, seed, i):
    failure = campaign.one(target, seed, i)[1]
    assert failure is None, failure
