"""The site of documents: what its pages name, and that it is built, whole, without a network."""

import importlib
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from support import browser
from support.pages import DOCS, script

ROOT = Path(__file__).resolve().parents[2]
API = "\n".join(p.read_text(encoding="utf-8") for p in sorted((DOCS / "api").glob("*.md")))
DOORS = ["flex", "caches", "caches.jax", "caches.torch", "modeling", "operations", "parallel", "select", "sharding"]
# the field's terms -> the page that a search for them shows first
LEADS = {
    **dict.fromkeys(["GQA", "grouped-query attention", "padding mask", "sequence packing", "sliding window",
                     "speculative decoding"], "/recipes/"),
    **dict.fromkeys(["KV cache", "prefill", "decode", "chunked prefill"], "/caches/"),
    **dict.fromkeys(["context parallelism", "ring attention", "all-gather"], "/parallel/"),
    **dict.fromkeys(["sharding", "tensor parallelism"], "/sharding/"),
    **dict.fromkeys(["document mask", "sink", "soft cap", "full tile", "partial tile", "empty tile", "backward",
                     "recompile", "launch"], "/glossary/"),
    "block-sparse": "/block-sparsity/",
}  # fmt: skip
COMMON = ["query", "key", "head", "tile"]  # words of most pages: the glossary is among the first three
needs_mkdocs = pytest.mark.skipif(
    not all(map(find_spec, ("mkdocs", "material", "mkdocstrings_handlers"))),
    reason="builds the site: pip install 'frisket-attention[docs]'",
)


@pytest.mark.parametrize("module", ["frisket", *(f"frisket.{door}" for door in DOORS)])
def test_public_names_are_in_the_reference(module):
    for name in importlib.import_module(module).__all__:
        assert re.search(rf"^::: {re.escape(module)}\.{name}$|`{name}`", API, re.M), name


def test_reference_names_are_public_and_listed_once():
    named = re.findall(r"^::: ([\w.]+)$", API, re.M)
    assert len(set(named)) == len(named)
    for name in named:  # frisket.runtime.export is what `Layout.to_...` give
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__, f"{name} has no docstring"


def test_pages_are_all_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    placed = re.findall(r"^ +- (?:.*: )?([\w/.-]+\.md)$", text[text.index("\nnav:") :], re.M)
    pages = {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")} - {"tour.md"}
    notebooks = {f"notebooks/{p.stem}.md" for p in (ROOT / "examples" / "notebooks").glob("*.ipynb")}
    assert sorted(placed) == sorted({*pages, *notebooks, "changelog.md", "contributing.md", "security.md"})


def test_pages_of_the_site_have_an_end():
    """At most 400 lines, except reference pages that a reader searches."""
    long = {p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md") if p.read_text().count("\n") > 400}
    assert long <= {"language.md", "command-line.md", "tour.md"}


@needs_mkdocs
def test_site_check_finds_resources_of_other_hosts(tmp_path):
    hooks = script("site_hooks")
    page = tmp_path / "page.html"
    page.write_text(
        '<a href="https://a.b/"></a><script src="assets/x.js"></script><link rel=canonical href=https://a.b>'
    )
    assert not list(hooks.fetched(tmp_path))
    for bad in (
        '<script async src="https://a.b/x.js">', "<img alt='' src=//a.b/x.png>", '<link rel="stylesheet" href="http://a.b">',
        "<style>@font-face { src: url('https://a.b/x.woff2') }</style>", '<style>@import "https://a.b/x.css";</style>',
    ):  # fmt: skip
        page.write_text(bad)
        assert len(list(hooks.fetched(tmp_path))) == 1, bad


@needs_mkdocs
@pytest.mark.parametrize(("address", "left"), [(None, None), ("https://a.b/c/d", "edit/main/docs/")])
def test_edit_links_are_for_a_known_repository(address, left):
    config = {"repo_url": address, "edit_uri": "edit/main/docs/", "extra": {}}
    script("site_hooks").on_config(config)
    assert config == {"repo_url": address, "edit_uri": left, "extra": {}}


@needs_mkdocs
@pytest.mark.parametrize(("address", "clone"), [(None, "REPOSITORY_URL"), ("https://a.b/c/d", "https://a.b/c/d")])
def test_first_page_of_the_site_has_the_address(address, clone):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"), meta={})
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    shown = script("site_hooks").on_page_markdown(text, page, {"repo_url": address}, None)
    assert f"\ngit clone {clone} frisket && cd frisket\n" in shown
    assert shown.count("REPOSITORY_URL") == (0 if address else text.count("REPOSITORY_URL"))


@needs_mkdocs
def test_calls_of_classes_have_a_heading_of_words():
    entry = SimpleNamespace(title="__call__", id="frisket.flax.Layer.__call__", children=[])
    page = SimpleNamespace(toc=[SimpleNamespace(title="Layer", id="frisket.flax.Layer", children=[entry])])
    html = '<h3 id="frisket.flax.Layer.__call__" class="doc">\n <span class="x">{}</span></h3><code>__call__(q)</code>'
    shown = script("site_hooks").on_page_content(html.format("__call__"), page)
    assert (shown, entry.title) == (html.format("Calling Layer"), "Calling Layer")


@needs_mkdocs
def test_a_site_of_several_versions_lists_them(monkeypatch):
    monkeypatch.setenv("MIKE_DOCS_VERSION", "0.2.0")
    config = {"repo_url": None, "edit_uri": None, "extra": {}}
    script("site_hooks").on_config(config)
    assert config["extra"] == {"version": {"provider": "mike"}}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built by its one command, where nothing of a network answers."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    # not with --quiet: mkdocs then counts no warnings, and --strict lets them pass
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **nowhere}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@needs_mkdocs
@pytest.mark.exhaustive
def test_site_is_built_without_a_network(site):
    assert "frisket.compile" in (site / "api" / "attention" / "index.html").read_text(encoding="utf-8")
    code = (site / "index.html").read_text(encoding="utf-8")
    assert '<span class="gp">&gt;&gt;&gt; </span>' in code  # a session, not a text
    assert "edit/main" not in code
    assert not [p for p in site.rglob("*.py") if p.is_file()]


@contextmanager
def served(site):
    """(origin, browser) of a server of the site."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        origin = f"http://127.0.0.1:{server.server_port}"
        with browser.Page(origin=origin) as page:
            yield origin, page
        server.shutdown()


@needs_mkdocs
@pytest.mark.exhaustive
@pytest.mark.skipif(browser.executable() is None, reason="no chromium to open it with")
def test_site_search_finds_the_page_of_each_term(site):
    shown = "[...document.querySelectorAll('.md-search-result__item a')].map(a => a.pathname)"
    found = {}
    with served(site) as (origin, page):
        for word in [*LEADS, *COMMON]:
            page.ask("Page.navigate", url=f"{origin}/?q={quote(word)}")
            page.until(f"document.readyState == 'complete' && {shown}.length > 0")
            found[word] = list(dict.fromkeys(page.evaluate(shown)))[:3]
    assert {word: pages[0] for word, pages in found.items() if word in LEADS} == LEADS
    assert [word for word in COMMON if "/glossary/" not in found[word]] == []


def test_glossary_has_each_term():
    headings = re.findall(r"^## (.*)$", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.M)
    assert headings == sorted(headings, key=str.lower)
    assert [word for word in [*LEADS, *COMMON] if not any(word.lower() in h.lower() for h in headings)] == []


@needs_mkdocs
@pytest.mark.exhaustive
@pytest.mark.skipif(browser.executable() is None, reason="no chromium to open it with")
def test_pages_ask_for_nothing_elsewhere_and_are_found(site):
    with served(site) as (origin, page):
        for path in ("gallery/", "api/attention/", ""):
            page.ask("Page.navigate", url=f"{origin}/{path}")
            page.until(f"location.pathname == '/{path}' && document.readyState == 'complete'")
        page.evaluate("document.querySelector('[data-md-component=search-query]').focus()")
        page.evaluate("document.execCommand('insertText', false, 'softcap')")
        page.until("document.querySelectorAll('.md-search-result__item').length > 2")
        # what the button copies is what one types
        code = "[...document.querySelectorAll('.md-content pre code')][1]"
        page.evaluate(f"{code}.setAttribute('data-md-copying', '')")
        typed = page.evaluate(f"{code}.innerText")
        assert typed.startswith("import frisket as fk, torch\nm = fk.mask(")
        assert "queries" not in typed
        assert page.complaints == []
