"""The explorer in a browser without a window: what people type, drag and choose, and what the page makes of it.

`PICTURES=folder pytest tests/runtime/explore/test_explore_page.py` keeps what the browser showed, to look at.
"""

import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from support import browser

import frisket as fk
from frisket.runtime.draw.pixels import DARK, LIGHT
from frisket.runtime.explore.server import Analyst, Server, token_classes
from frisket.runtime.explore.server import page as page_of

DOC = np.sort(np.random.default_rng(0).integers(0, 5, 1024)).astype(np.int32)
STATE = {
    "text": "causal & window(w)", "values": {}, "q_len": 1024, "kv_len": 1024, "batch": 1, "heads": 1,
    "block": [128, 128], "documents": 8,
}  # fmt: skip
QUIET = "under === null && !waiting && document.documentElement.dataset.ready === 'yes'"


@pytest.fixture(scope="module")
def served():
    if browser.executable() is None:
        pytest.skip("needs chromium on the PATH")
    with Server(Analyst({"doc": DOC}), lambda nonce: page_of(STATE, {"doc": DOC}, nonce)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            with browser.Page(origin=server.url.rsplit("/", 2)[0]) as page:
                page.go(server.url)
                yield page, server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def page(served, request):
    """The explorer as it opens."""
    page, server = served
    page.go(f"{server.url}?{request.node.name}")
    quiet(page)
    yield page
    if folder := os.environ.get("PICTURES"):
        page.screenshot(Path(folder, f"explore-{request.node.name}.png"))
    assert page.complaints == []


def quiet(page):
    page.until(QUIET)
    page.settle()


def write(page, text):
    """With the keyboard, in place of what is there."""
    page.evaluate("$('source').focus(), $('source').select()")
    page.type(text)
    quiet(page)


def checked(page, mask, q_len=1024, kv_len=1024, palette=LIGHT, **sizes):
    """The picture is that of the mask: in the middle of tiles, away from edges."""
    layout = mask.layout(q_len, kv_len, **sizes)
    (bq, bk), kinds, seen = layout.block, layout.kinds()[0, 0], mask.dense(q_len, kv_len)[0, 0]
    rng = np.random.default_rng(0)
    for q, k in np.stack([rng.integers(8, n - 8, 12) for n in (q_len, kv_len)], 1).tolist():
        near = seen[q - 6 : q + 7, k - 6 : k + 7]
        if near.min() != near.max() or min(q % bq, bq - q % bq, k % bk, bk - k % bk) < 7:
            continue  # a pixel beside an edge shows both sides
        want = [palette.empty, palette.partial if seen[q, k] else palette.tint, palette.full][kinds[q // bq, k // bk]]
        corner = page.evaluate("[canvas.getBoundingClientRect().left, canvas.getBoundingClientRect().top]")
        x, y = page.evaluate(f"[X({k}.5), Y({q}.5)]")
        assert page.colour(corner[0] + x, corner[1] + y) == want, (q, k)
    assert f"{layout.counts.full:,}" in page.text("#tiles")


def slide(page, name, value):
    page.evaluate(f"$('slide-{name}').value = {value}, $('slide-{name}').dispatchEvent(new Event('input'))")
    quiet(page)


def typed(page, name, value):
    page.evaluate(f"$('set-{name}').value = {value}, $('set-{name}').dispatchEvent(new Event('input'))")
    quiet(page)


def test_explorer_page_draws_the_typed_mask(page):
    checked(page, fk.mask("causal & window(32)"))
    write(page, "causal & same(doc) | k < 100")
    mask = fk.mask("causal & same(doc) | k < 100", doc=DOC)
    checked(page, mask)
    assert f"{mask.visible_pairs(1024, 1024):,} pairs" in page.text("#cost")
    assert page.text("#tables") == "docint32[1024]"
    page.evaluate("inspect(900, 500)")
    assert page.text("#because") == mask.layout(1024, 1024).explain(900, 500).because
    assert page.evaluate("document.activeElement.id") == "source"


def test_an_error_is_shown_where_it_is_and_goes(page):
    write(page, "causal & windw(3)")
    assert page.text("#problems pre") == "causal & windw(3)\n         ^^^^^^^^"
    assert page.text("#problems .remedy") == "did you mean `window`?"
    assert page.text("#mirror mark") == "windw(3)"
    assert page.evaluate("$('source').getAttribute('aria-invalid')") == "true"
    assert page.evaluate("$('source').getAttribute('aria-describedby')") == "problems"
    page.until("getComputedStyle(canvas).opacity === '0.4'")  # what is drawn is of an earlier text
    width = "(e) => e.getBoundingClientRect()"
    over = page.evaluate(f"(({width})(document.querySelector('#mirror mark')).left - ({width})($('source')).left)")
    assert 60 < over < 110  # nine characters on
    write(page, "causal & window(3)")
    assert page.evaluate("$('problems').childElementCount") == 0
    checked(page, fk.mask("causal & window(3)"))


def test_an_error_says_whose_picture_is_still_there(page):
    page.evaluate("write('causal & window(32)')")
    quiet(page)
    page.evaluate("write('causal &')")
    quiet(page)
    assert page.text("#problems pre i").strip() == "^"
    assert page.text("#problems .still code") == "causal & window(32)"
    assert page.evaluate("$('cost').textContent.includes('visible')")
    page.evaluate("write('causal')")
    quiet(page)
    assert page.evaluate("document.querySelector('.still')") is None


def test_explorer_legend_is_visible_without_scrolling(served):
    page, server = served
    page.go(f"{server.url}?legend", width=1400, height=900)
    quiet(page)
    assert page.text("#legend").split() == ["full", "partial:", "visible,", "hidden", "empty"]
    assert page.evaluate("$('legend').getBoundingClientRect().bottom") < 900
    assert page.complaints == []


@pytest.mark.exhaustive
def test_errors_outside_the_text_and_astral_characters(page):
    write(page, "same(doc)")
    typed(page, "q_len", 2048)
    assert "read at `q` = 0..2047" in page.text("#problems")
    page.evaluate("write('causal & windw(3) # 𝕢')")
    quiet(page)
    assert page.text("#mirror mark") == "windw(3)"


def test_sliders_and_typed_values(page):
    slide(page, "v-w", 100)
    assert page.evaluate("$('set-v-w').value") == "100"
    checked(page, fk.mask("causal & window(100)"))
    typed(page, "v-w", 700)
    assert page.evaluate("$('slide-v-w').value") == "700"
    checked(page, fk.mask("causal & window(700)"))
    write(page, "causal & flag | window(w)")
    page.evaluate("$('set-v-flag').click()")
    quiet(page)
    checked(page, fk.mask("window(700)"))


def test_lengths_and_tiles(page):
    slide(page, "q_len", 9)
    assert page.evaluate("[state.q_len, state.kv_len]") == [512, 512]  # keys go along
    typed(page, "kv_len", 700)
    slide(page, "q_len", 8)
    assert page.evaluate("[state.q_len, state.kv_len]") == [256, 700]
    slide(page, "tile", 5)
    typed(page, "tile-1", 64)
    assert page.text("#shape") == "256 × 700 tokens in tiles of 32 × 64"
    checked(page, fk.mask("causal & window(16)"), 256, 700, block=(32, 64))


def test_explorer_view_stays_while_the_text_changes(page):
    page.evaluate("zoom(6, 300, 400)")
    before = page.evaluate("[view.q, view.k, view.scale]")
    write(page, "causal & window(w + 200)")
    assert page.evaluate("[view.q, view.k, view.scale]") == before
    page.drag(500, 500, 400, 450)
    moved = page.evaluate("[view.q, view.k]")
    assert moved == pytest.approx([before[0] + 50 / before[2], before[1] + 100 / before[2]])
    slide(page, "v-w", 100)
    assert page.evaluate("[view.q, view.k, view.scale]") == [*moved, before[2]]
    page.evaluate("fit()")
    checked(page, fk.mask("causal & window(300)"))


def test_explorer_page_searches_the_library(page):
    page.evaluate("$('choose').click()")
    assert page.evaluate("document.activeElement.id") == "search"
    page.type("several doc")
    assert "nothing is called so" in page.text("#entries")
    page.evaluate("$('search').value = 'docu', search()")
    assert page.text("#entries [aria-selected=true] code") == "document(off)"
    page.key("ArrowDown")
    assert page.text("#entries [aria-selected=true] code") == "document(off, m)"
    assert page.evaluate("$('search').getAttribute('aria-activedescendant')") == "entry-1"
    page.key("Enter")
    quiet(page)
    assert page.evaluate("state.text") == "causal & window(w) & document(off, causal)"
    assert "made up: 8 documents" in page.text("#tables")
    assert page.evaluate("document.activeElement.id") == "source"
    page.evaluate("browse(), pick(begun.library.find((e) => e.name === 'softcap'))")
    quiet(page)
    assert page.evaluate("state.text") == "mask = causal & window(w) & document(off, causal)\nscore = softcap(c)"
    assert page.text("#score") == "c * tanh(score / c)"
    assert not page.evaluate("$('mod').hidden")


def test_names_are_offered_while_they_are_written(page):
    write(page, "causal & win")
    assert page.text("#offers [role=option] code") == "window(w)"
    assert page.evaluate("getComputedStyle($('problems')).display") == "none"  # the list says it, too
    page.key("ArrowDown")
    assert page.evaluate("$('source').getAttribute('aria-activedescendant')") == "offer-0"
    assert page.text("#offers [aria-selected=true] code") == "window(w)"
    page.key("Escape")
    assert page.evaluate("$('offers').hidden && !$('source').hasAttribute('aria-activedescendant')")
    assert "did you mean `window`?" in page.text("#problems")
    page.type("d")
    page.key("Tab")
    quiet(page)
    assert page.evaluate("[state.text, document.activeElement.id]") == ["causal & window(w)", "source"]
    page.type("40")  # in place of the argument
    quiet(page)
    assert page.evaluate("[state.text, $('offers').hidden]") == ["causal & window(40)", True]
    checked(page, fk.mask("causal & window(40)"))


def test_completion_is_taken_by_mouse_and_absent_in_comments(page):
    write(page, "full & docu")
    box = page.evaluate("(({x, y}) => [x, y])($('offer-0').getBoundingClientRect())")
    page.click(box[0] + 20, box[1] + 10)
    quiet(page)
    assert page.evaluate("[state.text, document.activeElement.id]") == ["full & document(off)", "source"]
    write(page, "full # docu")
    assert page.evaluate("$('offers').hidden")


def test_explorer_text_has_the_colours_of_editors(page):
    text = "causal & where(q - k < 0x10, flag, true) # 𝕢 half"
    page.evaluate(f"write({text!r})")
    quiet(page)
    shown = page.evaluate("[...$('mirror').children].map((e) => [e.className, e.textContent]).filter(([c]) => c)")
    places = [(name.replace(".", "-"), p) for name, p in token_classes()]
    want, at = [], 0
    while at < len(text):
        name, hit = next((n, m) for n, p in places if (m := re.compile(p).match(text, at)))
        want += [[name, hit[0]]] if name else []
        at = hit.end()
    assert shown == want
    assert page.text("#mirror") == text + "\n"
    function, place = (f"getComputedStyle($('mirror').querySelector('{c}')).color" for c in (
        ".support-function", ".variable-language"))  # fmt: skip
    assert page.evaluate(f"{function} !== {place}")


def test_help_opens_and_axes_have_titles(page):
    page.evaluate("$('help').click()")
    assert "An attention mask says which keys each query sees." in page.text("#helping")
    page.evaluate("document.querySelector('#helping form button').click()")
    assert not page.evaluate("$('helping').open")
    page.evaluate(
        "{ const old = context.fillText; window.drawnText = [];"
        "context.fillText = (t, ...at) => (drawnText.push(t), old.call(context, t, ...at)); }"
    )
    page.evaluate("fit()")
    page.settle()
    assert page.evaluate("['keys', 'queries'].every((t) => drawnText.includes(t))")


def test_reload_and_history(served, page):
    write(page, "causal & window(w) | k < 64")
    slide(page, "v-w", 90)
    page.evaluate("zoom(3), keep()")
    view, text = page.evaluate("[view.q, view.k, view.scale]"), page.evaluate("state.text")
    page.go(page.evaluate("location.href").replace("?", "?again"))
    quiet(page)
    assert page.evaluate("[$('source').value, state.values.w]") == [text, 90]
    assert page.evaluate("[view.q, view.k, view.scale]") == pytest.approx(view, rel=1e-5)
    write(page, "full")
    page.evaluate("$('back').click()")
    page.until(f"state.text === {text!r}")
    quiet(page)
    assert page.evaluate("[$('source').value, $('forth').disabled]") == [text, False]
    page.evaluate("$('forth').click()")
    page.until("state.text === 'full'")
    quiet(page)
    page.evaluate("fit()")
    checked(page, fk.mask("full"))


@pytest.mark.parametrize(
    "fragment", ["text=%ZZ", "text=&q_len=-5&block=x&set=w&view=1,2", "q_len=99999999999&block=0x0&set=w=1e999"]
)
@pytest.mark.exhaustive
def test_fragments_that_make_no_sense(served, fragment):
    page, server = served
    page.go(f"{server.url}?{abs(hash(fragment))}#{fragment}")
    quiet(page)
    assert page.evaluate("[state.q_len, state.block[0], typeof state.text]") == [1024, 128, "string"]
    assert page.complaints == []


def test_taking_it_along(page):
    write(page, "causal & window(9)")
    assert page.text("#command") == "frisket show 'causal & window(9)' --q-len 1024"
    assert 'fk.mask("causal & window(9)")' in page.text("#python")
    saved = page.evaluate("new Promise((done) => canvas.toBlob((blob) => done(blob.size)))")
    assert saved > 1000


@pytest.mark.exhaustive
def test_a_first_text_with_a_mistake(served):
    page, server = served
    page.go(f"{server.url}?first#text=causal+%26+windw(3)")
    quiet(page)
    assert page.text("#problems .remedy") == "did you mean `window`?"
    page.mouse("mouseMoved", 400, 400)
    page.click(1130, 24)  # zoom in: there is nothing to zoom into
    page.drag(400, 400, 500, 500)
    write(page, "causal & window(3)")
    checked(page, fk.mask("causal & window(3)"))
    assert page.complaints == []


@pytest.mark.exhaustive
def test_explorer_page_escapes_hostile_text(page):
    page.evaluate("write('causal # <img src=x onerror=alert(1)>')")
    quiet(page)
    page.evaluate("write('<img src=x onerror=alert(1)> & windw(1)')")
    quiet(page)
    assert page.evaluate("document.querySelectorAll('img').length") == 0


@pytest.mark.exhaustive
def test_a_burst_ends_with_its_last(page):
    page.evaluate("for (let w = 1; w <= 200; w++) write(`causal & window(${w})`)")
    quiet(page)
    checked(page, fk.mask("causal & window(200)"))
    assert page.evaluate("turn") < 20  # what nobody waits for is not asked


@pytest.mark.exhaustive
def test_dark_narrow_and_score_mods(served):
    page, server = served
    fragment = "text=mask+%3D+causal+%26+same(doc)%0Ascore+%3D+alibi&q_len=256&kv_len=256&heads=4"
    page.go(f"{server.url}?dark#{fragment}", dark=True, width=420, height=900)
    quiet(page)
    checked(page, fk.mask("causal & same(doc)", doc=DOC), 256, 256, palette=DARK)
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    assert "orange more, violet less" in page.evaluate("$('heat').getAttribute('aria-label')")
    assert page.complaints == []


@pytest.mark.exhaustive
def test_explorer_controls_have_accessible_names(page):
    page.evaluate("write('mask = causal & window(w) & document(off)\\nscore = softcap(c)')")
    quiet(page)
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, textarea, canvas[role], dialog, [role=listbox]')].filter((e) => "
        "!(e.getAttribute('aria-label') || e.labels?.length || e.textContent.trim())).map((e) => e.outerHTML)"
    )
    assert unnamed == []


@pytest.mark.exhaustive
def test_a_server_that_is_gone_is_said(page, monkeypatch):
    page.evaluate("window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    page.evaluate("write('full')")
    quiet(page)
    assert "is `frisket explore` still running?" in page.text("#problems")
