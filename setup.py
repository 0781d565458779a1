"""README as PyPI shows it, and the links beside it: `REPOSITORY_URL=https://github.com/OWNER/NAME python -m build`.

PyPI has README without the files beside it. With the address of the repository, links and pictures of README lead to
the files of this version's tag there, and the address stands in the command that clones. Without an address README
stays as it is. All else stands in pyproject.toml.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PICTURES = (".gif", ".png", ".svg")
RELATIVE = re.compile(r'(\]\(|\bsrc="|\bsrcset=")(?!https?:|#)([^)"]+)')


def described(readme: str, url: str, version: str) -> str:
    """README with the address of the repository, and those of pages and pictures under the tag of a version."""

    def absolute(found: re.Match[str]) -> str:
        return f"{found[1]}{url}/{'raw' if found[2].endswith(PICTURES) else 'blob'}/v{version}/{found[2]}"

    # the even parts are prose, the odd ones blocks of code
    parts = re.split(r"(^```.*?^```$)", readme, flags=re.M | re.S)
    page = "".join(x if i % 2 else RELATIVE.sub(absolute, x) for i, x in enumerate(parts))
    return page.replace("REPOSITORY_URL", url)


def dynamic(url: str) -> dict[str, object]:
    """The fields that pyproject.toml calls dynamic, but for the version."""
    facade = (ROOT / "runtime" / "facade" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.*)"$', facade, re.M)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found: dict[str, object] = {"long_description": readme, "long_description_content_type": "text/markdown"}
    if url:
        changes = f"{url}/blob/v{version}/CHANGELOG.md"
        found["long_description"] = described(readme, url, version)
        found["project_urls"] = {"Source": url, "Issues": f"{url}/issues", "Changelog": changes}
    return found


if __name__ == "__main__":
    from setuptools import setup

    setup(**dynamic(os.environ.get("REPOSITORY_URL", "").rstrip("/")))
