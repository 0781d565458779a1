$# The numbers of attention_delta for a tile of queries; `at_q` counts its first row over all heads.
lse = tl.load(Stats + (at_q + rows) * 4, mask=present, other=0.0)[:, None]
factor = tl.load(Stats + (at_q + rows) * 4 + 1, mask=present, other=0.0)[:, None]
delta = tl.load(Stats + (at_q + rows) * 4 + 2, mask=present, other=0.0)[:, None]
