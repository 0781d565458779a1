"""frisket bench: who takes part, that results are compared before a clock runs, what is written. Nothing here looks at
how long anything took."""

import json
import shlex
import sys
from argparse import ArgumentParser
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest

import frisket as fk
from frisket.runtime.bench import contestants, race, schema
from frisket.runtime.bench.race import Contest, Contestant, NoWordsError, Sizes, lines, standard
from frisket.runtime.cli import timing as cli_bench
from frisket.runtime.cli.main import main
from frisket.runtime.cli.timing import add_bench

torch = pytest.importorskip("torch")
SIZES = Sizes(96, 96, batch=1, heads=2, kv_heads=2, head_dim=16)
CAUSAL = Contest("causal", fk.mask("causal"), None, SIZES)


INSTANT = "frisket aten", "SDPA is_causal", "SDPA with a mask"  # compile nothing


def finished(contest, stage, rounds=2, families=None):
    """The race at its end."""
    return list(race.run(contest, stage, rounds, families))[-1]


def named(stage, *names):
    return replace(stage, contestants=tuple(c for c in stage.contestants if c.name in names))


@pytest.fixture(scope="module")
def stage():
    """The contestants that compile nothing."""
    return named(contestants.torch_stage("cpu"), *INSTANT)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("contest", standard(SIZES), ids=lambda c: c.name)
def test_peers_that_have_the_mask_agree_before_timing(stage, contest, backward):
    contest = replace(contest, sizes=replace(SIZES, backward=backward))
    found = finished(contest, stage)
    said = {"frisket aten"} | ({"SDPA with a mask"} if "softcap" not in contest.name else set())
    said |= {"SDPA is_causal"} if contest.name in ("causal", "causal & window(256)") else set()  # 96 tokens: the same
    assert {n for n, t in found.times.items() if len(t) == 2} == said
    assert not [why for why in found.out.values() if why.startswith(("wrong", "failed", "not timed"))]
    schema.check(result(found))


def result(found):
    machine = {"date": "2026-01-01", "cpu": "x", "cores": 2, "python": "3.11"}
    return {"schema": 1, "parts": {"p": {"machine": machine, "settings": {"rounds": 2}, "rows": {"r": found.row()}}}}


@pytest.mark.exhaustive
@pytest.mark.parametrize("contest", standard(SIZES)[2:5:2], ids=lambda c: c.name)
def test_compiled_flex_attention_agrees_before_timing(contest):
    """flex_attention with our mask_mod and score_mod, and native kernels."""
    found = finished(contest, contestants.torch_stage("cpu"))
    assert {"flex_attention, compiled", "frisket aten"} <= set(found.times), found.out
    assert not [why for why in found.out.values() if why.startswith(("wrong", "failed", "not timed"))]


@pytest.mark.parametrize("contest", standard(SIZES)[2:5], ids=lambda c: c.name)
def test_jax_peers_agree_before_timing(contest):
    pytest.importorskip("jax")
    pytest.importorskip("jax")
    stage = named(contestants.jax_stage("cpu"), "frisket xla", "jax.nn.dot_product_attention")
    found = finished(contest, stage, rounds=1)
    assert not [why for why in found.out.values() if why.startswith(("wrong", "failed", "not timed"))]
    assert ("jax.nn.dot_product_attention" in found.times) is ("softcap" not in contest.name)


def test_heads_that_see_different_keys_of_the_same_tiles(stage):
    """A dense mask has as many heads as differ, which tiles do not tell."""
    mask = fk.mask("causal & k < t[h]", t=np.array([5, 70]))
    found = finished(Contest("t", mask, None, SIZES), stage, families={"sdpa"})
    assert "SDPA with a mask" in found.times, found.out


def off(stage, name, change):
    """The stage with one contestant's results changed."""

    def wrong(contestant):
        def prepare(contest):
            call = contestant.prepare(contest)
            return lambda: change(call())

        return replace(contestant, prepare=prepare)

    changed = tuple(wrong(c) if c.name == name else c for c in stage.contestants)
    return replace(stage, contestants=changed)


@pytest.mark.parametrize("who", ["SDPA is_causal", "frisket aten"])
def test_a_wrong_contestant_is_shown_and_not_timed(stage, who):
    found = finished(CAUSAL, off(stage, who, lambda x: x + 1e-2), families={"sdpa"})
    assert found.out[who] == "wrong, not timed: 0.01 apart from the interpreter"
    assert who not in found.times
    assert len(found.times["SDPA with a mask"]) == 2


def test_an_error_where_the_interpreter_does_not_look(stage):
    def change(x):
        x = x.clone()
        x[:, :, 60, 3] += 1  # of 300 queries, 32 are sampled in three places
        return x

    contest = replace(CAUSAL, sizes=replace(SIZES, q_len=300, kv_len=300))
    found = finished(contest, off(stage, "SDPA is_causal", change), families={"sdpa"})
    assert found.out["SDPA is_causal"].startswith("not timed: 1 apart from frisket")


def test_nan_is_never_agreement(stage):
    found = finished(CAUSAL, off(stage, "SDPA is_causal", lambda x: x * float("nan")), families={"sdpa"})
    assert found.out["SDPA is_causal"].startswith("wrong, not timed: 1,024 of 1,024 numbers are NaN")


def test_queries_that_see_no_key_are_told(stage):
    """A peer may answer anything there."""
    mask = fk.mask("causal & q >= 5")
    found = finished(Contest("late", mask, None, SIZES), off(stage, "SDPA with a mask", lambda x: x.fill_(1.0)))
    assert found.out["SDPA with a mask"].endswith("; some queries see no key, where results are 0 here")


def test_peers_with_wrong_gradients_are_not_timed(stage):
    contest = replace(CAUSAL, sizes=replace(SIZES, backward=True))
    changed = off(stage, "SDPA is_causal", lambda grads: (grads[0], grads[1] * 1.01, grads[2]))
    assert finished(contest, changed, families={"sdpa"}).out["SDPA is_causal"].startswith("not timed: ")


def test_an_error_of_a_peer_is_part_of_the_result(stage):
    def broken(contest):
        raise RuntimeError("no kernel\nand a long story")

    changed = replace(stage, contestants=(*stage.contestants, Contestant("new", broken, family="sdpa")))
    assert finished(CAUSAL, changed, families={"sdpa"}).out["new"] == "failed: RuntimeError: no kernel"


def test_flash_attention_is_told_causal_and_windows(monkeypatch):
    """A stand-in that has flash_attn's arguments and arrays [batch, length, heads, dim]."""
    given = []

    def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1)):
        given.append((causal, window_size))
        at = torch.arange(q.shape[1])
        far = at[:, None] - at
        seen = (far >= 0) & (far <= (window_size[0] if window_size[0] >= 0 else len(at)))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)

    module = ModuleType("flash_attn")
    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    halves = replace(SIZES, dtype="bfloat16")
    flash = Contestant("FlashAttention", lambda c: contestants._flash("cpu", c))
    ours = named(contestants.torch_stage("cpu"), "frisket aten")
    both = replace(ours, contestants=(*ours.contestants, flash))
    for text in ("causal", "causal & window(20)"):
        found = finished(Contest(text, fk.mask(text), None, halves), both, rounds=1)
        assert "FlashAttention" in found.times, found.out
    assert {(True, (-1, -1)), (True, (19, 0))} == set(given)
    with pytest.raises(NoWordsError, match="16 bits"):
        contestants._flash("cpu", CAUSAL)


def test_a_mask_that_hides_nothing_is_told_so(stage, monkeypatch):
    monkeypatch.setattr(Contest, "dense", lambda contest: pytest.fail("a bool for every pair"))
    for text in ("full", "q >= k | q < k"):
        contest = Contest(text, fk.mask(text), None, SIZES)
        found = finished(contest, named(stage, "frisket aten", "SDPA is_causal"), rounds=1)
        assert "SDPA is_causal" in found.times, found.out


def test_bench_results_name_the_device(stage):
    from frisket.runtime.cli.timing import results

    on_a_gpu = replace(stage, machine={"gpu": "H200"})
    made = results("gpu", [finished(CAUSAL, on_a_gpu, families={"sdpa"})], SIZES, 2)
    assert made["parts"]["gpu, torch"]["machine"]["gpu"] == "H200"


def test_a_window_is_known_by_what_it_shows():
    def window(text, **params):
        return Contest("", fk.mask(text, **params), None, SIZES).window()

    assert window("causal") == window("q - k >= 0") == 0
    assert window("causal & window(w)", w=7) == window("k <= q & k > q - 7") == 7
    assert window("causal & (window(7) | sinks(1))") is window("window(7)") is None


@pytest.mark.exhaustive
def test_splash_attention_interpreted():
    pytest.importorskip("jax")
    pytest.importorskip("jax")
    from functools import partial

    sizes = replace(SIZES, q_len=256, kv_len=256, head_dim=128)
    plain = contestants.jax_stage("cpu")
    splash = Contestant("splash", partial(contestants.splash, "cpu", True), family="splash")
    both = replace(plain, contestants=(*plain.contestants, splash))
    for contest in standard(sizes)[:3]:
        found = finished(contest, both, rounds=1, families={"splash"})
        assert "splash" in found.times, found.out


# -- layouts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["causal & window(200)", "natten2d(16, 32, 5, 5)"])
def test_block_mask_builders_agree_before_timing(text):
    contest = Contest(text, fk.mask(text), None, replace(SIZES, q_len=512, kv_len=512, heads=1))
    found = finished(contest, contestants.layout_stage())
    assert set(found.times) | set(found.out) == {"frisket", "create_block_mask", "splash process_mask"}
    assert not [why for why in found.out.values() if not why.endswith("is not installed")]


def test_a_layout_that_misses_a_tile():
    def change(given):
        tiles = given().copy()
        tiles[0, 0, 0, 0] = False
        return lambda: tiles

    contest = replace(CAUSAL, sizes=replace(SIZES, q_len=256, kv_len=256, heads=1))
    found = finished(contest, off(contestants.layout_stage(), "create_block_mask", change))
    assert found.out["create_block_mask"] == "wrong, not timed: 1 apart from the interpreter"


def test_a_score_mod_has_no_layout():
    contest = Contest("", None, fk.score("softcap(5)"), replace(SIZES, q_len=256, kv_len=256))
    found = finished(contest, contestants.layout_stage(), rounds=1)
    assert not found.times
    assert found.out["frisket"] == "a score mod hides nothing: there are no tiles to tell apart"


def test_peers_are_not_asked_for_what_takes_minutes():
    contest = replace(CAUSAL, sizes=replace(SIZES, q_len=1 << 20, kv_len=1 << 20, heads=1))
    found = finished(contest, contestants.layout_stage(), rounds=1)
    assert set(found.times) == {"frisket"}
    assert all("is not asked for more than" in why or "not installed" in why for why in found.out.values())


# -- the command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [72, 80, 120, None])
def test_a_table_is_as_wide_as_the_terminal(columns):
    times = {"frisket cpp": [0.0331, 0.0333], "jax.nn.dot_product_attention": [0.322, 0.323], "fast": [0.001, 0.002]}
    why = "it takes plain causal masks alone, of as many queries as keys, and this is another mask"
    found = race.Race(CAUSAL, "torch", ("frisket cpp",), 2, times, out={"SDPA is_causal": why})
    shown = [text.plain for text in lines([found], columns)]
    assert max(map(len, shown)) <= (columns or 200)
    assert ("█" in "".join(shown)) == (columns != 72)
    assert why in " ".join(" ".join(shown).split())
    assert not any(line.endswith(" ") for line in shown)


@pytest.fixture
def bench(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*argv):
        status = main(["bench", *map(str, argv)])
        out = capsys.readouterr()
        return status, out.out, out.err

    plain = contestants.torch_stage
    monkeypatch.setattr(contestants, "torch_stage", lambda device: named(plain(device), *INSTANT))
    return call


SMALL = ("--q-len", 64, "--heads", 2, "--head-dim", 16, "--rounds", 2, "--framework", "torch", "--peers", "sdpa")


def test_a_table_json_and_a_chart(bench, tmp_path):
    pytest.importorskip("matplotlib")
    status, out, err = bench("causal & window(w)", "--set", "w=8", *SMALL, "-o", "r.json", "--chart", "r.png")
    assert (status, err) == (0, "")
    assert out.startswith("causal & window(w), torch\n")
    assert "SDPA is_causal    it takes plain causal masks alone, of as many queries as keys\n" in out
    assert "64 × 64 tokens, batch 1, 2 heads of 16, float32, forward; medians of 2 rounds, interleaved" in out
    found = json.loads((tmp_path / "r.json").read_text())
    schema.check(found)
    part = found["parts"]["cpu, torch"]
    assert part["settings"]["dtype"] == "float32"
    row = part["rows"]["causal & window(w)"]
    ours = [n for n in row["figures"]["ms"] if n.startswith("frisket")]
    assert set(row["ratios"]) == {f"SDPA with a mask / {n}" for n in ours}
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    status, out, _ = bench("causal", *SMALL, "--json")
    schema.check(json.loads(out))
    status, out, _ = bench("causal", *SMALL[:-1], "none", "--chart", "none.png")
    assert (status, out.splitlines()[-1]) == (0, "written   no chart: no other library was timed")
    assert not (tmp_path / "none.png").exists()


def test_status_1_where_ours_is_wrong(bench, monkeypatch):
    plain = contestants.torch_stage
    wrong = lambda device: off(plain(device), "frisket aten", lambda x: x * 1.1)  # noqa: E731
    monkeypatch.setattr(contestants, "torch_stage", wrong)
    status, out, _ = bench("causal", *SMALL)
    assert status == 1
    assert "WRONG     causal: frisket aten" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--suite", "tpu"], "the tpu suite does not run here: no TPU is visible to "),
        (["--suite", "gpu"], "the gpu suite does not run here: no GPU is visible to "),
        (["--suite", "tpu", "--framework", "torch"], "the tpu suite does not run here: no TPU is visible to torch; "),
        (["--suite", "layout", "--backward"], "--suite layout does not read --backward; leave it out"),
        (["--suite", "compile", "--kv-len", "64"], "--suite compile does not read --kv-len; leave it out"),
        (["--peers", "sdap"], "there is no 'sdap'; there are sdpa, flex, flash, jax, splash, and none"),
        (["--chart", "x.pdf"], "cannot write 'x.pdf': name it .png or .svg"),
        (["-o", "x.txt"], "cannot write 'x.txt': name it .json"),
        (["-o", "no/x.json"], "cannot write no/x.json: there is no folder no"),
        (["causal & window(w)"], "`w` has no value; give it: --set w=VALUE"),
        (["--heads", "3", "--kv-heads", "2"], "--heads 3 is no multiple of --kv-heads 2"),
    ],
)  # fmt: skip
def test_bench_refuses_bad_input(bench, options, message):
    if options[0] == "--suite" and (torch.cuda.is_available() or "TPU" in str(sys.modules.get("libtpu"))):
        pytest.skip("there is one")
    status, out, err = bench(*options)
    assert (status, out) == (2, "")
    assert message in err


def test_bench_ignores_the_gpu_of_the_unused_framework(bench, monkeypatch):
    monkeypatch.setattr(cli_bench, "has_device", lambda device, name: name == "torch")
    pytest.importorskip("jax")
    status, out, err = bench("--suite", "gpu", "--framework", "jax")
    assert (status, out) == (2, "")
    assert "no GPU is visible to jax; --suite cpu does" in err


@pytest.mark.exhaustive
def test_bench_help_examples_run(bench, tmp_path):
    parser = ArgumentParser()
    add_bench(parser)
    lines = [line.strip() for line in parser.epilog.splitlines() if line.strip().startswith("frisket bench ")]
    assert len(lines) == 2
    for line in lines:
        assert bench(*shlex.split(line)[2:])[0] == 0


@pytest.mark.exhaustive
def test_bench_of_first_calls_counts_compilations(bench, tmp_path):
    (tmp_path / "queue.py").write_text("raise SystemExit('the file of a folder')")
    options = ("--q-len", 128, "--heads", 2, "--head-dim", 16, "--framework", "torch", "--peers", "sdpa", "--json")
    status, out, _ = bench("causal & window(9)", "--suite", "compile", *options)
    assert status == 0
    found = json.loads(out)
    schema.check(found)
    figures = found["parts"]["compile, torch"]["rows"]["causal & window(9)"]["figures"]
    assert set(figures["s, cold"]) == set(figures["s, from disk"])
    assert figures["compilations for 3 other lengths"]["frisket aten"] == 0
