"""Fields that a model's config adds to its attention: `frisket_mask`, `frisket_score`, `frisket_params`.

>>> from transformers import LlamaConfig
>>> config = LlamaConfig(frisket_mask="causal & q - k < w", frisket_params={"w": 256})
>>> config.to_diff_dict()["frisket_mask"]
'causal & q - k < w'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from frisket.dsl.errors import FrisketError, ParameterError
from frisket.lowering.plan import whole
from frisket.runtime.masks.mask import mask, score

from .transformers_masks import POSITIONS, SymbolicMask, constant, joined

FULL, SLIDING = "full_attention", "sliding_attention"


@constant
def canonical(text: str, kind: str) -> tuple[str, tuple[str, ...], tuple[tuple[str, Any], ...]]:
    """A user's program as one expression: its text, the names it reads, and the values it gives some of them."""
    try:
        parsed = (mask if kind == "mask" else score)(text)
    except FrisketError as error:
        error.add_note(f"in config.frisket_{kind}")
        raise
    return str(parsed), (*parsed.unbound, *parsed.params), tuple(parsed.params.items())


def program(
    module: torch.nn.Module, mask: SymbolicMask, heads: int, softcap: float | None, bias: Tensor | None,
    params: Mapping[str, Any] | None,
) -> tuple[str | None, str | None, dict[str, Any]]:  # fmt: skip
    """The texts of a layer's mask and score mod, and values for the names in them."""
    config = getattr(module, "config", None)
    steps = [f"softcap({float(softcap)!r})"] if softcap is not None else []
    if mask.bias:
        steps.append(f"score + {mask.bias}")
    places: dict[str, Any] = {}
    if bias is not None:
        index = ", ".join(["0" if n == 1 else x for x, n in zip(POSITIONS, bias.shape[:2])])
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
    values.update(_values(config, params, names))
    if missing := [n for n in names if n not in values]:
        raise ParameterError(
            f"`{missing[0]}` of the config's frisket_mask or frisket_score has no value; give it there, "
            f'config.frisket_params = {{"{missing[0]}": ...}}, or to the call: model(..., frisket_params={{...}})'
        )
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
                raise ParameterError(
                    f"config.{name} names {kind!r}; the layers of this model are {', '.join(sorted(known))}"
                )
        if types is not None:
            text = text.get(types[module.layer_idx])
        else:
            text = text.get(FULL if getattr(config, "sliding_window", None) is None else SLIDING)
    if text is not None and not isinstance(text, str):
        raise ParameterError(
            f"config.{name} is {text!r}; it is a text, or a dict of texts by type of layer, which configs can save\n"
            f"  the text of a mask or score mod of frisket is str(it)"
        )
    if text is not None and getattr(config, "is_encoder_decoder", False):
        raise ParameterError(f"config.{name} is set, and an encoder-decoder has three kinds of attention: leave it out")
    return text


def _values(config: Any, params: Mapping[str, Any] | None, names: list[str]) -> dict[str, Any]:
    """Values of the user's names: those of the config, and of the call."""
    values = {**(getattr(config, "frisket_params", None) or {}), **(params or {})}
    unused = [n for n in values if n not in names]
    if unused and not isinstance(getattr(config, "frisket_mask", None), dict):  # another layer's may read it
        raise ParameterError(
            f"`{unused[0]}` is in frisket_params, and neither frisket_mask nor frisket_score of the config reads it; "
            "the names there are " + (", ".join(sorted(names)) or "none")
        )
    return {n: x for n, x in values.items() if n in names}


def _check_place(text: str, values: Mapping[str, Any], symbolic: SymbolicMask, heads: int) -> None:
    """Refuse a user's mask where it has no meaning, or shows keys that the cache of a sliding window has dropped."""
    if "attention_mask" in symbolic.tables:
        raise ParameterError(
            "config.frisket_mask is set, and this call brings an attention_mask of 4 axes: leave out one of them"
        )
    if symbolic.chosen:
        raise ParameterError("config.frisket_mask is set, and this model chooses keys under its own mask: leave it out")
    if not symbolic.kv_offset:
        return
    user_mask = mask(text, **{n: x for n, x in values.items() if n in canonical(text, "mask")[1]})
    _, _, q, k = symbolic.origin
    full = whole((0, 0, q, k), (symbolic.batch, heads, symbolic.q_len, symbolic.kv_len))
    if user_mask.layout(symbolic.q_len, k, symbolic.batch, heads, origin=(0, 0, q, 0), sizes=full).visible_pairs:
        raise ParameterError(
            f"config.frisket_mask shows query {q} keys before {k}, which the cache of this sliding-window layer has "
            f"dropped: {text}\n  give past_key_values=transformers.DynamicCache(), which keeps all, or raise "
            "config.sliding_window"
        )
