"""Adds many values to places of a table, with the same bits on every run.

On the CPU one thread adds in order. On a device threads add with atomics in any order, so there numbers are added in
fixed point: integers give one sum in any order. The unit is a power of two, chosen on the device from the sum of all
magnitudes, so that no sum leaves 64 bits:

    unit <= 2**-60 * sum(|values|);  the error of a place is at most a unit for every value added to it

A sum of float32 is wrong by up to 2**-24 of its partial sums for every value added. (Units stay in
2**-126..2**126, as float32 has them. A value that is not finite makes all places NaN.)
"""

from __future__ import annotations

from typing import Any

Tensor = Any
BITS = 61  # of the sum of all magnitudes; rounding of each value is far below what is left of 64


def units(total: Tensor) -> Tensor:
    """The number of fixed-point units that make 1, float32, a power of two, from the sum of all magnitudes or from a
    little less; shaped and placed as `total`. NaN where the sum is not finite."""
    import torch

    total = total.double()
    _, exponent = torch.frexp(total)
    found = torch.ldexp(torch.ones_like(total), (BITS - exponent).clamp(-126, 126))
    return torch.where(total.isfinite(), found, torch.nan).float()


def amounts(counted: Tensor, per: Tensor) -> Tensor:
    """The Float64 amounts of integers in units of which there are `per` to 1."""
    return counted.double() / per


def summed(place: Tensor, values: Tensor, size: int) -> Tensor:
    """The sums of `values` by `place`, Float64 [size]; both of one shape, 0 <= place < size."""
    import torch

    place, values = place.flatten(), values.flatten().double()
    if values.device.type == "cpu":
        # With one axis index_add_ is a plain loop. index_put_ adds with atomics, in any order.
        return torch.zeros(size, dtype=torch.float64).index_add_(0, place, values)
    return fixed(place, values, size)


def fixed(place: Tensor, values: Tensor, size: int) -> Tensor:
    """The sums of `summed` in fixed point."""
    import torch

    per = units(values.abs().sum())
    counted = torch.zeros(size, dtype=torch.int64, device=values.device)
    counted.index_add_(0, place, (values * per).round().long())
    return amounts(counted, per)
