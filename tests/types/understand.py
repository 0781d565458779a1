"""What people write without a framework: `tests/typecheck.py` reads it as type checkers do, a test runs it."""

from pathlib import Path
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import frisket as fk
from frisket.caches import PagePool


def write(folder: Path) -> None:
    m = fk.mask("causal & window(w)", w=256)
    n = fk.mask(lambda q, k: (q >= k) & (q - k < 256))
    s = fk.score("softcap(50) + slope[h] * (k - q)", slope=np.ones(8, np.float32))
    t = fk.score(lambda score, b, h, q, k: score * 2.0)
    assert_type(m, fk.Mask)
    assert_type(m & n | ~n ^ m, fk.Mask)
    assert_type(m - n & "k >= 4", fk.Mask)
    assert_type("k >= 4" | m, fk.Mask)
    assert_type(m.at(q="q // 2", k="k // 2"), fk.Mask)
    assert_type(s.then(t), fk.ScoreMod)
    assert m == n.at(q="q") or hash(m) != hash(n) or str(m)
    assert_type(m.dense(8, 8, batch=1, heads=1), NDArray[np.bool_])
    path = folder / "mask.frisket"
    path.write_text("causal & window(4)\n")
    loaded = fk.load(path)
    assert_type(loaded, fk.Program)
    assert_type(loaded.mask, fk.Mask | None)
    assert_type(loaded.score, fk.ScoreMod | None)
    for entry in fk.library().values():
        assert_type(entry, fk.Entry)


def understand(folder: Path) -> None:
    m, n = fk.mask("causal & window(w)", w=256), fk.mask("causal")
    layout = m.layout(1024, 1024, batch=1, heads=1, block=(128, 128), origin=(0, 0, 0, 0), sizes=None, exact=True)
    assert_type(layout, fk.Layout)
    assert_type(layout.counts.full + layout.counts.partial + layout.counts.empty, int)
    assert_type(layout.visible_pairs, int)
    assert_type(layout.density, float)
    assert_type(layout.exact, bool)
    assert_type(layout.kinds(), NDArray[np.uint8])
    for runs in (layout.runs, layout.transposed.runs):
        assert_type(runs.row_ptr[0] + runs.start[0] + runs.stop[0] + runs.kind[0], Any)
    assert_type(layout.to_html(folder / "mask.html"), str)
    why = layout.explain(q=300, k=17)
    assert_type(why, fk.Explanation)
    assert_type(why.visible, bool)
    assert_type(why.because, str)
    print(layout, layout.facts, layout.explain(tile=(4, 1)), layout.spans.count)
    for answer in (m.implies(n, 1024, 1024), m.equivalent(n, 64, 64), m.is_empty(64, 64), m.empty_rows(64, 64)):
        assert_type(answer, fk.Answer)
        assert_type(bool(answer), bool)
        assert_type(answer.witness, tuple[int, int, int, int | None] | None)
    print(layout.to_flashmask(), layout.to_bsr(), layout.to_slices())
    try:
        fk.mask("k > 5").layout(8, 8).to_varlen()
    except fk.ExportError as error:
        assert_type(error, fk.ExportError)


def compiled() -> None:
    att = fk.compile(
        mask="causal", score="softcap(50)", scale=None, enable_gqa=True, deterministic=True, dropout=0.0, sinks=None,
        backend=None, tile=None,
    )  # fmt: skip
    assert_type(att, fk.Attention)
    assert_type(att.source("cpp", q_len=512, kv_len=512, heads=2, head_dim=64, dtype="float32"), str)
    stages = att.stages(q_len=512, kv_len=512, heads=2, head_dim=64)
    assert_type(stages, fk.Stages)
    print(stages.expr, stages.simplified, stages.facts, stages.layout, stages.plan, stages.target, stages.source)
    assert_type(att.plan(512, 512, batch=1, heads=2), fk.Plan | fk.FlatPlan)
    print(fk.backends()["dense"])
    x = np.zeros((1, 2, 16, 8))
    print(fk.reference(x, x, x, mask="causal", layout="bhsd"))
    assert_type(fk.parallel.deal("causal", 1024, ranks=4).imbalance, float)
    assert_type(PagePool(pages=8, page=16).available, int)


def main(folder: Path) -> None:
    write(folder)
    understand(folder)
    compiled()
