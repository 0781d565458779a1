"""Settings from the environment: one table. A keyword of a call beats its variable."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from frisket.dsl.errors import MissingPackageError, ParameterError
from frisket.grammar.memo import memo

choices: dict[str, Callable[[], tuple[str, ...]]] = {}  # names that exist, when records of backends are loaded
# the stages from a text to a kernel, in order, which FRISKET_SHOW names
STAGES = ("expr", "simplified", "facts", "layout", "plan", "target", "source")


def offer(**names: Callable[[], tuple[str, ...]]) -> None:
    """Say which names exist. Variables that were read before are read again, and checked."""
    choices.update(names)
    _settings.memo.clear()
    _last[0] = _NONE


@dataclass(frozen=True)
class Variable:
    """One row of the table: `read` turns its text into a value or raises with the good ones."""

    name: str
    read: Callable[[str], Any]
    meaning: str


def _stages(text: str) -> tuple[str, ...]:
    names = tuple(n.strip() for n in text.split(",") if n.strip())
    for n in names:
        if n not in (*STAGES, "compiles"):
            raise ParameterError(f"FRISKET_SHOW={text}: no stage {n!r}; there are {', '.join(STAGES)}, compiles")
    return names


def _backend(text: str) -> str:
    if "backends" in choices and text not in (names := choices["backends"]()):
        raise ParameterError(f"FRISKET_BACKEND={text}: there are {', '.join(names)}")
    return text


def _engines(text: str) -> bool | tuple[str, ...]:
    engines = tuple(n.strip() for n in text.split(","))
    offered = choices["engines"]() if "engines" in choices else engines
    if text not in ("0", "1") and any(n not in offered for n in engines):
        raise ParameterError(f"FRISKET_ENGINES={text}: write 0, 1, or names among {', '.join(offered)}")
    return text == "1" if text in ("0", "1") else engines


def _compile(text: str) -> str:
    if text != "background":
        raise ParameterError(f"FRISKET_COMPILE={text}: write background; without it a call waits for its kernel")
    return text


def _check(text: str) -> bool:
    if text not in ("0", "1"):
        raise ParameterError(f"FRISKET_CHECK={text}: write 0 or 1")
    return text == "1"


def _tuned(text: str) -> bool:
    if text not in ("0", "1"):
        raise ParameterError(f"FRISKET_TUNED={text}: write 0 or 1")
    return text == "1"


VARIABLES = (
    Variable("FRISKET_SHOW", _stages, "stages to print to stderr at each compilation; compiles: why it compiled"),
    Variable("FRISKET_CACHE_DIR", str, "where generated kernels are kept"),
    Variable("FRISKET_BACKEND", _backend, "the backend of every call that names none"),
    Variable("FRISKET_CHECK", _check, "1: check every call against the float64 reference"),
    Variable("FRISKET_ENGINES", _engines, "0: no engines; flash,cudnn: these alone may run, compared in full or not"),
    Variable("FRISKET_COMPILE", _compile, "background: library calls run while a thread compiles a native kernel"),
    Variable("FRISKET_TUNED", _tuned, "0: tiles that frisket tune measured are not used"),
)


class Settings(NamedTuple):
    """The values of the environment variables, a part of keys; `Settings.read()` looks at the environment now."""

    show: tuple[str, ...] = ()
    cache_dir: str | None = None
    backend: str | None = None
    check: bool = False
    engines: bool | tuple[str, ...] = True
    compile: str | None = None
    tuned: bool = True

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> Settings:
        # private: a Python may lack it
        if environment is None and (raw := getattr(os.environ, "_data", None)) is not None:
            texts = tuple(map(raw.get, _KEYS))  # a tenth of the time of os.environ.get
            last = _last[0]
            if texts != last[0]:
                values = tuple([None if x is None else os.environ.decodevalue(x) for x in texts])
                last = _last[0] = texts, _settings(values)
            return last[1]
        env = os.environ if environment is None else environment
        return _settings(tuple([env.get(n) for n in _NAMES]))


def cache_folder() -> Path:
    """The folder of generated kernels: that of FRISKET_CACHE_DIR, or the user's cache, which platformdirs knows.

    Images for GPUs may lack that package: it is imported for the default folder alone.
    """
    if folder := Settings.read().cache_dir:
        return Path(folder)
    try:
        from platformdirs import user_cache_dir
    except ModuleNotFoundError:
        raise MissingPackageError(
            "platformdirs is not installed, and it says where the user's caches are: pip install platformdirs, "
            "or set FRISKET_CACHE_DIR to a folder for generated kernels",
            name="platformdirs",
        ) from None
    return Path(user_cache_dir("frisket"))


_NAMES = tuple(v.name for v in VARIABLES)
_KEYS = tuple(map(getattr(os.environ, "encodekey", str), _NAMES))  # as os.environ holds them


@memo(64)
def _settings(texts: tuple[str | None, ...]) -> Settings:
    # an empty text is no setting
    return Settings(**{v.name[8:].lower(): v.read(x) for v, x in zip(VARIABLES, texts, strict=True) if x})


_NONE: Any = (None,) * len(VARIABLES), Settings()  # no variable is there
_last: list[tuple[Any, Settings]] = [_NONE]  # every call asks: what was read last, in one entry, since threads read it
