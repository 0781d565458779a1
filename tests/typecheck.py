"""`python tests/typecheck.py`: mypy --strict over the package; mypy and pyright over what users of it write.

Type checkers cannot follow setuptools' editable hook, so the folders are linked into `build/types/frisket`
as `package-dir` in pyproject.toml maps them. Links are to folders: new files show through.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def link(root: Path = ROOT) -> Path:
    """Bring the tree of links up to date and return the folder to put on the checker's path."""
    top = root / "build" / "types"
    folders = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    wanted: dict[Path, Path] = {}
    for package, folder in folders.items():
        place = top.joinpath(*package.split("."))
        if "." in package:
            wanted[place] = root / folder
        else:  # the façade shares its folder with the links to the others: link its files one by one
            place.mkdir(parents=True, exist_ok=True)
            wanted |= {place / f.name: f for f in (root / folder).iterdir() if f.name != "__pycache__"}
    for old in top.glob("*/*"):
        if old not in wanted and old.is_symlink():  # bytecode is kept in a folder there
            old.unlink()
    for place, target in wanted.items():
        if not place.is_symlink():
            place.symlink_to(target)
    return top


def main() -> int:
    link()
    mypy = [sys.executable, "-m", "mypy", "--strict"]
    pyright = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]  # its files are named in pyproject.toml
    commands = [*mypy, *sys.argv[1:]], [*mypy, "tests/types"], pyright
    return max(subprocess.call(command, cwd=ROOT) for command in commands)


if __name__ == "__main__":
    sys.exit(main())
