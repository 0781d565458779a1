"""Every model type of transformers with frisket in place of its eager attention: what is equal, refused, or neither.

    python tests/outside/transformers_sweep.py [TYPE ... | --rest]

Each type runs in a process of its own with a time limit, a tiny configuration and random weights. The results are
written to tests/outside/transformers.json, one line for each type; with types, only their lines change, and
`--rest` runs those that have not run. `python docs/compatibility.py` makes the page from it.

A verdict is one of VERDICTS. What was compared is in `parts`: outputs and gradients of all parameters, padding on both
sides, and `generate` through caches, assisted, and with beams. A part that eager attention itself cannot do is left
out.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from support.hf_tiny import LENGTH, VOCABULARY, configs  # noqa: E402

NOT_RUN = {"verdict": "not run"}
RESULTS = HERE / "transformers.json"
LIMIT = 60  # seconds of a processor for a type; other work on the machine changes no verdict
VERDICTS = {
    "equal": "all that was compared is equal to eager attention",
    "refused": "refused in words",
    "as sdpa": "a result is that of transformers' sdpa, and not that of its eager attention",
    "its own": "computes attention itself, and says so in a warning",
    "no attention": "has no attention that asks for an implementation, or calls none with this configuration",
    "no tiny model": "no tiny configuration works under eager attention",
    "differs": "a result is not eager attention's",
    "fails": "fails otherwise",
    "not run": "not run since the plug-in or transformers changed",
}
# tried in this order: the first class of a type that works under eager attention is compared
CLASSES = [
    "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ",
    "CTC", "", "IMAGE_CLASSIFICATION", "PRETRAINING", "TEXT_ENCODING", "BACKBONE",
]  # fmt: skip
GENERATE = {
    "generate, dynamic cache": {"cache_implementation": "dynamic"},
    "generate, static cache": {"cache_implementation": "static"},
    "generate, padded left": {"left": 4},
    "assisted decoding": {"prompt_lookup_num_tokens": 3},
    "beam search": {"num_beams": 3},
}


# -- models -----------------------------------------------------------------------------------------------------------


def classes(kind: str) -> list[Any]:
    """The classes of a model type, those with a loss on tokens first."""
    import transformers
    from transformers.models.auto import modeling_auto

    names: list[str] = []
    for task in CLASSES:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES")
        found = mapping.get(kind, ())
        names += [found] if isinstance(found, str) else list(found)
    for mapping in (
        x for n, x in vars(modeling_auto).items() if n.startswith("MODEL_") and n.endswith("_MAPPING_NAMES")
    ):
        found = mapping.get(kind, ())
        names += [found] if isinstance(found, str) else list(found)
    listed = [made for n in dict.fromkeys(names) if (made := getattr(transformers, n, None)) is not None]
    return listed or parts(transformers.CONFIG_MAPPING[kind])


def parts(config: type) -> list[Any]:
    """The models of a configuration that no automatic class knows: parts of others."""
    from transformers import PreTrainedModel

    package = config.__module__.rpartition(".")[0]
    found = []
    folder = Path(importlib.import_module(package).__file__).parent
    for path in sorted(folder.glob("modeling_*.py")):
        module = importlib.import_module(f"{package}.{path.stem}")
        found += [
            x for x in vars(module).values()
            if inspect.isclass(x) and issubclass(x, PreTrainedModel) and getattr(x, "config_class", None) is config
            and "PreTrained" not in x.__name__
        ]  # fmt: skip
    return found


def spread(model: Any) -> None:
    """Weights under which attention matters, and nothing grows."""
    import torch

    torch.manual_seed(1)
    with torch.no_grad():
        for m in model.modules():
            weight = getattr(m, "weight", None)
            if isinstance(weight, torch.nn.Parameter) and weight.ndim == 2:
                embeds = isinstance(m, torch.nn.Embedding)
                weight.normal_(0, 1 if embeds else (2 / max(1, sum(weight.shape))) ** 0.5)
        for p in model.parameters():
            if not bool(p.isfinite().all()):
                p.normal_(0, 0.1)


def inputs(model: Any) -> Iterator[dict[str, Any]]:
    """What a model may be called with, the likeliest first: tokens, pictures or sound, as its `forward` names them."""
    import torch

    torch.manual_seed(7)
    config, names = model.config, inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    inner = [getattr(config, n, None) for n in ("text_config", "vision_config", "audio_config", "backbone_config")]

    def size(*path: str, otherwise: Any) -> Any:
        for part in (config, *[x for x in inner if x is not None]):
            for n in path:
                found = part.get(n) if isinstance(part, dict) else getattr(part, n, None)
                if found is not None:
                    return found
        return otherwise

    side = size("image_size", "crop_size", "input_size", otherwise=32)
    height, width = side if isinstance(side, list | tuple) else (side, side)
    channels = size("num_channels", "in_channels", otherwise=3)
    channels = channels if isinstance(channels, int) else 3
    hidden = size("hidden_size", "d_model", "embed_dim", otherwise=32)
    hidden = hidden if isinstance(hidden, int) else 32
    frames = size("num_frames", "frames_per_clip", "max_frames", otherwise=4)
    bins = size("num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "input_dim", otherwise=80)
    bins = bins if isinstance(bins, int) else 80
    most, longest = size("max_source_positions", otherwise=128), size("max_length", otherwise=32)
    picture = torch.randn(2, channels, height, width)
    made: dict[str, list[Any]] = {
        "input_ids": [torch.randint(3, min(80, size("vocab_size", otherwise=VOCABULARY)), (2, LENGTH))],
        "pixel_values": [picture, torch.randn(2, frames, channels, height, width)],
        "pixel_values_videos": [torch.randn(2, frames, channels, height, width)],
        "input_values": [torch.randn(2, 4000), torch.randn(2, 1, 4000), torch.randn(2, longest, bins)],
        "input_features": [torch.randn(2, *x) for x in ((bins, 2 * most), (40, bins), (bins, 40), (1, 64, 64))],
        "inputs_embeds": [torch.randn(2, LENGTH, hidden)],
        "hidden_states": [torch.randn(2, LENGTH, hidden)],
        "query_embeds": [torch.randn(2, 6, hidden)],
        "encoder_hidden_states": [torch.randn(2, 7, size("encoder_hidden_size", otherwise=hidden))],
    }  # fmt: skip
    more: dict[str, Any] = {}
    if "decoder_input_ids" in names:
        more["decoder_input_ids"] = torch.randint(3, 80, (2, 9))
    if "bbox" in names:
        more["bbox"] = torch.randint(0, 20, (2, LENGTH, 4)).sort(-1).values
    if "use_cache" in names:
        more["use_cache"] = False
    if "grid_thw" in names:
        patch, time_ = size("patch_size", otherwise=8), size("temporal_patch_size", otherwise=1)
        more["grid_thw"] = torch.tensor([[1, 4, 4], [1, 4, 4]])
        for n in ("hidden_states", "pixel_values"):
            made[n] = [torch.randn(32, channels * time_ * patch * patch), torch.randn(32, hidden)]
    needed = [n for n, x in names.items() if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD and n in made]
    chosen = [
        [main], needed, [*needed, "input_ids"], ["input_ids", "pixel_values"], ["input_ids", "input_features"],
        ["pixel_values"], ["inputs_embeds"], ["hidden_states"], ["query_embeds", "encoder_hidden_states"],
        ["input_features"], ["input_values"],
    ]  # fmt: skip
    seen = []
    for some in chosen:
        some = sorted({n for n in some if n in names and n in made})
        if some and some not in seen:
            seen.append(some)
            for i in range(max(len(made[n]) for n in some)):
                yield {**{n: made[n][min(i, len(made[n]) - 1)] for n in some}, **more}


def floats(out: Any) -> list[Any]:
    """The tensors of a result that are compared: not caches, and no losses."""
    import torch

    found: list[Any] = []
    items = out.items() if hasattr(out, "items") else enumerate(out if isinstance(out, tuple | list) else [out])
    for name, x in items:
        if name in ("past_key_values", "attentions", "cross_attentions", "loss"):
            continue
        if isinstance(x, torch.Tensor):
            if x.is_floating_point():
                found.append(x)
        elif isinstance(x, tuple | list) or hasattr(x, "items"):
            found += floats(x)
    return found


def trained(model: Any, given: dict[str, Any], real: Any = None) -> tuple[list[Any], dict[str, Any]]:
    """Outputs, of real tokens where some are padding, and gradients of all parameters."""
    import torch

    torch.manual_seed(11)
    model.zero_grad()
    found = floats(model(**given))
    if real is not None:
        found = [x[real] for x in found if x.shape[:2] == real.shape]
    if not found:
        raise RuntimeError("no output to compare")
    weights = [torch.linspace(-1, 1, x.shape[-1] if x.ndim else 1).double() for x in found]
    sums = [(x.double() * w).mean() for x, w in zip(found, weights, strict=True) if x.requires_grad and x.numel()]
    if sums:
        torch.stack(sums).sum().backward()
    return [x.detach() for x in found], {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def far(got: tuple[list[Any], dict[str, Any]], want: tuple[list[Any], dict[str, Any]]) -> str:
    """What is not equal, or nothing."""
    import torch

    if len(got[0]) != len(want[0]):
        return f"{len(got[0])} outputs for {len(want[0])}"
    for i, (x, y) in enumerate(zip(got[0], want[0], strict=True)):
        if x.shape != y.shape:
            return f"output {i} is {list(x.shape)} for {list(y.shape)}"
        if not torch.equal(x.isnan(), y.isnan()):
            return f"output {i} is NaN elsewhere"
        if not x.numel():
            continue
        off, most = ((z).nan_to_num(0, 0, 0).abs().max() for z in (x - y, y))
        if off > 2e-4 * (most + 0.1):
            return f"output {i} is off by {float(off):.2g} of {float(most):.2g}"
    gradients = {name: g for name, g in want[1].items() if g.numel()}
    top = max((float(g.nan_to_num().abs().max()) for g in gradients.values()), default=0.0)
    for name, g in gradients.items():
        if name not in got[1]:
            return f"no gradient of {name}"
        off = float((got[1][name] - g).nan_to_num(0, 0, 0).abs().max())
        if off > 2e-3 * float(g.nan_to_num().abs().max()) + 1e-4 * top:
            return f"the gradient of {name} is off by {off:.2g} of {float(g.abs().max()):.2g}"
    return ""


# -- one type ---------------------------------------------------------------------------------------------------------


Make = Callable[[str], Any]


def pair(kind: str) -> tuple[Any, Make, dict[str, Any]]:
    """The first tiny model of a type that works under eager attention, what makes its like, and its inputs."""
    first: Exception | None = None
    for config, made in ((c, m) for c in configs(kind) for m in classes(kind)):
        if time.process_time() > LIMIT / 3:
            break
        make = partial(maker, made, config)
        try:
            eager = make("eager")
            spread(eager)
        except Exception as e:
            first = first or shown(e)
            continue
        for given in inputs(eager):
            try:
                trained(eager, given)
            except Exception as e:
                first = first or shown(e)
            else:
                return eager, make, given
    raise first or RuntimeError("transformers has no model of this type alone")


def maker(made: Any, config: Any, name: str) -> Any:
    import torch

    torch.manual_seed(0)
    return made._from_config(copy.deepcopy(config), attn_implementation=name).eval()


def shown(error: Exception) -> Exception:
    if os.environ.get("SHOW"):
        traceback.print_exception(error)
    return error


def asked(eager: Any, given: dict[str, Any]) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """The parts that are compared: a name, and what gives the results of a model."""
    import torch

    yield "outputs and gradients", lambda model: trained(model, given)
    ids = given.get("input_ids")
    if ids is not None and "attention_mask" in inspect.signature(eager.forward).parameters:
        for side in ("left", "right"):
            seen = torch.ones_like(ids)
            seen[0, slice(0, 5) if side == "left" else slice(-5, None)] = 0
            real = seen.bool() if "decoder_input_ids" not in given else None
            more = {**given, "attention_mask": seen}
            yield f"padded {side}", partial(trained, given=more, real=real)
    if eager.can_generate() and ids is not None:
        for part, how in GENERATE.items():
            left = how.get("left", 0)
            rows = ids[:1, :11] if "prompt_lookup_num_tokens" in how else ids[:, :11]
            seen = torch.ones_like(rows)
            seen[0, :left] = 0
            yield part, partial(generated, rows=rows, seen=seen, how={k: v for k, v in how.items() if k != "left"})


def generated(model: Any, rows: Any, seen: Any, how: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    length = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    return [model.generate(rows, attention_mask=seen, **length, **how)], {}


def compared(eager: Any, ours: Any, make: Make, given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each part that eager attention can do, and what is not equal in it."""
    for part, results in asked(eager, given):
        try:
            want = results(eager)
        except Exception as e:
            shown(e)
            continue
        if not (wrong := far(results(ours), want)):
            yield part, ""
        elif not far(results(eager), want):  # the same as the first time
            try:
                sdpa = make("sdpa")
                sdpa.load_state_dict(eager.state_dict())
                as_sdpa = not far(results(ours), results(sdpa))
            except Exception:
                as_sdpa = False
            yield part, wrong + AS_SDPA if as_sdpa else wrong


AS_SDPA = ", as under sdpa"


def one(kind: str) -> dict[str, Any]:
    """The verdict on a type."""
    import torch

    torch.set_num_threads(1)
    import frisket.integrations.transformers as ours_module
    from frisket.dsl.errors import FrisketError

    calls = [0]
    inner = ours_module.attention

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return inner(*args, **kwargs)

    ours_module.attention = counted  # type: ignore[assignment]
    ours_module.register()
    try:
        eager, make, given = pair(kind)
    except Exception as e:
        return {"verdict": "no tiny model", "why": said(e)}
    found: dict[str, Any] = {"verdict": "", "model": type(eager).__name__, "parts": [], "why": ""}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            ours = make("frisket")
            ours.load_state_dict(eager.state_dict())
            for part, wrong in compared(eager, ours, make, given):
                if not wrong:
                    found["parts"].append(part)
                else:
                    verdict = "as sdpa" if wrong.endswith(AS_SDPA) and found["verdict"] != "differs" else "differs"
                    found.update(verdict=verdict, why=f"{part}: {wrong}")
        except FrisketError as e:
            return {**found, "verdict": "refused", "why": said(shown(e))}
        except Exception as e:
            return {**found, "verdict": "fails", "why": said(shown(e))}
    told = [str(w.message) for w in warned if "attn_implementation='frisket' is not used" in str(w.message)]
    if not found["verdict"]:
        found["verdict"] = "equal" if calls[0] else "its own" if told else "no attention"
        found["why"] = told[0].partition("itself: ")[2] if told else ""
    return found


def said(error: BaseException) -> str:
    """An error in a line."""
    text = " ".join(str(error).split())
    text = text if type(error).__module__.startswith("frisket") else f"{type(error).__name__}: {text}"
    return text.replace(str(Path.home()), "~")[:240]


# -- all of them ------------------------------------------------------------------------------------------------------


def child(kind: str, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT + 5))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not os.environ.get("SHOW"):
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
    try:
        pipe.send(one(kind))
    except BaseException as e:
        pipe.send({"verdict": "fails", "why": said(e)})


def limited(kind: str) -> dict[str, Any]:
    """The verdict on a type, from a process that may hang or die."""
    context = multiprocessing.get_context("fork")
    ends = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(kind, ends[1]))
    process.start()
    ends[1].close()
    try:
        if not ends[0].poll(10 * LIMIT):
            return {"verdict": "fails", "why": f"no end after {10 * LIMIT} s, whether it computed or waited"}
        found: dict[str, Any] = ends[0].recv()
        return found
    except EOFError:
        process.join()
        late = process.exitcode == -signal.SIGXCPU
        why = f"no end after {LIMIT} s of a processor" if late else f"the process ended with {process.exitcode}"
        return {"verdict": "fails", "why": why}
    finally:
        process.kill()
        process.join()
        ends[0].close()


def types() -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES)


def read() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"transformers": "", "types": {}}


def write(found: dict[str, Any]) -> None:
    import transformers

    lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(found["types"].items()))
    head = f'{{"transformers": {json.dumps(transformers.__version__)}, "types": {{\n'
    RESULTS.write_text(head + lines + "\n}}\n", encoding="utf-8")


def prepare(set_: Callable[[str, str], object]) -> None:
    """What processes that are forked find done: settings, and imports."""
    for name, value in (("TRANSFORMERS_VERBOSITY", "error"), ("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1")):
        set_(name, value)
    set_("FRISKET_BACKEND", os.environ.get("FRISKET_BACKEND", "library"))
    import torch
    import transformers  # noqa: F401

    import frisket.integrations.transformers  # noqa: F401

    torch.set_num_threads(1)


def main(chosen: list[str]) -> None:
    prepare(os.environ.__setitem__)
    found = read()
    if chosen == ["--rest"]:
        chosen = [k for k in types() if found["types"].get(k, NOT_RUN) == NOT_RUN]
    with ThreadPoolExecutor(2) as pool:
        for kind, verdict in zip(all_ := chosen or types(), pool.map(limited, all_)):
            found["types"][kind] = verdict
            print(f"{kind:32} {verdict['verdict']:14} {verdict.get('why', '')[:150]}", flush=True)
            write(found)


if __name__ == "__main__":
    main(sys.argv[1:])
