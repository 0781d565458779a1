"""Fields that a model's config adds to its attention, and checks of a model when it is made.

>>> from transformers import LlamaConfig
>>> config = LlamaConfig(frisket_mask="causal & q - k < w", frisket_params={"w": 256})
>>> config.to_diff_dict()["frisket_mask"]
'causal & q - k < w'

The fields are `frisket_mask`, `frisket_score`, `frisket_params`.

transformers checks the name of an implementation and nothing more: not whether a model asks for one at all. A model
that looks classes up by that name ends in a KeyError; a model that never asks for an implementation ignores it, and the
masks of its config. `watch` mends both: such a model gets the implementation that transformers would choose without a
name, with a warning. A mask that no attention reads is an error when the model is called.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterable, Mapping
from functools import wraps
from typing import Any

import torch

from frisket.dsl.errors import FrisketError, ParameterError, nearest
from frisket.lowering.plan import whole
from frisket.runtime.masks.mask import mask, score

from .transformers_masks import POSITIONS, SymbolicMask, constant, expect_bools, joined

FULL, SLIDING = "full_attention", "sliding_attention"
FIELDS = "frisket_mask", "frisket_score", "frisket_params"


@constant
def canonical(text: str, kind: str) -> tuple[str, tuple[str, ...], tuple[tuple[str, Any], ...]]:
    """A user's program as one expression: its text, the names it reads, and the values it gives some of them."""
    try:
        parsed = (mask if kind == "mask" else score)(text)
    except FrisketError as error:
        error.add_note(f"in config.frisket_{kind}")  # the reader of a text does not know where it is from
        raise
    return str(parsed), (*parsed.unbound, *parsed.params), tuple(parsed.params.items())


def program(
    module: Any, mask: SymbolicMask, heads: int, softcap: float | None, bias: Any, params: Mapping[str, Any] | None
) -> tuple[str | None, str | None, dict[str, Any]]:
    """The texts of a layer's mask and score mod, and values for the names in them."""
    config = getattr(module, "config", None)  # layers of some models have none
    steps = [f"softcap({float(softcap)!r})"] if softcap is not None else []
    if mask.bias:
        steps.append(f"score + {mask.bias}")
    places: dict[str, Any] = {}
    if bias is not None:
        index = ", ".join(["0" if n == 1 else x for x, n in zip(POSITIONS, bias.shape[:2])])
        # a bias counts from the first query and key of the call, a mask from those of the sequence
        steps.append(f"score + position_bias[{index}, q - q_start, k - k_start]")
        places = {"position_bias": bias, "q_start": mask.origin[2], "k_start": mask.origin[3]}
    structure, theirs = mask.structure, _config_text(config, module, "frisket_mask")
    names: list[str] = []
    values: dict[str, Any] = {}
    if theirs is not None:
        structure, used, defaults = canonical(theirs, "mask")
        names.extend(used)
        values.update(defaults)
    if (mod := _config_text(config, module, "frisket_score")) is not None:
        text, used, defaults = canonical(mod, "score")
        steps.append(text)
        names.extend(used)
        values.update(defaults)
    values.update(_values(config, params, names))  # after the defaults in the texts, which they replace
    if missing := [n for n in names if n not in values]:
        text = f"`{missing[0]}` of the config's frisket_mask or frisket_score has no value; give it there, "
        text += f'config.frisket_params = {{"{missing[0]}": ...}}, or to the call: '
        raise ParameterError(f"{text}model(..., frisket_params={{...}})")
    shown = mask.text(structure)
    tables = {**mask.read_by(shown), **places}
    if mask.bias:
        tables.update(mask.tables)
    if clashes := [n for n in names if n in tables]:
        raise ParameterError(f"`{clashes[0]}` is a name of the plug-in's own here; call yours something else")
    if theirs is not None:
        _check_place(structure, values, mask, heads)
    return shown or None, joined(steps, " then ") or None, {**tables, **values}


def _config_text(config: Any, module: torch.nn.Module, name: str) -> str | None:
    """The config's text for a layer: a text for all, or texts by the type of layer."""
    text = getattr(config, name, None)
    if isinstance(text, dict):
        types = getattr(config, "layer_types", None)
        known = {FULL, SLIDING} if types is None else set(types)
        for kind in text:
            if kind not in known:
                message = f"config.{name} names {kind!r}; the layers of this model are {', '.join(sorted(known))}"
                raise ParameterError(message)
        if types is not None:
            text = text.get(types[module.layer_idx])
        else:
            # without layer_types all layers are of one kind
            text = text.get(FULL if getattr(config, "sliding_window", None) is None else SLIDING)
    if text is not None and not isinstance(text, str):
        message = f"config.{name} is {text!r}; it is a text, or a dict of texts by type of layer, which configs can "
        raise ParameterError(f"{message}save\n  the text of a mask or score mod of frisket is str(it)")
    if text is not None and getattr(config, "is_encoder_decoder", False):
        raise ParameterError(f"config.{name} is set, and an encoder-decoder has three kinds of attention: leave it out")
    return text


def _values(config: Any, params: Mapping[str, Any] | None, names: list[str]) -> dict[str, Any]:
    """Values of the user's names: those of the config, and of the call."""
    values = {**(getattr(config, "frisket_params", None) or {}), **(params or {})}
    unused = [n for n in values if n not in names]
    if unused and not isinstance(getattr(config, "frisket_mask", None), dict):  # another layer's may read it
        text = (
            f"`{unused[0]}` is in frisket_params, and neither frisket_mask nor frisket_score of the config reads it; "
        )
        raise ParameterError(f"{text}the names there are {', '.join(sorted(names)) or 'none'}")
    return {n: x for n, x in values.items() if n in names}


def _check_place(text: str, values: Mapping[str, Any], symbolic: SymbolicMask, heads: int) -> None:
    """Refuse a user's mask where it has no meaning, or shows keys that the cache of a sliding window has dropped."""
    if "attention_mask" in symbolic.tables:
        message = "config.frisket_mask is set, and this call brings an attention_mask of 4 axes: leave out one of them"
        raise ParameterError(message)
    if symbolic.chosen:
        raise ParameterError("config.frisket_mask is set, and this model chooses keys under its own mask: leave it out")
    if not symbolic.kv_offset:  # a cache from key 0 on has dropped nothing
        return
    user_mask = mask(text, **{n: x for n, x in values.items() if n in canonical(text, "mask")[1]})
    _, _, q, k = symbolic.origin
    full = whole((0, 0, q, k), (symbolic.batch, heads, symbolic.q_len, symbolic.kv_len))
    if user_mask.layout(symbolic.q_len, k, symbolic.batch, heads, origin=(0, 0, q, 0), sizes=full).visible_pairs:
        message = (
            f"config.frisket_mask shows query {q} keys before {k}, which the cache of this sliding-window layer has "
        )
        message += f"dropped: {text}\n  give past_key_values=transformers.DynamicCache(), which keeps all, or raise "
        raise ParameterError(f"{message}config.sliding_window")


def check_fields(names: Iterable[str], where: str) -> None:
    """Raise `ParameterError` for a name that begins as a field does and is none: configs take any.

    >>> check_fields(["frisket_masks", "dtype"], "config.")
    Traceback (most recent call last):
    frisket.dsl.errors.ParameterError: config.frisket_masks is not read; did you mean `frisket_mask`?
      the fields are frisket_mask, frisket_score, frisket_params
    """
    if wrong := [n for n in names if str(n).startswith("frisket") and n not in FIELDS]:
        near = nearest(wrong[0], FIELDS)
        text = f"{where}{wrong[0]} is not read{f'; did you mean `{near}`?' if near else ''}\n"
        raise ParameterError(f"{text}  the fields are {', '.join(FIELDS)}")


# -- when a model is made ----------------------------------------------------------------------------------------------


def watch(name: str) -> None:
    """Look at every model that is made with the implementation `name`. A second call changes nothing."""
    from transformers import PreTrainedModel

    plain = PreTrainedModel.get_correct_attn_implementation
    if hasattr(plain, "frisket"):
        return

    @wraps(plain)
    def correct(self: Any, requested_attention: str | None, is_init_check: bool = False) -> str:
        if requested_attention == name:
            if _check_read not in self._forward_pre_hooks.values():  # one hook, however often the implementation is set
                self.register_forward_pre_hook(_check_read)
            if computes_itself(type(self)):
                fallback: str = plain(self, None, is_init_check)
                _warn(type(self), name, f"it has taken {fallback!r}")
                return fallback
            tables = _by_name(type(self))
            # a model that computes with its mask expects Bools, as under sdpa
            if self._supports_sdpa and all(other == "sdpa" for _, other in tables):
                expect_bools(self.config)
            for classes, other in tables:
                # the model looks its class up by the name, and would end in a KeyError
                layer_class = classes.setdefault(name, classes[other])
                _warn(type(self), name, f"its {layer_class.__name__} computes what {other!r} does")
        implementation: str = plain(self, requested_attention, is_init_check)
        return implementation

    correct.frisket = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = correct  # type: ignore[method-assign]


def _warn(kind: type, name: str, instead: str) -> None:
    text = f"attn_implementation={name!r} is not used by {kind.__name__}, which computes attention itself: {instead}"
    warnings.warn(text, stacklevel=2)


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
        if m is not module  # the model has its config anyway
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
    # imported classes are those of other models
    classes = [x for names in known for x in names.values() if inspect.isclass(x) and x.__module__ == names["__name__"]]
    return any(issubclass(x, torch.nn.Module) and "attention" in x.__name__.lower() for x in classes)


def _by_name(kind: type) -> list[tuple[dict[str, Any], str]]:
    """Tables of classes by implementation, in models that ask for implementations elsewhere, and the entry to take."""
    tables = []
    for names in _modules(kind):
        for n, x in names.items():
            # models in the older style have such tables
            if n.endswith("ATTENTION_CLASSES") and isinstance(x, dict) and "eager" in x:
                tables.append((x, "sdpa" if "sdpa" in x else "eager"))
    return tables


# a constant of a graph, in which Dynamo does not read namespaces
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def eager_only(place: str) -> bool:
    """Whether the models of a Python module are said to work under eager attention alone. There `is_causal` of a layer
    may say anything, and no mask means that all is seen."""
    from transformers import PreTrainedModel

    classes = [x for x in vars(sys.modules[place]).values() if inspect.isclass(x) and x.__module__ == place]
    models = [x for x in classes if issubclass(x, PreTrainedModel)]
    flags = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn", "_supports_attention_backend")
    return bool(models) and not any(getattr(x, flag, False) for x in models for flag in flags)
