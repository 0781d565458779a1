"""CONTRIBUTING's page "Add a test": its examples pass, and what it names exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Add a test\n")[1].split("\n## ")[0]
EXAMPLES = dict(re.findall(r"^`(tests/\S+\.py)`\n\n```python\n(.*?)^```", PAGE, re.M | re.S))


def test_examples_of_the_page_pass(tmp_path):
    assert len(EXAMPLES) == 4
    for name, text in EXAMPLES.items():
        (tmp_path / Path(name).name).write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml"]
    paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, tmp_path], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert re.search(r"^[45] passed", done.stdout, re.M), done.stdout + done.stderr


def test_examples_of_the_page_stand_in_folders_of_tests():
    for name in EXAMPLES:
        assert (ROOT / name).parent.is_dir()
        assert not (ROOT / name).exists(), "an example is no test of the tree"


def test_files_named_on_the_page_exist():
    named = (
        set(re.findall(r"`((?:tests|benchmarks)/[\w./]+)`", PAGE))
        - EXAMPLES.keys()
        - {"tests/lowering/kernels/BACKEND"}
    )
    assert len(named) > 12
    assert [name for name in named if not (ROOT / name).exists()] == []
