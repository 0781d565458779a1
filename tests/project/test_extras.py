"""What needs a package that is not installed says which extra brings it."""

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from frisket.dsl.errors import BackendError, MissingPackageError
from frisket.runtime.machine import modules as module
from frisket.runtime.machine.modules import DISTRIBUTION, EXTRAS, extras, pip_install

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = PROJECT["optional-dependencies"]
TEXTS = {".py", ".md", ".toml", ".txt", ".cff", ".yml", ".html", ".js", ".cpp", ".hpp", ".tpl", ".frisket"}
# a statement, and the extra it asks for where nothing is installed
ASKED = {
    "import frisket.flex": "torch",
    "from frisket.caches.torch import KVCache": "torch",
    "from frisket.caches.jax import KVCache": "jax",
    "from frisket.operations import AttentionRegistry": "jax",
    "import frisket as fk; fk.sharding": "jax",
    "import frisket as fk; fk.modeling": "jax",
    "import frisket.integrations.transformers": "torch",
    "from frisket.integrations import flax": "jax",
    "import frisket as fk; fk.mask('causal').layout(128, 128).to_block_mask()": "torch",
    "import frisket as fk; fk.mask('causal').layout(128, 128).to_splash()": "jax",
    "import frisket as fk; fk.mask('causal').layout(128, 128).plot()": "plot",
}
PROGRAM = """
import sys
from importlib.abc import MetaPathFinder

class Hidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
for statement in {statements!r}:
    try:
        exec(statement)
    except ImportError as error:
        print(type(error).__name__, error)
"""


def test_doors_and_methods_name_the_extra():
    program = PROGRAM.format(hidden=set(EXTRAS), statements=list(ASKED))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(ASKED), done.stdout
    for line, (statement, extra) in zip(lines, ASKED.items(), strict=True):
        assert line.startswith("MissingPackageError "), (statement, line)
        assert line.endswith(f"is not installed: {pip_install(extra)}"), (statement, line)


def test_engines_of_a_plan_are_listed_without_torch():
    """As in `frisket emit --report` where the extra triton alone is installed."""
    program = """
import sys
from importlib.machinery import PathFinder

class Others(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in ("torch", "jax") else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Others
import frisket as fk
plan = fk.compile("causal").plan(1024, 1024, 1, 4)
for device in ("cpu", "cuda"):
    print(plan.engines(64, 4, "float32", device=device))
"""
    env = {n: x for n, x in os.environ.items() if n != "FRISKET_BACKEND"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert not done.returncode, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["sdpa", "flash", "cudnn", "sdpa"]
    assert all(line.endswith(f": torch is not installed: {pip_install('torch')}") for line in lines)


@pytest.mark.exhaustive
def test_integrations_name_the_extra_of_their_library():
    packages = "transformers", "flax"
    program = PROGRAM.format(hidden={*packages}, statements=[f"import frisket.integrations.{x}" for x in packages])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = [f"MissingPackageError {package} is not installed: {pip_install(package)}" for package in packages]
    assert done.stdout.splitlines() == lines


@pytest.mark.parametrize(
    ("said", "command"),
    [
        (
            '{"url": "file://FOLDER/a%20clone", "dir_info": {"editable": true}}',
            "pip install -e 'FOLDER/a clone[torch]'",
        ),
        ('{"url": "file://FOLDER/a%20clone", "dir_info": {}}', "pip install 'FOLDER/a clone[torch]'"),
        ('{"url": "file://FOLDER/a.whl", "archive_info": {}}', "pip install 'FOLDER/a.whl[torch]'"),
        ('{"url": "file://FOLDER/gone.whl", "archive_info": {}}', "pip install 'frisket-attention[torch]'"),
        ('{"url": "https://there/a.git", "vcs_info": {}}', "pip install 'frisket-attention[torch]'"),
        (None, "pip install 'frisket-attention[torch]'"),
    ],
)
def test_a_command_installs_from_where_frisket_came(said, command, tmp_path, monkeypatch):
    """The distribution is not on PyPI yet: a clone or a wheel is what there is."""
    (tmp_path / "a clone").mkdir()
    (tmp_path / "a.whl").touch()
    text = said and said.replace("FOLDER", str(tmp_path))
    found = [SimpleNamespace(read_text=lambda file: None), SimpleNamespace(read_text=lambda file: text)]
    monkeypatch.setattr(metadata, "distributions", lambda name: iter(found))
    module.installed_from.cache_clear()
    assert pip_install("torch") == command.replace("FOLDER", str(tmp_path))
    module.installed_from.cache_clear()


@pytest.mark.parametrize("package", EXTRAS)
def test_extra_brings_the_package_that_errors_name(package):
    assert any(requirement.startswith(package) for requirement in OPTIONAL[EXTRAS[package]])


def test_requirements_name_the_distribution_of_frisket():
    """`frisket` on the package index is another project: every requirement says `frisket-attention`."""
    folders = "grammar dsl lowering runtime tests docs benchmarks examples .github .ci".split()
    files = [*ROOT.iterdir(), *(file for name in folders for file in (ROOT / name).rglob("*"))]
    read = [f for f in files if f.suffix in TEXTS and f.name != "CHANGELOG.md" and f.is_file()]
    assert len(read) > 400
    wrong = re.compile(r"\bfrisket(?!-attention)\\?\[[\w{,-]+\\?\]|pip install ['\"]?frisket(?!-attention)\b")
    found = {str(f.relative_to(ROOT)): wrong.findall(f.read_text(encoding="utf-8")) for f in read}
    assert len(found.pop("tests/project/test_extras.py")) == 1, "the example below, which shows that something is found"
    assert not {name: said for name, said in found.items() if said}
    assert wrong.search("pip install 'frisket[torch]'")
    assert PROJECT["name"] == DISTRIBUTION


def test_missing_package_error_is_an_import_error():
    with pytest.raises(MissingPackageError) as caught, extras():
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, BackendError)
    assert caught.value.name == "torch"


def test_missing_modules_of_frisket_raise_plain_errors():
    with pytest.raises(ModuleNotFoundError) as caught, extras():
        import frisket.no_such_module  # noqa: F401
    assert not isinstance(caught.value, MissingPackageError)
