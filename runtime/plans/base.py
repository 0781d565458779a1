"""CallPlan: tables and layout of a mask, made on the host or on a device. Calls read both alike."""

from __future__ import annotations

from typing import TypeAlias

from .device import FlatPlan
from .host import Plan

CallPlan: TypeAlias = Plan | FlatPlan
