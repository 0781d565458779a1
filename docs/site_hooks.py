"""Hooks of mkdocs: pages of the root, notebooks and linked files as pages, a table that filters, coloured sessions."""

from __future__ import annotations

import csv
import html
import os
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

sys.path.insert(0, str(ROOT / "docs"))

from notebooks import NAMES  # noqa: E402
from notebooks import page as notebook  # noqa: E402
from typecheck import link  # noqa: E402

OFF_SITE = "tour.md"  # a page for readers of the source
LINK = re.compile(rf"\]\(((?:\.\./)+[\w/.-]+|{OFF_SITE})(#[\w-]+)?\)")
SOURCE = re.compile(
    r"""<(?:script|img|iframe|source|audio|video)\b[^>]*\bsrc=["']?(https?:)?//"""
    r"""|<link\b(?![^>]*\brel=["']?canonical)[^>]*\bhref=["']?(https?:)?//"""
    r"""|url\(\s*["']?(https?:)?//|@import\s+["'](https?:)?//""",
    re.I,
)
# how much a page counts in a search; 0: it is not searched
BOOST = {
    "glossary.md": 2, "recipes.md": 3, "caches.md": 3, "parallel.md": 3, "sharding.md": 2, "block-sparsity.md": 2,
    "design-notes.md": 0.3, "changelog.md": 0.2, "contributing.md": 0.2, "performance.md": 0.3,
    "compatibility.md": 0.3, "reliability.md": 0.3, "train-packed.md": 0.2, "train-packed-jax.md": 0.2,
    "cheat-sheet.md": 0.2, "how-do-i.md": 0.5,
}  # fmt: skip
FOLDERS = (("source/", 0), ("performance/", 0.3))
# pages that stand in the root of the repository, where people look for them
ROOT_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
AS_IS = (".md", ".png")
LANGUAGES = {".py": "python", ".frisket": "frisket", ".json": "json", ".hpp": "cpp"}


def on_startup(command: str, dirty: bool) -> None:
    link()  # the package as griffe finds it; mkdocstrings looks which folders there are when it is configured
    sys.path.insert(0, str(ROOT / "docs"))
    from editors import register

    register()


def on_config(config: Any) -> None:
    if not config["repo_url"]:  # links to edit a page lead nowhere without a repository
        config["edit_uri"] = None
    if "MIKE_DOCS_VERSION" in os.environ:  # mike writes a folder for each version: the theme shows a list of them
        config["extra"]["version"] = {"provider": "mike"}


def on_files(files: Files, config: Any) -> None:
    for name, page in ROOT_PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        text = re.sub(r"\]\((?!https?:|#)", "](../", text).replace("](../docs/", "](")
        files.append(File.generated(config, page, content=text))
    written = files.documentation_pages()
    for name in NAMES:
        text, pictures = notebook(name)
        files.append(File.generated(config, f"notebooks/{name}.md", content=text.replace("](../../docs/", "](../")))
        for path, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{path}", content=picture))
    waiting, done = {name for f in written for name in linked(f)}, set[str](ROOT_PAGES)
    while waiting:
        name = waiting.pop()
        done.add(name)
        file = File.generated(config, source_page(name), content=source(name))
        files.append(file)
        waiting |= {*linked(file)} - done if name.endswith(".md") else set()


def linked(file: File) -> Iterator[str]:
    """The paths outside of the site to which a page leads, notebooks left out."""
    names = (outside(file, target) for target, _ in LINK.findall(file.content_string))
    yield from (name for name in names if name and not name.endswith(".ipynb") and name not in ROOT_PAGES)


def source_page(name: str) -> str:
    return f"source/{name}" if name.endswith(AS_IS) else f"source/{name}.md"


def source(name: str) -> str | bytes:
    """The page of a file outside of docs/: Markdown as it is, with links from its new place, other text as code."""
    if name.endswith(".png"):
        return (ROOT / name).read_bytes()
    text = (ROOT / name).read_text(encoding="utf-8")
    if not name.endswith(".md"):
        return f"# {name}\n\n~~~{LANGUAGES.get(Path(name).suffix, '')}\n{text}~~~\n"
    here = posixpath.dirname(name)

    def target(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(here, found[1]))
        return f"]({posixpath.relpath(path, f'docs/source/{here}')}{found[2] or ''})"

    return re.sub(r"\]\((?!https?:)([\w/.-]+)(#[\w-]+)?\)", target, text)


def outside(file: File, target: str) -> str | None:
    """The path from the root of the repository that a link leads to, where that is not on the site."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(file.src_uri), target))
    return None if path.startswith("docs/") and path != f"docs/{OFF_SITE}" else path


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    boost = BOOST.get(page.file.src_uri, next((x for folder, x in FOLDERS if page.file.src_uri.startswith(folder)), 1))
    page.meta["search"] = {"boost": boost} if boost else {"exclude": True}

    def moved(found: re.Match[str]) -> str:
        name = outside(page.file, found[1])
        top = "../" * page.file.src_uri.count("/")
        if name is None:
            return found[0]
        notebook = name.endswith(".ipynb")
        to = f"notebooks/{posixpath.basename(name)[:-6]}.md" if notebook else ROOT_PAGES.get(name, source_page(name))
        return f"]({top}{to}{found[2] or ''})"

    markdown = re.sub(r"^\[([^]]*)\]\((\w+\.csv)\), as a table:$", filtered, markdown, flags=re.M)
    if page.file.src_uri == "index.md" and config["repo_url"]:
        markdown = markdown.replace("REPOSITORY_URL", config["repo_url"])
    markdown = re.sub(r"^\|.*", bare, LINK.sub(moved, markdown), flags=re.M)
    return re.sub(r"^```python\n(?=>>> )", "```pycon\n", markdown, flags=re.M)


NAME = re.compile(r"(?<=<br>)\w+(?=</a>)")  # under a picture of the gallery
CALL = re.compile(r'(<h\d id="[\w.]+?(\w+)\.__call__" [^>]*>\s*<span [^>]*>)__call__(?=</span>)')


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Headings "Calling CLASS" for methods `__call__`, in the table of contents too; long names may break at `_`."""
    entries = [*page.toc]
    for entry in entries:
        entries += entry.children
        if entry.title == "__call__":
            entry.title = f"Calling {entry.id.split('.')[-2]}"
    content = NAME.sub(lambda name: name[0].replace("_", "_<wbr>"), content)
    return CALL.sub(r"\1Calling \2", content)


def filtered(found: re.Match[str]) -> str:
    """A table of docs/ with a field that filters its rows, by docs/assets/filter.js."""
    title, name = found[1], found[2]
    with open(ROOT / "docs" / name, encoding="utf-8", newline="") as file:
        head, *rows = [[html.escape(cell) for cell in row] for row in csv.reader(file)]
    lines = ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    columns = "".join(f"<th>{cell}</th>" for cell in head)
    id = name.partition(".")[0]
    return (
        f'{found[0]}\n\n<input class="filter" data-filters="{id}" type="search" placeholder="Filter" '
        f'aria-label="Filter: {title}">\n\n<table id="{id}"><thead><tr>{columns}</tr></thead>\n<tbody>{body}</tbody>'
        "</table>"
    )


def bare(row: re.Match[str]) -> str:
    """A row of a table without the backslashes before bars in code, which GitHub wants and Python-Markdown shows."""
    return re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0])


def on_post_build(config: Any) -> None:
    """The site is whole: nothing that a page shows, runs or is styled by comes from elsewhere."""
    found = [f"{path}: {m[0]}" for path, m in fetched(Path(config.site_dir))]
    if found:
        raise PluginError("the site fetches from elsewhere:\n  " + "\n  ".join(found))


def fetched(site: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    for path in sorted(p for p in site.rglob("*") if p.suffix in (".html", ".css")):
        for m in SOURCE.finditer(path.read_text(encoding="utf-8")):
            yield path.relative_to(site), m
