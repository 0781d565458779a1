"""Compilers that are missing, killed, out of order or lying, under calls of users."""

from __future__ import annotations

import json
import random
import shutil

from .machine import environment, folder, said, script

# what the compiler does with a kernel (the probe it compiles) -> (what is said, whether the next call has the kernel)
KINDS = {
    "missing": ("", "no C\\+\\+ compiler: CXX is", False),
    "deleted": ('rm "$0"; exit 1', "does not compile|no C\\+\\+ compiler", False),
    "killed": ("kill -9 $$", "was killed by SIGKILL while it compiled", False),
    "killed once": ('[ -e $0.once ] || { touch $0.once; kill -9 $$; }; exec REAL "$@"', "was killed by SIGKILL", True),
    "interrupted once": ('[ -e $0.once ] || { touch $0.once; kill -INT $$; }; exec REAL "$@"', "by SIGINT", True),
    "out of order": ("printf 'error: \\377 out of order\\n' >&2; exit 1", "(?s)does not compile.*out of order", False),
    "nothing": ("exit 0", "(?s)reports no error.*the file is empty", False),
    "noise": ("head -c 9000 /dev/urandom > $out", "is no library: the file is no ELF file", False),
    "a part": ('REAL "$@"; head -c 9000 $out > $out.a; mv $out.a $out', "or not all of one", False),
    "another library": ("echo 'int other;' | REAL -x c++ -shared -fPIC -o $out -", "there is no frisket_", False),
    "an object file": ('REAL -c -o $out -x c++ /dev/null', "there is no frisket_", False),
}  # fmt: skip
CALLS = """
import json, os, re, sys, warnings
warnings.simplefilter("always")
import torch, frisket as fk
from frisket.grammar import memo
from frisket.runtime.machine import caller, cpp_build
cpp_build.RETRY = cpp_build.LaterError.wait = 0
q, k, v = torch.randn(3, 1, 2, 150, 16, generator=torch.Generator().manual_seed(1), requires_grad=False)
want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
for kind, compiler, words, mends in json.loads(sys.argv[1]):
    os.environ.update(CXX=compiler, FRISKET_CACHE_DIR=os.path.join(os.path.dirname(compiler), "cache"))
    caller.SAID.clear(), memo.clear()
    att = fk.compile("causal", engines=False)
    with warnings.catch_warnings(record=True) as told:
        first = att(q, k, v)
    told = [str(w.message) for w in told if "native" in str(w.message)]
    assert (first - want).abs().max() < 1e-5, kind
    if kind != "missing":  # of which `frisket doctor` tells
        assert len(told) == 1 and re.search(words, told[0]), (kind, told)
    try:
        found = fk.compile("causal", backend="cpp")(q, k, v)
        assert mends and (found - want).abs().max() < 1e-5, kind
        again = att(q, k, v)
        assert torch.equal(again, found), kind + ": library calls still run"
    except fk.BackendError as error:
        assert not mends and re.search(words, str(error)), (kind, str(error))
        assert torch.equal(att(q, k, v), first), kind
    left = [x for _, _, files in os.walk(os.environ["FRISKET_CACHE_DIR"]) for x in files]
    assert not [x for x in left if x.endswith((".tmp", ".lock", ".a"))], (kind, left)
    print(kind)
"""


def failing(draw: random.Random) -> dict[str, int]:
    real = shutil.which("g++")
    with folder() as place:
        given = []
        for kind, (does, words, mends) in draw.sample(sorted(KINDS.items()), len(KINDS)):
            own = place / kind.replace(" ", "-")  # CXX may have arguments, so its path has no blanks
            own.mkdir()
            path = own / "compiler"
            find = 'for x; do [ "$last" = -o ] && out=$x; last=$x; done\n'
            probe = f'grep -q frisket_probe "$last" && exec {real} "$@"\n'
            if kind != "missing":
                script(path, find + probe + does.replace("REAL", str(real)))
            given.append((kind, str(path), words, mends))
        lines = said(CALLS, environment(place / "cache", TMPDIR=str(place)), arguments=[json.dumps(given)])
        assert sorted(lines) == sorted(KINDS), lines
    return {"compilers": len(KINDS)}


FAULTS = {"compilers": (failing, 1)}
