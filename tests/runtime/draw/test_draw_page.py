"""The page of a layout, as text and in a browser without a window: what it draws, says and refuses.

`PICTURES=folder pytest tests/runtime/draw/test_draw_page.py` keeps what the browser showed, to look at.
"""

import itertools
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from support import browser
from support.lowering import brute
from support.lowering.effort import at_most

import frisket as fk
from frisket.dsl.errors import ParameterError
from frisket.runtime.draw import html
from frisket.runtime.draw.pixels import DARK, LIGHT

DOC = np.arange(1024) // 300
MASK = fk.mask("causal & (window(w) | same(doc) | sinks(4))", w=200, doc=DOC)


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


# -- as text -----------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def tags(text):
    parser = Tags()
    parser.feed(text)
    return parser.found


def test_layout_page_is_complete_and_loads_nothing(tmp_path):
    layout = MASK.layout(1024, 1024)
    page = layout.to_html(tmp_path / "m.html")
    assert (tmp_path / "m.html").read_text(encoding="utf-8") == page == layout.to_html()
    assert "{{" not in page.replace(page[page.index('<script type="application/json"') :], "")
    for tag, attributes in tags(page):
        assert tag not in ("link", "iframe", "base", "object")
        assert not {"src", "href"} & set(attributes) or attributes["src"].startswith("data:")
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|@import|url\(", page)


def test_layout_page_has_the_tiles_and_the_mask():
    layout = fk.mask("causal & window(8 * h + 8)").layout(256, 256, heads=3, block=(16, 16))
    data = data_of(layout.to_html())
    assert data["mask"]["text"] == "causal & window(8 * h + 8)"
    assert [data["mask"]["text"][a:b] for places in data["mask"]["spans"].values() for a, b in places] == [
        "causal",
        "window(8 * h + 8)",
    ]
    assert (data["qLen"], data["heads"], data["rows"], data["columns"]) == (256, 3, 16, 16)


HOSTILE = "</script><script>alert(1)</script><!-- {{data}} & \u2028 'x' \"y\""


def test_layout_page_escapes_hostile_text(monkeypatch):
    plain = fk.mask("causal").layout(64, 64).to_html()
    monkeypatch.setattr(html, "places", lambda e, known: (HOSTILE, []))
    layout = fk.mask("causal").layout(64, 64)
    layout.params = {HOSTILE: HOSTILE}
    page = layout.to_html()
    assert data_of(page)["mask"]["text"] == HOSTILE
    assert len(tags(page)) == len(tags(plain)) + 3  # one more row of two cells, and nothing of the text
    assert "<script>alert" not in page


def test_a_comment_in_the_text_does_not_get_there():
    page = fk.mask("causal # </script><b>").layout(64, 64).to_html()
    assert "<b>" not in page


def test_large_tables_stay_out_and_the_page_says_so(monkeypatch):
    monkeypatch.setattr(html, "TABLES", 1000)
    layout = fk.mask("causal & keep[q, k]", keep=np.random.default_rng(0).random((256, 256)) < 0.5).layout(256, 256)
    mask = data_of(layout.to_html())["mask"]
    assert mask["program"] is None
    assert mask["why"] == "its tables take 0.0 MiB, more than the 0 a page carries"


def test_layout_page_refuses_bad_file_names(tmp_path):
    layout = fk.mask("causal").layout(64, 64)
    with pytest.raises(
        ParameterError, match=r"^cannot write 'm\.png': name it \.html; for \.png and \.svg there is `plot`$"
    ):
        layout.to_html("m.png")
    path = tmp_path / "nowhere" / "m.html"
    with pytest.raises(ParameterError, match=f"^cannot write {path}: No such file or directory$"):
        layout.to_html(path)


def test_a_million_tokens_are_a_small_page():
    doc = np.sort(np.random.default_rng(0).integers(0, 2000, 1 << 20)).astype(np.int32)
    page = fk.mask("causal & same(doc)", doc=doc).layout(1 << 20, 1 << 20).to_html()
    assert len(page) < 150_000


# -- in notebooks --------------------------------------------------------------------------------------------


def test_notebooks_get_a_picture_and_counts():
    layout = fk.mask("causal & window(256)").layout(1024, 1024)
    text = layout._repr_html_()
    found = tags(text)
    assert {tag for tag, _ in found} <= {"div", "img", "code", "table", "tr", "td", "span"}
    assert not [a for _, attributes in found for a in attributes if a.startswith("on")]
    assert all(f"<td>{square}" in re.sub(r"<span[^>]*></span>", "", text) for square in ("full", "partial", "empty"))
    assert "1,024 × 1,024 tokens in tiles of 128 × 128" in text
    assert len(text) < 5000


def test_notebooks_are_quick():
    doc = np.sort(np.random.default_rng(0).integers(0, 2000, 1 << 20)).astype(np.int32)
    layout = fk.mask("causal & same(doc)", doc=doc).layout(1 << 20, 1 << 20)
    html.notebook(fk.mask("causal").layout(64, 64))
    with at_most(4000):  # 4 ms; half of these calls, and as many at 65,536 tokens
        text = layout._repr_html_()
    assert "one dot shows 64 × 64 tiles" in text


# -- in a browser --------------------------------------------------------------------------------------------


def keep(page, name):
    if folder := os.environ.get("PICTURES"):
        page.screenshot(Path(folder, f"{name}.png"))


def place(page, q, k):
    """Where in the window the middle of a token is."""
    return page.evaluate(
        f"(() => {{ const b = canvas.getBoundingClientRect(); return [b.left + X({k}.5), b.top + Y({q}.5)]; }})()"
    )


def colour(page, q, k):
    return page.colour(*place(page, q, k))


def typed(page, field, value):
    page.evaluate(f"$('{field}').value = {value}, $('{field}').dispatchEvent(new Event('change'))")


def highlighted(page):
    return page.evaluate("[...document.querySelectorAll('#text .decides')].map((part) => part.textContent)")


def opened():
    if browser.executable() is None:
        pytest.skip("needs chromium on the PATH")
    return browser.Page()


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "documents.html"
    MASK.layout(1024, 1024).to_html(path)
    with opened() as page:
        page.go(path)
        yield page


@pytest.fixture
def fresh(documents):
    """The page of MASK as it opens."""
    documents.evaluate("pin(false), at.q = -1, fit()")
    documents.settle()
    yield documents
    assert documents.complaints == []


@pytest.fixture(scope="module")
def window():
    with opened() as page:
        yield page


@pytest.fixture
def shown(window, tmp_path):
    """`shown(layout)` opens its page."""

    def show(layout, **options):
        layout.to_html(tmp_path / "m.html")
        window.go(tmp_path / "m.html", **options)
        return window

    yield show
    assert window.complaints == []


def test_layout_page_draws_tiles_and_tokens(fresh):
    keep(fresh, "fit")
    kinds = brute.kinds(MASK.expr, 1024, 1024, params={"w": 200}, tables={"doc": DOC})[0, 0]
    seen = MASK.dense(1024, 1024)[0, 0]
    rng = np.random.default_rng(0)
    for q, k in rng.integers(0, 1024, (40, 2)):
        near = seen[max(q - 3, 0) : q + 4, max(k - 3, 0) : k + 4]
        if near.min() != near.max() or {q % 128, k % 128} & {0, 1, 126, 127}:
            continue  # a pixel beside an edge shows both sides
        kind = kinds[q // 128, k // 128]
        want = [LIGHT.empty, LIGHT.partial if seen[q, k] else LIGHT.tint, LIGHT.full][kind]
        assert colour(fresh, q, k) == want, (q, k)


def test_hover_says_which_clause_hides_the_key(fresh):
    layout = MASK.layout(1024, 1024)
    for q, k, clauses in (
        (600, 250, ["window(w)", "same(doc)", "sinks(4)"]),
        (100, 900, ["causal"]),
        (900, 2, ["causal", "sinks(4)"]),
    ):
        fresh.mouse("mouseMoved", *place(fresh, q, k))
        at = fresh.evaluate("[at.q, at.k]")
        assert abs(at[0] - q) <= 1
        assert abs(at[1] - k) <= 1
        fresh.evaluate(f"inspect({q}, {k})")
        said = layout.explain(q, k)
        assert fresh.text("#because") == said.because
        assert fresh.text("#verdict") == ("visible" if said.visible else "hidden")
        assert highlighted(fresh) == clauses
        keep(fresh, f"hover-{q}-{k}")
    assert fresh.text("#tile") == "partial tile, row 7, column 0"


def test_wheel_zooms_to_tokens_around_the_pointer(fresh):
    q, k = 600, 300
    x, y = place(fresh, q, k)
    for _ in range(14):
        fresh.mouse("mouseWheel", x, y, deltaX=0, deltaY=-120)
    fresh.settle()
    keep(fresh, "tokens")
    assert fresh.evaluate("view.scale") > 16
    seen = MASK.dense(1024, 1024)[0, 0]
    row = [colour(fresh, q, c) for c in range(k - 8, k + 9)]
    assert row == [LIGHT.partial if seen[q, c] else LIGHT.tint for c in range(k - 8, k + 9)]
    column = [colour(fresh, r, k) for r in range(q - 8, q + 9)]
    assert column == [LIGHT.partial if seen[r, k] else LIGHT.tint for r in range(q - 8, q + 9)]
    assert len(set(column)) == 2  # the end of the document is in sight
    fresh.mouse("mouseMoved", *place(fresh, q, k))
    assert (fresh.evaluate("document.getElementById('q').value"), fresh.evaluate("at.k")) == (str(q), k)


def test_layout_page_pans_by_dragging(fresh):
    fresh.evaluate("zoom(4)")
    before = fresh.evaluate("[view.q, view.k, view.scale]")
    fresh.drag(500, 500, 400, 450)
    after = fresh.evaluate("[view.q, view.k, view.scale]")
    assert after[0] - before[0] == pytest.approx(50 / before[2])
    assert after[1] - before[1] == pytest.approx(100 / before[2])


def test_two_fingers_zoom(fresh):
    def touch(kind, *points):
        fingers = [{"x": x, "y": y, "id": i} for i, (x, y) in enumerate(points)]
        fresh.ask("Input.dispatchTouchEvent", type=kind, touchPoints=fingers)

    fresh.ask("Emulation.setTouchEmulationEnabled", enabled=True)
    fresh.evaluate("zoom(4)")
    scale, middle = fresh.evaluate("[view.scale, keyAt(400)]")
    touch("touchStart", (350, 400), (450, 400))
    for step in range(1, 11):
        touch("touchMove", (350 - 5 * step, 400), (450 + 5 * step, 400))
    touch("touchEnd")
    fresh.ask("Emulation.setTouchEmulationEnabled", enabled=False)
    assert fresh.evaluate("view.scale") == pytest.approx(2 * scale, rel=0.02)
    assert fresh.evaluate("keyAt(400)") == pytest.approx(middle, abs=1)


def test_click_holds_and_escape_lets_go(fresh):
    fresh.click(*place(fresh, 300, 200))
    held = fresh.text("#because")
    fresh.mouse("mouseMoved", *place(fresh, 900, 700))
    assert fresh.text("#because") == held
    assert fresh.text("#spoken").startswith("query 300, key 200: ")
    fresh.key("Escape")
    fresh.mouse("mouseMoved", *place(fresh, 900, 100))
    assert fresh.text("#because") != held


def test_keys_zoom_pan_and_move_the_position(fresh):
    fresh.evaluate("canvas.focus()")
    scale = fresh.evaluate("view.scale")
    fresh.key("+")
    assert fresh.evaluate("view.scale") == pytest.approx(1.5 * scale)
    corner = fresh.evaluate("[view.q, view.k]")
    fresh.key("ArrowDown")
    fresh.key("ArrowRight")
    moved = fresh.evaluate("[view.q, view.k]")
    assert moved[0] > corner[0]
    assert moved[1] > corner[1]
    fresh.key("-")
    fresh.key("f")
    assert fresh.evaluate("view.scale") == pytest.approx(scale)
    fresh.evaluate("inspect(500, 400)")
    for key in ("ArrowUp", "ArrowLeft", "ArrowLeft"):
        fresh.key(key, shift=True)
    assert fresh.evaluate("[at.q, at.k]") == [499, 398]
    assert fresh.text("#spoken").startswith("query 499, key 398: ")
    fresh.key("t")
    assert fresh.evaluate("view.scale") == 16


def test_a_typed_position_is_shown(fresh):
    fresh.evaluate("moveTo(0, 0, 16)")
    typed(fresh, "q", 1000)
    typed(fresh, "k", 5000)
    assert fresh.evaluate("[at.q, at.k]") == [1000, 1023]  # kept inside
    x, y = place(fresh, 1000, 1023)
    assert 0 < x < 1280
    assert 0 < y < 800
    assert fresh.text("#verdict") == "hidden"


def test_batches_and_heads_in_the_dark(shown):
    mask = fk.mask("causal & window((h + 1) * 64 + b * 100)")
    layout = mask.layout(300, 300, batch=2, heads=4, block=(32, 32), origin=(1, 0, 100, 50), sizes=(3, 4, 400, 400))
    page = shown(layout, dark=True)
    for b, h in ((1, 0), (2, 3)):
        typed(page, "b", b)
        typed(page, "h", h)
        page.evaluate("inspect(200, 20)")
        keep(page, f"slice-{b}-{h}")
        said = layout.explain(300, 70, b=b, h=h)
        assert page.text("#because") == said.because
        kinds = layout.kinds()[b - 1, h]
        seen = mask.dense(400, 400, batch=3, heads=4)[b, h, 100:400, 50:350]
        for q, k in itertools.product(range(9, 300, 32), repeat=2):
            near = seen[q - 3 : q + 4, k - 3 : k + 4]
            if near.min() == near.max():  # a pixel beside an edge shows both sides
                want = [DARK.empty, DARK.partial if seen[q, k] else DARK.tint, DARK.full][kinds[q // 32, k // 32]]
                assert colour(page, q, k) == want, (q, k)


@pytest.mark.parametrize(
    ("text", "length", "most"),
    [("causal & same(doc)", 1 << 20, 5), ("causal & (window(16384) | k // 512 % 8 == 0)", 1 << 19, 8)],
)
def test_large_masks_open_quickly(shown, text, length, most):
    params = (
        {"doc": np.sort(np.random.default_rng(0).integers(0, 2000, length)).astype(np.int32)} if "doc" in text else {}
    )
    layout = fk.mask(text, **params).layout(length, length)
    page = shown(layout)
    keep(page, f"large-{length}")
    assert page.evaluate("performance.now()") < 1000 * most  # half a second where nothing else runs
    assert re.fullmatch(r"one dot shows (\d+) × \1 tiles", page.text("#scale"))
    page.evaluate(f"inspect({length // 2}, {length // 2 - 1000})")
    assert page.text("#because") == layout.explain(length // 2, length // 2 - 1000).because
    page.evaluate("toTokens()")
    page.settle()
    q, k = length // 2, length // 2 - 990
    seen = layout.explain(q, k).visible
    assert colour(page, q, k) in ((LIGHT.partial, LIGHT.full) if seen else (LIGHT.tint, LIGHT.empty))


def test_cells_of_many_tiles_are_counted_right(shown):
    layout = fk.mask("causal & (k < 900 | (q - k) % 64 < 8)").layout(6000, 5000, block=(8, 4))
    kinds = layout.kinds()[0, 0]
    page = shown(layout)
    for level in (0, 3):
        found = page.evaluate(f"(() => {{ const c = counted({level}, 0, 0); return [[...c.full], [...c.read]]; }})()")
        side = 256 * 2**level
        part = np.zeros((side, side), int)
        part[: kinds.shape[0], : kinds.shape[1]] = kinds[:side, :side]
        cells = part.reshape(256, 2**level, 256, 2**level)
        full, read = (np.array(x).reshape(256, 257)[:, :256] for x in found)
        np.testing.assert_array_equal(full, (cells == 2).sum((1, 3)))
        np.testing.assert_array_equal(read, (cells > 0).sum((1, 3)))


def test_a_page_without_tables_explains_tiles(shown, monkeypatch):
    monkeypatch.setattr(html, "TABLES", 1000)
    keep_ = np.random.default_rng(0).random((256, 256)) < 0.5
    page = shown(fk.mask("causal & keep[q, k]", keep=keep_).layout(256, 256))
    page.evaluate("inspect(200, 100)")
    keep(page, "no-tables")
    assert page.text("#verdict") == "unknown"
    assert (
        page.text("#because")
        == "This page carries tiles only: its tables take 0.0 MiB, more than the 0 a page carries."
    )
    page.evaluate("inspect(10, 200)")
    assert page.text("#verdict") == "hidden"


@pytest.mark.exhaustive
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 100_000), (100_000, 1), (3, 5)])
def test_layout_page_draws_very_long_and_small_shapes(shown, q_len, kv_len):
    page = shown(fk.mask("(q + k) % 5 > 1").layout(q_len, kv_len))
    keep(page, f"odd-{q_len}-{kv_len}")
    q, k = min(q_len - 1, q_len // 2 + 1), min(kv_len - 1, kv_len // 2 + 1)
    page.evaluate(f"inspect({q}, {k}), toTokens()")
    assert colour(page, q, k) == (LIGHT.partial if (q + k) % 5 > 1 else LIGHT.tint)
