"""Context parallel attention: a sequence over ranks, under any mask.

>>> import frisket as fk
>>> fk.parallel.deal("causal", 1024, ranks=4).imbalance
1.0
"""

from frisket.runtime.parallel.attend import attend as attend
from frisket.runtime.parallel.deal import Deal as Deal
from frisket.runtime.parallel.deal import deal as deal
from frisket.runtime.parallel.schedule import Step as Step
from frisket.runtime.parallel.schedule import steps as steps

__all__ = ["Deal", "Step", "attend", "deal", "steps"]
