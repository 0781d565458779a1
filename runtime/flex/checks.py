"""Checks of flex_attention: lengths, arrays, masks and promises that do not fit, more of them than torch checks; and
`kernel_options`, read and turned into a `Tuning`.

>>> read({"BLOCK_M": 64, "bwd_num_warps": 8}).tuning.text
'forward.block_q=64,dq.num_warps=8,dkv.num_warps=8'
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.nn.attention.flex_attention import BlockMask

from frisket.dsl import ir
from frisket.dsl.errors import BackendError, ParameterError, ShapeError, TraceError, nearest
from frisket.dsl.show import show
from frisket.grammar.memo import memo
from frisket.lowering.analysis.decide import Lookup
from frisket.lowering.dtypes import BYTES
from frisket.runtime.attention.attention import Attention
from frisket.runtime.calls.arrays import scale_of, symbolic
from frisket.runtime.calls.options import AS_CHOSEN, KERNELS, LaunchOptions, Options, Tuning
from frisket.runtime.machine.caller import as_int


class MaskModError(TraceError, AssertionError, RuntimeError, ValueError):
    """An error for an argument that is no mask_mod; torch raises one of these three, whichever line notices."""


class ListError(ShapeError, AssertionError, RuntimeError):
    """Lists of tiles that do not fit together."""


class LengthError(ShapeError, RuntimeError):
    """Arrays of other lengths than their BlockMask; torch raises a ValueError, from 2.14 on a RuntimeError."""


class PickError(ShapeError, IndexError):
    """An index that picks nothing of a BlockMask."""


class OrderError(ShapeError, NotImplementedError):
    """An explicit order of dQ's sums belongs to the lists it was made for."""


class GatherError(ParameterError, IndexError):
    """A table is read outside its entries where the mask or score mod shows a position."""


class ScoreModError(TraceError, AssertionError, RuntimeError, ValueError):
    """An error for an argument that is no score_mod; torch raises one of these three, whichever line notices."""


class ArrayError(ShapeError, NotImplementedError):
    """Arrays that attention does not take."""


def check_lookups(lookups: Iterable[Lookup], renamed: Mapping[str, str] | None = None, words: Any = None) -> None:
    """Refuse the first lookup that leaves its table, with the position; torch wraps negative indices silently. Of a
    lookup in the user's names and its witness, `words` gives what the user wrote and where it is wrong."""
    for one in lookups:
        if one.proved or one.witness is None or one.value is None or one.node is None:
            continue
        b, h, q, k = one.witness
        node = ir.renamed(one.node, {new: old for old, new in (renamed or {}).items()})
        node, at = words(node, one.witness) if words else (node, f"query {q:,}, key {k:,} (b {b}, h {h})")
        known = [n for kind in ir.free_names(node) for n in kind]
        text, index = show(node, known), show(node.args[one.axis], known)
        negative = one.value < 0
        wraps = ", and torch would read from the end" if negative else ""
        bound = f"{index} >= 0" if negative else f"{index} < {one.size}"
        reads = f"`{text}` reads `{node.name}` at {one.value} on axis {one.axis}, which has entries 0..{one.size - 1}, "
        clamp = f"or clamp the index: `({index}).clamp(0, {one.size - 1})`"
        raise GatherError(f"{reads}at {at}{wraps}\n  hide such positions first, `({bound}) & ...`, {clamp}")


# key -> the kernels it is for, and its place in LaunchOptions
TILES = {"BLOCK_M": ("forward", "block_q"), "BLOCK_N": ("forward", "block_k"), "BLOCK_M1": ("dkv", "block_q")}
TILES |= {"BLOCK_N1": ("dkv", "block_k"), "BLOCK_M2": ("dq", "block_q"), "BLOCK_N2": ("dq", "block_k")}
LAUNCH = ("num_warps", "num_stages")
OF_PREFIX = {"": KERNELS, "fwd_": ("forward",), "bwd_": ("dq", "dkv")}
PROMISES = ("ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "TRITON_DECODE")
FLAGS = (*PROMISES[:2], "FORCE_USE_FLEX_ATTENTION", "PRESCALE_QK", "WRITE_DQ", "USE_TMA")
COUNTS = """SPLIT_KV PARTITION_SIZE kpack matrix_instr_nonkdim waves_per_eu num_consumer_groups
num_buffers_warp_spec""".split()
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
MOST_WARPS = 32  # 1,024 threads of a block


class KernelOptionError(ParameterError, RuntimeError, AssertionError):
    """A kernel option is unknown, has a value it cannot have, or promises what is not so; torch raises one of these
    three, whichever line notices."""


@dataclass(frozen=True)
class KernelRequests:
    """The requests in kernel_options. `promises` are claims about the call that need a proof."""

    tuning: Tuning = AS_CHOSEN
    backend: str | None = None
    promises: tuple[str, ...] = ()


NOTHING = KernelRequests()


def options_of(scale: float | None, enable_gqa: bool, requests: KernelRequests, device: str) -> Options:
    """The options with which an attention is compiled for this type of device. On a CPU BACKEND chooses nothing: it
    names kernels of a GPU, and a script that says so runs there as it is."""
    return Options(scale_of(scale), enable_gqa, None if device == "cpu" else requests.backend, tuning=requests.tuning)


def read(options: Mapping[str, Any] | None) -> KernelRequests:
    """The requests in kernel_options; every key is used, checked, known to have no effect, or refused."""
    if options is None:
        return NOTHING
    try:
        return _read(tuple(options.items()))
    except (AttributeError, TypeError):  # no mapping, or a value without a hash for the memo
        text = f"kernel_options is {options!r}\n  it is a dict: its keys are names, its values numbers, bools and names"
        raise KernelOptionError(text) from None


@memo(256)
def _read(options: tuple[tuple[str, Any], ...]) -> KernelRequests:
    launches: dict[str, Any] = dict.fromkeys(KERNELS, LaunchOptions())
    choices: dict[str, Any] = {}
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
            choices[name] = value
    # FORCE_USE_FLEX_ATTENTION turns off torch's decode kernel, the one that splits keys
    splits = 1 if choices.get("FORCE_USE_FLEX_ATTENTION") else choices.get("SPLIT_KV") or None
    promises = tuple(n for n in PROMISES if choices.get(n) is True or choices.get("BACKEND") == n)
    tuning = Tuning(**launches, precision=choices.get("FLOAT32_PRECISION"), splits=splits, tanh=choices.get("TANH"))
    return KernelRequests(tuning, _backend(choices), promises)


def _named(key: Any) -> tuple[str, str]:
    """The prefix of a key and its name, or an error that says which there are."""
    prefix = key[:4] if isinstance(key, str) and key[:4] in ("fwd_", "bwd_") else ""
    name = key[len(prefix) :] if isinstance(key, str) else str(key)
    if name in REFUSED:
        raise KernelOptionError(f"kernel option {key!r}: {REFUSED[name]}")
    if name not in KNOWN:
        near = nearest(name, KNOWN)
        hint = f"; did you mean {prefix + near!r}?" if near else ""
        text = f"no kernel option {key!r}{hint}\n  there are {', '.join(KNOWN)}\n"
        raise KernelOptionError(f"{text}  each may begin with fwd_ or bwd_, for the forward or the backward alone")
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
        x = x.strip("'\"") if isinstance(x, str) else x  # torch's templates take them quoted: "'ieee'"
        good, what = x in WORDS[name], "one of " + ", ".join(WORDS[name])
    else:
        whole = isinstance(x, int) and not isinstance(x, bool)
        good, what = whole and x > (0 if name in (*TILES, *LAUNCH) else -1), "a positive integer"
        if name in TILES:
            # tl.dot takes tiles of 16 at least, tl.arange powers of 2
            good, what = good and x >= 16 and x & (x - 1) == 0, "a power of 2, 16 at least, in tokens"
        if name == "num_warps":
            good, what = good and x <= MOST_WARPS and x & (x - 1) == 0, f"a power of 2, {MOST_WARPS} at most"
    if not good:
        raise KernelOptionError(f"kernel option {key!r} is {x!r}; it is {what}")
    return x


def _backend(choices: Mapping[str, Any]) -> str | None:
    if "BACKEND" in choices and choices.get("FORCE_USE_FLEX_ATTENTION"):
        text = "BACKEND cannot be combined with legacy FORCE_USE_FLEX_ATTENTION\n  BACKEND alone says which kernel runs"
        raise KernelOptionError(text)
    name = choices.get("BACKEND", "AUTO")
    return None if name == "AUTO" else name.removesuffix("_DECODE").lower()  # TRITON_DECODE is Triton, FLASH flash


SHORT = 128  # queries: fewer are a step of decoding to torch


def pair(value: Any, name: str, least: int = 1) -> tuple[int, int]:
    """(queries, keys) from one length or two, each at least `least`."""
    values = tuple(value) if isinstance(value, tuple | list) else (value, value)
    counts = tuple([count_of(n) for n in values])
    if len(counts) != 2 or not all(is_count(n, least) for n in counts):
        what = "positive ints" if least else "ints, 0 or more"
        raise ShapeError(f"{name} is {value!r}\n  it is {what}, (queries, keys), in tokens")
    return int(counts[0]), int(counts[1])


def count_of(n: Any) -> Any:
    """The int that a numpy int or a tensor without axes stands for; anything else as it is."""
    return n if isinstance(n, int | torch.SymInt) else as_int(n)


def is_count(n: Any, least: int = 1) -> bool:
    """Whether n can count something. A size of an exported program is one: it becomes that number there."""
    return isinstance(n, int | torch.SymInt) and not isinstance(n, bool) and bool(n >= least)


def check_arrays(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Refuse what are no arrays, and shapes and devices that do not fit together."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            hint = "it is a torch.Tensor (batch, heads, length, dim)"
            if symbolic(x):
                hint = "torch.fx.symbolic_trace records no flex_attention: take make_fx, torch.export or torch.compile"
            raise ArrayError(f"{name} is a {type(x).__name__}\n  {hint}")
        if x.is_nested:
            text = f"{name} is a nested tensor, and query is none\n  query, key and value are jagged nested tensors, "
            raise ArrayError(f"{text}all or none")
        if x.layout is not torch.strided:
            raise ArrayError(f"{name} is sparse, of layout {x.layout}\n  it is dense: {name}.to_dense()")
        if x.dim() != 4:
            raise ArrayError(f"{name} has {x.dim()} axes\n  it is (batch, heads, length, dim)")
        if x.shape[3] == 0:
            raise ShapeError(f"{name} has a head size of 0: (batch, heads, length, dim) = {tuple(x.shape)}")
    if query.device != key.device or query.device != value.device:
        text = f"query is on {query.device}, key on {key.device}, value on {value.device}\n  move them to one device"
        raise ShapeError(text)
    (b, h, _, e), (kb, hkv, n, ke), (vb, vh, vn, _) = query.shape, key.shape, value.shape
    if e != ke:
        raise ShapeError(f"query has an embedding of {e}, key of {ke}\n  they are multiplied: give them one length")
    if kb != vb or hkv != vh or n != vn:
        text = f"key is (batch, heads, length) = {(kb, hkv, n)}, value {(vb, vh, vn)}\n  every key has one value"
        raise ShapeError(text)
    if h != hkv and not enable_gqa:
        text = f"query has {h} heads, key and value {hkv}\n  enable_gqa=True shares a head of theirs among several"
        raise ShapeError(text)
    if h % hkv if hkv else h:
        raise ShapeError(f"query has {h} heads, key and value {hkv}\n  their number divides that of query's")
    if kb != 1 and kb != b:  # in graphs a number is not in a tuple with a length that varies, as below
        raise ShapeError(f"query has {b} batch entries, key and value {kb}\n  theirs are as many, or one for all")


STORED = tuple(getattr(torch, name) for name in BYTES)  # of keys and values that kernels read as they are


def alike(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value in one dtype that holds all three, as torch computes: nothing is rounded to query's."""
    if key.dtype == value.dtype and (query.dtype == key.dtype or (key.dtype in STORED and not query.requires_grad)):
        return query, key, value
    if query.device.type != "meta" and torch.is_autocast_enabled(query.device.type):
        return query, key, value  # all of them are cast to its dtype
    widest = query.dtype
    for x in (key, value):
        if not x.is_floating_point() and x.dtype not in STORED:
            raise ArrayError(f"query is {query.dtype}, key {key.dtype}, value {value.dtype}\n  they are Floats")
        widest = widest if x.dtype.itemsize == 1 else torch.promote_types(widest, x.dtype)
    return query.to(widest), key.to(widest), value.to(widest)


def check_block_mask(block_mask: Any, query: Tensor, key: Tensor) -> None:
    """Refuse a mask for other arrays. torch takes indices modulo the mask's B and H instead of looking."""
    if not isinstance(block_mask, BlockMask):
        what = "a function" if callable(block_mask) else type(block_mask).__name__
        text = f"block_mask is {what}\n  it is a BlockMask: create_block_mask(mask_mod, B, H, {query.shape[2]}, "
        raise ParameterError(f"{text}{key.shape[2]})")
    *batch, q_len, kv_len = block_mask.shape
    # lengths are tensors in torch.jit.trace
    have = tuple([int(n) if isinstance(n, Tensor) else n for n in (query.shape[2], key.shape[2])])
    # one by one: in graphs of torch 2.11 no two tuples with a length that varies are equal
    other = guard_or_false(have[0] != q_len) or guard_or_false(have[1] != kv_len)
    no_mask = 1 << 30, 1 << 30  # the tile of what torch makes where there is none: one, without lengths
    if other and no_mask != block_mask.BLOCK_SIZE:
        longer = q_len >= have[0] and kv_len >= have[1]
        advice = f"or block_mask._adjust{have} for the first of them" if longer else "it says nothing of the rest"
        text = f"block_mask was created for q_len={q_len} and kv_len={kv_len}, query and key have {have[0]} and "
        raise LengthError(f"{text}{have[1]}\n  make one for these lengths, {advice}")
    if torch.compiler.is_dynamo_compiling() and not other:
        for n, of_mask in zip(have, (q_len, kv_len)):  # a length that only a run knows is checked by the graph
            torch._check(n == of_mask, lambda: "block_mask was created for other lengths than query and key have")  # type: ignore[no-untyped-call]
    for name, n, want in zip(("batch entries", "heads")[2 - len(batch) :], batch, query.shape[2 - len(batch) : 2]):
        if n != 1 and n != want:
            text = f"block_mask is for {n} {name}, query has {want}\n  make it for {want}, or for one that does for all"
            raise ShapeError(text)


def check_device(block_mask: Any, query: Tensor) -> None:
    device = block_mask.kv_num_blocks.device if type(block_mask) is BlockMask else block_mask.device
    if device.type != query.device.type:
        text = f"query is on {query.device}, block_mask on {device}\n  block_mask.to({str(query.device)!r}) moves it"
        raise BackendError(text)


def check_promises(promises: tuple[str, ...], att: Attention, block_mask: Any, query: Tensor, key: Tensor) -> None:
    """Refuse a promise that is not kept; torch believes it, and its numbers are then wrong."""
    b, h, q_len, _ = query.shape
    if "TRITON_DECODE" in promises and q_len >= SHORT:
        text = f"BACKEND is 'TRITON_DECODE', for fewer than {SHORT} queries, and there are {q_len}\n  leave it out"
        raise KernelOptionError(text)
    if "ROWS_GUARANTEED_SAFE" in promises and att.mask is not None:
        empty_rows = att.mask.empty_rows(q_len, key.shape[2], batch=b, heads=h)
        if empty_rows:
            at = empty_rows.witness
            text = f"ROWS_GUARANTEED_SAFE is not so: query {at[2]} of batch entry {at[0]} and head {at[1]} sees no "
            text += "key\n  leave it out: frisket finds out by itself, and pays for such rows only where they can be"
            raise KernelOptionError(text)
    if "BLOCKS_ARE_CONTIGUOUS" in promises and block_mask is not None:
        _check_contiguous(block_mask)


def _check_contiguous(block_mask: BlockMask) -> None:
    for kind in ("kv", "full_kv"):
        count, index = (getattr(block_mask, f"{kind}_{part}") for part in ("num_blocks", "indices"))
        if count is None:
            continue
        steps = torch.arange(index.shape[-1], device=index.device)
        gaps = (steps < count[..., None]) & (index != index[..., :1] + steps)
        if bool(gaps.any()):
            row = gaps.nonzero()[0].tolist()[-2]
            text = f"BLOCKS_ARE_CONTIGUOUS is not so: the blocks that row {row} of tiles reads have gaps\n"
            raise KernelOptionError(f"{text}  leave it out: frisket knows the runs of every row")
