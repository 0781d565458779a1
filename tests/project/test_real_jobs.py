"""The jobs inside real packages: each says how it is installed, and has a result for the versions that it pins."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

JOBS = sorted(Path(__file__).parents[1].glob("real/*/job.toml"))
KEYS = {"about", "python", "install", "alone", "remove", "versions"}
PIN = re.compile(r"([\w.-]+)(?:\[[\w,-]+\])?==([\w.]+)(?:;.*)?")


def name(text):
    return re.sub(r"[-_.]+", "-", text).lower()


@pytest.mark.parametrize("file", JOBS, ids=[file.parent.name for file in JOBS])
def test_result_of_a_job_is_of_the_versions_it_pins(file):
    job = tomllib.loads(file.read_text(encoding="utf-8"))
    result = json.loads(file.with_name("result.json").read_text(encoding="utf-8"))
    assert {"about", "python", "install", "versions"} <= set(job) <= KEYS
    assert file.with_name("job.py").exists()
    assert result["failures"] == []
    assert result["passed"] > 0
    pins = dict(match.groups() for line in job["install"] + job.get("alone", []) if (match := PIN.fullmatch(line)))
    pins = {name(package): version for package, version in pins.items()}
    versions = {name(package): version.partition("+")[0] for package, version in result["versions"].items()}
    assert set(map(name, job["versions"])) == set(versions) - {"python"}
    assert pins, "a job that pins nothing cannot be repeated"
    assert {package: versions[package] for package in pins if package in versions} == {
        package: version for package, version in pins.items() if package in versions
    }
    assert set(pins) & set(versions), "no package whose version is shown is pinned"
