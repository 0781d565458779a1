"""Engines: kernels of vendors, which run where a proof says that they compute the call. `proof` decides, `costs` says
where they are faster, `torch` runs one in the place of generated kernels."""
