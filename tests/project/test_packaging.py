"""What ships is what is on the disk."""

import importlib
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import versions

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
FOLDERS = SETUPTOOLS["package-dir"]


def folder(package):
    """The folder a package ships from, through its nearest mapped parent."""
    parts = package.split(".")
    for n in range(len(parts), 0, -1):
        if (mapped := FOLDERS.get(".".join(parts[:n]))) is not None:
            return ROOT.joinpath(mapped, *parts[n:])
    raise AssertionError(package)


def test_package_list_is_the_folders_on_disk():
    listed = {folder(package) for package in SETUPTOOLS["packages"]}
    rooms = (ROOT / name for name in ("grammar", "dsl", "lowering", "runtime"))
    found = {file.parent for room in rooms for file in room.rglob("*.py")}
    # a folder without an __init__.py would be absent from the wheel and present in an editable install
    assert listed - {ROOT / "runtime" / "facade"} == found - {ROOT / "runtime" / "facade"}
    assert all((place / "__init__.py").is_file() for place in listed)


def test_data_files_are_declared_as_package_data():
    for room in ("grammar", "dsl", "lowering", "runtime"):
        for file in (ROOT / room).rglob("*"):
            if file.is_dir() or "__pycache__" in file.parts or file.suffix == ".py":
                continue
            above = [p for p in SETUPTOOLS["packages"] if folder(p) in file.parents]
            package = max(above, key=lambda p: len(folder(p).parts))
            patterns = SETUPTOOLS["package-data"].get(package, [])
            declared = {found for pattern in patterns for found in folder(package).glob(pattern)}
            assert file in declared, f"{file} is not in package-data"


def test_constraints_pin_every_direct_dependency():
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *(r for group in extras.values() for r in group)]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in wanted} - {PROJECT["project"]["name"]}
    assert names <= set(pinned)


def test_lower_bounds_are_those_that_passed():
    outcomes = json.loads(versions.RESULTS.read_text(encoding="utf-8"))
    tried = {}
    for name in versions.ENVIRONMENTS:
        if "oldest" in name and outcomes[name].get("failures") == []:
            for package, version in outcomes[name]["versions"].items():
                tried.setdefault(package, []).append(version)
    extras = PROJECT["project"]["optional-dependencies"]
    of_users = ("torch", "jax", "triton", "plot", "flax", "quantized", "transformers")
    bounds = [*PROJECT["project"]["dependencies"], *(r for extra in of_users for r in extras[extra])]
    for name, bound in (m.groups() for r in bounds if (m := re.match(r"([\w-]+)>=([\d.]+)", r))):
        oldest = min(tried[name], key=lambda v: tuple(map(int, v.split("."))))
        assert f"{oldest}.".startswith(f"{bound}."), (name, bound, oldest)


@pytest.mark.parametrize("name", ["numpy", "lark", "rich", "platformdirs", "shtab"])
def test_core_dependencies_are_declared(name):
    assert any(r.startswith(name) for r in PROJECT["project"]["dependencies"])


def test_frisket_command_is_installed():
    entry = next(e for e in metadata.entry_points(group="console_scripts") if e.name == "frisket")
    module, function = entry.value.split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_package_version_is_written_once():
    import frisket

    assert "version" not in PROJECT["project"]
    assert SETUPTOOLS["dynamic"] == {"version": {"attr": "frisket.__version__"}}
    assert re.fullmatch(r"\d+\.\d+\.\d+", frisket.__version__)


def test_links_of_readme_work_where_pypi_shows_it():
    spec = importlib.util.spec_from_file_location("frisket_setup", ROOT / "setup.py")
    spec.loader.exec_module(setup := importlib.util.module_from_spec(spec))
    url = "https://example.org/owner/name"
    made, readme = setup.dynamic(url), (ROOT / "README.md").read_text(encoding="utf-8")
    assert setup.dynamic("")["long_description"] == readme
    prose, there = (re.sub(r"^```.*?^```$", "", x, flags=re.M | re.S) for x in (readme, made["long_description"]))
    before, after = (re.findall(r"(!?)\[[^]]*\]\(([^)]+)", x) for x in (prose, there))
    assert len(before) == len(after) > 40
    import frisket

    for (picture, old), (_, new) in zip(before, after, strict=True):
        kind = "raw" if picture else "blob"
        assert new == (old if old.startswith(("https://", "#")) else f"{url}/{kind}/v{frisket.__version__}/{old}")
    pictures = [re.findall(r'(?:srcset|src)="([^"]+)', x) for x in (prose, there)]
    assert pictures[1] == [f"{url}/raw/v{frisket.__version__}/{old}" for old in pictures[0]]
    assert len(pictures[0]) == 6
    fenced = [re.findall(r"^```.*?^```$", x, re.M | re.S) for x in (readme, made["long_description"])]
    assert [x.replace("REPOSITORY_URL", url) for x in fenced[0]] == fenced[1] != fenced[0]
    assert "REPOSITORY_URL" not in made["long_description"]
    assert set(PROJECT["project"]["dynamic"]) == {"version", "readme", "urls"}
    assert made["project_urls"]["Source"] == url
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    build = workflow[workflow.index("bash .ci/run all") : workflow.index("upload-artifact")]
    assert "REPOSITORY_URL: ${{ github.server_url }}/${{ github.repository }}" in build


def test_test_files_have_unique_names():
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "statement",
    [
        "import frisket; print(frisket.__version__)",
        "from frisket.dsl import ir, types",
        "import frisket as fk, frisket.runtime.masks.layout; fk.mask('causal').layout(9, 9)",
    ],
)
def test_clone_called_frisket_does_not_hide_the_package(tmp_path, statement):
    """Without `__init__.py` at the top, the folder is a namespace package that hides an editable install."""
    (tmp_path / "frisket").symlink_to(ROOT)
    done = subprocess.run([sys.executable, "-c", statement], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_clone_that_is_not_installed_says_how_to_install_it(tmp_path):
    (tmp_path / "frisket").symlink_to(ROOT)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import frisket"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stderr.endswith(f"ModuleNotFoundError: frisket is not installed: pip install -e {ROOT}\n"), done.stderr
