"""To be imported before frisket: where frisket is not installed, `import frisket` then finds this checkout, in this
process and in those that it starts."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

UNINSTALLED = str(Path(__file__).resolve().parent / "uninstalled")

if find_spec("frisket") is None:
    sys.path.append(UNINSTALLED)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), UNINSTALLED]))
