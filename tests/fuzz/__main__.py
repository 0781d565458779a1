"""`python tests/fuzz TARGET --seed N --cases N --resume FILE`: a campaign of random programs or texts.

The cases of a seed are always the same. FILE holds a line of JSON for each hundred cases: how far the campaign is, the
distinct programs, the failures. With the same FILE a campaign goes on where it stopped. `--union FILE ...` prints the
counts of several files.
"""

import argparse
import gc
import os
import resource
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from fuzz import campaign, targets  # noqa: E402

MEMORY = 8 << 30
ENVIRONMENT = {
    "triton": {"TRITON_INTERPRET": "1"},
    "parallel": {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__)
    parser.add_argument("target", choices=targets.TARGETS, nargs="?")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1000, help="cases in all, earlier runs with FILE included")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="lines of JSON; made where there is none")
    parser.add_argument("--union", type=Path, metavar="FILE", nargs="+", help="only print the counts of files of one "
                        "target, such as the parts of a campaign on several cores, and of all together")  # fmt: skip
    args = parser.parse_args()
    if (args.target is None) == (args.union is None):
        parser.error("name a target, or files after --union")
    if args.union:
        return 1 if campaign.union(args.union).failed else 0
    os.environ |= ENVIRONMENT.get(args.target, {})  # read when Triton or JAX is imported, by the first case
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))  # a text that asks for more fails, and not the machine
    gc.freeze()  # else every collection looks at all that torch and JAX have made
    gc.set_threshold(100_000, 20, 20)
    counts = campaign.run(args.target, args.seed, args.cases, args.resume, show=print)
    print(counts)
    return 1 if counts.failed else 0


if __name__ == "__main__":
    sys.exit(main())
