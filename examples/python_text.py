"""Text for these examples: the source of Python's standard library, which is wherever Python is."""

import re
from pathlib import Path
from sysconfig import get_paths

import numpy as np


def documents(seed: int = 0) -> list[np.ndarray]:
    """Functions and classes of the standard library, 200 to 2,000 bytes long, in an order drawn from the seed."""
    files = sorted(Path(get_paths()["stdlib"]).glob("*.py"))
    parts = [part for file in files for part in re.split(rb"^(?=def |class )", file.read_bytes(), flags=re.M)[1:]]
    found = [np.frombuffer(part, np.uint8) for part in parts if 200 <= len(part) <= 2000]
    return [found[i] for i in np.random.default_rng(seed).permutation(len(found))]
