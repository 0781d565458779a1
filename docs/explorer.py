"""The picture of docs/explorer.md: `python docs/explorer.py` writes docs/explorer.png. Needs chromium on the PATH."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from support import browser  # noqa: E402

from frisket.runtime.explore.analyst import Analyst  # noqa: E402
from frisket.runtime.explore.page import page as page_of  # noqa: E402
from frisket.runtime.explore.server import Server  # noqa: E402

QUIET = "under === null && !waiting && document.documentElement.dataset.ready === 'yes'"
STATE = {
    "text": "causal & window(w) & document(off)", "values": {"w": 9000}, "q_len": 131072, "kv_len": 131072, "batch": 1,
    "heads": 1, "block": [128, 128], "documents": 8,
}  # fmt: skip


def picture(path: Path, width: int = 1280, height: int = 800, dark: bool = False, typed: str = "") -> None:
    """The explorer in a window of this size; `typed` is written after the text, as a keyboard sends it."""
    with Server(Analyst({}), lambda nonce: page_of(STATE, {}, nonce)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            with browser.Page(origin=server.url.rsplit("/", 2)[0]) as page:
                page.go(server.url, dark, width, height)
                page.until(QUIET)
                page.evaluate("inspect(90000, 84000, true)")
                page.type(typed)
                page.until(QUIET)
                page.screenshot(path)
                assert page.complaints == [], page.complaints
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    picture(HERE / "explorer.png")
