"""Clock, power and temperature of the GPU, by NVML's library or else by nvidia-smi."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from frisket.runtime.bench.race import seconds

QUANTITIES = ("SM MHz", "W", "C")
Reading = tuple[float, float, float]
CLOCK_SM, TEMPERATURE_GPU = 1, 0  # of NVML's enumerations
SLOWEST = 0.2  # seconds of a reading: every round has one


def by_nvml(uuid: str) -> Callable[[], Reading]:
    library = ctypes.CDLL("libnvidia-ml.so.1")

    def call(function: str, *arguments: Any) -> None:
        if status := getattr(library, function)(*arguments):
            raise OSError(f"{function} returned {status}")

    def number(function: str, *arguments: Any) -> int:
        value = ctypes.c_uint()
        call(function, handle, *arguments, ctypes.byref(value))
        return value.value

    handle = ctypes.c_void_p()
    call("nvmlInit_v2")
    call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
    return lambda: (
        number("nvmlDeviceGetClockInfo", CLOCK_SM),
        number("nvmlDeviceGetPowerUsage") / 1000,  # of milliwatts
        number("nvmlDeviceGetTemperature", TEMPERATURE_GPU),
    )


def by_smi(uuid: str) -> Callable[[], Reading]:
    fields = "clocks.sm,power.draw,temperature.gpu"
    command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]

    def read() -> Reading:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        clock, power, temperature = map(float, done.stdout.split(","))
        return clock, power, temperature

    return read


@cache
def sensor() -> tuple[Callable[[], Reading] | None, str]:
    """(the function that reads, its name), or (None, why nothing can be read)."""
    if not torch.cuda.is_available():
        return None, "no GPU is visible to torch"
    uuid, reasons = f"GPU-{torch.cuda.get_device_properties(0).uuid}", []
    for name, connect in {"NVML": by_nvml, "nvidia-smi": by_smi}.items():
        try:
            read = connect(uuid)
            took = seconds(read)
        except Exception as error:  # of any driver: measurements do without
            reasons.append(f"{name}: {type(error).__name__}: {error}")
            continue
        if took <= SLOWEST:
            return read, name
        reasons.append(f"{name}: a reading takes {took:.1f} s")
    return None, "; ".join(reasons)


def reading(call: Callable[[], Any]) -> Reading | None:
    """A reading while `call` runs on the GPU, for an idle one may change its clock; None where nothing can be read."""
    read, _ = sensor()
    if read is None:
        return None
    call()
    try:
        return read()
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
