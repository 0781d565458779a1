rows = tl.arange(0, BLOCK_Q)
columns = tl.arange(0, BLOCK_K)
d = tl.arange(0, DIM)
e = tl.arange(0, DIM_V)  $if apart
