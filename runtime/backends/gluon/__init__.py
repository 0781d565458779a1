"""Kernels of Gluon for GPUs, which are not there yet."""

from frisket.runtime.backends.base import Backend, register

register(Backend(name="gluon", kernels="kernels for GPUs", later="the Gluon kernels come in a later version", order=50))
