"""One version everywhere, workflows that do what `.ci/run` does, commands that are there."""

import re
import tomllib
from pathlib import Path

import pytest
import readme

import frisket

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
CHANGES = re.findall(r"^## \[(\S+)\](?: - (\S+))?$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_changelog_and_citation_are_of_this_version():
    assert CHANGES[0] == ("Unreleased", "")
    version, date = CHANGES[1]
    assert version == frisket.__version__
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], str(cited["date-released"])) == (version, date)
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert (cited["title"], cited["license"]) == ("frisket", PROJECT["license"])
    assert PROJECT["name"] in cited["abstract"], "what to install"
    assert cited["authors"] == [{"name": "The frisket developers"}]
    for page in ("README.md", "docs/index.md"):
        assert f"This is version {version.rpartition('.')[0]}," in (ROOT / page).read_text(), page


def test_workflows_run_what_people_run():
    run = [step["run"] for step in steps(WORKFLOWS["ci.yml"]) if "run" in step]
    assert run == ["bash .ci/run", 'bash -ec "$(python3 tests/readme.py tests)"']
    assert "DIST=dist bash .ci/run all" in [step.get("run") for step in steps(WORKFLOWS["release.yml"])]
    script = (ROOT / ".ci" / "run").read_text()
    for command in (
        "tests/readme.py tests",
        "tests/readme.py first",
        "tests/typecheck.py",
        "-m exhaustive",
        "tests/release.py",
    ):
        assert command in script, command
    assert 'dist=$(realpath -m "${DIST:-' in script


def test_outside_tests_are_excluded_by_default():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert "not slow and not exhaustive and not outside" in options["addopts"]
    assert "outside" in [line.partition(":")[0] for line in options["markers"]]
    assert "outside" not in (ROOT / ".ci" / "run").read_text().replace("outside the tree", "")


def test_supported_python_versions_are_tested_in_ci():
    jobs = WORKFLOWS["ci.yml"]["jobs"]
    tested = {step["with"]["python-version"] for step in jobs["all"]["steps"] if "setup-python" in step.get("uses", "")}
    tested |= set(jobs["tests"]["strategy"]["matrix"]["python"])
    said = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)}
    assert tested == said


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_and_tokens_read(name):
    text = (ROOT / ".github" / "workflows" / name).read_text()
    used = re.findall(r"uses: (.*)$", text, re.M)
    assert used
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action) for action in used), used
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}


def test_release_workflow_grants_the_fewest_permissions():
    jobs = WORKFLOWS["release.yml"]["jobs"]
    assert {name: job["permissions"] for name, job in jobs.items() if "permissions" in job} == {
        "publish": {"id-token": "write"},
        "site": {"contents": "write"},
    }
    assert (jobs["publish"]["needs"], jobs["site"]["needs"]) == ("build", "publish")
    assert WORKFLOWS["release.yml"][True] == {"push": {"tags": ["v*"]}}  # `on` is a boolean of YAML 1.1


def test_commands_and_files_of_contributing_exist():
    page = ROOT / "CONTRIBUTING.md"
    commands = [part.strip() for block in readme.blocks("bash", page) for part in re.split(r"&&|;|\n", block)]
    known = ("pip install -e '.[", "ruff ", "pytest", "git diff ", "mkdocs build --strict", "python ")
    assert len(commands) > 8
    for command in filter(None, commands):
        assert command.startswith(known), command
    extras = set(re.findall(r"[\w-]+", " ".join(re.findall(r"'\.\[(.*?)\]'", page.read_text(encoding="utf-8")))))
    assert extras <= PROJECT["optional-dependencies"].keys()
    named = re.findall(
        r"(?:tests|docs|lowering|runtime|benchmarks|dsl)/[\w/.]+\.(?:py|frisket|md)", page.read_text("utf-8")
    )
    toy = re.compile("[a-z/]+/toy/")  # the backend of the recipe, which test_add_a_backend.py writes
    examples = set(re.findall(r"^`(\S+)`\n\n```python", page.read_text("utf-8"), re.M))  # of test_add_a_test.py
    assert not [path for path in {*named} - examples if not toy.match(path) and not (ROOT / path).exists()]
