"""The threads of frisket's own pool."""

from frisket.runtime.machine import cpp_build
from frisket.runtime.machine.cpp_build import ONE_THREAD, Threads


def pool_threads(count: int) -> Threads:
    return (count, cpp_build._address(cpp_build._library().frisket_own), 0) if count > 1 else ONE_THREAD
