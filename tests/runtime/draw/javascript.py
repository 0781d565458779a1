"""runtime/draw/mask.js without a page: in node where there is one, else in a browser.

answers = javascript.run("async (given) => given.map((x) => printed(x, 'F'))", [1.5, 2.0])
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from support import browser

import frisket.runtime.draw as room

SOURCE = (Path(room.__file__).parent / "mask.js").read_text(encoding="utf-8")
WHY_NOT = None if shutil.which("node") or browser.executable() else "needs node, or chromium, on the PATH"


def run(function: str, given):
    """What an async JavaScript function makes of `given`, both as JSON; it sees everything in mask.js."""
    with tempfile.TemporaryDirectory() as folder:
        if shutil.which("node"):
            script, data = Path(folder, "run.js"), Path(folder, "given.json")
            call = f"({function})(JSON.parse(require('fs').readFileSync({json.dumps(str(data))}, 'utf8')))"
            script.write_text(f"{SOURCE}\n{call}.then((found) => console.log(JSON.stringify(found)));")
            data.write_text(json.dumps(given))
            done = subprocess.run(["node", str(script)], capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout)
        page = Path(folder, "run.html")
        ready = "document.documentElement.dataset.ready = 'yes';"
        text = json.dumps(given).replace("<", "\\u003c")
        page.write_text(f'<script type="application/json" id="given">{text}</script><script>{SOURCE}{ready}</script>')
        with browser.Page(page) as open_page:
            call = f"({function})(JSON.parse(document.getElementById('given').textContent))"
            return json.loads(open_page.evaluate(f"{call}.then((found) => JSON.stringify(found))"))
