"""The list of docs/how-it-works.md that says which kernel a call takes agrees with the records, and with calls."""

import re

import pytest
from support.pages import DOCS

import frisket as fk
from frisket.runtime.backends.base import RECORDS, backends_of, offered, ranked
from frisket.runtime.backends.engines.proof import CHECKED
from frisket.runtime.backends.registry import library
from frisket.runtime.machine.cpp_build import reason
from frisket.runtime.machine.settings import VARIABLES

torch = pytest.importorskip("torch")
jnp = pytest.importorskip("jax.numpy")
HEAD = "## Which kernel a call takes"
LIST = (DOCS / "how-it-works.md").read_text(encoding="utf-8").partition(HEAD)[2].partition("\n## ")[0]
ROW = re.compile(r"^ +\| (torch|JAX) \| (?:`(\w+)`|others)[^|]* \| (.*) \|$", re.M)
ROWS = {(found[1].lower(), found[2] or "others"): found[3] for found in ROW.finditer(LIST)}
NAMED = {"native": "cpp", "library": "aten", "aten": "aten", "dense": "dense"}
CHOICES = [v.name for v in VARIABLES if v.name != "FRISKET_SHOW"]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in CHOICES:
        if name != "FRISKET_CACHE_DIR":
            monkeypatch.delenv(name, raising=False)


def calls(q_len=128, framework="torch", **options):
    """The backend of a causal call."""
    x = torch.ones(1, 2, q_len, 64) if framework == "torch" else jnp.ones((1, q_len, 2, 64))
    return fk.compile("causal", **options).stages(x, x, x).target.backend


def named(text):
    return [n for n in re.findall(r"`([\w-]+)`", text) if n in RECORDS]


def test_kernel_list_names_each_backend_and_variable():
    assert set(named(LIST)) | set(offered()) == set(RECORDS)
    assert all(name in LIST for name in CHOICES)


@pytest.mark.parametrize(("framework", "platform"), ROWS)
def test_kernels_of_a_device(framework, platform):
    ours = [b.name for b in ranked(framework, platform)]
    faster = [b.name for b in backends_of(framework) if b.instead in ours and platform in b.platforms]
    last = [library(framework)] if framework == "jax" or platform == "cpu" else []
    assert [*dict.fromkeys(named(ROWS[framework, platform]))] == [*dict.fromkeys([*ours, *faster, *last])]


def test_kernel_table_has_each_platform():
    ours = {(f, p) for f in ("torch", "jax") for b in backends_of(f) for p in b.platforms if not b.is_engine}
    assert set(ROWS) == ours | {("torch", "others"), ("jax", "others")}


@pytest.mark.parametrize("name", NAMED)
def test_a_backend_that_is_named(name, monkeypatch):
    if NAMED[name] == "cpp" and reason():
        pytest.skip(reason())
    assert calls(backend=name) == NAMED[name]
    monkeypatch.setenv("FRISKET_BACKEND", name)
    assert calls() == NAMED[name]


@pytest.mark.parametrize(("framework", "otherwise"), [("torch", "aten"), ("jax", "xla")])
def test_kernels_of_a_cpu(framework, otherwise, monkeypatch):
    if not reason():
        assert calls(512, framework) == "cpp"
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert calls(512, framework) == otherwise


def test_sdpa_runs_short_calls_on_a_cpu_without_compiler(monkeypatch):
    assert [x.engine for x in CHECKED if x.platform == "cpu"] == ["sdpa"]
    monkeypatch.setenv("CXX", "/no/such/compiler")
    longest = int(re.search(r"only `sdpa` runs: .* up to (\d+) queries", LIST)[1])
    assert (calls(longest), calls(longest + 1)) == ("sdpa", "aten")
    assert calls(tile=(32, 32)) == calls(engines=False) == "aten"
    for value, taken in (("0", "aten"), ("flash,cudnn", "aten"), ("sdpa", "sdpa")):
        monkeypatch.setenv("FRISKET_ENGINES", value)
        assert calls() == taken


def test_while_a_kernel_is_compiled(monkeypatch, tmp_path):
    if reason():
        pytest.skip(reason())
    monkeypatch.setenv("FRISKET_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FRISKET_COMPILE", "background")
    x = torch.ones(1, 2, 128, 64)
    found = fk.compile("causal & q - k != 5").stages(x, x, x)
    assert (found.target.backend, found.awaits) == ("aten", "cpp")
