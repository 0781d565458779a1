"""PyTorch's flex_attention with frisket underneath: change the import, keep the code.

>>> from frisket.flex import create_block_mask
>>> create_block_mask("causal & window(256)", None, None, 1024, 1024, device="cpu").sparsity()
67.1875
"""

from frisket.runtime.flex import pytree as pytree  # a BlockMask is one from here on
from frisket.runtime.flex.block_mask import BlockMask as BlockMask
from frisket.runtime.flex.create import and_masks as and_masks
from frisket.runtime.flex.create import create_block_mask as create_block_mask
from frisket.runtime.flex.create import create_mask as create_mask
from frisket.runtime.flex.create import noop_mask as noop_mask
from frisket.runtime.flex.create import or_masks as or_masks
from frisket.runtime.flex.nested import create_nested_block_mask as create_nested_block_mask

__all__ = [
    "BlockMask",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "create_nested_block_mask",
    "noop_mask",
    "or_masks",
]
