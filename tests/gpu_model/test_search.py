"""The search for tiles: candidates fit, what spills is out, and the worse of two Tritons decides."""

import json
import re
from functools import partial
from types import SimpleNamespace

import gpu_model
import pytest
from gpu_sim import search
from gpu_sim.ours import Tile
from gpu_sim.search import Cell

from frisket.lowering.architectures import GPUS
from frisket.runtime.backends.triton import tiles


@pytest.mark.parametrize("arch", search.ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkv"])
@pytest.mark.parametrize("dim", search.DIMS)
def test_tile_candidates_fit_into_shared_memory(arch, kernel, dim):
    found = search.candidates(Cell(arch, kernel, "long", dim))
    assert found
    assert len(set(found)) == len(found) < 42 * len(Cell(arch, kernel, "long", dim).reads)
    for t in [x for one in found for x in search.staged(Cell(arch, kernel, "long", dim), one)]:
        assert search.fits(Cell(arch, kernel, "long", dim), t)
    for t in found:
        own, walked = (t.block_k, t.block_q) if kernel == "dkv" else (t.block_q, t.block_k)
        assert walked <= own
        assert tiles.shared(kernel, dim, own, walked, t.stages, products=GPUS[arch].products) <= GPUS[arch].shared


def test_published_best_tiles_are_candidates():
    """tokamax's search on an H100, for a kernel of the same shape: 128 x 128 in 8 warps at head size 128, 128 x 64 in
    4 at 64, 3 stages each."""
    assert Tile(128, 128, 8, 3) in search.candidates(Cell("sm_90", "forward", "long", 128))
    assert Tile(128, 64, 4, 3) in search.candidates(Cell("sm_90", "forward", "long", 64))


def test_descriptors_are_candidates_where_there_are_some():
    for arch, ways in (
        ("sm_90", {0, 1}),
        ("sm_100", {0, 1}),
        ("sm_90 by pointers", {0}),
        ("sm_80", {0}),
        ("gfx942", {0}),
    ):
        assert {t.descriptors for t in search.candidates(Cell(arch, "dkv", "long", 64))} == ways
    assert Cell("sm_90 by pointers", "dkv", "long", 64).modelled


def test_a_score_mod_keeps_the_warps_and_the_own_side():
    cell = Cell("sm_90", "dkv", "curved", 128)
    assert {(t.block_k, t.warps) for t in search.candidates(cell, Tile(64, 128, 8, 3))} == {(128, 8)}


A, B, C = Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(128, 128, 8, 2)


def test_tile_search_takes_the_worse_time_and_drops_spills():
    here = {A: {"seconds": 1.0}, B: {"seconds": 2.0}, C: {"stack": 8}}
    assert search.best(here, None) == [A, B]
    assert search.best(here, {A: {"seconds": 3.0}, B: {"seconds": 2.5}, C: {"seconds": 0.1}}) == [B, A]
    assert search.best(here, {A: {"stack": 16}, B: {"seconds": 2.0}}) == [B]
    assert search.best(here, {}) == []


def test_without_a_model_larger_own_sides_go_first():
    cell = Cell("sm_100", "forward", "long", 64)
    assert search.ranked(cell, Tile(128, 32, 8, 2)) < search.ranked(cell, Tile(64, 64, 8, 2))
    assert search.ranked(cell, Tile(128, 64, 8, 2)) < search.ranked(cell, Tile(128, 32, 8, 2))
    assert not cell.modelled
    assert Cell("sm_80", "dq", "long", 64).modelled


def test_single_stage_tiles_rank_after_tiles_of_half_a_side():
    """Copies that wait for products cost more than tiles that read each key twice, but on AMD, which has one stage."""
    cell = Cell("sm_100", "dkv", "long", 128)
    assert search.ranked(cell, Tile(64, 64, 8, 2)) < search.ranked(cell, Tile(64, 128, 8, 1))
    assert search.ranked(cell, Tile(64, 64, 8, 1)) < search.ranked(cell, Tile(32, 32, 8, 2))


def test_tile_that_spills_in_any_form_is_not_a_candidate(monkeypatch):
    cell, tile = Cell("sm_100", "dkv", "long", 128), Tile(64, 64, 8, 2)
    seen = []

    def made(form, tile, text="UTCHMMA", spilling=None):
        seen.append((form.group, form.listed))
        return SimpleNamespace(registers=9, shared=9, text=text, stack=8 * (seen[-1] == spilling))

    monkeypatch.setattr(search.ours, "compiled", made)
    assert search.evaluate(cell, tile)["seconds"] > 0
    assert seen == [(1, False), (8, False), (1, True)]
    for form in tuple(seen):
        monkeypatch.setattr(search.ours, "compiled", partial(made, spilling=form))
        assert search.evaluate(cell, tile) == {"registers": 9, "stack": 8, "shared": 9}
    monkeypatch.setattr(search.ours, "compiled", partial(made, text="EXIT"))
    assert "seconds" not in search.evaluate(cell, tile)


def test_tile_that_spills_on_a_gpu_alike_is_not_a_candidate(monkeypatch):
    """Tiles of sm_89 are those of sm_120, where ptxas allots registers differently."""
    seen = []

    def made(form, tile):
        seen.append(form.arch)
        return SimpleNamespace(registers=9, shared=9, text="HMMA.", stack=16 * (form.arch == "sm_120"))

    monkeypatch.setattr(search.ours, "compiled", made)
    assert search.evaluate(Cell("sm_89", "dkv", "long", 256), Tile(16, 64, 8, 2))["stack"] == 16
    assert seen == ["sm_89"] * 3 + ["sm_120"]
    assert "seconds" in search.evaluate(Cell("sm_89", "dkv", "long", 256), Tile(16, 64, 8, 2), False)


@pytest.fixture
def table(tmp_path, monkeypatch):
    path = tmp_path / "tiles.json"
    path.write_text(search.TABLE.read_text())
    monkeypatch.setattr(search, "TABLE", path)
    return path


def test_a_table_is_written_as_it_was_read(table):
    text = table.read_text()
    search.write(search.table())
    assert table.read_text() == text


def test_a_search_writes_what_is_best(table, monkeypatch, capsys):
    times = {A: 2.0, B: 1.0}
    monkeypatch.setattr(search, "candidates", lambda cell, long: [A, B, C])
    monkeypatch.setattr(
        search, "evaluate", lambda cell, t, whole=True: {"seconds": times[t]} if t in times else {"stack": 8}
    )
    command = "tiles --arch sm_90 --kernels dq --classes long --dims 128 --jobs 1"
    gpu_model.main(command.split())
    assert json.loads(table.read_text()) == tiles.TABLE  # nothing is written unless it is asked for
    gpu_model.main([*command.split(), "--write"])
    assert json.loads(table.read_text())["sm_90"]["dq"]["long"]["128"] == [64, 64, 4, 3, 0]
    assert re.search(
        r"sm_90 dq long D128: 64 x 64 w4 s3 1e\+06, 128 x 64 w8 s3 2e\+06; until now", capsys.readouterr().out
    )


def test_only_the_fastest_tiles_are_compiled_in_every_form(table, monkeypatch, capsys):
    tiles_by_time = [Tile(64, n, 4, 3) for n in (16, 32, 64, 128)]
    whole_forms = []

    def evaluate(cell, tile, whole=True):
        if whole:
            whole_forms.append(tile)
        spills = whole and tile == tiles_by_time[0]  # with eight heads to a key head, say
        return {"stack": 8} if spills else {"seconds": float(tile.block_k)}

    monkeypatch.setattr(search, "candidates", lambda cell, long: tiles_by_time)
    monkeypatch.setattr(search, "evaluate", evaluate)
    monkeypatch.setattr(search, "staged", lambda cell, tile: [])
    gpu_model.main("tiles --arch sm_89 --kernels dq --classes long --dims 128 --jobs 1 --write".split())
    assert json.loads(table.read_text())["sm_89"]["dq"]["long"]["128"] == [64, 32, 4, 3, 0]
    assert tiles_by_time[3] not in whole_forms
    before = search.current(Cell("sm_89", "dq", "long", 128), tiles.TABLE)
    assert f"until now {before} {1e6 * before.block_k:.4g}" in capsys.readouterr().out


def test_tile_table_is_unchanged_where_each_candidate_spills(table, monkeypatch, capsys):
    monkeypatch.setattr(search, "candidates", lambda cell, long: [A])
    monkeypatch.setattr(search, "evaluate", lambda cell, t, whole=True: {"stack": 8})
    before = table.read_text()
    gpu_model.main("tiles --arch sm_90 --kernels dq --classes long --dims 128 --jobs 1 --write".split())
    assert "nothing compiles without a spill" in capsys.readouterr().out
    assert table.read_text() == before


def test_measured_tiles_are_in_the_table_and_stay(table, monkeypatch, capsys):
    assert {cell: search.current(cell, tiles.TABLE) for cell in search.MEASURED} == search.MEASURED
    monkeypatch.setattr(search, "candidates", lambda cell, long: [A])
    monkeypatch.setattr(search, "evaluate", lambda cell, t, whole=True: {"seconds": {A: 1.0}.get(t, 2.0)})
    command = "tiles --arch sm_90 --kernels forward,dq --classes long,medium --dims 64,128 --jobs 1"
    gpu_model.main([*command.split(), "--write"])
    written, said = json.loads(table.read_text()), capsys.readouterr().out
    for cell in search.cells(["sm_90"], ["forward", "dq"], ["long", "medium"], [64, 128]):
        stays = cell in search.MEASURED
        assert search.current(cell, written) == search.MEASURED.get(cell, A)
        assert (f"{cell}: {search.current(cell, written)} stays, by measurement" in said) == stays
    gpu_model.main(command.split())  # without --write the search says what the model prefers
    assert "stays, by measurement" not in capsys.readouterr().out


def test_cells_are_places_of_the_table():
    found = search.cells(["sm_80", "sm_90", "sm_90 by pointers", "sm_100"], ["dq"], ["each"], [64])
    assert [x.arch for x in found] == ["sm_90", "sm_90 by pointers"]
    with pytest.raises(ValueError, match="no class 'eech'; there are long, medium"):
        list(search.cells(["sm_90"], ["dq"], ["eech"], [64]))
