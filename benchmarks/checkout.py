"""Imported before frisket: where that is not installed, this checkout is what `import frisket` finds, here and in the
processes that are started from here."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

UNINSTALLED = str(Path(__file__).resolve().parent / "uninstalled")

if find_spec("frisket") is None:
    sys.path.append(UNINSTALLED)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), UNINSTALLED]))
