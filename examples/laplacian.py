"""Kinetic energies of a wave function with attention between electrons: second derivatives by coordinates, in JAX.

    python examples/laplacian.py

The local kinetic energy of electrons at x is -1/2 (sum of d2 log psi / dx2 + (d log psi / dx)2): the Laplacian of a
network by its inputs, as in PsiFormer (von Glehn et al., 2022, arXiv 2211.13672) and in networks that solve
differential equations. Two molecules are packed into one sequence; a document mask keeps their electrons apart. Dense
attention has the same energies.
"""

import jax
import jax.numpy as jnp
import numpy as np

import frisket as fk

ELECTRONS, DIM, HEADS = np.array([4, 2]), 16, 2  # of lithium hydride and of hydrogen
MOLECULE = np.repeat(np.arange(2), ELECTRONS).astype(np.int32)  # of each electron
NUCLEI = np.array([[0.0, 0.0, 0.0], [3.0, 0.0, 0.0]])  # one of each molecule
attend = fk.compile(fk.mask("same(molecule)", molecule=MOLECULE))


def dense(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(MOLECULE[:, None] == MOLECULE, scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def weights(key):
    sizes = {"read": (4, DIM), "q": (DIM, DIM), "k": (DIM, DIM), "v": (DIM, DIM), "out": (DIM, DIM), "write": (DIM, 1)}
    keys = jax.random.split(key, len(sizes))
    return {n: jax.random.normal(x, size) * size[0] ** -0.5 for x, (n, size) in zip(keys, sizes.items(), strict=True)}


def log_psi(w, x, attention):
    """The sum over both molecules of log psi at electrons x [electrons, 3]."""
    apart = x - NUCLEI[MOLECULE]
    distance = jnp.linalg.norm(apart, axis=-1, keepdims=True)
    h = jnp.tanh(jnp.concatenate([apart, distance], -1) @ w["read"])
    q, k, v = ((h @ w[n]).reshape(1, len(x), HEADS, -1) for n in "qkv")
    h = h + jnp.tanh(attention(q, k, v).reshape(len(x), DIM) @ w["out"])
    return (h @ w["write"]).sum() - distance.sum()


def kinetic_energies(w, x, attention):
    """Of each molecule, by one tangent of the gradient for each coordinate."""

    def gradient(flat):
        return jax.grad(lambda flat: log_psi(w, flat.reshape(-1, 3), attention))(flat)

    def second(along):
        slope, curved = jax.jvp(gradient, (x.reshape(-1),), (along,))
        return slope @ along, curved @ along

    slopes, curvatures = jax.vmap(second)(jnp.eye(x.size))
    of_electrons = (curvatures + slopes**2).reshape(-1, 3).sum(-1)
    return -0.5 * jax.ops.segment_sum(of_electrons, MOLECULE, len(ELECTRONS))


def main():
    """The largest relative difference of the energies from those of dense attention."""
    with jax.enable_x64(True):
        w = weights(jax.random.key(0))
        x = NUCLEI[MOLECULE] + jax.random.normal(jax.random.key(1), (len(MOLECULE), 3))
        ours, theirs = (jax.jit(kinetic_energies, static_argnums=2)(w, x, attention) for attention in (attend, dense))
        error = float(jnp.abs(ours / theirs - 1).max())
        print(f"Kinetic energies {ours[0]:.4f} and {ours[1]:.4f}; dense attention differs by {error:.0e} of them.")
        assert error < 1e-10

        step = 1e-4  # the Laplacian of all coordinates, by differences
        values = jax.jit(jax.vmap(lambda flat: log_psi(w, flat.reshape(-1, 3), attend)))
        flat, steps = x.reshape(-1), step * jnp.eye(x.size)
        ahead, here, behind = values(flat + steps), values(flat + 0 * steps), values(flat - steps)
        energy = -0.5 * (((ahead - 2 * here + behind) / step**2) + ((ahead - behind) / (2 * step)) ** 2).sum()
        print(f"Their sum is {ours.sum():.6f}, and {energy:.6f} by differences of log psi.")
        assert abs(float(energy / ours.sum()) - 1) < 1e-4
    return error


if __name__ == "__main__":
    main()
