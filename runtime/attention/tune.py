"""`fk.tune`: a race of a few tiles for the user's masks and shapes on the user's GPU. Later calls take the winners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frisket.dsl.errors import ParameterError
from frisket.runtime.backends.triton import race
from frisket.runtime.backends.triton.race import Tuned

from .attention import Attention
from .entry import compile
from .ordered import OrderedAttention
from .warm import listed, sizes_of


def tune(masks: Any, *shapes: Mapping[str, Any], gradients: bool = True, rounds: int = 20) -> Tuned:
    """Race up to six tiles of each Triton kernel on the current GPU, and keep the fastest for later calls.

    >>> import torch, frisket as fk
    >>> if torch.cuda.is_available():
    ...     print(fk.tune("causal & window(1024)", {"q_len": 8192, "heads": 32, "head_dim": 128, "dtype": "bfloat16"}))

    - `masks`: an `Attention`, or a mask as `frisket.compile` takes it, with values; or a list of them.
    - `shapes`: sizes of calls by name, as in `frisket.warm`. Give those of your calls: batch and heads as well.
    - `gradients`: whether the kernels of gradients are raced too.
    - `rounds`: timed runs of each tile, in turns.

    A tile is left out where its kernel does not launch or spills registers. So is a tile whose results or gradients
    differ from a float64 reference by more than twice the error of the tile as chosen. Winners serve calls on a GPU of
    this name with these versions of Triton and frisket. Dtype, head sizes, heads for each key head and the class of the
    mask must be the same; lengths count up to the next power of two. FRISKET_TUNED=0 turns winners off. BackendError
    without a GPU.
    """
    device = race.check_gpu()
    rows: list[race.TunedRow] = []
    files: dict[str, None] = {}
    for mask in listed(masks):
        att = mask if isinstance(mask, Attention) else compile(mask)
        for sizes in map(sizes_of, shapes or ({},)):
            if isinstance(att, OrderedAttention):
                raise ParameterError("an attention with `reorder` has the tile of its order; tune the mask without it")
            rows_of_call, path = race.raced(att, sizes, race.TileRace(device, gradients, rounds, race.gpu_seconds))
            rows += rows_of_call
            files |= {path: None} if path else {}
    return Tuned(tuple(rows), race.name_of(device), tuple(files))
