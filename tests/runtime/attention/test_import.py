"""`import frisket` costs what it uses, and every public name is there."""

import subprocess
import sys

import pytest

import frisket as fk

HEAVY = ("torch", "jax", "triton", "rich", "matplotlib")


def run(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_and_layouts_load_no_framework():
    loaded = f"print([n for n in {HEAVY} if n in sys.modules])"
    layout = "fk.mask('causal & window(64)').layout(512, 512).counts; fk.compile('causal')"
    assert run(f"import sys, frisket as fk; {loaded}; {layout}; {loaded}").split() == ["[]", "[]"]


def test_import_registers_operators_with_torch():
    """Programs that torch exported name them."""
    assert run("import torch, frisket; print(torch.ops.frisket.attend.default)").strip() == "frisket.attend.default"


@pytest.mark.exhaustive
def test_jax_arrays_do_not_load_torch():
    found = run(
        "import sys, jax.numpy as jnp, frisket as fk; x = jnp.ones((1, 8, 2, 4));"
        "fk.attention(x, x, x, 'causal'); print('torch' in sys.modules)"
    )
    assert found.strip() == "False"


def test_public_names_can_be_read_after_import():
    for name in fk.__all__:
        assert getattr(fk, name) is not None
    assert set(fk.__all__) <= set(dir(fk))
    wanted = "mask score load compile attention reference backends Mask ScoreMod Program Attention Layout Report Stages"
    assert set(wanted.split()) <= set(fk.__all__)


GRAPH_FIRST = """
import {imports}
import torch
import frisket.runtime.torch.{module} as module
q = torch.ones(1, 1, 4, 8)
print(tuple({call}.shape))
"""


@pytest.mark.parametrize("imports", ["frisket, torch", "torch, frisket"])
@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("operators", "torch.ops.frisket.attend_alone(q, q, q, None, [], [], {spec!r}, ':')"),
        ("graph", "module.attend_by_text({spec!r}, q, q, q)"),
    ],
    ids=["operator", "node of fx"],
)
def test_a_graph_may_run_before_any_other_call(imports, module, call):
    spec = fk.compile("causal").spec
    assert run(GRAPH_FIRST.format(imports=imports, module=module, call=call.format(spec=spec))) == "(1, 1, 4, 8)\n"
