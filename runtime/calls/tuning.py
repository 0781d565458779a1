"""Launch options of kernels that the caller sets: `frisket.flex` reads them from kernel_options.

>>> Tuning(forward=LaunchOptions(block_q=64), precision="tf32").text
'forward.block_q=64,precision=tf32'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from frisket.lowering.plan import Target


@dataclass(frozen=True)
class LaunchOptions:
    """One kernel's tile, in tokens, its warps and its pipeline's stages, and of the forward whether it reads its arrays
    through tensor descriptors, where they allow it. None: chosen by frisket."""

    block_q: int | None = None
    block_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    descriptors: bool | None = None

    def applied(self, target: Target) -> Target:
        """The target with what is given here."""
        options = {n: x for n, x in vars(self).items() if x is not None}
        return replace(target, fixed=target.fixed or bool(options), **options)


@dataclass(frozen=True)
class Tuning:
    """The caller's choices for the Triton kernels; nothing of it changes what is computed, but `precision`: that of
    products of float32, "ieee", "tf32" or "tf32x3", and `tanh` of 16-bit inputs, "exact" or "approximate", which is the
    instruction of NVIDIA's GPUs. `splits` are those of a short query's keys."""

    forward: LaunchOptions = LaunchOptions()
    dq: LaunchOptions = LaunchOptions()
    dkv: LaunchOptions = LaunchOptions()
    precision: str | None = None
    splits: int | None = None
    tanh: str | None = None

    def applied(self, target: Target) -> Target:
        """The target of a call, with what is given here; the backward's kernels keep what frisket chose for them."""
        if self == AS_CHOSEN:
            return target
        target = target.everywhere(precision=self.precision or target.precision, tanh=self.tanh or target.tanh)
        alone = replace(target, dq=None, dkv=None, decode=None, dv=target.dv if self.dkv == LaunchOptions() else None)
        theirs = (x or alone for x in (target.dq, target.dkv))
        few = target.decode and self.forward.applied(target.decode)
        splits = target.splits if self.splits is None else self.splits
        dq, dkv = (one.applied(t) for one, t in zip((self.dq, self.dkv), theirs, strict=True))
        return replace(self.forward.applied(alone), splits=splits, dq=dq, dkv=dkv, decode=few)

    @property
    def text(self) -> str:
        """The choices as one word; "None" where nothing is chosen."""
        said = [f"{k}.{n}={x}" for k in KERNELS for n, x in vars(getattr(self, k)).items() if x is not None]
        said += [f"{n}={getattr(self, n)}" for n in ("precision", "splits", "tanh") if getattr(self, n) is not None]
        return ",".join(said) or "None"

    @property
    def given(self) -> dict[str, Any] | None:
        """The choices as dicts, numbers and words; None where nothing is chosen."""
        launches = {
            k: {n: x if isinstance(x, bool) else int(x) for n, x in vars(getattr(self, k)).items() if x is not None}
            for k in KERNELS
        }
        splits = None if self.splits is None else int(self.splits)
        rest = {"precision": self.precision, "splits": splits, "tanh": self.tanh}
        return {n: x for n, x in {**launches, **rest}.items() if x not in (None, {})} or None

    @classmethod
    def of(cls, fields: Mapping[str, Any] | None) -> Tuning:
        """The choices that the fields of a Tuning hold."""
        choices: dict[str, Any] = {n: LaunchOptions(**x) if n in KERNELS else x for n, x in (fields or {}).items()}
        return cls(**choices)


KERNELS = ("forward", "dq", "dkv")
AS_CHOSEN = Tuning()
