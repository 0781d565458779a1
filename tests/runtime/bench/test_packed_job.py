"""The parts of the main job: packing, projections, the dense rivals and the oracle by pieces."""

import re

import numpy as np
import pytest

from frisket.dsl.errors import BackendError, ShapeError
from frisket.dsl.ir import lookup
from frisket.dsl.sugar import eq, function, k, q, score
from frisket.lowering import dense
from frisket.lowering.plan import Problem
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.bench import race
from frisket.runtime.cli import timing as packed
from frisket.runtime.machine.modules import pip_install

MASK = (q >= k) & eq(lookup("doc", (q,)), lookup("doc", (k,))) & (q - k < 9)
SCORE = function("tanh", score / 5) * 5


@pytest.fixture
def files(tmp_path):
    for name, text in (("a.md", "abc" * 10), ("b.md", "d" * 300), ("empty.md", ""), ("c.md", "é" * 100)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    return sorted(tmp_path.iterdir())


def test_pack_takes_tokens_from_each_file(files):
    p = packed.pack(files, 1000)
    assert (p.names, p.lengths, p.available) == (("a.md", "b.md", "c.md"), (30, 300, 200), 530)
    assert p.doc.dtype == np.int32
    assert bytes(p.tokens[:3]) == b"abc"
    np.testing.assert_array_equal(np.bincount(p.doc), p.lengths)


def test_pack_cuts_the_longest(files):
    p = packed.pack(files, 100)
    assert (p.lengths, len(p), p.available) == ((30, 35, 35), 100, 530)


def test_shares_of_a_budget_are_even():
    assert packed.shares([10, 200, 300], 110) == [10, 50, 50]
    assert packed.shares([5, 5], 100) == [5, 5]
    assert sum(packed.shares([7, 100, 50, 3], 101)) == 101


def test_pack_refuses_empty_files_and_small_budgets(files, tmp_path):
    with pytest.raises(ShapeError, match=r"^the files are empty; give --tokens at least one byte$"):
        packed.pack([tmp_path / "empty.md"], 10)
    with pytest.raises(ShapeError, match=r"^--max-tokens 2 for 3 files: give at least one token each$"):
        packed.pack(files, 2)


def test_rope_sees_distances_only():
    tokens = np.zeros(40, np.uint8)
    q_, k_, _ = packed.projections(tokens, 2, 16)
    s = q_ @ k_.swapaxes(-1, -2)
    np.testing.assert_allclose(s[..., 1:, 1:], s[..., :-1, :-1], rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(packed.projections(tokens, 2, 16)[0], q_)


def test_reference_in_slabs_equals_the_whole_reference(monkeypatch):
    monkeypatch.setattr(packed, "SLAB", 16)
    arrays = packed.projections(np.arange(50, dtype=np.uint8), 3, 8)
    tables = {"doc": np.repeat([0, 1], 25).astype(np.int32)}
    whole, _ = dense.attention(
        *arrays, dense.DenseCall(ProgramExprs(MASK, SCORE), scale=8**-0.5, params={}, tables=tables)
    )
    built = np.empty_like(whole)
    for at, out in packed.oracle(packed.Job(arrays, ProgramExprs(MASK, SCORE), {}, tables)):
        built[:, *at] = out
    np.testing.assert_allclose(built, whole, rtol=1e-12, atol=1e-12)
    seen = packed.visible(MASK, {}, tables, 3, 50, by_head=False)
    np.testing.assert_array_equal(seen, dense.visible(MASK, dense.coordinates(Problem(50, 50)), tables, (1, 1, 50, 50)))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_dense_peers_of_the_packed_job_agree(framework):
    arrays = packed.projections(np.arange(40, dtype=np.uint8), 2, 8)
    tables = {"doc": np.repeat([0, 1], 20).astype(np.int32)}
    seen = packed.visible(MASK, {}, tables, 2, 40, by_head=False)
    for mod in (SCORE, None):
        bench = packed.prepare_bench(
            framework, packed.Job(arrays, ProgramExprs(MASK, mod), {}, tables), seen, lambda *a: None
        )
        want, _ = dense.attention(
            *arrays, dense.DenseCall(ProgramExprs(MASK, mod), scale=8**-0.5, params={}, tables=tables)
        )
        np.testing.assert_allclose(bench.numpy(bench.dense.run()), want, atol=2e-6)
        assert (bench.builtin is None) == (mod is None)
    bench = packed.prepare_bench(
        framework, packed.Job(arrays, ProgramExprs(MASK, SCORE), {}, tables), seen, lambda *a: None
    )
    plain, _ = dense.attention(*arrays, dense.DenseCall(ProgramExprs(MASK), scale=8**-0.5, params={}, tables=tables))
    np.testing.assert_allclose(bench.numpy(bench.builtin.run()), plain, atol=2e-6)


def test_interleaved_runs_take_turns():
    calls = []
    *rounds, medians = packed.interleaved([lambda: calls.append("a"), lambda: calls.append("b")], 3)
    assert calls == ["a", "b"] * 4
    assert rounds == [None] * 4
    assert len(medians) == 2


def test_a_framework_that_is_not_there(monkeypatch):
    monkeypatch.setattr(race, "installed", list)
    with pytest.raises(BackendError, match="neither torch nor JAX is installed: pip install"):
        race.choose(None)
    with pytest.raises(BackendError, match="^" + re.escape(f"jax is not installed: {pip_install('jax')}") + "$"):
        race.choose("jax")
    monkeypatch.setattr(race, "installed", lambda: ["jax"])
    assert race.choose(None) == "jax"
