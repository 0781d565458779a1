"""benchmarks/decode_overhead.py: each of its calls runs."""

import decode_overhead
import pytest

from frisket.runtime.machine.cpp_build import reason


@pytest.mark.exhaustive
@pytest.mark.skipif(bool(reason()), reason=reason())
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_steps_of_decoding_and_their_attention_run(framework, monkeypatch):
    pytest.importorskip(framework)
    monkeypatch.setenv("FRISKET_BACKEND", "native")
    monkeypatch.setattr(decode_overhead, "STEPS", 2)
    calls, _ = getattr(decode_overhead, f"in_{framework}")(2, "float32", "causal & window(256)")
    for call in calls.values():
        call()
