"""Hooks of mkdocs: pages of the root, notebooks and linked source files as pages, and coloured sessions."""

from __future__ import annotations

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

LINK = re.compile(r"\]\(((?:\.\./)+[\w/.-]+)(#[\w-]+)?\)")
SOURCE = re.compile(
    r"""<(?:script|img|iframe|source|audio|video)\b[^>]*\bsrc=["']?(https?:)?//"""
    r"""|<link\b(?![^>]*\brel=["']?canonical)[^>]*\bhref=["']?(https?:)?//"""
    r"""|url\(\s*["']?(https?:)?//|@import\s+["'](https?:)?//""",
    re.I,
)
# how much a page counts in a search beside others; 0: it is not searched
BOOST = {
    "glossary.md": 2, "recipes.md": 3, "caches.md": 3, "parallel.md": 3, "sharding.md": 2, "block-sparsity.md": 2,
    "tour.md": 0.2, "design-notes.md": 0.3, "changelog.md": 0.2, "contributing.md": 0.2, "performance.md": 0.3,
    "compatibility.md": 0.3, "predictions.md": 0.2,
    "gallery/from-test-suites-masks.md": 0.2, "gallery/from-test-suites-score-mods.md": 0.2,
}  # fmt: skip
# pages that stand in the root of the repository, where people look for them
ROOT_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
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
    linked = {name for f in written for target, _ in LINK.findall(f.content_string) if (name := outside(f, target))}
    for name in sorted(n for n in linked if not n.endswith(".ipynb") and n not in ROOT_PAGES):
        path = ROOT / name
        text = f"# {name}\n\n~~~{LANGUAGES.get(path.suffix, '')}\n{path.read_text(encoding='utf-8')}~~~\n"
        files.append(File.generated(config, f"source/{name}.md", content=text))


def outside(file: File, target: str) -> str | None:
    """The path from the root of the repository that a link leads to, where that is not in docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(file.src_uri), target))
    return None if path.startswith("docs/") else path


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    boost = 0 if page.file.src_uri.startswith("source/") else BOOST.get(page.file.src_uri, 1)
    page.meta["search"] = {"boost": boost} if boost else {"exclude": True}

    def moved(found: re.Match[str]) -> str:
        name = outside(page.file, found[1])
        top = "../" * page.file.src_uri.count("/")
        if name is None:
            return found[0]
        notebook = name.endswith(".ipynb")
        to = f"notebooks/{posixpath.basename(name)[:-6]}.md" if notebook else ROOT_PAGES.get(name, f"source/{name}.md")
        return f"]({top}{to}{found[2] or ''})"

    if page.file.src_uri == "index.md" and config["repo_url"]:
        markdown = markdown.replace("REPOSITORY_URL", config["repo_url"])
    markdown = re.sub(r"^\|.*", bare, LINK.sub(moved, markdown), flags=re.M)
    return re.sub(r"^```python\n(?=>>> )", "```pycon\n", markdown, flags=re.M)


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
