"""Modules of Python: imported when they are needed, brought by extras, or generated as a text.

An import that fails for want of an extra says which one.
"""

from __future__ import annotations

import importlib
import json
import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from frisket.dsl.errors import BackendError, MissingPackageError
from frisket.grammar.memo import memo

from .cpp_build import kernel_step, ours, put, sweep, writable

DISTRIBUTION = "frisket-attention"  # `frisket` belongs to another project on the package index
EXTRAS = {n: n for n in ("torch", "jax", "flax", "transformers")} | {"matplotlib": "plot", "qwix": "quantized"}


def loaded(module: str) -> Any:
    """The module of a name, imported where it is not yet."""
    there: Any = sys.modules.get(module)
    if there is None or getattr(there.__spec__, "_initializing", False):  # in another thread: this waits for it
        there = importlib.import_module(module)
    return there


def pip_install(extra: str) -> str:
    """The command that installs frisket with an extra, from where this frisket came: a clone, a wheel or the index.

    >>> pip_install("torch").endswith("[torch]'")
    True
    """
    editable, source = installed_from()
    return f"pip install {'-e ' if editable else ''}'{source}[{extra}]'"


@memo(1)
def installed_from() -> tuple[bool, str]:
    """(whether pip installed it with -e, what pip was given): a folder or a wheel that is still there, else the name on
    the index."""
    from importlib.metadata import distributions  # slow to import, and asked for in errors alone
    from urllib.parse import urlparse
    from urllib.request import url2pathname

    # a clone that is the current folder has separate metadata, which do not say it
    texts = (x.read_text("direct_url.json") for x in distributions(name=DISTRIBUTION))
    origin = json.loads(next(filter(None, texts), "{}"))
    address = urlparse(origin.get("url", ""))
    path = url2pathname(address.path)
    if address.scheme != "file" or not Path(path).exists():
        return False, DISTRIBUTION
    return origin.get("dir_info", {}).get("editable", False), path


@contextmanager
def extras() -> Iterator[None]:
    """Around imports of optional packages: what is not there is a `MissingPackageError`.

    It is an ImportError too, so code that tries an import goes on working. Modules of our own, and packages that an
    installed package misses, raise what they raise.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        if (extra := EXTRAS.get(missing.name or "")) is None:
            raise
        raise MissingPackageError(f"{missing.name} is not installed: {pip_install(extra)}", name=missing.name) from None


def load_source(source: str, *, importable: bool = False, **scope: Any) -> dict[str, Any]:
    """The names of a generated module, in addition to those of `scope`; tracebacks show its lines. `importable` ones
    are modules that others can import, one for a text: torch.compile looks there for what functions call."""
    digest = sha256(source.encode()).hexdigest()[:12]
    name, file = f"frisket_kernel_{digest}", f"<frisket {digest}>"
    if importable and name in sys.modules:
        return vars(sys.modules[name])
    # None for the time of change: linecache would look for a file
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = ModuleType(name if importable else "frisket_kernel")
    names = vars(module)
    names.update(__file__=file, **scope)
    exec(compile(source, file, "exec"), names)
    if importable:
        sys.modules[name] = module  # after it ran: other threads import it
    return names


def load_from_file(source: str) -> ModuleType:
    """The module of a generated source, imported from its file in the cache."""
    path = write_source(source)
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    # Not the import system: its bytecode cache goes by time and size, and here only the text counts.
    exec(compile(source, str(path), "exec"), module.__dict__)
    kernel_step.set("built")  # Triton compiles it at its first launch
    return module


def write_source(source: str) -> Path:
    """The file that holds `source`, named by its hash; rewritten unless it holds just that. Triton and
    tracebacks read it."""
    folder = writable("triton")
    if folder is None:
        raise BackendError(
            "there is no folder for Triton kernels that others cannot write to\n  set FRISKET_CACHE_DIR to another"
        )
    data = source.encode()
    path = folder / f"attention_{sha256(data).hexdigest()[:20]}.py"
    if not (ours(path) and path.read_bytes() == data):
        put(path, data)
        sweep(folder)
    return path
