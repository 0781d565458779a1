"""On PYTHONPATH: this processor has AVX2 and nothing wider, for frisket and torch."""

import io
import os
import pathlib

os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
_open = pathlib.Path.open


def _narrowed(self: pathlib.Path, *args: object, **kwargs: object) -> object:
    file = _open(self, *args, **kwargs)
    if str(self) != "/proc/cpuinfo":
        return file
    with file:
        lines = file.read().splitlines(keepends=True)
    wide = ("avx512", "avx_vnni", "amx")
    return io.StringIO(
        "".join(
            " ".join(x for x in line.split(" ") if not x.strip().startswith(wide)).rstrip() + "\n" for line in lines
        )
    )


pathlib.Path.open = _narrowed
