"""`python tests/mutation AREA --resume FILE --sample N --seed S`: how many small wrong changes the tests notice.

Each mutant is a change of one place of a source file. A mutant that no test notices has survived. FILE holds a line of
JSON for each mutant; with the same FILE a run goes on where it stopped.
"""

import argparse
import json
import signal
import sys
from collections import Counter
from hashlib import blake2b
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from mutation import areas, run  # noqa: E402
from mutation.table import commit, equivalent, summary  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/mutation", description=__doc__)
    parser.add_argument("area", choices=areas.AREAS)
    parser.add_argument("--resume", type=Path, metavar="FILE", help="lines of JSON; made where there is none")
    parser.add_argument("--sample", type=int, metavar="N", help="N mutants of each group of the area; all by default")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--again", action="store_true", help="try the mutants of FILE that have survived once more")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="mutants whose line `ID FILE:LINE KIND: …` holds it")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # the copy is removed
    done = {}
    if args.resume and args.resume.exists():
        done = {x["id"]: x for x in map(json.loads, args.resume.read_text(encoding="utf-8").splitlines())}
    if args.again:
        done = {id: x for id, x in done.items() if x["outcome"] != "survived"}
    known, here, results = equivalent(), commit(), []
    for group in areas.AREAS[args.area]:
        found = [m for m in areas.mutants(run.ROOT, group) if any(text in str(m) for text in args.only or [""])]
        # a larger sample of the same seed begins with a smaller one, whatever other lines are edited
        found = sorted(found, key=lambda m: blake2b(f"{args.seed} {m.id}".encode()).digest())[: args.sample]
        results += [{"id": m.id, "outcome": "equivalent"} for m in found if m.id in known]
        results += [done[m.id] for m in found if m.id in done and m.id not in known]
        left = [m for m in found if m.id not in done and m.id not in known]
        for result in run.of_group(group, left):
            results.append(result | {"commit": here})
            if args.resume:
                with args.resume.open("a", encoding="utf-8") as f:
                    f.write(json.dumps(results[-1]) + "\n")
    print(summary(args.area, results))
    return 1 if Counter(r["outcome"] for r in results)["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
