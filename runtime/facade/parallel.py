"""Context parallel attention: a sequence over ranks, under any mask.

>>> import frisket as fk
>>> fk.parallel.deal("causal", 1024, ranks=4).imbalance
1.0
"""

from frisket.runtime.parallel import attend
from frisket.runtime.parallel.deal import Deal, Step, deal, steps

__all__ = ["Deal", "Step", "attend", "deal", "steps"]
