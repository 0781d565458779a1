"""Jobs that run tiny models inside real packages under frisket: `python tests/real/run.py [JOB ...]`.

README.md beside this file says what a job is. A job whose Python is not on this machine is left out and says so. The
exit status is 1 where a test of a job failed or an environment could not be made.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from versions import interpreter  # noqa: E402 (tests is no package)

ROOT = HERE.parents[1]
JOBS: dict[str, dict[str, Any]] = {
    file.parent.name: tomllib.loads(file.read_text(encoding="utf-8")) for file in sorted(HERE.glob("*/job.toml"))
}
VERSIONS = (
    "import importlib.metadata as m, json, platform, sys\n"
    "print(json.dumps({'python': platform.python_version()} | {n: m.version(n) for n in sys.argv[1:]}))"
)


def environment(job: dict[str, Any], python: str, folder: str) -> str:
    """The Python of a new environment with the packages of a job. CalledProcessError where pip fails."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    inside = f"{folder}/bin/python"
    pip = [inside, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "-e", str(ROOT), "pytest", *job["install"]], check=True)
    if job.get("alone"):
        subprocess.run([*pip, "--no-deps", *job["alone"]], check=True)
    if job.get("remove"):
        subprocess.run([inside, "-m", "pip", "uninstall", "-q", "-y", *job["remove"]], check=True)
    return inside


def run(name: str, python: str) -> dict[str, Any]:
    """Runs the tests of a job in an environment; its versions, the counts of outcomes and the names of what failed."""
    start = time.monotonic()
    shown = subprocess.run([python, "-c", VERSIONS, *JOBS[name]["versions"]], capture_output=True, text=True)
    if shown.returncode:
        raise SystemExit(f"{name}: {shown.stderr.strip().splitlines()[-1]}")
    with tempfile.TemporaryDirectory(prefix="frisket-job-") as folder:
        options = [
            "-c",
            os.devnull,
            "--rootdir",
            str(HERE / name),  # a folder above would be a module that hides the package of its name
            "--noconftest",
            "--import-mode=importlib",
            "-p",
            "no:cacheprovider",
        ]
        command = [python, "-m", "pytest", "-q", "-ra", "--durations=10", *options, str(HERE / name / "job.py")]
        # what a job writes, models and kernels, lies in the temporary folder
        variables = {**os.environ, "FRISKET_CACHE_DIR": f"{folder}/kernels", "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(
            [*command, f"--basetemp={folder}/tests"], cwd=folder, env=variables, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        status = process.wait()
    counts = {
        outcome: int(n)
        for n, outcome in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", lines[-1] if lines else "")
    }
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", "".join(lines), re.M)
    if status and not failures:
        failures = [f"pytest ended with {status}"]
    return {
        "versions": json.loads(shown.stdout),
        **counts,
        "failures": failures,
        "seconds": round(time.monotonic() - start),
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("jobs", nargs="*", metavar="JOB", help="jobs by name; all of them unless named")
    options.add_argument("--list", action="store_true", help="print the jobs")
    options.add_argument("--part", metavar="I/N", help="every Nth job from the Ith on")
    options.add_argument("--python", help="of an environment that is there, for the one JOB")
    arguments = options.parse_args()
    if arguments.list:
        print(*(f"{name}: {' '.join(job['install'])}" for name, job in JOBS.items()), sep="\n")
        return 0
    if unknown := set(arguments.jobs) - set(JOBS):
        options.error(f"no job named {', '.join(sorted(unknown))}; the jobs are {', '.join(JOBS)}")
    names = arguments.jobs or list(JOBS)
    if arguments.part:
        first, step = map(int, arguments.part.split("/"))
        names = names[first - 1 :: step]
    failed = False
    for name in names:
        job = JOBS[name]
        print(f"== {name}", flush=True)
        python = arguments.python or next(filter(None, map(interpreter, job["python"])), None)
        if python is None:
            print(f"no Python {' or '.join(job['python'])} is here: left out")
            continue
        with tempfile.TemporaryDirectory(prefix="frisket-job-") as folder:
            result = run(name, python if arguments.python else environment(job, python, folder))
        failed |= bool(result["failures"])
        if not arguments.part:
            text = json.dumps({"date": str(datetime.date.today()), **result}, indent=1) + "\n"
            (HERE / name / "result.json").write_text(text, encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
