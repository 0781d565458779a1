"""CONTRIBUTING's recipe "Add a backend" is executed: its three files make a backend that runs, prints and refuses."""

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

import frisket as fk
from frisket.dsl.errors import BackwardError
from frisket.runtime.backends.base import RECORDS, unregister
from frisket.runtime.cli.main import main

torch = pytest.importorskip("torch")
PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
PACKAGES = ("frisket.lowering.kernels", "frisket.runtime.backends")


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The backend of the recipe, in a folder of its own, and gone after the test."""
    recipe = PAGE.read_text(encoding="utf-8").split("## Add a backend")[1].split("\n## ")[0]
    files = re.findall(r"^`(\S+\.py)`\n\n```python\n(.*?)^```", recipe, re.M | re.S)
    assert len(files) == 3
    for name, text in files:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    for package in PACKAGES:
        folder = tmp_path / Path(*package.split(".")[1:])
        monkeypatch.setattr(module := import_module(package), "__path__", [*module.__path__, str(folder)])
    import_module("frisket.runtime.backends.toy")
    yield RECORDS["toy"]
    unregister("toy")
    for name in [n for n in sys.modules if re.match(r"frisket\.(lowering\.kernels|runtime\.backends)\.toy", n)]:
        del sys.modules[name]


def arrays(dtype=torch.float32, gradients=False):
    torch.manual_seed(0)
    return [torch.randn(2, h, 150, 16, dtype=dtype).requires_grad_(gradients) for h in (4, 2, 2)]


def test_lists_have_the_backend(toy, capsys):
    assert list(fk.backends())[-2:] == ["toy", "dense"]
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert re.search("✓ toy +runs here: kernels to learn from", out)
    assert "arrays of torch run on toy" not in out
    with pytest.raises(fk.BackendError, match=r"there are aten, xla, .*, toy, dense, library, native"):
        fk.compile("causal", backend="toys")


def test_toy_backend_prints_its_source(toy, capsys):
    text = fk.compile("causal & window(9)", "softcap(5)").source("toy")
    assert "def attention_forward(" in text
    assert "q >= k" in text
    assert "s0" in text
    assert main(["emit", "causal", "--backend", "toy"]) == 0
    assert "def attention_forward(" in capsys.readouterr().out


@pytest.mark.parametrize(("mask", "score"), [("causal & window(40)", "softcap(5)"), ("causal & q != 7", None)])
def test_a_call_equals_the_oracle(toy, mask, score):
    att = fk.compile(mask, score, backend="toy")
    att.check(*arrays()).require()
    att.check(*arrays(torch.bfloat16)).require()


def test_frisket_check_takes_it(toy, capsys):
    assert main(["check", "causal", "--backend", "toy", "--quick"]) == 0
    assert re.search("torch +toy +float32 ", capsys.readouterr().out)


def test_toy_backend_refuses_gradients(toy):
    with pytest.raises(BackwardError) as caught:
        fk.compile("causal", backend="toy")(*arrays(gradients=True))
    assert str(caught.value) == (
        "backend 'toy' has no gradients; aten, cpp, gluon, triton and xla have\n"
        "  for the forward alone write `with torch.no_grad():`, or detach the tensors"
    )


def test_dtypes_tables_and_frameworks_are_refused(toy):
    att = fk.compile("causal", backend="toy")
    with pytest.raises(fk.BackendError, match=r"^the toy kernel takes float32 and bfloat16; cast q, k and v$"):
        att(*arrays(torch.float16))
    with pytest.raises(fk.LoweringError, match=r"^the toy kernel reads no tables"):
        fk.compile("same(doc)", backend="toy")(*arrays(), doc=torch.zeros(150, dtype=torch.int32))
    with pytest.raises(fk.LoweringError, match=r"`exp` has no toy form"):
        fk.compile("causal", "score = exp(score)", backend="toy")(*arrays())
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(fk.BackendError, match=r"^backend 'toy' does not take jax arrays; they run on xla, cpp, "):
        att(*(jnp.ones((1, 8, 2, 16)),) * 3)
