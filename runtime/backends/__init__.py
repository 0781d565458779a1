"""Backends: a folder each, whose `__init__` registers its record. Folders are found, not listed."""

import importlib
import pkgutil

for _found in pkgutil.iter_modules(__path__, f"{__name__}."):
    if _found.ispkg:
        importlib.import_module(_found.name)
