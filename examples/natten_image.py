# %% [markdown]
# # Neighbourhood attention on an image
#
# Every patch of an image attends to the patches around it (NATTEN, Hassani et al., 2023). Patches are tokens, row by
# row, so a two-dimensional neighbourhood is a mask of bands: `natten2d(rows, cols, kernel_rows, kernel_cols)`. A block
# learns to remove noise from the left half of a photograph and is tested on the right half. The photograph comes with
# matplotlib: `pip install -e '.[torch,plot]' -c constraints.txt`.
#
#     python examples/natten_image.py                  # about half a minute; --small for a few seconds
#     python examples/natten_image.py --save out.png   # and the pictures: noisy, denoised, the photograph

# %%
import statistics
import sys
import time

import matplotlib.cbook
import matplotlib.image
import numpy as np
import torch
from torch import nn
from torch.nn.functional import gelu, mse_loss, scaled_dot_product_attention

import frisket as fk

SMALL = "--small" in sys.argv
SIDE, STEPS, KERNEL, PATCH, NOISE = (16, 80, 5, 2, 0.2) if SMALL else (48, 80, 7, 2, 0.2)

# %% [markdown]
# ## A photograph
#
# Grace Hopper, from matplotlib's sample data.

# %%
torch.manual_seed(0)
with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as file:
    image = torch.tensor(matplotlib.image.imread(file, format="jpg")[::2, ::2] / 255.0, dtype=torch.float32)
size = SIDE * PATCH
left, right = (image[40 : 40 + size, at : at + size] for at in (30, 130))
print(f"Squares of {size} x {size} pixels, in patches of {PATCH} x {PATCH}: {SIDE**2:,} tokens.")


def tokens(pixels):
    """[side * patch, side * patch, 3] to [1, side * side, patch * patch * 3]."""
    parts = pixels.unflatten(0, (SIDE, PATCH)).unflatten(2, (SIDE, PATCH))
    return parts.transpose(1, 2).reshape(1, SIDE**2, -1)


def pixels(x):
    return x.reshape(SIDE, SIDE, PATCH, PATCH, 3).transpose(1, 2).reshape(size, size, 3)


# %% [markdown]
# ## The mask

# %%
mask = fk.mask(f"natten2d({SIDE}, {SIDE}, {KERNEL}, {KERNEL})")
layout = mask.layout(SIDE**2, SIDE**2, block=(SIDE**2 // 16, SIDE**2 // 16))
print(layout)
share = layout.visible_pairs / SIDE**4
print(f"A patch sees the {KERNEL} x {KERNEL} patches around it, {share:.1%} of all.")
att = fk.compile(mask, "score + near[h, q // side - k // side + reach, q % side - k % side + reach]",
                 side=SIDE, reach=KERNEL - 1)  # fmt: skip


# %% [markdown]
# ## A block that denoises
#
# Each place of the neighbourhood has a learned bias, as in the paper. The kernels sum its gradients over all patches.


# %%
class Denoiser(nn.Module):
    """Noisy patches to clean ones."""

    def __init__(self, dim=64, heads=4):
        super().__init__()
        self.heads = heads
        self.read, self.write = nn.Linear(3 * PATCH**2, dim), nn.Linear(dim, 3 * PATCH**2)
        self.norm, self.qkv, self.out = nn.RMSNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.near = nn.Parameter(torch.zeros(heads, 2 * KERNEL - 1, 2 * KERNEL - 1))

    def forward(self, noisy, attend):
        x = self.read(noisy)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(q, k, v, self.near).transpose(1, 2).flatten(2))
        return self.write(x + self.down(gelu(self.up(x))))


def neighbours(q, k, v, near):
    return att(q, k, v, near=near)


def nobody(q, k, v, near):
    return v


def decibels(x, clean):
    return -10 * torch.log10(mse_loss(x, clean)).item()


def denoised(attend):
    """What the block makes of the right half after training on the left, in decibels and as it is."""
    torch.manual_seed(1)
    model, clean = Denoiser(), tokens(left)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(STEPS):
        loss = mse_loss(model(clean + NOISE * torch.randn_like(clean), attend), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        found = model(noisy, attend)
    return model, decibels(found, tokens(right)), found


noisy = tokens(right) + NOISE * torch.randn(1, SIDE**2, 3 * PATCH**2)
before = decibels(noisy, tokens(right))
model, with_neighbours, found = denoised(neighbours)
_, without, _ = denoised(nobody)
print(f"Peak signal to noise of the unseen half: {before:.1f} dB noisy, {without:.1f} dB with each patch by itself,")
print(f"and {with_neighbours:.1f} dB with its neighbourhood, after {STEPS} steps.")

# %% [markdown]
# ## Beside a dense mask
#
# The same block with scaled_dot_product_attention: the mask and the learned bias as arrays of all pairs.

# %%
visible = torch.as_tensor(mask.dense(SIDE**2, SIDE**2)[0, 0])
n = torch.arange(SIDE**2)
row, col = (x[:, None] - x + KERNEL - 1 for x in (n // SIDE, n % SIDE))
row, col = (x.clamp(0, 2 * KERNEL - 2) for x in (row, col))


def dense(q, k, v, near):
    return scaled_dot_product_attention(q, k, v, near[:, row, col].masked_fill(~visible, -torch.inf)[None])


def gradients(attend):
    start = time.perf_counter()
    loss = mse_loss(model(noisy, attend), tokens(right))
    found = torch.autograd.grad(loss, list(model.parameters()))
    return time.perf_counter() - start, torch.cat([x.flatten() for x in found])


rounds = [(gradients(neighbours), gradients(dense)) for _ in range(2 if SMALL else 4)][1:]
(_, ours), (_, theirs) = rounds[-1]
error = ((ours - theirs).norm() / theirs.norm()).item()
times = [statistics.median(pair[i][0] for pair in rounds) * 1000 for i in range(2)]
print(f"Gradients of all weights, the bias among them, agree with the dense ones to {error:.0e} in norm.")
print(f"A step takes {times[0]:.0f} ms, the dense one {times[1]:.0f} ms: {times[1] / times[0]:.1f} times as long.")

# %%
if "--save" in sys.argv:
    shown = np.concatenate([pixels(x).clamp(0, 1).numpy() for x in (noisy, found, tokens(right))], axis=1)
    matplotlib.image.imsave(sys.argv[sys.argv.index("--save") + 1], shown)

# %%
assert with_neighbours > before + 2, "the block takes noise out"
assert with_neighbours > without + 0.3, "neighbours help"
assert error < 1e-4
assert share < 0.15
