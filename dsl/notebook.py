"""HTML for notebooks: sentences with a verdict, tables of code, sections to open. Styled in place, no scripts.

>>> sentence("no", "query 3 sees key 0 < 1", good=False)
'<div><b style="color:#b3261e">no</b>: query 3 sees key 0 &lt; 1</div>'
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

GOOD, BAD = "#1a7f37", "#b3261e"  # legible on light and on dark pages


def sentence(verdict: str, rest: str, *, good: bool) -> str:
    """HTML of a verdict in colour and the reason behind it; line breaks are kept."""
    why = escape(rest).replace("\n", "<br>")
    return f'<div><b style="color:{GOOD if good else BAD}">{escape(verdict)}</b>{": " if rest else ""}{why}</div>'


def table(rows: Iterable[tuple[str, str]]) -> str:
    """An HTML table of names and code; rows without code are left out."""
    cells = "".join(
        f'<tr><td style="text-align:left;vertical-align:top;padding-right:1em;opacity:.7">{escape(name)}</td>'
        f'<td style="text-align:left"><code style="white-space:pre-wrap">{escape(code)}</code></td></tr>'
        for name, code in rows
        if code
    )
    return f'<table style="border-collapse:collapse;font-size:13px">{cells}</table>'


def sections(parts: Iterable[tuple[str, str]]) -> str:
    """HTML of headings that open on a click and show preformatted text."""
    return "".join(
        f'<details><summary>{escape(name)}</summary><pre style="overflow-x:auto">{escape(text)}</pre></details>'
        for name, text in parts
    )
