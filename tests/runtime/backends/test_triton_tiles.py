"""Which tiles Triton's kernels take: by the mask, never by lengths or tables; what fits; what the user says."""

import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import frisket as fk
from frisket.lowering.architectures import GPUS
from frisket.lowering.kernels.triton.captured import square
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import Geometry
from frisket.runtime.backends.triton import tiles
from frisket.runtime.backends.triton.grids import of_backward, of_forward
from frisket.runtime.backends.triton.launch import GRID
from frisket.runtime.backends.triton.tiles import ProgramTraits
from frisket.runtime.calls.options import LaunchOptions, Tuning

COMPILED = Path(__file__).parents[3] / "benchmarks" / "results" / "compiled"


def target(mask, score=None, *, q_len=4096, dim=128, dtype="bfloat16", arch="sm_90", **params):
    att = fk.compile(mask, score, backend="triton", **params)
    return att.stages(q_len=q_len, heads=8, head_dim=dim, dtype=dtype, backend="triton", arch=arch).target


def test_useful_fractions_in_the_docstring_are_right():
    aligned, anywhere = re.findall(r"( +128 x 128 .*\n +128 x  64 .*\n +64 x  64 .*)", tiles.__doc__)
    windows = [128, 192, 256, 512, 1024, 4096]
    for text, share in (
        (aligned, lambda w, q, k: w / (math.ceil((q + w - 1) / k) * k)),
        (anywhere, lambda w, q, k: w / (w + q + k - 2)),
    ):
        for line in text.splitlines():
            q, k, *percent = map(int, re.findall(r"\d+", line))
            assert percent == [int(100 * share(w, q, k) + 0.5) for w in windows], line


SEEN = {
    "causal": (3072.0, True), "causal & window(128)": (128.0, True), "causal & window(192)": (192.0, True),
    "causal & window(512)": (512.0, True), "causal & (window(128) | sinks(4))": (192.0, False),
    "prefix(700) | causal": (3072.0, False), "causal & chunked(1024)": (512.0, True), "k < 100": (64.0, True),
    "causal & same(doc)": (3072.0, False), "causal & same(doc) & window(128)": (128.0, False),
    "same(doc)": (math.inf, False), "causal & q - k < 20 * (h + 1)": (3072.0, False),
    "causal & (q - k) % 4 == 0": (1568.0, False),
}  # fmt: skip


@pytest.mark.parametrize("mask", SEEN)
def test_keys_that_a_query_sees(mask):
    doc = {"doc": np.arange(4096) // 100} if "doc" in mask else {}
    plan = fk.compile(mask, **doc).plan(4096, 4096, heads=2)
    assert tiles.keys_seen(plan.simplified.mask, tuple(sorted(plan.scalars.items()))) == SEEN[mask]


def test_classes_and_their_borders():
    assert [tiles.window_of(w) for w in (1, 192, 193, 768, 769, math.inf)] == [
        "short", "short", "medium", "medium", "long", "long",
    ]  # fmt: skip
    short, medium, long = (target(f"causal & window({w})") for w in (128, 512, 2048))
    rows = tiles.TABLE["sm_90"]["forward"]
    for made, window in ((short, "short"), (medium, "medium"), (long, "long")):
        assert row_of(made) == rows[window]["128"]
    assert long == target("causal").everywhere(order=long.order) == target(None)
    no_formulas = target("causal & (window(2048) | sinks(4))"), target("prefix(700) | causal")
    assert {t.everywhere(order=medium.order) for t in no_formulas} == {medium}


@pytest.mark.parametrize(("mask", "sizes", "order"), [
    ("causal", {}, "longest-of-all-first"), ("prefix(700) | causal", {}, "longest-of-all-first"),
    ("causal", {"q_len": 8192, "heads": 16}, "longest-of-all-first"),
    ("causal", {"q_len": 8192, "heads": 64, "kv_heads": 32}, "longest-first"),
    ("causal", {"q_len": 32768}, "longest-first"), ("causal", {"batch": 32}, "longest-first"),
    ("causal", {"heads": 1}, "longest-first"), ("causal", {"heads": 66}, "longest-first"),
    ("causal", {"q_len": 1 << 20}, "longest-first"),
    ("causal & window(1024)", {}, "longest-first"), ("causal & same(doc)", {}, "longest-first"),
    (None, {}, "longest-first"),
])  # fmt: skip
def test_longest_rows_start_first_where_they_would_end_late(mask, sizes, order):
    """Rows of other masks that run at a time share keys in L2 where they are of one head."""
    tables = {"doc": np.arange(4096) // 100} if mask and "doc" in mask else {}
    given = {
        "q_len": 4096,
        "heads": 8,
        "head_dim": 128,
        "dtype": "bfloat16",
        "backend": "triton",
        "arch": "sm_90",
    } | sizes
    made = fk.compile(mask, **tables).stages(**given).target
    assert {t.order for t in parts(made) if t} == {order}
    batch, heads = given.get("batch", 1), given["heads"]
    g = Geometry(batch, heads, given.get("kv_heads", heads), given["q_len"], given["q_len"], 128, 128, 0.1)
    by_head = order == "longest-of-all-first"
    rows = -(-g.q_len // made.block_q)
    assert of_forward(g, made) == ((g.heads, rows, batch) if by_head else (rows, g.heads, batch))
    dq, dkv = of_backward(g, made, ("attention_dq", "attention_dkv"))
    rows, columns = -(-g.q_len // made.dq.block_q), -(-g.kv_len // made.dkv.block_k)
    assert dq.grid == ((g.heads, rows, batch) if by_head else (rows, g.heads, batch))
    assert dkv.grid == ((g.kv_heads, columns, batch) if by_head else (columns, g.kv_heads, batch))
    assert max(x.grid[1] for x in (dq, dkv)) <= GRID


@pytest.mark.parametrize(
    ("installed", "dkv"), [("3.6", [64, 64, 4, 2, 1]), ("3.9", [32, 64, 4, 4, 1]), ("", [32, 64, 4, 4, 1])]
)
def test_tiles_of_the_triton_that_compiles(monkeypatch, installed, dkv):
    monkeypatch.setattr(tiles, "triton_version", lambda: installed)
    g = Geometry(1, 8, 8, 4096, 4096, 128, 128, 0.1)
    assert row_of(tiles.default_target(g, "bfloat16").dkv) == dkv
    assert row_of(tiles.default_target(g, "bfloat16", ProgramTraits(keys=128)).dkv) == (
        dkv if installed == "3.6" else [32, 64, 4, 3, 1]
    )
    curved, each = ({"traits": ProgramTraits(**x)} for x in ({"curved": True}, {"reads": "each"}))
    other = [{"descriptors": False}, curved, each, {"arch": "sm_80"}]
    for given in other:
        made = tiles.default_target(g, "bfloat16", **given)
        monkeypatch.setattr(tiles, "OF_TRITON", {})
        assert made == tiles.default_target(g, "bfloat16", **given), given
        monkeypatch.undo()
        monkeypatch.setattr(tiles, "triton_version", lambda: installed)


@pytest.mark.parametrize("installed", ["3.6", "3.9"])
def test_dv_has_a_separate_kernel_at_head_size_256(monkeypatch, installed):
    monkeypatch.setattr(tiles, "triton_version", lambda: installed)
    g = Geometry(1, 8, 8, 4096, 4096, 256, 256, 0.1)
    for given in ({}, {"keys": 128}, {"keys": 512}):
        made = tiles.default_target(g, "bfloat16", ProgramTraits(**given))
        assert row_of(made.dkv) == [32, 128, 8, 2, int(installed == "3.6")]
        assert row_of(made.dv) == [64, 128, 8, 2, 1]
    few = tiles.default_target(replace(g, kv_len=50), "bfloat16")
    assert (few.dkv.block_k, few.dv.block_k) == (64, 64)
    assert Tuning(dkv=LaunchOptions(num_stages=3)).applied(made).dv is None  # the caller's tile is that of both
    assert Tuning(dq=LaunchOptions(num_stages=3)).applied(made).dv == made.dv
    for given in ({"traits": ProgramTraits(reads="each")}, {"arch": "sm_80"}, {"arch": "sm_100"}):
        assert tiles.default_target(g, "bfloat16", **given).dv is None
    assert tiles.default_target(g, "float32").dv is None
    assert tiles.default_target(replace(g, head_dim=128, v_dim=128), "bfloat16").dv is None


def row_of(t):
    return [t.block_q, t.block_k, t.num_warps, t.num_stages, int(t.descriptors)]


def test_lengths_windows_and_documents_do_not_change_tiles():
    for same in (
        [target("causal & window(w)", w=w) for w in (400, 512, 700)],
        [target("causal", q_len=n) for n in (256, 4096, 100_000)],
        [target("causal & same(doc)", doc=np.arange(4096) // n) for n in (10, 100, 4096)],
    ):
        assert len({t.everywhere(order="longest-first") for t in same}) == 1


def test_documents_on_a_device_have_the_tiles_of_the_host():
    torch = pytest.importorskip("torch")
    doc = torch.arange(4096) // 100
    att = fk.compile("causal & same(doc)", backend="library")
    g = Geometry(1, 8, 8, 4096, 4096, 128, 128, 0.1)
    flat, host = att.plan(4096, 4096, heads=8, doc=doc, flat=True), att.plan(4096, 4096, heads=8, doc=doc, flat=False)
    assert type(flat) is not type(host)
    assert tiles.target(flat, g, "bfloat16") == tiles.target(host, g, "bfloat16")


def test_tables_per_position_take_their_searched_tiles():
    table = {"t": np.zeros((4096, 4096), np.float32)}
    rows = tiles.TABLE["sm_90"]
    for given, row in ((("causal", "score + t[q, k]"), "each"), (("causal & t[q, k] > 0",), "each medium")):
        made = target(*given, **table)
        assert [row_of(x) for x in (made, made.dq, made.dkv)] == [rows[n][row]["128"] for n in tiles.SINGLE]
        assert made.decode.block_k == 32
    assert target("causal", "score + t[h]", t=np.zeros(8, np.float32)) == target("causal")


@pytest.mark.parametrize(("mask", "score", "arch"), [
    ("causal", "score + t[q, k]", "sm_80"), ("causal & window(128)", "score + t[q, k]", "sm_90"),
    *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (
        ("t[q, k] > 0", None, "gfx942"),
        ("causal", "softcap(50) + t[q, k]", "sm_90"), ("t[q, k] > 0", "softcap(50)", "sm_90"),
    )),
])  # fmt: skip
def test_tables_per_position_take_narrow_tiles_elsewhere(mask, score, arch):
    made = target(mask, score, arch=arch, t=np.zeros((4096, 4096), np.float32))
    assert max(made.block_k, made.dq.block_k, made.dkv.block_q) <= 32
    assert max(x.num_stages for x in (made, made.dq, made.dkv)) <= 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("score", ["score + t[q, k]", "score + t[0, clamp(q - k, 0, 99)]"])
@pytest.mark.parametrize(("mask", "dim"), [
    ("causal", 64),
    *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (
        ("causal & window(128)", 128), ("causal", 128), ("causal & window(128)", 64), ("causal & window(512)", 64),
        ("causal & window(512)", 128),
    )),
])  # fmt: skip
def test_gradients_of_tables_take_64_queries_and_keys(mask, score, dim):
    """32 x 32 would read each query and key twice as often, and fill no warp-group product."""
    made = square(target(mask, score, dim=dim, t=np.zeros((4096, 4096), np.float32)))
    assert row_of(made) == [64, 64, 8, 1, 0]
    assert square(target(mask, score, dim=dim, dtype="float32", t=np.zeros((4096, 4096), np.float32))).block_q <= 32


def test_tables_by_distance_take_the_tiles_of_medium_windows():
    near = target("causal", "score + t[clamp(q - k, 0, 99)]", t=np.zeros(100, np.float32))
    # tiles of the table that every Triton shares: those of OF_TRITON were tried without a score mod
    assert [row_of(x) for x in parts(near)[:3]] == [tiles.TABLE["sm_90"][n]["medium"]["128"] for n in tiles.SINGLE]
    both = target("causal", "score + t[clamp(q - k, 0, 99)] + u[q, k]", t=np.zeros(100, np.float32),
                  u=np.zeros((4096, 4096), np.float32))  # fmt: skip
    assert both.block_k == 32


def test_a_derivative_for_every_score_takes_a_narrower_tile():
    made = target("causal", "softcap(50)", dim=64).dkv
    row = tiles.TABLE["sm_90"]["dkv"]["curved"]["64"]
    assert row_of(made) == row
    assert target("causal & window(512)", "softcap(50)", dim=64).dkv.block_q <= 32
    assert target("causal", "alibi", dim=64) == target("causal", dim=64)


def test_triton_tile_table_has_each_kernel_and_window():
    kernels = {"forward", "dq", "dkv"}
    each = {"sm_90": ["each", "each medium"], "sm_90 by pointers": ["each"]}
    for name, rows in tiles.TABLE.items():
        arch, pointers, _ = name.partition(" by pointers")
        assert arch in GPUS
        assert set(rows) == kernels == set(tiles.SINGLE)
        for by_window in rows.values():
            assert list(by_window) == ["long", "medium", "short", "curved", *each.get(name, [])]
            assert all(list(dims) == ["64", "128", "256"] for dims in by_window.values())
            for t in (t for dims in by_window.values() for t in dims.values()):
                assert len(t) == 5
                assert t[2] in (4, 8)
                assert t[4] in ((0,) if pointers or arch not in ("sm_90", "sm_100") else (0, 1))
    assert {gpu.tiles for gpu in GPUS.values()} <= set(tiles.TABLE)


@pytest.mark.parametrize(("arch", "same"), [
    ("sm_121", "sm_120"), ("sm_86", "sm_89"), ("sm_103", "sm_100"), ("sm_110", "sm_100"), ("sm_130", "sm_89"),
    ("sm_70", "sm_75"), ("gfx90a", "gfx942"), ("gfx1151", "gfx1100"), ("gfx1200", "gfx1201"), ("gfx906", "gfx942"),
])  # fmt: skip
def test_unlisted_gpus_take_the_tiles_of_a_relative(arch, same):
    """They took an H100's, which ask for more shared memory than most GPUs have."""
    for dim, dtype in product((64, 128, 256, 512), ("float16", "float32")):
        g = Geometry(1, 8, 8, 4096, 4096, dim, dim, 0.1)
        made, like = (tiles.default_target(g, dtype, arch=x) for x in (arch, same))
        assert [row_of(x) for x in parts(made)] == [row_of(x) for x in parts(like)]


def test_tiles_fit_the_memory_that_a_gpu_reports(monkeypatch):
    """An H100's memory is known; a GPU with its name and less has tiles that fit."""
    properties = SimpleNamespace(
        major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=65_536
    )  # fmt: skip
    monkeypatch.setattr(tiles, "_gpu", lambda device: properties)
    g = Geometry(1, 8, 8, 4096, 4096, 128, 128, 0.1)
    made = tiles.target(None, g, "bfloat16")
    for kernel, t, own, walked in of_kernels(made):
        assert tiles.shared(kernel, 128, own, walked, t.num_stages) <= 65_536
    named = tiles.target(None, g, "bfloat16", arch="sm_90")
    assert row_of(named) == tiles.TABLE["sm_90"]["forward"]["long"]["128"]


def compiled_lines():
    """(kernel, head size, tile, warps, stages, bytes of shared memory) of GPUs with mma.sync, as they compiled."""
    line = re.compile(r"(sm_\d+) +D (\d+) +causal +(forward|dq|dkv) +(\d+) x (\d+) +\d+ warps (\d+) .* (\d+) shared")
    for name in ("triton-3.6.txt", "triton-3.9.txt", "gpus-triton-3.6.txt", "gpus-triton-3.9.txt"):
        for arch, dim, kernel, *numbers in line.findall((COMPILED / name).read_text()):
            if GPUS[arch].products == "mma":
                yield kernel, int(dim), *map(int, numbers)


def test_shared_memory_of_mma_is_what_the_compiler_takes():
    """Some warps hold scores in shared memory, too: that is all that may differ."""
    lines = list(compiled_lines())
    assert len(lines) >= 60
    for kernel, dim, block_q, block_k, stages, taken in lines:
        own, walked = (block_k, block_q) if kernel == "dkv" else (block_q, block_k)
        estimate = tiles.shared(kernel, dim, own, walked, stages, products="mma")
        assert abs(taken - estimate) <= 2 * own * walked, (kernel, dim, block_q, block_k, stages)
    assert tiles.shared("forward", 128, 128, 64, 3, products="mma") == 98_304
    made = tiles.default_target(Geometry(1, 8, 8, 4096, 4096, 128, 128, 0.1), "float16", arch="sm_89")
    assert row_of(made) == [128, 64, 8, 3, 0]


@pytest.mark.parametrize(("arch", "order"), [("sm_90", "longest-of-all-first"), ("sm_87", "longest-first")])
def test_order_of_rows_counts_the_processors_of_the_gpu(arch, order):
    """16 processors of an Orin end eight heads at the same time in any order; 132 of an H100 do not."""
    assert target("causal", arch=arch).order == order


def test_order_of_rows_counts_the_processors_of_the_device(monkeypatch):
    large, small = (
        SimpleNamespace(major=8, minor=9, multi_processor_count=n, shared_memory_per_block_optin=101_376)
        for n in (142, 12)
    )
    att, g = fk.compile("causal", backend="triton"), Geometry(1, 8, 8, 4096, 4096, 128, 128, 0.1)
    plan = att.plan(4096, 4096, heads=8)
    for properties, order in ((large, "longest-of-all-first"), (small, "longest-first")):
        monkeypatch.setattr(tiles, "_gpu", lambda device, found=properties: found)
        assert tiles.target(plan, g, "float16").order == order


def test_gpus_without_tensor_cores_take_the_tiles_of_fma():
    """Triton multiplies without tensor cores there, and tiles of 128 x 64 spilled 4,296 bytes of a thread."""
    for dim, dtype in product((64, 128, 256), ("float16", "float32")):
        made = tiles.default_target(Geometry(1, 8, 8, 4096, 4096, dim, dim, 0.1), dtype, arch="sm_75")
        by_hand = tiles.BY_HAND["fma"]
        assert [row_of(x) for x in (made, made.dq, made.dkv)] == [by_hand[n][str(dim)] for n in tiles.SINGLE]


def test_heads_of_512_take_eight_warps_on_rtx_cards():
    """With four warps the forward spilled 88 bytes on sm_120."""
    g = Geometry(1, 8, 8, 4096, 4096, 512, 512, 0.1)
    assert row_of(tiles.default_target(g, "bfloat16", arch="sm_120")) == [32, 32, 8, 2, 0]


def test_smaller_tiles_have_fewer_stages_then_fewer_keys():
    made = Target("triton", 128, 128, 8, 3, dq=Target("triton", 64, 64, 4, 2), dkv=Target("triton", 32, 128, 8, 2))
    assert row_of(tiles.smaller(made, "attention_forward", 0.9)) == [128, 128, 8, 2, 0]
    assert row_of(tiles.smaller(made, "attention_forward", 0.5)) == [128, 64, 8, 2, 0]
    assert row_of(tiles.smaller(made, "attention_dq", 0.99).dq) == [64, 32, 4, 2, 0]
    assert row_of(tiles.smaller(made, "attention_dkv", 0.99).dkv) == [16, 128, 8, 2, 0]
    assert row_of(tiles.smaller(made, "attention_decode", 0.99).decode) == [128, 128, 8, 2, 0]
    assert row_of(tiles.smaller(square(made), "attention_plane", 0.99)) == [32, 32, 8, 1, 0]
    least = Target("triton", 16, 16, 4, 2)
    assert tiles.smaller(least, "attention_dkv", 0.1) is tiles.smaller(made, "attention_delta", 0.5) is None


@pytest.mark.parametrize("arch", GPUS)
def test_triton_tiles_fit_into_shared_memory(arch):
    for dim, keys in product((64, 96, 128, 192, 256), (128, 512, math.inf)):
        check_fits(dim, keys, arch)


def check_fits(dim, keys, arch):
    made = tiles.default_target(Geometry(1, 8, 8, 4096, 4096, dim, dim, 0.1), "float16", ProgramTraits(keys), arch=arch)
    for kernel, t, own, walked in of_kernels(made):
        assert {own, walked} <= {16, 32, 64, 128}
        wide = 2 ** math.ceil(math.log2(dim))
        products = GPUS[arch].products
        assert tiles.shared(kernel, wide, own, walked, t.num_stages, products=products) <= GPUS[arch].shared


def of_kernels(made):
    """(kernel, target, positions of the program's own axis, positions of the walked axis)"""
    yield "forward", made, made.block_q, made.block_k
    yield "dq", made.dq, made.dq.block_q, made.dq.block_k
    yield "dkv", made.dkv, made.dkv.block_k, made.dkv.block_q


def test_few_queries_take_lower_tiles_and_few_keys_narrower_ones():
    g = Geometry(1, 8, 8, 20, 4096, 64, 64, 0.1)
    made = tiles.default_target(g, "float16")
    assert (made.block_q, made.dq.block_q, made.dkv.block_k) == (32, 32, tiles.TABLE["sm_90"]["dkv"]["long"]["64"][1])
    made = tiles.default_target(Geometry(1, 8, 8, 4096, 20, 64, 64, 0.1), "float16")
    assert (made.block_q, made.dkv.block_k) == (tiles.TABLE["sm_90"]["forward"]["long"]["64"][0], 32)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_a_score_mod_leaves_few_queries_their_tiles(arch, dim):
    plain, curved = (target("causal", score, dim=dim, arch=arch).decode for score in (None, "softcap(50)"))
    assert (curved.block_q, curved.block_k) == (plain.block_q, plain.block_k)


def test_user_tiles_and_tuning_override_the_table():
    g = Geometry(1, 8, 8, 4096, 4096, 128, 128, 0.1)
    own = tiles.target(None, g, "float16", (64, 32))
    assert own == Target("triton", 64, 32, 4, tanh="approximate", words=True, fixed=True)
    tuned = tiles.target(None, g, "float16", tuning=Tuning(dq=LaunchOptions(block_q=32), precision="tf32"))
    chosen = tiles.target(None, g, "float16")
    assert (tuned.dq.block_q, tuned.dq.block_k, tuned.precision) == (32, chosen.dq.block_k, "tf32")
    assert (tuned.block_q, tuned.dkv.block_q) == (chosen.block_q, chosen.dkv.block_q)


def test_callers_without_descriptors_have_tiles_of_their_own():
    g = Geometry(1, 8, 8, 4096, 4096, 128, 128, 0.1)
    own = tiles.default_target(g, "float16", descriptors=False)
    rows = tiles.TABLE["sm_90 by pointers"]
    assert [row_of(t) for t in (own, own.dq, own.dkv)] == [rows[n]["long"]["128"] for n in tiles.SINGLE]
    for arch in GPUS:
        made = tiles.default_target(g, "float16", ProgramTraits(128), descriptors=False, arch=arch)
        assert not any(t.descriptors for t in (made, made.dq, made.dkv, made.decode))
    stored = tiles.default_target(g, "float16", ProgramTraits(128, stored=True))
    assert not any(t.descriptors for t in (stored, stored.dq, stored.dkv, stored.decode))


def parts(target):
    return target, target.dq, target.dkv, target.decode


@pytest.mark.parametrize(("dtype", "arch", "tanh"), [
    ("bfloat16", "sm_90", "approximate"), ("float16", "sm_80", "approximate"), ("float32", "sm_90", "exact"),
    ("bfloat16", "gfx942", "exact"),
])  # fmt: skip
def test_tanh_is_approximate_for_half_precision_on_nvidia(dtype, arch, tanh):
    g = Geometry(1, 8, 8, 4096, 4096, 128, 128, 0.1)
    assert {t.tanh for t in parts(tiles.target(None, g, dtype, arch=arch))} == {tanh}
    exact = tiles.target(None, g, dtype, arch=arch, tuning=Tuning(tanh="exact"))
    assert {t.tanh for t in parts(exact)} == {"exact"}
    assert tiles.target(None, g, dtype, (64, 64), arch=arch).tanh == tanh


@pytest.mark.parametrize(
    ("properties", "arch"),
    [
        (SimpleNamespace(major=9, minor=0, multi_processor_count=132), "sm_90"),
        (SimpleNamespace(major=12, minor=0, multi_processor_count=188, gcnArchName="NVIDIA"), "sm_120"),
        (SimpleNamespace(major=9, minor=4, multi_processor_count=304, gcnArchName="gfx942:sramecc+:xnack-"), "gfx942"),
    ],
)
def test_architecture_and_processors_are_those_of_the_gpu(monkeypatch, properties, arch):
    assert (tiles.architecture(), tiles.processors()) == ("sm_90", 132)  # none
    monkeypatch.setattr(tiles, "_gpu", lambda device: properties)
    assert (tiles.architecture(), tiles.processors()) == (arch, properties.multi_processor_count)


@pytest.mark.parametrize("kv_len", [0, 64])
def test_text_of_triton_is_written_without_a_query(kv_len):
    stages = fk.compile("causal").stages(q_len=0, kv_len=kv_len, backend="triton", dtype="float16")
    assert "def attention_forward" in stages.source
