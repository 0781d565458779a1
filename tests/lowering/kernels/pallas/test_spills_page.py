"""The table of spills in benchmarks/notes/pallas.md is that of the compiled kernels in benchmarks/results/compiled."""

import re
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[4] / "benchmarks" / "results" / "compiled"
LINE = re.compile(r"(?P<name>\S.*?) +(?P<dim>\d+) (?:bfloat16|float16) .*, (?P<bytes>\d+) spilled,")
PLAIN = ("causal", "window", "softcap", "alibi")
KERNELS = [
    match.group("name", "dim", "bytes")
    for file in RESULTS.glob("pallas-gpu-jax-*.txt")
    for match in map(LINE.match, file.read_text(encoding="utf-8").splitlines()) if match
]  # fmt: skip


def spills(dim, wanted):
    found = sorted({int(spilled) for name, size, spilled in KERNELS if int(size) == dim and wanted(name)})
    return " to ".join(map(str, found[:: len(found) - 1])) if len(found) > 1 else str(found[0])


def test_spills_on_the_pallas_page_are_the_compiled_ones():
    page = (RESULTS.parents[1] / "notes" / "pallas.md").read_text(encoding="utf-8")
    plain = [spills(dim, PLAIN.__contains__) for dim in (64, 128, 192, 256)]
    values = [spills(dim, lambda name: ":" not in name and name not in PLAIN) for dim in (64, 128, 192, 256)]
    dq = [spills(dim, lambda name: ": dq" in name) for dim in (64, 128, 256)]
    both = spills(64, lambda name: ": dk dv" in name)
    softcap = spills(128, lambda name: name == "softcap: dk dv")
    others = spills(128, lambda name: ": dk dv" in name and name != "softcap: dk dv")
    dk, dv = (spills(256, lambda name, end=end: name.endswith(end)) for end in (": dk", ": dv"))
    for row in (
        "| forward of causal, windows, softcap, ALiBi | {} | {} | causal {} | causal {} |".format(*plain),
        f"| forward with values per key, distance or pair | {' | '.join(values)} |",
        "| dq | {} | {} | | {} |".format(*dq),
        f"| dk and dv | {both} | {others}; softcap {softcap} | | dk {dk}, dv {dv} |",
    ):
        assert row in page
