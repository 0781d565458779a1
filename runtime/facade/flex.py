"""PyTorch's flex_attention with frisket underneath: change the import, keep the code.

>>> from frisket.flex import create_block_mask
>>> create_block_mask("causal & window(256)", None, None, 1024, 1024, device="cpu").sparsity()
67.1875
"""

from frisket.runtime.machine.modules import extras

with extras():
    # torch does not document the names with an underscore; programs import them with the public ones
    from torch.nn.attention.flex_attention import _DEFAULT_SPARSE_BLOCK_SIZE as _DEFAULT_SPARSE_BLOCK_SIZE
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, FlexKernelOptions, noop_mask
    from torch.nn.attention.flex_attention import _convert_mask_to_block_mask as _convert_mask_to_block_mask
    from torch.nn.attention.flex_attention import _identity as _identity
    from torch.nn.attention.flex_attention import _mask_mod_signature as _mask_mod_signature
    from torch.nn.attention.flex_attention import _MaskModWrapper as _MaskModWrapper
    from torch.nn.attention.flex_attention import _score_mod_signature as _score_mod_signature
    from torch.nn.attention.flex_attention import _vmap_for_bhqkv as _vmap_for_bhqkv

from frisket.runtime.flex.attention import Installed, flex_attention, install
from frisket.runtime.flex.block_mask import BlockMask
from frisket.runtime.flex.create import _create_empty_block_mask as _create_empty_block_mask
from frisket.runtime.flex.create import _create_sparse_block_from_block_mask as _create_sparse_block_from_block_mask
from frisket.runtime.flex.create import and_masks, create_block_mask, create_mask, create_nested_block_mask, or_masks

__all__ = ["AuxOutput", "AuxRequest", "BlockMask", "FlexKernelOptions", "Installed", "and_masks", "create_block_mask"]
__all__ += ["create_mask", "create_nested_block_mask", "flex_attention", "install", "noop_mask", "or_masks"]
