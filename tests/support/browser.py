"""Chromium without a window, driven through its pipe: DevTools messages, JSON ended by a NUL byte.

with browser.Page(path) as page:
    page.evaluate("document.title")
    page.mouse("mouseMoved", 200, 300)
    assert page.complaints == []

Needs no package: a chromium or Chrome on the PATH.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 30.0  # seconds for anything


@cache
def executable() -> str | None:
    """A browser that starts: some systems ship a `chromium` that only says where to get one."""
    for path in filter(None, map(shutil.which, NAMES)):
        with suppress(OSError, subprocess.TimeoutExpired):
            if subprocess.run([path, "--version"], capture_output=True, timeout=PATIENCE).returncode == 0:
                return path
    return None


def _pipe() -> tuple[int, int]:
    """A pipe away from the numbers that the browser gives its own."""
    ends = os.pipe()
    high = fcntl.fcntl(ends[0], fcntl.F_DUPFD_CLOEXEC, 10), fcntl.fcntl(ends[1], fcntl.F_DUPFD_CLOEXEC, 10)
    for end in ends:
        os.close(end)
    return high


class Page:
    """One page of one browser. `complaints` are errors and warnings of its console, exceptions, and every
    request that leaves the file, or the `origin` that it may ask."""

    def __init__(self, path: Path | str | None = None, origin: str | None = None) -> None:
        self.allowed = ("file:", "data:", "blob:", *([origin] if origin else []))
        self.serial, self.rest, self.session = 0, b"", None
        self.complaints: list[str] = []
        self.profile = tempfile.TemporaryDirectory(prefix="frisket-browser-", ignore_cleanup_errors=True)
        heard, self.to = _pipe()  # it reads on 3, writes on 4
        self.back, said = _pipe()
        command = [
            executable(), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--mute-audio",
            "--disable-dev-shm-usage", "--disable-extensions", "--hide-scrollbars", "--force-device-scale-factor=1",
            "--remote-debugging-pipe", f"--user-data-dir={self.profile.name}", "about:blank",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{heard} 4>&{said}', "browser", *command], pass_fds=(heard, said),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(heard)
        os.close(said)
        try:
            target = self.ask("Target.createTarget", url="about:blank")["targetId"]
            self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.ask(f"{domain}.enable")
            nothing = {"latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
            if origin is None:
                self.ask("Network.emulateNetworkConditions", offline=True, **nothing)
            if path is not None:
                self.go(path)
        except BaseException:
            self.close()
            raise

    def go(self, path: Path | str, dark: bool = False, width: int = 1280, height: int = 800) -> None:
        """Open a file or an address, and wait until all of it is drawn."""
        url = str(path) if str(path).startswith("http") else Path(path).resolve().as_uri()
        self.complaints.clear()
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=url)
        self.until(f"location.href.startsWith({json.dumps(url)})")
        self.until("document.documentElement?.dataset.ready === 'yes'")
        self.settle()

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.to)  # it leaves when nobody is there any more
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.back)
        self.profile.cleanup()

    # -- what a person does ---------------------------------------------------------------------------

    def mouse(self, kind: str, x: float, y: float, **more) -> None:
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def drag(self, x0: float, y0: float, x1: float, y1: float) -> None:
        self.mouse("mousePressed", x0, y0, button="left", clickCount=1)
        self.mouse("mouseMoved", (x0 + x1) / 2, (y0 + y1) / 2, button="left", buttons=1)
        self.mouse("mouseMoved", x1, y1, button="left", buttons=1)
        self.mouse("mouseReleased", x1, y1, button="left", clickCount=1)

    def key(self, key: str, shift: bool = False) -> None:
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, modifiers=8 if shift else 0)

    def type(self, text: str) -> None:
        """What a keyboard sends for each character."""
        for character in text:
            self.ask("Input.dispatchKeyEvent", type="keyDown", key=character, text=character)
            self.ask("Input.dispatchKeyEvent", type="keyUp", key=character)

    def screenshot(self, path: Path | str) -> None:
        self.settle()
        Path(path).write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

    # -- what the page says ---------------------------------------------------------------------------

    def evaluate(self, expression: str):
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"].get("exception", {}).get("description", expression))
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")

    def until(self, condition: str) -> None:
        end = time.monotonic() + PATIENCE
        while not self.evaluate(condition):
            assert time.monotonic() < end, f"never true: {condition}; {self.complaints}"
            time.sleep(0.02)

    def settle(self) -> None:
        """Until everything wanted is drawn."""
        self.until("typeof drawing === 'undefined' || (drawing === 0 && wanted.length === 0)")

    def colour(self, x: float, y: float) -> str:
        """The pixel of the canvas at (x, y) of the window, as `#rrggbb`."""
        self.settle()
        copied = (
            "const box = canvas.getBoundingClientRect(), pen = new OffscreenCanvas(1, 1).getContext('2d');"
            f"pen.drawImage(canvas, -Math.floor({x} - box.left), -Math.floor({y} - box.top));"
            "return [...pen.getImageData(0, 0, 1, 1).data.slice(0, 3)];"
        )
        return "#" + "".join(f"{part:02x}" for part in self.evaluate(f"(() => {{ {copied} }})()"))

    # -- messages ---------------------------------------------------------------------------------------

    def ask(self, method: str, **params):
        self.serial += 1
        message = {"id": self.serial, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.serial:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self._hear(answer)

    def _next(self):
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.back], [], [], PATIENCE)
            assert ready, "the browser is silent"
            more = os.read(self.back, 1 << 20)
            assert more, "the browser is gone"
            self.rest += more
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def _hear(self, event) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(self.allowed):
            self.complaints.append("asked for " + params["request"]["url"])
