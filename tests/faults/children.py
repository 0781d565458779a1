"""Fork and spawn after use, and interpreters that end while kernels run."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter

from .machine import environment, folder, python

HEAD = """
import atexit, faulthandler, json, multiprocessing, os, signal, sys, threading, time, traceback, warnings
warnings.simplefilter("ignore")
import numpy as np
import torch, frisket as fk
torch.set_num_threads(2)

def problem(n, mask="causal & window(60)", gradients=True, **more):
    draw = torch.Generator().manual_seed(n)
    qkv = [torch.randn(1, 4, n, 16, generator=draw).requires_grad_(gradients) for _ in "qkv"]
    att = fk.compile(mask, engines=False, **more)
    def run():
        out = att(*qkv)
        return [out.detach(), *(torch.autograd.grad(out.sum(), qkv) if gradients else ())]
    return run

def same(found, want):
    return len(found) == len(want) and all(map(np.array_equal, found, want))

def child(work, limit=60):
    pid = os.fork()
    if not pid:
        status = 1
        try:
            faulthandler.dump_traceback_later(limit, exit=True)  # a child that hangs says where, and ends
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
FORKS = (
    HEAD
    + """
run, library = problem(700), problem(700, backend="aten")
rng = np.random.default_rng(0)
changing = fk.compile("causal & doc[q] == doc[k]", engines=False)
one = [torch.randn(1, 4, 300, 16) for _ in "qkv"]
def tables():  # a planner of its own after some changes
    doc = np.sort(rng.integers(0, 9, 300))
    seen = torch.from_numpy((doc[:, None] == doc) & np.tri(300, dtype=bool))
    want = torch.nn.functional.scaled_dot_product_attention(*one, attn_mask=seen)
    assert (changing(*one, doc=doc) - want).abs().max() < 1e-5
kinds = [problem(700, gradients=False), problem(700, gradients=False, backend="aten")]
wants, new = [kind() for kind in kinds], problem(150, "causal & window(61)", gradients=False)
run(), library()
for _ in range(40):
    tables()
def work(forked=True):
    # torch itself refuses gradients in the child of a process that had some, and its own threads hang there
    for threads, kind, want in zip((2, 1), kinds, wants):
        torch.set_num_threads(threads)
        assert np.allclose(kind()[0].numpy(), want[0].numpy(), atol=1e-5)
    tables()
    new()
    torch.set_num_threads(2)
stop = threading.Event()
def loop(what):
    while not stop.is_set():
        what()
busy = [threading.Thread(target=loop, args=(x,)) for x in (run, library, tables)]
counts = {}
assert child(work) == 0
for thread in busy:
    thread.start()
for _ in range(12):  # forked while all of it runs
    time.sleep(0.05 * rng.random())
    status = child(work)
    counts[f"exit status {status}"] = counts.get(f"exit status {status}", 0) + 1
stop.set()
for thread in busy:
    thread.join()
work()
print(json.dumps(counts))
"""
)
COMPILING = (
    HEAD
    + """
q, k, v = torch.randn(3, 1, 2, 200, 16)
want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
def work():
    assert (fk.compile("causal", backend="cpp")(q, k, v) - want).abs().max() < 1e-5
fk.compile("causal", backend="aten")(q, k, v)  # imports are done: what a thread imports, no child of a fork can
thread = threading.Thread(target=work)
thread.start()
time.sleep(0.4)  # its compiler runs
statuses = [child(work) for _ in range(2)]
thread.join()
work()
print(json.dumps({f"exit status {x}": statuses.count(x) for x in statuses}))
"""
)
STARTED = (
    HEAD
    + """
def work(att, qkv, want, said):
    torch.set_num_threads(2)
    said.put(torch.equal(att(*qkv), want))
if __name__ == "__main__":
    qkv = [torch.randn(1, 2, 200, 16) for _ in "qkv"]
    att = fk.compile("causal & window(w)", engines=False, w=70)
    want, counts = att(*qkv), {}
    for how in ("spawn", "forkserver", "fork"):
        context = multiprocessing.get_context(how)
        said = context.Queue()
        process = context.Process(target=work, args=(att, qkv, want, said))
        process.start()
        assert said.get(timeout=200), how
        process.join(60)
        counts[f"{how} exit status {process.exitcode}"] = 1
    print(json.dumps(counts))
"""
)
# how an interpreter ends while threads run kernels -> its exit status
ENDS = {
    "daemon": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "error": ("raise ValueError('an error of the user')", 1),
    "sys.exit in atexit": ("atexit.register(sys.exit, 5)", 0),
    "call in atexit": ("atexit.register(check)", 0),
    "in a thread that is waited for": ("threading.Thread(target=lambda: (time.sleep(0.3), check())).start()", 0),
}
# C++ of torch or XLA in a daemon thread that Python 3.11 ends: any call of theirs may, and loses nothing
ABORTS = "terminate called without an active exception", "FATAL: exception not rethrown"
SHUTDOWN = (
    HEAD
    + """
if sys.argv[1] == "torch":
    run = problem(700)
elif sys.argv[1] == "library":
    run = problem(700, backend="aten")
elif sys.argv[1] == "jax":
    import jax
    x, att = jax.numpy.ones((1, 700, 4, 16)), fk.compile("causal & window(60)")
    f = jax.jit(jax.grad(lambda x: att(x, x, x).sum()))
    run = lambda: [np.array(f(x))]
else:  # a planner and the analysis: no framework
    doc = np.sort(np.random.default_rng(0).integers(0, 99, 30_000))
    from frisket.lowering.plan import Problem
    from frisket.lowering.planner import planner
    from frisket.runtime.plans import run as run_cpp
    plan = planner.planner(fk.mask("causal & doc[q] == doc[k]").bind(doc=doc).expr, frozenset())
    planned, at, n = run_cpp.function(plan), (np.zeros(1, np.int64),) * 4, len(doc)
    def run():
        place = run_cpp.SpanRequest(at, Problem(n, n), (64, 64))
        found = run_cpp.called(planned, plan, place, {"doc": doc})
        return found[:2]
want = run()
def check():
    assert same(run(), want)
    new = torch.ones(1, 2, 300, 16)
    fk.compile("causal & window(59)", engines=False, backend="aten")(new, new, new)
    fk.compile("causal & window(58)", engines=False)(new, new, new)
    fk.mask("causal").layout(4096, 4096)
    print("right", flush=True)
def loop():
    while True:
        run()
for _ in range(3 * (sys.argv[2] != "alone")):
    threading.Thread(target=loop, daemon=True).start()
time.sleep(0.2)
print("ends", flush=True)
"""
)


def counted(text: str, draw: random.Random) -> dict[str, int]:
    with folder() as place:
        program = place / "program.py"  # spawn reads it again
        program.write_text(text)
        started = f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')"
        done = python(started, environment(place / "cache"))
    assert done.returncode == 0, done.stderr[-4000:]
    found = Counter(json.loads(done.stdout.splitlines()[-1]))
    assert not [x for x in found if not x.endswith("exit status 0")], f"{found}\n{done.stderr[-4000:]}"
    return found


def spawned(draw: random.Random) -> dict[str, int]:
    with folder() as place:
        program = place / "program.py"
        program.write_text(STARTED)
        done = subprocess.run(
            [sys.executable, str(program)],
            env=environment(place / "cache"),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found = Counter(json.loads(done.stdout.splitlines()[-1]))
    assert not [x for x in found if not x.endswith("exit status 0")], found
    return found


def shut(draw: random.Random) -> dict[str, int]:
    counts: Counter[str] = Counter()
    with folder() as place:
        env = environment(place / "cache")
        for kind in ("planner", "torch", "library", "jax"):
            for how, (ends, status) in ENDS.items():
                for company in ("alone", "beside daemon threads"):
                    if company == "alone" and "atexit" not in how:
                        continue
                    done = python(f"{SHUTDOWN}{ends}\n", env, arguments=[kind, company])
                    told = f"{kind}, {how}, {company}: {done.returncode}\n{done.stdout}{done.stderr[-3000:]}"
                    assert done.stdout.splitlines() == (["ends", "right"] if "check" in ends else ["ends"]), told
                    if done.returncode == -6 and company != "alone" and any(x in done.stderr for x in ABORTS):
                        counts["aborts of torch or XLA in daemon threads"] += 1
                        assert kind != "planner", told
                        continue
                    assert done.returncode == status, told
                    counts["ends"] += 1
    return counts


FAULTS = {
    "forks": (lambda draw: counted(FORKS, draw), 4),
    "forks-while-compiling": (lambda draw: counted(COMPILING, draw), 2),
    "spawns": (spawned, 1),
    "shutdowns": (shut, 2),
}
