"""benchmarks/tpu_tables.py at a few tokens: its parts run, and count what there is."""

import pytest
import tpu_bundles
import tpu_tables


def test_a_schedule_falls_into_steps_tiles_and_rows():
    """A text as libtpu writes it has branches that skip what begins a row, two kinds of tiles, and what ends a row."""
    lines, parts = ["LH: loop header", "   0 : { %0 = nop }", " 0x1 LB: > { %1 = nop }"], [70, 100, 120, 90]
    for region, size in enumerate(parts):
        bundle = "%3 = vmatmul.bf16.gmra.mxu0 ;; %4 = vpop" if region in (1, 2) else "%3 = vst [vmem:[%4]]"
        lines += [
            f" 0x2 : > {{ %2 = sbr.rel (%p{region}) target = $region{region} }}",
            *[f" 0x3 : > {{ {bundle} }}"] * size,
        ]
        lines += [f" 0x4 PF: > {{ %5 = nop }} /* Start/End empty region {region} :: Start region 9{region} */"]
    lines += [" 0x5 LB: >> { %6 = nop }", " 0x6 : > { %7 = nop }", " 0x7 : { %8 = nop }"]
    schedule = tpu_bundles.read("\n".join(lines))
    assert schedule == tpu_bundles.Schedule(step=1 + 2 * 4 + 2, tiles=(100, 120), row=70 + 90, loops=1)
    assert schedule.total(steps=7, rows=2, tiles=(3, 4)) == 7 * 11 + 2 * 160 + 3 * 100 + 4 * 120


@pytest.mark.parametrize("kernel", tpu_tables.ENTRIES)
def test_steps_tiles_and_rows_are_counted(kernel):
    """8,192 causal tokens in tiles of 512 x 1024: 72 of 128, 16 at the border; our backward has tiles of 512 x 512."""
    causal = tpu_tables.COMPARED["causal"]

    def counts(total, kinds):
        units = [tpu_bundles.Schedule(1, (0,) * kinds, 0, 0), tpu_bundles.Schedule(0, (0,) * kinds, 1, 0)]
        units += [tpu_bundles.Schedule(0, tuple(int(i == j) for j in range(kinds)), 0, 0) for i in range(kinds)]
        return [total(causal, 8192, kernel, unit) for unit in units]

    assert counts(tpu_tables.our_total, 2) == ([72, 16, 56, 16] if kernel == "forward" else [136, 16, 120, 16])
    assert counts(tpu_tables.splash_total, 1) == [128, 8 if kernel == "dkv" else 16, 72]


def test_visits_of_our_kernels_are_noted(monkeypatch):
    """512 causal tokens in tiles of 128 x 128: ten tiles with a visible pair, each visited by each kernel."""
    monkeypatch.setattr(tpu_tables, "TOKENS", 512)
    assert tpu_tables.ours(tpu_tables.MASKS["causal"]) == {"visible": 10, "forward": 10, "dq": 10, "dkv": 10}


@pytest.mark.exhaustive
def test_tables_and_visits(monkeypatch):
    monkeypatch.setattr(tpu_tables, "MASKS", {"documents": tpu_tables.MASKS["documents"]})
    monkeypatch.setattr(tpu_tables, "LENGTHS", {2048: 1})
    monkeypatch.setattr(tpu_tables, "LONGEST", 4096)
    monkeypatch.setattr(tpu_tables, "TOKENS", 1024)
    for found in tpu_tables.tables().values():
        assert set(found["rows"]) == {"2,048 tokens", "4,096 tokens"}
        assert found["rows"]["4,096 tokens"]["figures"]["ms"]["frisket"] > 0
    found = tpu_tables.visits()["documents"]["figures"]
    visible = found["tiles with a visible pair"]["all"]
    kernels = ["forward, dq", "dkv", "dq, dk and dv in one"]
    ours = [f"frisket, {kernel}" for kernel in ("forward", "dq", "dkv")]
    theirs = [*(f"splash, {kernel}" for kernel in kernels), "flex_attention, dq", "flex_attention, dkv"]
    assert found["tiles computed"] == dict.fromkeys([*ours, *theirs], visible)
    assert all(steps >= visible for steps in found["steps of the grid"].values())
