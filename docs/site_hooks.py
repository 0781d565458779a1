"""What mkdocs is told beside mkdocs.yml: links to source files become pages, sessions are coloured as such."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from typecheck import link  # noqa: E402

OUTSIDE = re.compile(r"\]\((?:\.\./)+([\w/.-]+\.\w+)\)")
LANGUAGES = {".py": "python", ".frisket": "frisket", ".json": "json", ".hpp": "cpp"}


def on_config(config: Any) -> None:
    link()  # the package as griffe finds it


def on_files(files: Files, config: Any) -> None:
    """A page for every file of the repository that a page links to."""
    pages = [f for f in files.documentation_pages() if not f.generated_by]
    linked = {name for f in pages for name in OUTSIDE.findall(f.content_string)}
    for name in sorted(linked):
        path = ROOT / name
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
        else:
            text = f"# {name}\n\n~~~{LANGUAGES.get(path.suffix, '')}\n{path.read_text(encoding='utf-8')}~~~\n"
        files.append(File.generated(config, f"source/{name}.md", content=text))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    up = "../" * page.file.src_uri.count("/")
    markdown = OUTSIDE.sub(rf"]({up}source/\1.md)", markdown)
    return re.sub(r"^```python\n(?=>>> )", "```pycon\n", markdown, flags=re.M)
