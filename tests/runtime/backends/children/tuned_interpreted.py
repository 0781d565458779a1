"""Run by test_tuned.py with TRITON_INTERPRET=1: races of tiles whose kernels run in Triton's interpreter, with a clock
that makes one tile faster."""

import json

import pytest
import torch

import frisket as fk
from frisket.dsl.errors import ParameterError
from frisket.runtime.attention.warm import sizes_of
from frisket.runtime.backends.triton import launch as triton_launch
from frisket.runtime.backends.triton import race, tiles, tuned
from frisket.runtime.machine import caller

SIZES = {"q_len": 128, "heads": 2, "kv_heads": 1, "head_dim": 16, "dtype": "float32"}
FAST = {"forward": (32, 64), "dq": (32, 64), "dkv": (64, 32)}


class Gpu:
    """A GPU in place of the interpreter: what runs on it, how long it takes, and tiles that do not work there."""

    def __init__(self, monkeypatch, tmp_path):
        monkeypatch.setenv("FRISKET_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(tuned, "device_name", lambda device: "Toy GPU")
        tuned._known.clear()
        caller.SAID.clear()
        self.ran, self.faults, self.fast = {}, {}, FAST
        was = triton_launch.Launch.__call__

        def run(launch, values, *tensors):
            kernel, tile = launch.step.name.removeprefix("attention_"), launch.tile
            self.ran[kernel] = tile
            fault = self.faults.get((kernel, tile))
            if fault == "memory":
                error = triton_launch.TooLargeError("attention takes 99 bytes of shared memory\n  more")
                error.kernel, error.fixed = launch.step.name, True
                raise error
            was(launch, values, *tensors)
            if fault == "wrong":
                tensors[launch.names.index("Out")].add_(1)
            if fault == "spills":
                launch.spills = 24

        monkeypatch.setattr(triton_launch.Launch, "__call__", run)

    def clock(self, run):
        self.ran.clear()
        run()
        return 1.0 - sum(self.ran.get(kernel) == tile for kernel, tile in self.fast.items()) / 4

    def race(self, att, gradients=True, **sizes):
        return race.raced(
            att, sizes_of({**SIZES, **sizes}), race.TileRace(torch.device("cpu"), gradients, 1, self.clock)
        )


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    return Gpu(monkeypatch, tmp_path)


def arrays(**more):
    s = {**SIZES, **more}
    shapes = [(s["heads"], s["q_len"]), (s["kv_heads"], s["q_len"]), (s["kv_heads"], s["q_len"])]
    return [torch.randn(1, h, n, s["head_dim"]).requires_grad_() for h, n in shapes]


def target(mask="causal & window(50)", **more):
    return fk.compile(mask, backend="triton", **more).stages(*arrays()).text("target").splitlines()


def test_winners_of_a_race_run_later_calls(gpu, monkeypatch):
    before = target()
    rows, path = gpu.race(fk.compile("causal & window(50)"))
    assert [(row.kernel, row.winner[:2]) for row in rows] == [*FAST.items()]
    assert all(row.winner_ms == 750 and row.chosen_ms == 1000 for row in rows)
    assert "speed-up 1.33" in str(rows[0])
    assert str(tuned.tiles_of(json_key(path)).date) in path_text(path)
    after = target()
    assert all("; tile measured on this GPU on 20" in line for line in after)
    assert after[0].startswith("triton: 32 queries x 64 keys, ")
    assert all("measured" not in line for line in before)
    gpu.ran.clear()
    att = fk.compile("causal & window(50)", backend="triton")
    att.check(*arrays())
    assert {n: gpu.ran[n] for n in FAST} == FAST
    monkeypatch.setenv("FRISKET_TUNED", "0")
    assert target() == before
    monkeypatch.delenv("FRISKET_TUNED")
    assert target(tile=(16, 16))[0].startswith("triton: 16 queries x 16 keys")
    assert all("measured" not in line for line in target("causal"))  # another class of masks
    monkeypatch.setattr(tuned, "versions", lambda: {"triton": "0", "frisket": "0"})
    assert target() == before


def json_key(path):
    entry = json.loads(path_text(path).split("\n", 1)[1])
    return tuple(map(tuple, entry["key"]))


def path_text(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def test_tiles_that_do_not_work_are_left_out(gpu):
    """The fast tile gives wrong results, does not fit, or spills: the tile as chosen stays."""
    att = fk.compile("causal & window(50)")
    words = {
        "wrong": r"out differs from the float64 reference by",
        "memory": "attention takes 99 bytes of shared memory",
        "spills": "spills 24 registers of each thread",
    }
    for fault, why in words.items():
        gpu.faults = {("forward", FAST["forward"]): fault}
        (row,), _ = gpu.race(att, gradients=False)
        assert row.winner == row.chosen
        (said,) = row.left_out.values()
        assert said.startswith(why)
        assert str(row).splitlines()[1].startswith("    32 x 64, ")


def test_a_small_gain_changes_no_tile(gpu, monkeypatch):
    monkeypatch.setattr(race, "GAIN", 0.7)
    (row,), _ = gpu.race(fk.compile("causal & window(50)"), gradients=False)
    assert row.winner == row.chosen
    assert "stays the fastest" in str(row)


def test_kernels_as_chosen_that_are_wrong_raise(gpu):
    words = target()[0].split()  # triton: 64 queries x 64 keys, ...
    gpu.faults = {("forward", (int(words[1]), int(words[4]))): "wrong"}
    with pytest.raises(fk.FrisketError, match="out differs from the float64 reference by"):
        gpu.race(fk.compile("causal & window(50)"), gradients=False)


def test_a_later_race_keeps_winners_of_other_kernels(gpu):
    att = fk.compile("causal & window(50)")
    chosen = target()[0]
    gpu.race(att)
    gpu.fast = {}
    gpu.race(att, gradients=False)
    lines = target()
    assert lines[0].startswith(f"{chosen}; tile measured on this GPU on 20")
    assert lines[1].startswith("    dq: 32 queries x 64 keys")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: text.replace('"forward": [32', '"forward": [64'), "its digest differs from its contents"),
        (lambda text: text[:30], "its digest differs from its contents"),
        (lambda text: signed(text.replace('"forward": [32', '"forward": [33')), "forward has no tile of 33 x 64"),
        (lambda text: signed(text.replace("Toy GPU", "Other GPU")), "it is about other calls"),
        (lambda text: signed("[]\n[]"), "list indices must be integers"),
    ],
)
def test_changed_entries_are_not_used(gpu, change, why):
    _, path = gpu.race(fk.compile("causal & window(50)"), gradients=False)
    text = path_text(path)
    with open(path, "w", encoding="utf-8") as file:
        file.write(change(text))
    tuned._known.clear()
    with pytest.warns(UserWarning, match=f"is not used: {why}.*\n  delete it, and run `frisket tune` again"):
        lines = target()
    assert "measured" not in lines[0]


def signed(text):
    from hashlib import sha256

    body = text.split("\n", 1)[1]
    return sha256(body.encode()).hexdigest() + "\n" + body


def test_entries_that_others_may_write_to_are_not_used(gpu, tmp_path):
    gpu.race(fk.compile("causal & window(50)"), gradients=False)
    (tmp_path / "tuned").chmod(0o777)
    tuned._known.clear()
    with pytest.warns(UserWarning, match="is not used: others may write to it"):
        assert "measured" not in target()[0]


def test_tables_and_learned_scalars_are_raced(gpu):
    doc = torch.arange(128) // 50
    att = fk.compile("causal & same(doc)", "score * c", doc=doc.numpy(), c=torch.tensor(0.5, requires_grad=True))
    rows, path = gpu.race(att)
    assert [row.kernel for row in rows] == ["forward", "dq", "dkv"]
    assert path


def test_candidates_are_few_and_fit(monkeypatch):
    monkeypatch.setattr(tiles, "shared_memory", lambda device=None: 101_376)
    sizes = {"head_dim": 128, "v_dim": 128, "dtype": "bfloat16"}
    for kernel in ("forward", "dq", "dkv"):
        found = [*race.candidates(kernel, (64, 64, 4, 2), sizes)]
        assert 2 <= len(found) < race.MOST
        assert len({*found, (64, 64, 4, 2)}) == len(found) + 1
        for queries, keys, _, stages in found:
            owned, walked = (keys, queries) if kernel == "dkv" else (queries, keys)
            assert tiles.shared(kernel, 128, owned, walked, stages) <= 101_376


def test_candidates_of_mma_keep_a_stage_less_in_shared_memory(monkeypatch):
    """A tile with the three stages that an RTX 40 has at head size 128: half of the queries fit too."""
    monkeypatch.setattr(tiles, "shared_memory", lambda device=None: 101_376)
    monkeypatch.setattr(tiles, "architecture", lambda device=None: "sm_89")
    sizes = {"head_dim": 128, "v_dim": 128, "dtype": "bfloat16"}
    assert (64, 64, 4, 3) in [*race.candidates("forward", (128, 64, 8, 3), sizes)]


@pytest.mark.parametrize(
    ("att", "sizes", "why"),
    [
        (fk.compile("causal", tile=(64, 64)), {}, "the attention names tiles"),
        (fk.compile("causal", backend="aten"), {}, "backend='aten' has no tiles of Triton"),
        (fk.compile("causal"), {"q_len": 16}, "q_len=16: tiles are raced from 128 queries on"),
        (fk.compile("causal"), {"dtype": "float64"}, "float64"),
    ],
)
def test_calls_without_a_race_say_why(gpu, att, sizes, why):
    with pytest.raises(ParameterError, match=why):
        gpu.race(att, **sizes)
