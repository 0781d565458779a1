"""The page of versions, packages and model types, and its table, say what the tests found."""

import json
import re

from support.pages import DOCS, script

from frisket.lowering.architectures import ARCHITECTURES, MEASURED, tried


def test_compatibility_page_is_up_to_date():
    made = script("compatibility")
    for path, text in made.pages().items():
        assert text == path.read_text(encoding="utf-8"), "run `python docs/compatibility.py`"


def test_states_of_machines_follow_from_results():
    """Each kind of GPU and TPU is listed once; what compiled and what ran is in benchmarks/results."""
    results = DOCS.parent / "benchmarks" / "results"
    compiled = "".join(p.read_text(encoding="utf-8") for p in (results / "compiled").glob("*.txt"))
    gpus = {part["machine"]["gpu"] for part in json.loads((results / "gpu.json").read_text())["parts"].values()}
    rows = {x.machine: x for x in tried()}
    assert len(rows) == len(tried())
    for name, x in ARCHITECTURES.items():
        if x.vendor == "google":
            continue
        ours = [row for machine, row in rows.items() if machine.endswith(f"({name})")]
        assert sorted(n for row in ours for n in row.machine.split(" (")[0].split(", ")) == sorted(x.kinds)
        for row in ours:
            ran = [n for n in row.machine.split(" (")[0].split(", ") if any(n in gpu for gpu in gpus)]
            assert bool(ran) == (row.state == "measured on"), row
            assert re.search(rf"^{name[:5]}\w* ", compiled, re.M), row
    assert all(any(n in gpu for gpu in gpus) for names in MEASURED.values() for n in names)
    (tpus,) = (x for x in tried() if x.machine.startswith("TPU v4,"))
    for version in tpus.machine.removeprefix("TPU ").split(", "):
        assert re.search(rf" {version} +compiles", compiled), version
