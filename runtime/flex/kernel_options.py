"""`kernel_options` of flex_attention: read, checked, and turned into a `Tuning`.

>>> read({"BLOCK_M": 64, "bwd_num_warps": 8}).tuning.text
'forward.block_q=64,dq.num_warps=8,dkv.num_warps=8'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from frisket.dsl.errors import ParameterError
from frisket.dsl.hints import nearest
from frisket.grammar.memo import memo
from frisket.runtime.calls.options import Options
from frisket.runtime.calls.tuning import AS_CHOSEN, KERNELS, LaunchOptions, Tuning

# key -> the kernels it is for, and its place in LaunchOptions
TILES = {
    "BLOCK_M": ("forward", "block_q"), "BLOCK_N": ("forward", "block_k"),
    "BLOCK_M1": ("dkv", "block_q"), "BLOCK_N1": ("dkv", "block_k"),
    "BLOCK_M2": ("dq", "block_q"), "BLOCK_N2": ("dq", "block_k"),
}  # fmt: skip
LAUNCH = ("num_warps", "num_stages")
OF_PREFIX = {"": KERNELS, "fwd_": ("forward",), "bwd_": ("dq", "dkv")}
PROMISES = ("ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "TRITON_DECODE")
FLAGS = (*PROMISES[:2], "FORCE_USE_FLEX_ATTENTION", "PRESCALE_QK", "WRITE_DQ", "USE_TMA")
COUNTS = ("SPLIT_KV", "PARTITION_SIZE", "kpack", "matrix_instr_nonkdim", "waves_per_eu", "num_consumer_groups",
          "num_buffers_warp_spec")  # fmt: skip
WORDS = {
    "BACKEND": ("AUTO", "TRITON", "TRITON_DECODE", "FLASH"),
    "FLOAT32_PRECISION": ("ieee", "tf32", "tf32x3"),
    "TANH": ("approximate", "exact"),  # ours: of 16-bit inputs
}
REFUSED = {
    "SKIP_MASK_SCORE": "a mask is applied wherever a tile is not proved to be full",
    "OUTPUT_LOGSUMEXP": "ask for it as return_aux=AuxRequest(lse=True)",
    "OUTPUT_MAX": "ask for it as return_aux=AuxRequest(max_scores=True)",
}
KNOWN = (*TILES, *LAUNCH, *FLAGS, *COUNTS, *WORDS)
MOST_WARPS = 32


class KernelOptionError(ParameterError, RuntimeError, AssertionError):
    """A kernel option is unknown, has a value it cannot have, or promises what is not so; torch raises one of these
    three, whichever line notices."""


@dataclass(frozen=True)
class Asked:
    """The requests in kernel_options. `promises` are claims about the call that need a proof."""

    tuning: Tuning = AS_CHOSEN
    backend: str | None = None
    promises: tuple[str, ...] = ()


NOTHING = Asked()


def options_of(scale: float | None, enable_gqa: bool, asked: Asked, device: str) -> Options:
    """The options with which an attention is compiled for this type of device. On a CPU BACKEND chooses nothing: it
    names kernels of a GPU, and a script that says so runs there as it is."""
    return Options(scale, enable_gqa, None if device == "cpu" else asked.backend, tuning=asked.tuning)


def read(options: Mapping[str, Any] | None) -> Asked:
    """The requests in kernel_options; every key is used, checked, known to have no effect, or refused."""
    if options is None:
        return NOTHING
    try:
        return _read(tuple(options.items()))
    except (AttributeError, TypeError):
        raise KernelOptionError(
            f"kernel_options is {options!r}\n  it is a dict: its keys are names, its values numbers, bools and names"
        ) from None


@memo(256)
def _read(options: tuple[tuple[str, Any], ...]) -> Asked:
    launches = dict.fromkeys(KERNELS, LaunchOptions())
    given: dict[str, Any] = {}
    for key, x in sorted(options, key=lambda item: str(item[0]).startswith(("fwd_", "bwd_"))):  # the special one last
        prefix, name = _named(key)
        value = _checked(key, name, x)
        if name in TILES:
            kernel, place = TILES[name]
            launches[kernel] = replace(launches[kernel], **{place: value})
        elif name == "USE_TMA":
            launches["forward"] = replace(launches["forward"], descriptors=value)
        elif name in LAUNCH:
            launches.update({k: replace(launches[k], **{name: value}) for k in OF_PREFIX[prefix]})
        else:
            given[name] = value
    return Asked(
        Tuning(**launches, precision=given.get("FLOAT32_PRECISION"), splits=_splits(given), tanh=given.get("TANH")),
        _backend(given), tuple(n for n in PROMISES if given.get(n) is True or given.get("BACKEND") == n),
    )  # fmt: skip


def _named(key: Any) -> tuple[str, str]:
    """The prefix of a key and its name, or an error that says which there are."""
    prefix = key[:4] if isinstance(key, str) and key[:4] in ("fwd_", "bwd_") else ""
    name = key[len(prefix) :] if isinstance(key, str) else str(key)
    if name in REFUSED:
        raise KernelOptionError(f"kernel option {key!r}: {REFUSED[name]}")
    if name not in KNOWN:
        near = nearest(name, KNOWN)
        hint = f"; did you mean {prefix + near!r}?" if near else ""
        raise KernelOptionError(
            f"no kernel option {key!r}{hint}\n  there are {', '.join(KNOWN)}\n"
            "  each may begin with fwd_ or bwd_, for the forward or the backward alone"
        )
    if name in TILES and prefix and (prefix == "fwd_") != (TILES[name][0] == "forward"):
        have = ", ".join(n for n, (k, _) in TILES.items() if (k == "forward") == (prefix == "fwd_"))
        raise KernelOptionError(f"kernel option {key!r}: the {'for' if prefix == 'fwd_' else 'back'}ward has {have}")
    if prefix and name in (*WORDS, *FLAGS, "SPLIT_KV"):
        raise KernelOptionError(f"kernel option {key!r}: {name} is for the whole call; leave out {prefix!r}")
    return prefix, name


def _checked(key: str, name: str, x: Any) -> Any:
    """The value, if the option can have it."""
    if name in FLAGS:
        good, what = isinstance(x, bool), "True or False"
    elif name in WORDS:
        x = x.strip("'\"") if isinstance(x, str) else x
        good, what = x in WORDS[name], "one of " + ", ".join(WORDS[name])
    else:
        whole = isinstance(x, int) and not isinstance(x, bool)
        good, what = whole and x > (0 if name in (*TILES, *LAUNCH) else -1), "a positive integer"
        if name in TILES:
            good, what = good and x >= 16 and x & (x - 1) == 0, "a power of 2, 16 at least, in tokens"
        if name == "num_warps":
            good, what = good and x <= MOST_WARPS and x & (x - 1) == 0, f"a power of 2, {MOST_WARPS} at most"
    if not good:
        raise KernelOptionError(f"kernel option {key!r} is {x!r}; it is {what}")
    return x


def _splits(given: Mapping[str, Any]) -> int | None:
    return 1 if given.get("FORCE_USE_FLEX_ATTENTION") else given.get("SPLIT_KV") or None


def _backend(given: Mapping[str, Any]) -> str | None:
    if "BACKEND" in given and given.get("FORCE_USE_FLEX_ATTENTION"):
        raise KernelOptionError(
            "BACKEND cannot be combined with legacy FORCE_USE_FLEX_ATTENTION\n  BACKEND alone says which kernel runs"
        )
    name = given.get("BACKEND", "AUTO")
    return None if name == "AUTO" else name.removesuffix("_DECODE").lower()  # TRITON_DECODE is Triton, FLASH flash
