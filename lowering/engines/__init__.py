"""Masks and score mods as the flags of engines: kernels of vendors, which know a few masks each."""
