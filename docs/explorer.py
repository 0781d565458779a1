"""The pictures of docs/explorer.md and README: `python docs/explorer.py` writes docs/explorer.png and explorer.gif.

Needs chromium on the PATH, and Pillow for the GIF.
"""

from __future__ import annotations

import io
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from support import browser  # noqa: E402

from frisket.runtime.explore.server import Analyst, Server  # noqa: E402
from frisket.runtime.explore.server import page as page_of  # noqa: E402

QUIET = "under === null && !waiting && document.documentElement.dataset.ready === 'yes'"
STATE = {
    "text": "causal & window(w) & document(off)", "values": {"w": 9000}, "q_len": 131072, "kv_len": 131072, "batch": 1,
    "heads": 1, "block": [128, 128], "documents": 8,
}  # fmt: skip


FIRST = "causal"
TYPED = (" &", " win", "do", "w(", "w", ")", " &", " sa", "me(", "doc", ")")  # a frame each


@contextmanager
def explorer(state: dict, width: int, height: int, dark: bool = False) -> Iterator[browser.Page]:
    """The explorer in a window of this size; at its end, its console must have been silent."""
    with Server(Analyst({}), lambda nonce: page_of(state, {}, nonce)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            with browser.Page(origin=server.url.rsplit("/", 2)[0]) as page:
                page.go(server.url, dark, width, height)
                page.until(QUIET)
                yield page
                assert page.complaints == [], page.complaints
        finally:
            server.shutdown()
            thread.join()


def picture(path: Path, width: int = 1280, height: int = 800, dark: bool = False, typed: str = "") -> None:
    """The explorer in a window of this size; `typed` is written after the text, as a keyboard sends it."""
    with explorer(STATE, width, height, dark) as page:
        page.evaluate("inspect(90000, 84000, true)")
        page.type(typed)
        page.until(QUIET)
        page.screenshot(path)


def animation(path: Path, width: int = 960, height: int = 640) -> None:
    """A GIF of a mask that is typed: a frame for every few keys, and the last one for three seconds."""
    from PIL import Image

    start = STATE | {"text": FIRST, "values": {"w": 600}, "q_len": 8192, "kv_len": 8192}
    frames = []
    with explorer(start, width, height) as page, tempfile.TemporaryDirectory() as folder:
        for typed in ("", *TYPED):
            page.type(typed)
            page.until(QUIET)
            page.screenshot(Path(folder) / "frame.png")
            frames.append(Image.open(io.BytesIO((Path(folder) / "frame.png").read_bytes())).convert("RGB"))
    palette = frames[-1].quantize(64)  # one for all frames: colours do not flicker
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    times = [900, *[350] * (len(frames) - 2), 3000]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=times, loop=0, optimize=True)


if __name__ == "__main__":
    picture(HERE / "explorer.png")
    animation(HERE / "explorer.gif")
