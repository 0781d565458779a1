"""Checks of a model of transformers when it is made: whether it asks for an implementation of attention at all.

transformers checks the name of an implementation and nothing more. A model that looks classes up by that name ends in a
KeyError; a model that never asks for an implementation ignores it, and the masks of its config. `watch` mends both:
such a model gets the implementation that transformers would choose without a name, with a warning. A mask that no
attention reads is an error when the model is called.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch

from frisket.dsl.errors import ParameterError, nearest

BOOLS: set[type] = set()  # configs of models that work under sdpa, and so compute with masks of Bools


def watch(name: str) -> None:
    """Look at every model that is made with the implementation `name`. A second call changes nothing."""
    from transformers import PreTrainedModel

    plain = PreTrainedModel.get_correct_attn_implementation
    if hasattr(plain, "frisket"):
        return

    @wraps(plain)
    def correct(self: Any, requested_attention: str | None, is_init_check: bool = False) -> str:
        if requested_attention == name:
            if _check_read not in self._forward_pre_hooks.values():
                self.register_forward_pre_hook(_check_read)
            if computes_itself(type(self)):
                fallback: str = plain(self, None, is_init_check)
                _warn(type(self), name, f"it has taken {fallback!r}")
                return fallback
            tables = _by_name(type(self))
            if self._supports_sdpa and all(other == "sdpa" for _, other in tables):
                BOOLS.add(type(self.config))
            for classes, other in tables:
                layer_class = classes.setdefault(name, classes[other])
                _warn(type(self), name, f"its {layer_class.__name__} computes what {other!r} does")
        implementation: str = plain(self, requested_attention, is_init_check)
        return implementation

    correct.frisket = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = correct  # type: ignore[method-assign]


def _warn(kind: type, name: str, instead: str) -> None:
    warnings.warn(
        f"attn_implementation={name!r} is not used by {kind.__name__}, which computes attention itself: {instead}",
        stacklevel=2,
    )


def _check_read(module: Any, *_: Any) -> None:
    """Refuse the mask or score mod of a config that no attention of the model reads, and a field that is none."""
    config = module.config
    if not torch.compiler.is_compiling():
        check_fields(vars(config), "config.")
    for what in ("frisket_mask", "frisket_score"):
        value = getattr(config, what, None)
        if value is not None and not torch.compiler.is_compiling() and not _is_read(module, what, value):
            parts = ", ".join([f"config.{n}" for n in config.sub_configs])
            raise ParameterError(
                f"config.{what} is set, and no attention of {type(module).__name__} reads it\n  "
                + (f"set it on the part that has attention: {parts}" if parts else "leave it out")
            )


def _is_read(module: Any, what: str, value: Any) -> bool:
    """Whether some layer that asks for an implementation finds that value in its config."""
    return any(
        getattr(getattr(m, "config", None), what, None) == value and _asks(vars(sys.modules[type(m).__module__]))
        for m in module.modules()
        if m is not module
    )


def _asks(names: dict[str, Any]) -> bool:
    from transformers import AttentionInterface

    return any(isinstance(x, AttentionInterface) for x in names.values())


def _modules(kind: type) -> list[dict[str, Any]]:
    """The namespaces of the Python modules that define a model's class and its bases among models."""
    from transformers import PreTrainedModel

    bases = [c for c in kind.__mro__ if issubclass(c, PreTrainedModel) and c is not PreTrainedModel]
    return [vars(sys.modules[n]) for n in dict.fromkeys(c.__module__ for c in bases) if n in sys.modules]


def computes_itself(kind: type) -> bool:
    """Whether a model has attention, and no implementation from outside ever comes into it."""
    known = _modules(kind)
    if any(map(_asks, known)):
        return False
    return any(
        inspect.isclass(x) and issubclass(x, torch.nn.Module) and "attention" in x.__name__.lower()
        and x.__module__ == names["__name__"]
        for names in known
        for x in names.values()
    )  # fmt: skip


def _by_name(kind: type) -> list[tuple[dict[str, Any], str]]:
    """Tables of classes by implementation, in models that ask for implementations elsewhere, and the entry to take."""
    tables = []
    for names in _modules(kind):
        for n, x in names.items():
            if n.endswith("ATTENTION_CLASSES") and isinstance(x, dict) and "eager" in x:
                tables.append((x, "sdpa" if "sdpa" in x else "eager"))
    return tables


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def eager_only(place: str) -> bool:
    """Whether the models of a Python module are said to work under eager attention alone. There `is_causal` of a layer
    may say anything, and no mask means that all is seen."""
    from transformers import PreTrainedModel

    models = [
        x for x in vars(sys.modules[place]).values()
        if inspect.isclass(x) and issubclass(x, PreTrainedModel) and x.__module__ == place
    ]  # fmt: skip
    flags = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn", "_supports_attention_backend")
    return bool(models) and not any(getattr(x, flag, False) for x in models for flag in flags)


FIELDS = "frisket_mask", "frisket_score", "frisket_params"


def check_fields(names: Iterable[str], where: str) -> None:
    """Raise `ParameterError` for a name that begins as a field does and is none: configs take any.

    >>> check_fields(["frisket_masks", "dtype"], "config.")
    Traceback (most recent call last):
    frisket.dsl.errors.ParameterError: config.frisket_masks is not read; did you mean `frisket_mask`?
      the fields are frisket_mask, frisket_score, frisket_params
    """
    if wrong := [n for n in names if str(n).startswith("frisket") and n not in FIELDS]:
        near = nearest(wrong[0], FIELDS)
        raise ParameterError(
            f"{where}{wrong[0]} is not read{f'; did you mean `{near}`?' if near else ''}\n"
            f"  the fields are {', '.join(FIELDS)}"
        )
