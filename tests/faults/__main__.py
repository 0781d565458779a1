"""`python tests/faults [NAME …] --seed N --rounds N --resume FILE`: faults of the machine.

A fault is a program: it breaks something, and holds the results, the words and what is left behind to what they should
be. A round of a seed does the same again as far as time allows. Each round is a line of JSON in FILE: with the same
FILE the rounds that are done are not run again. Without a name, all faults run. Root may mount the small file systems
that some of them need; the others say that they did not run.
"""

import argparse
import signal
import sys
from pathlib import Path

sys.path[:1] = [str(Path(__file__).resolve().parents[1])]

from faults import campaign  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/faults", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(campaign.FAULTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, help="rounds of each fault; without it those of the table in its file")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="lines of JSON; made where there is none")
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - set(campaign.FAULTS)):
        parser.error(f"there is no {unknown[0]}; there are {', '.join(campaign.FAULTS)}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    failed = 0
    for name in args.names or campaign.FAULTS:
        outcome = campaign.run(name, args.seed, args.rounds, args.resume, show=print)
        failed += outcome.failed
        print(f"{name}: {outcome}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
