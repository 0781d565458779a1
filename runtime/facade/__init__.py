"""frisket: write which keys a query may see, get block-sparse attention for torch and JAX.

>>> import frisket as fk
>>> fk.mask("causal & window(256)").layout(1024, 1024).counts
Counts(empty=43, partial=14, full=7)

Ten names to begin with:

    mask, score     a mask, or a score mod, from a text or a function
    library         masks and score mods by name, to print and search
    load            a mask and a score mod from a file
    attention       attention in one call
    compile         an attention to keep, call, plan, print and check
    reference       dense attention in float64, to compare with
    merge           attention over disjoint keys, combined
    backends        what runs on this machine, and why the rest does not
    warm            compile kernels before the first call

Modules: `flex` (the API of flex_attention), `caches`, `parallel`, `select`, `sharding`, `operations`, `modeling`.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from frisket.runtime.calls import makers

if TYPE_CHECKING:
    from frisket import caches as caches
    from frisket import flex as flex
    from frisket import modeling as modeling
    from frisket import operations as operations
    from frisket import parallel as parallel
    from frisket import select as select
    from frisket import sharding as sharding
    from frisket.dsl.errors import BackendError as BackendError
    from frisket.dsl.errors import BudgetError as BudgetError
    from frisket.dsl.errors import CapacityError as CapacityError
    from frisket.dsl.errors import EvaluationError as EvaluationError
    from frisket.dsl.errors import ExportError as ExportError
    from frisket.dsl.errors import FrisketError as FrisketError
    from frisket.dsl.errors import LoweringError as LoweringError
    from frisket.dsl.errors import MaskSyntaxError as MaskSyntaxError
    from frisket.dsl.errors import MismatchError as MismatchError
    from frisket.dsl.errors import MissingPackageError as MissingPackageError
    from frisket.dsl.errors import ParameterError as ParameterError
    from frisket.dsl.errors import PeerError as PeerError
    from frisket.dsl.errors import ShapeError as ShapeError
    from frisket.dsl.errors import TraceError as TraceError
    from frisket.dsl.errors import Undecided as Undecided
    from frisket.dsl.explain import Explanation as Explanation
    from frisket.dsl.library import Entry as Entry
    from frisket.dsl.library import library as library
    from frisket.integrations.sdpa import sdpa as sdpa
    from frisket.integrations.sdpa import sdpa_for as sdpa_for
    from frisket.runtime.attention.attention import Attention as Attention
    from frisket.runtime.attention.entry import attention as attention
    from frisket.runtime.attention.entry import compile as compile
    from frisket.runtime.attention.entry import merge_sums as merge_sums
    from frisket.runtime.attention.entry import reference as reference
    from frisket.runtime.attention.merge import merge as merge
    from frisket.runtime.attention.order import Order as Order
    from frisket.runtime.attention.order import reorder as reorder
    from frisket.runtime.attention.report import Report as Report
    from frisket.runtime.attention.statistics import Statistics as Statistics
    from frisket.runtime.attention.tune import tune as tune
    from frisket.runtime.attention.warm import Warmed as Warmed
    from frisket.runtime.attention.warm import warm as warm
    from frisket.runtime.attention.weighted import Sums as Sums
    from frisket.runtime.backends.registry import backends as backends
    from frisket.runtime.backends.stages import Stages as Stages
    from frisket.runtime.backends.triton.race import Tuned as Tuned
    from frisket.runtime.masks.layout import Answer as Answer
    from frisket.runtime.masks.layout import Layout as Layout
    from frisket.runtime.masks.mask import Mask as Mask
    from frisket.runtime.masks.mask import Program as Program
    from frisket.runtime.masks.mask import ScoreMod as ScoreMod
    from frisket.runtime.masks.mask import Weight as Weight
    from frisket.runtime.masks.mask import load as load
    from frisket.runtime.masks.mask import mask as mask
    from frisket.runtime.masks.mask import score as score
    from frisket.runtime.masks.mask import weight as weight
    from frisket.runtime.plans.device import FlatPlan as FlatPlan
    from frisket.runtime.plans.host import Plan as Plan

__version__ = "0.3.0"

# Names are fetched when first used: `import frisket` costs what it uses.
_HOMES = {
    "frisket.dsl.errors": (
        "BackendError BudgetError CapacityError EvaluationError ExportError FrisketError LoweringError MaskSyntaxError "
        "MismatchError MissingPackageError ParameterError PeerError ShapeError TraceError Undecided"
    ),
    "frisket.dsl.explain": "Explanation",
    "frisket.dsl.library": "Entry library",
    "frisket.runtime.backends.stages": "Stages",
    "frisket.runtime.attention.attention": "Attention",
    "frisket.runtime.backends.registry": "backends",
    "frisket.runtime.attention.entry": "attention compile merge_sums reference",
    "frisket.runtime.plans.device": "FlatPlan",
    "frisket.runtime.plans.host": "Plan",
    "frisket.runtime.masks.layout": "Answer Layout",
    "frisket.runtime.attention.order": "Order reorder",
    "frisket.runtime.masks.mask": "Mask Program ScoreMod Weight load mask score weight",
    "frisket.runtime.attention.merge": "merge",
    "frisket.runtime.attention.report": "Report",
    "frisket.runtime.attention.statistics": "Statistics",
    "frisket.runtime.attention.tune": "tune",
    "frisket.runtime.attention.warm": "Warmed warm",
    "frisket.runtime.attention.weighted": "Sums",
    "frisket.runtime.backends.triton.race": "Tuned",
    "frisket.integrations.sdpa": "sdpa sdpa_for",  # imports torch
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
_DOORS = ("caches", "flex", "modeling", "operations", "parallel", "select", "sharding")
makers.append(lambda: __getattr__("compile"))  # `runtime.calls` may not import what is above it
_FIRST = "mask score library load attention compile reference merge backends warm".split()
# `from frisket import *` needs no torch
__all__ = [*_FIRST, *sorted(_HOME.keys() - {*_FIRST, "sdpa", "sdpa_for"})]


if "torch" in sys.modules:  # operators that programs exported by torch hold
    from frisket.runtime.torch import operators as _operators  # noqa: F401


def __getattr__(name: str) -> Any:
    home = f"frisket.{name}" if name in _DOORS else _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'frisket' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    module = import_module(home)
    if name in _DOORS:  # modules, which import a framework
        return module
    globals()[name] = value = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return [*(n for n in globals() if n.startswith("__")), *_HOME, *_DOORS]  # imports of this module are not its names
