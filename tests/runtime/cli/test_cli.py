"""The command line: what it prints, where, and its exit status."""

import contextlib
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from support.tiers import default_only

from frisket.lowering.analysis.tiling import Facts
from frisket.lowering.architectures import tried
from frisket.runtime.backends import base
from frisket.runtime.backends.base import RECORDS
from frisket.runtime.cli.main import main
from frisket.runtime.machine import cpp_build as native_build
from frisket.runtime.machine.modules import pip_install


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """`run("show", "causal")` gives (status, stdout, stderr), in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*argv):
        status = main([str(a) for a in argv])
        out = capsys.readouterr()
        return status, out.out, out.err

    return call


DOC = np.repeat([0, 1, 2], [300, 500, 224]).astype(np.int32)
SHOWN = {
    "causal_window": ["causal & window(w)", "--set", "w=256"],
    "documents": ["causal & same(doc)", "--table", "doc=doc.npy", "--q-len", "1024"],
    "prefix": ["prefix(300) | causal", "--q-len", "1000"],
    "dilated": ["dilated(512, 4)", "--score", "alibi", "--q-len", "1500", "--block", "128x256"],
    "long": ["causal & (window(4096) | sinks(4))", "--q-len", "131072"],
    "heads": ["causal | h == 0", "--heads", "4", "--h", "1", "--q-len", "700"],
    "everything": ["q >= 0", "--q-len", "256", "--kv-len", "512"],
}


@pytest.mark.parametrize("name", SHOWN)
def test_show_prints_the_golden_picture(run, golden, tmp_path, name):
    np.save(tmp_path / "doc.npy", DOC)
    status, out, err = run("show", *SHOWN[name])
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    golden(f"show_{name}.txt", out)


def test_show_a_score_mod_alone(run):
    assert run("show", "softcap(c)", "--set", "c=50.0") == (
        0,
        "score     softcap(c)\nmeans     c * tanh(score / c)\nwith      c = 50.0\n",
        "",
    )


HIDES = "where(q - k < 200, score, -inf)"
BOTH = "causal & q - k < 200"


def test_tiles_hidden_by_a_score_mod_are_shown_and_drawn(run, tmp_path):
    """Attention does not read it, so it is no part of the picture, whichever command draws."""
    sizes = ("--q-len", "1024")
    wanted = json.loads(run("show", BOTH, *sizes, "--json")[1])
    for argv in (("causal", "--score", HIDES), (f"where({BOTH}, score, -inf)",)):
        found = json.loads(run("show", *argv, *sizes, "--json")[1])
        assert (found["counts"], found["visible_pairs"]) == (wanted["counts"], wanted["visible_pairs"])
        drawn = json.loads(run("plot", *argv, *sizes, "-o", "m.html", "--json")[1])
        assert (drawn["counts"], drawn["score"]["hides"]) == (wanted["counts"], True)
        assert "is false" in json.loads(run("explain", *argv, "--q", "500", "--k", "3", "--json")[1])["because"]
        assert json.loads(run("explain", *argv, *sizes, "--tile", "5,0", "--json")[1])["kind"] == "empty"
    read = (tmp_path / "m.html").read_text()
    run("plot", "causal", *sizes, "-o", "causal.html")
    assert read != (tmp_path / "causal.html").read_text()


def test_plot_says_that_a_score_mod_is_not_drawn(run):
    for suffix in (".png", ".html"):
        status, out, err = run("plot", "causal", "--score", "softcap(50)", "-o", "m" + suffix)
        assert (status, err) == (0, "")
        assert "score     softcap(50) hides nothing, so it is not in the picture" in out
    assert "score" not in run("plot", "causal", "-o", "m.png")[1]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_that_json_lacks_are_texts(run, value):
    status, out, _ = run("show", "q - k < w", "--set", f"w={value}", "--q-len", "8", "--json")
    found = json.loads(out, parse_constant=pytest.fail)
    assert (status, str(float(found["params"]["w"]))) == (0, value)


def test_show_a_file(run, tmp_path):
    (tmp_path / "m.frisket").write_text("param w: int = 64\nmask = causal & window(w)\nscore = softcap(50)\n")
    status, out, _ = run("show", "m.frisket", "--q-len", 512, "--json")
    found = json.loads(out)
    assert status == 0
    assert found["mask"] == "q >= k & abs(q - k) < w"
    assert found["simplified"]["score"] == "50.0 * tanh(score / 50.0)"
    assert found["params"] == {"w": 64}
    assert found["counts"] == {"empty": 9, "partial": 7, "full": 0}
    assert found["visible_pairs"] == sum(min(q + 1, 64) for q in range(512))


def test_explain_a_point(run):
    assert run("explain", "causal & window(w)", "--set", "w=256", "--q", 300, "--k", 17) == (
        0,
        "position  query 300, key 17\nanswer    hidden\n"
        "because   in window(w), abs(q - k) < w is false: abs(q - k) = 283, w = 256\n"
        "mask      causal & window(w)\n                   ^^^^^^^^^\n",
        "",
    )
    status, out, _ = run("explain", "causal", "--q", 5, "--k", 2, "--json")
    assert status == 0
    assert json.loads(out)["visible"] is True


def test_explain_a_tile(run):
    assert run("explain", "causal & window(w)", "--set", "w=256", "--tile", "8,2") == (
        0,
        "tile      queries 1,024..1,151, keys 256..383\nanswer    empty\n"
        "because   in window(w), abs(q - k) < w is false throughout: abs(q - k) = 641..895, w = 256\n"
        "mask      causal & window(w)\n                   ^^^^^^^^^\n",
        "",
    )
    status, out, _ = run("explain", "causal", "--tile", "5,5", "--json")
    data = json.loads(out)
    assert (status, data["kind"], data["tile"]) == (0, "partial", [5, 5])
    assert data["visible_at"] == {"b": 0, "h": 0, "q": 640, "k": 640}
    assert data["hidden_at"] == {"b": 0, "h": 0, "q": 640, "k": 641}


def test_expand_writes_calls_out_as_formulas(run):
    text, formula = "causal & window(w) | sinks(4)", "q >= k & abs(q - k) < w | k < 4"
    argv = [text, "--set", "w=256"]
    assert run("show", *argv)[1].startswith(f"mask      {text}\n")
    assert run("show", *argv, "--expand")[1].startswith(f"mask      {formula}\n")
    point = run("explain", *argv, "--q", 300, "--k", 17, "--expand")[1].splitlines()
    assert point[2:5] == [
        "because   abs(q - k) < w is false: abs(q - k) = 283, w = 256",
        "          k < 4 is false: k = 17",
        f"mask      {formula}",
    ]
    stages = run("explain", "causal", "--score", "alibi then softcap(5)", "--expand", "--json")[1]
    assert json.loads(stages)["expr"].splitlines()[0] == "mask = q >= k"
    assert "softcap" not in json.loads(stages)["expr"]
    kept = run("explain", "causal", "--score", "alibi then softcap(5)", "--json")[1]
    assert json.loads(kept)["expr"] == "mask = causal\nscore = alibi then softcap(5)"


def test_show_says_where_lookups_leave_their_tables(run, tmp_path):
    np.save(tmp_path / "t.npy", np.zeros(500, np.float32))
    table = f"t={tmp_path / 't.npy'}"
    argv = ["show", "causal & window(600)", "--score", "score + t[q - k]", "--table", table, "--q-len", "1024"]
    status, out, _ = run(*argv)
    assert status == 0
    line = "score     t[q - k] leaves 500 entries: q - k = 500 at query 500, key 0 (b 0, h 0), where it reads the last"
    assert line in out.splitlines()
    status, out, _ = run(*argv, "--json")
    assert json.loads(out)["score_lookups"][0]["witness"] == [0, 0, 500, 0]
    status, out, _ = run("show", "causal & window(500)", *argv[2:])
    assert "score     t[q - k] stays within 500 entries" in out.splitlines()


NUMBERS = (
    "the numbers stand in brackets, for example doc=[0,0,1,1], and rows of equal length in brackets of theirs, "
    "for example t=[[0,1],[2,3]]\n"
)
BAD = {
    "show 'q - k'": "MaskSyntaxError: a mask needs a Bool, this is an Int\n  mask 1:1\n    q - k\n    ^^^^^\n"
    "  compare it with something, for example `q - k >= 0`\n",
    "show nothere.frisket": "cannot read nothere.frisket: No such file or directory\n",
    "show causal --set w=x": "ParameterError: --set w=x: write NAME=VALUE with a number, true or false, "
    "for example --set w=256\n",
    "show same(doc) --set doc=[0,0,1]": "ParameterError: --set doc=[0,0,1]: a list is a table: "
    "write --table doc=[0,0,1]\n",
    "show window(w)": "ParameterError: `w` has no value; give it: --set w=VALUE\n",
    "show q_idx>=k": "ParameterError: `q_idx` has no value (positions are `b`, `h`, `q` and `k`: write `q`); "
    "give it: --set q_idx=VALUE\n",
    "show same(doc)": "ParameterError: `doc` has no value; give it: --table doc=FILE\n",
    "show same(doc) --table doc": "ParameterError: --table doc: write NAME=FILE with a .npy file, "
    "for example --table doc=doc.npy, or the numbers, for example --table doc=[0,0,1,1]\n",
    "show same(doc) --table doc=[0,": "ParameterError: --table doc=[0,: " + NUMBERS,
    "show same(doc) --table doc=[[0],[1,2]]": "ParameterError: --table doc=[[0],[1,2]]: " + NUMBERS,
    "show 'same(doc)' --table 'doc=[\"a\"]'": 'ParameterError: --table doc=["a"]: ' + NUMBERS,
    "show same(doc) --table doc=no.npy": "cannot read no.npy: No such file or directory\n",
    "show same(doc) --table doc=short.npy": "ParameterError: table `doc` has 10 entries on axis 0 and is read at `q` = "
    "0..2047; give 2048, or hide what lies beyond: `q < 10 & ...`\n",
    "show causal --q-len 100000000000": "ParameterError: 100,000,000,000 queries are 781,250,000 rows of tiles, more "
    "than 16,777,216\n  take larger tiles, for example --block 5961\n",
    "emit window(w) --backend triton": "ParameterError: `w` has no value; give it: --set w=VALUE\n",
    "emit causal --backend nope": "BackendError: no backend 'nope'; there are aten, xla, cpp, triton, gluon, flash, "
    "pallas-tpu, pallas-mosaic-gpu, sdpa, cudnn, splash, dense, library, native\n",
    "emit causal --backend cpp --report": "ParameterError: --report is about Triton kernels, not 'cpp'; write "
    "--backend triton\n",
    "emit causal --backend cpp --arch sm_90": "ParameterError: --arch is about Triton kernels, not 'cpp'; write "
    "--backend triton\n",
    "emit causal --backend triton --arch sm_90 sm_80": "ParameterError: one text is for one GPU: --arch sm_90; several "
    "go with --report\n",
    "emit causal --build --report": "ParameterError: --report and --arch are about GPUs, --build about this CPU: "
    "leave one or the other out\n",
    "emit causal --build --arch sm_90": "ParameterError: --report and --arch are about GPUs, --build about this CPU: "
    "leave one or the other out\n",
    "emit causal --backend triton --heads 8 --kv-heads 3": "ShapeError: --heads 8 is no multiple of --kv-heads 3; "
    "key heads are shared evenly\n",
    "emit causal --backend triton --report --arch sm_70": "BackendError: no figures for 'sm_70'; ahead-of-time reports "
    "know sm_75, sm_80, sm_86, sm_87, sm_89, sm_90, sm_100, sm_103, sm_110, sm_120, sm_121, gfx90a, gfx942, gfx950, "
    "gfx1100, gfx1201\n  `frisket doctor` says which GPUs these are\n",
    "show causal --h 3": "ShapeError: --h 3 is outside the 1 there are; give --batch or --heads\n",
    "explain causal --q 3": "ShapeError: --q and --k go together: a query and a key, for example --q 300 --k 17\n",
    "explain softcap(50) --q 3 --k 3": "ParameterError: this score mod hides nothing, so there are no "
    "tiles to explain; give a mask\n",
    "explain causal --tile 0,0 --q 3 --k 3": "ShapeError: --tile explains a tile, --q and --k a position: "
    "give one of them\n",
    "explain softcap(50) --tile 0,0": "ParameterError: this score mod hides nothing, so there are no tiles to "
    "explain; give a mask\n",
    "explain causal --q-len 300 --tile 3,0": "ShapeError: tile row 3 is outside this layout, which has 0..2\n",
    "explain causal --q-len 8 --q 9 --k 3": "ShapeError: q = 9 is outside 0..7\n  positions are global\n",
    "run causal --tokens nothere.md": "cannot read nothere.md: No such file or directory\n",
    "run softcap(50) --tokens a.md": "ShapeError: `run` needs a mask; give one, for example `causal`, "
    "and the score mod with --score\n",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_command_input_is_refused_with_its_text(run, tmp_path, line):
    import shlex

    (tmp_path / "a.md").write_text("some text")
    np.save(tmp_path / "short.npy", np.zeros(10, np.int32))
    assert run(*shlex.split(line)) == (2, "", BAD[line])


def test_lengths_beyond_memory(run, monkeypatch):
    def layout(self, *args, **options):
        raise MemoryError("Unable to allocate 5.68 TiB")

    monkeypatch.setattr("frisket.runtime.masks.mask.Mask.layout", layout)
    assert run("show", "causal") == (
        2,
        "",
        "not enough memory: Unable to allocate 5.68 TiB\n  ask for smaller lengths, or larger tiles with --block\n",
    )


def test_a_table_that_is_no_table(run, tmp_path):
    (tmp_path / "doc.npy").write_text("not an array")
    status, out, err = run("show", "same(doc)", "--table", "doc=doc.npy")
    assert (status, out) == (2, "")
    assert err.startswith("ParameterError: --table doc=doc.npy: doc.npy is not a .npy file (")
    assert err.endswith("; write it with numpy.save\n")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["show"], "the following arguments are required: EXPR"),
        (["show", "causal", "--q-len", "0"], "argument --q-len: must be at least 1"),
        (["show", "causal", "--q-len", "-5"], "argument --q-len: must be at least 1"),
        (["explain", "causal", "--q", "-5", "--k", "0"], "argument --q: must be at least 0"),
        (
            ["show", "causal", "--q-len", "1e6"],
            "argument --q-len: '1e6' is not a whole number in digits, such as 1000000",
        ),
        (["show", "causal", "--block", "64x"], "argument --block: '' is not a whole number"),
        (["show", "causal", "--block", "0x64"], "argument --block: must be at least 1"),
        (["show", "causal", "--block", "big"], "argument --block: 'big' is not a whole number"),
        (["run", "causal", "--tokens", "a", "--head-dim", "63"], "must be even: RoPE turns pairs of channels"),
        (["shwo"], "frisket: there is no command 'shwo'; did you mean show?\n  see `frisket --help`\n"),
        (["show", "causal", "--q-lne", "8"], "frisket show: there is no option --q-lne; did you mean --q-len?\n"),
        (["show", "causal", "--q", "8"], "frisket show: there is no option --q; did you mean --q-len?\n"),
        (["doctor", "causal"], "frisket doctor: 'causal' is one word too many\n"),
        (["show", "q", "-", "k"], "'-' is one word too many; an EXPR with spaces is written in quotes: 'causal &"),
        (["check", "causal", "--case", "cpp"], "'cpp' is no case; a mismatch prints one, for example torch/cpp/"),
        (["completion", "tcsh"], "argument SHELL: invalid choice: 'tcsh' (choose from"),
    ],
)
def test_bad_command_usage_is_refused(run, argv, told):
    status, out, err = run(*argv)
    assert (status, out) == (2, "")
    assert told in err


def shell(argv, **env):
    code = "import sys; from frisket.runtime.cli.main import main; sys.exit(main(sys.argv[1:]))"
    merged = {**os.environ, **env}
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, env=merged, check=True).stdout


def test_output_to_pipes_has_no_colour_and_may_be_ascii():
    argv = ["show", "causal", "--q-len", "384"]
    plain = shell(argv, PYTHONIOENCODING="utf-8")
    assert b"\x1b" not in plain
    assert "▒▒·".encode() in plain
    narrow = shell(argv, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert narrow.isascii()
    assert b"++. ." in narrow
    assert b"384 queries x 384 keys, in tiles of 128 x 128" in narrow
    assert b"# 3 full: every pair" in narrow


def test_explain_shows_the_stages(run, golden):
    argv = ["explain", "causal & window(64)", "--score", "where(k < 500, score, -inf)", "--q-len", "512"]
    status, out, err = run(*argv)
    assert (status, err) == (0, "")
    golden("explain.txt", out)
    status, out, _ = run(*argv, "--json")
    assert json.loads(out)["rules"]["merge-bounds"] > 0


@pytest.mark.parametrize("backend", ["triton", "pallas-tpu"])
def test_emit_prints_the_kernel(run, backend):
    import frisket as fk

    status, out, err = run("emit", "causal & window(256)", "--backend", backend, "--head-dim", "128")
    assert (status, err) == (0, "")
    att = fk.compile("causal & window(256)")
    assert out == att.source(backend, q_len=2048, kv_len=2048, heads=1, head_dim=128)
    compile(out, backend, "exec")


def test_emit_takes_tile_heads_dtype_and_architecture(run):
    import frisket as fk

    sizes = "--heads 4 --kv-heads 2 --head-dim 64 --v-dim 32 --dtype bfloat16 --block 32x16 --arch gfx942"
    status, out, err = run("emit", "causal", "--backend", "triton", *sizes.split())
    assert (status, err) == (0, "")
    assert "tiles of 32 queries by 16 keys" in out
    shape = {"q_len": 2048, "kv_len": 2048, "heads": 4, "kv_heads": 2, "head_dim": 64, "v_dim": 32, "dtype": "bfloat16"}
    assert out == fk.compile("causal", tile=(32, 16)).source("triton", arch="gfx942", **shape)
    amd, nvidia = (
        run("emit", "causal", "--backend", "triton", "--dtype", "bfloat16", "--arch", arch)[1]
        for arch in ("gfx942", "sm_90")
    )
    assert "num_stages=1" in amd
    assert amd != nvidia


@pytest.mark.exhaustive
def test_emit_reports_what_kernels_take(run, monkeypatch):
    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
    argv = "emit causal --backend triton --report --q-len 4 --kv-len 2048 --dtype bfloat16".split()
    status, out, err = run(*argv, "--json")
    assert (status, err) == (0, "")
    decode, combine = json.loads(out)["kernels"]
    assert (decode["kernel"], combine["kernel"]) == ("attention_decode", "attention_combine")
    assert decode["arch"] == "sm_90"
    assert decode["spills"] == 0
    assert decode["mma"] > 0
    assert decode["fits"] is True
    assert "cudnn: no GPU of NVIDIA is visible to torch" in json.loads(out)["engines"].splitlines()
    status, out, err = run(*argv)
    head, line, _, _, *engines = out.splitlines()
    assert "H100 (sm_90): measured on; tests and benchmarks, torch and JAX" in engines
    assert "cudnn: no GPU of NVIDIA is visible to torch" in engines
    assert head.split()[:2] == ["kernel", "GPU"]
    assert line.split()[:6] == ["decode", "sm_90", str(decode["block_q"]), "x", str(decode["block_k"]), "4"]
    assert f" {decode['registers']} " in line
    assert f"{decode['shared']:,} of 232,448" in line


@pytest.mark.exhaustive
def test_emit_reports_the_kernels_that_divide_long_rows(run):
    mask = "abs(q - k) <= 256 | k < 64 | q < 64"
    argv = "--backend triton --report --q-len 8192 --heads 16 --head-dim 64 --dtype bfloat16".split()
    status, out, err = run("emit", mask, *argv, "--json")
    assert (status, err) == (0, "")
    found = {r["kernel"].removeprefix("attention_"): r for r in json.loads(out)["kernels"]}
    assert [*found] == ["forward", "combine", "delta", "dq", "dq_sums", "dkv", "dkv_sums"]
    assert all(r["registers"] > 0 and r["spills"] == 0 for r in found.values())
    assert [found[n]["warps"] for n in ("combine", "dq_sums", "dkv_sums")] == [2, 2, 2]
    assert [r["mma"] > 0 for r in found.values()] == [True, False, False, True, False, True, False]
    summed = [line.split() for line in run("emit", mask, *argv)[1].splitlines() if line.startswith("dq_sums")]
    assert summed[0][:4] == ["dq_sums", "sm_90", "2", str(found["dq_sums"]["stages"])]


@pytest.mark.parametrize("archs", default_only(["sm_90", "sm_90 sm_100"], "sm_90"))
def test_emit_reports_the_kernels_of_the_backend(run, archs):
    argv = "emit causal --backend gluon --report --q-len 1024 --head-dim 64 --dtype bfloat16 --arch"
    status, out, err = run(*argv.split(), *archs.split(), "--json")
    assert (status, err) == (0, "")
    rows = json.loads(out)["kernels"]
    # on Hopper the fused backward too
    kernels = {"sm_90": ["attention_forward", "attention_backward"], "sm_100": ["attention_forward"]}
    assert [(row["arch"], row["kernel"]) for row in rows] == [(a, n) for a in archs.split() for n in kernels[a]]
    sizes = {"sm_90": ("warps", 12), "sm_100": ("block_q", 256)}
    for row in rows:
        name, size = sizes[row["arch"]]
        assert row[name] == size
        assert row["spills"] == 0


def test_emit_reports_need_triton(run, monkeypatch):
    monkeypatch.setattr("frisket.runtime.backends.triton.kernels.find_spec", lambda name: None)
    status, out, err = run("emit", "causal", "--backend", "triton", "--report")
    assert (status, out) == (2, "")
    assert err == f"BackendError: triton is not installed: {pip_install('triton')}\n"


def test_emit_for_library_calls(run):
    status, out, err = run("emit", "causal", "--backend", "aten")
    assert (status, out) == (2, "")
    assert err.startswith("LoweringError: backend 'aten' runs library calls and has no kernel text")


def test_doctor_lists_packages_backends_and_engines(run):
    import frisket as fk

    status, out, err = run("doctor", "--json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert found["packages"]["numpy"] == np.__version__
    assert found["backends"].keys() == fk.backends().keys()
    for name, why in fk.backends().items():
        assert found["backends"][name].startswith(why or "runs here")
    status, out, _ = run("doctor")
    assert status == 0
    assert "backends  ✓ aten               runs here: library calls of torch\n" in out
    assert "FRISKET_BACKEND" in out
    assert found["lacks"] == {b.name: b.features for b in RECORDS.values() if b.features}
    assert "lacks     aten                 float8_e4m3fn, equal bits in any batch\n" in out
    assert "          xla                  float8_e4m3fn, equal bits in any batch, 64-bit integers\n" in out
    assert "queries of float8_e4m3fn are experimental" in RECORDS["gluon"].kernels  # shown where it runs
    assert "engines   cudnn                by itself on CUDA (compute capability 9.0, " in out
    assert [row["machine"] for row in found["tried"]] == [x.machine for x in tried()]
    assert "tried     measured on          x86-64 CPUs, Linux; H100 (sm_90)\n" in out
    assert "          never                arm64 CPUs, macOS; Windows; " in out
    assert "flash                experimental, as no device has run it under frisket; where it is named" in out
    assert "sdpa                 by itself on CPU; where it is named: engines='sdpa'\n" in out


def test_doctor_imports_no_framework_to_find_no_gpu(monkeypatch):
    """Where no driver of a GPU is: to import torch and JAX takes seconds."""
    program = """
import sys
from frisket.runtime.backends import base
from frisket.runtime.cli.main import main
base.DRIVERS = ()
try:
    main(["doctor"])
except SystemExit as done:
    assert not done.code
assert not {"torch", "jax"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "triton             no GPU is visible to torch" in done.stdout
    monkeypatch.setattr(base, "DRIVERS", ("/proc/self",))  # a driver's file: the framework is asked
    assert not base.no_driver("a framework")
    monkeypatch.setattr(base, "DRIVERS", ("/dev/no such driver*",))
    assert base.no_driver("a framework") == (sys.platform == "linux")
    assert not base.no_driver("sys")  # imported already


def test_doctor_on_caches(run):
    status, out, err = run("doctor", "--caches", "--json")
    assert (status, err) == (0, "")
    found = {t["name"]: t for t in json.loads(out)["tables"]}
    assert {"expressions", "sources", "lowering.pipeline.work"} <= found.keys()
    assert all(0 <= t["entries"] <= t["bound"] for t in found.values())
    assert found["expressions"]["entries"] > 0
    assert found["expressions"]["bytes"] > 0
    assert [line for line in run("doctor", "--caches")[1].splitlines() if line.startswith("expressions ")]


@pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason())
def test_doctor_on_native_kernels(run, monkeypatch, tmp_path):
    def native():
        return json.loads(run("doctor", "--json")[1])["native"]

    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
    monkeypatch.setenv("FRISKET_CACHE_DIR", str(tmp_path))
    found = native()
    assert list(found) == ["compiler", "cpu", "cache"]
    command = native_build.compiler()
    assert found["compiler"] == f"{' '.join(command)}: {native_build.compiler_version(command)}"
    assert found["cpu"] in native_build.VARIANTS
    assert found["cache"].startswith(f"{tmp_path}/native, ")
    monkeypatch.setenv("FRISKET_BACKEND", "library")
    assert native()["off"] == "FRISKET_BACKEND is library"
    monkeypatch.delenv("FRISKET_BACKEND")
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FRISKET_CACHE_DIR", str(tmp_path / "file"))
    assert native()["cache"].endswith(f"kernels; {tmp_path}/file/native cannot be written to")
    monkeypatch.setenv("CXX", str(tmp_path / "file"))
    assert native() == {"off": f"no C++ compiler: CXX is '{tmp_path}/file', which is not there"}
    assert "native    off                  no C++ compiler: CXX is" in run("doctor")[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_run_packs_attends_and_reports(run, tmp_path, framework):
    (tmp_path / "a.md").write_text("one " * 40)
    (tmp_path / "b.md").write_text("two " * 100)
    (tmp_path / "packed.frisket").write_text(
        "param w: int = 64\nmask = causal & same(doc) & window(w)\nscore = softcap(50)\n"
    )
    argv = ["run", "packed.frisket", "--tokens", "a.md", "b.md", "--max-tokens", "384", "--heads", "2"]
    argv += ["--head-dim", "16", "--repeats", "1", "--framework", framework]
    status, out, err = run(*argv)
    assert (status, err) == (0, "")
    assert (
        "tokens    384 of 560 bytes, the longest files cut at --max-tokens 384\n          a.md 160, b.md 224\n" in out
    )
    assert "score     softcap(50)\nmeans     50.0 * tanh(score / 50.0)\n" in out
    assert "queries ╲ keys" in out
    assert "from the float64 reference" in out
    assert re.search(r"^time +[\d.]+ (µs|ms|s)  frisket\n +[\d.]+ (µs|ms|s)  .*, [\d.]+ × as long$", out, re.M)
    assert "          medians of 1 run, interleaved\n" in out
    status, out, _ = run(*argv, "--json")
    found = json.loads(out)
    assert status == 0
    assert found["files"] == {"a.md": 160, "b.md": 224}
    pairs = 2 * sum(min(q + 1, 64) for n in (160, 224) for q in range(n))
    assert found["visible_pairs"] == pairs
    assert found["framework"].startswith(framework)
    assert len(found["seconds"]) == 3
    assert found["error"] <= 2 * found["error_dense"] + 1e-6


def test_run_measures_errors_by_the_formula(run, tmp_path, monkeypatch):
    """Whoever is raced against may be more exact than dense attention in that dtype, or wrong: no measure."""
    from dataclasses import replace

    from frisket.runtime.cli import timing as job

    prepare = job.prepare_bench

    def wrong(*arguments):
        made = prepare(*arguments)
        return replace(made, dense=replace(made.dense, run=lambda: float("nan")))

    monkeypatch.setattr(job, "prepare_bench", wrong)
    (tmp_path / "a.md").write_text("some text " * 10)
    argv = ["run", "causal", "--tokens", "a.md", "--repeats", "1", "--heads", "2", "--framework", "torch", "--json"]
    status, out, _ = run(*argv)
    found = json.loads(out)
    assert status == 0
    assert 1e-9 < found["error_dense"] < 1e-5
    assert found["error"] <= 2 * found["error_dense"] + 1e-6


def test_run_tells_a_mismatch(run, tmp_path, monkeypatch):
    from frisket.runtime.cli import timing as cli_run

    monkeypatch.setattr(cli_run, "compiled", lambda what: lambda q, k, v: 2 * v)
    (tmp_path / "a.md").write_text("some text")
    status, out, _ = run("run", "causal", "--tokens", "a.md", "--repeats", "1", "--heads", "1", "--framework", "torch")
    assert status == 1
    assert "MISMATCH: more than 2 × that of dense attention + 1e-6" in out


@pytest.mark.parametrize(
    ("text", "q_len", "kv_len", "heads"),
    [
        ("causal & window(50)", 300, 300, 1),
        ("causal & q % 7 != 3 & k > 20", 200, 333, 1),
        ("abs(q - k) < 30 * (h + 1)", 150, 150, 3),
        ("(q * k) % 5 == 0", 96, 64, 2),
        ("false", 64, 64, 1),
    ],
)
def test_show_counts_equal_the_dense_mask(run, text, q_len, kv_len, heads):
    import frisket as fk

    argv = ["show", text, "--q-len", q_len, "--kv-len", kv_len, "--heads", heads, "--block", 32]
    status, out, _ = run(*argv)
    assert status == 0
    seen = fk.mask(text).dense(q_len, kv_len, heads=heads)
    kinds = fk.mask(text).layout(q_len, kv_len, heads=heads, block=(32, 32)).kinds()
    assert f"visible   {seen.sum():,} of {seen.size:,} pairs, {100 * seen.mean():.3g} %\n" in out
    for kind, said in enumerate(("empty", "partial", "full")):
        assert re.search(rf" {(kinds == kind).sum():,} {said}: ", out)
    read = (kinds > 0).mean()
    saved = f"{100 * (1 - read):.3g} % of dense attention's FLOPs" if 0 < read < 1 else ""
    assert f"saved     {saved}" in out
    rows = np.argwhere(~seen.any(-1))
    if not seen.any():
        assert "rows      no query sees a key: the output is 0 everywhere\n" in out
    elif len(rows):
        first = re.search(r"rows      query (\d+)(?: of batch 0, head (\d))? sees no key; where that is so", out)
        assert [0, int(first[2] or 0), int(first[1])] in rows.tolist()
    else:
        assert "rows      every query sees at least one key\n" in out


def test_show_says_what_is_not_counted(run, monkeypatch):
    monkeypatch.setattr(Facts, "visible_pairs", None)
    monkeypatch.setattr(Facts, "rows_nonempty", None)
    status, out, _ = run("show", "causal")
    assert status == 0
    assert "visible   not counted: too many pairs to look at\n" in out
    assert "rows      not known whether every query sees a key: too many pairs to look at\n" in out


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["library"], pytest.param(["check", "--quick", "causal"], marks=pytest.mark.exhaustive)],
    ids=" ".join,
)
def test_lines_fit_a_terminal_of_80_columns(argv):
    import pty
    import termios

    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 80))
    env = {n: x for n, x in os.environ.items() if n != "COLUMNS"} | {"TERM": "dumb"}
    code = "import sys; from frisket.runtime.cli.main import main; sys.exit(main(sys.argv[1:]))"
    with subprocess.Popen([sys.executable, "-c", code, *argv], stdout=theirs, stderr=subprocess.DEVNULL, env=env):
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the end of a pseudo-terminal
            while part := os.read(ours, 1 << 16):
                shown += part
    os.close(ours)
    lines = [line.rsplit("\r", 1)[-1] for line in shown.decode().replace("\r\n", "\n").splitlines()]
    assert len(lines) > 10
    assert [line for line in lines if len(line) > 80] == []
