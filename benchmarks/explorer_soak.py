"""`frisket explore` for minutes, with clients that behave and others: `python benchmarks/explorer_soak.py`, for
ten minutes, on Linux. Results go to benchmarks/results/explorer-soak.json.

Four pages ask for tiles, over connections that stay and over new ones; as browsers do, they ask again where a
connection that stayed was closed. Beside them: clients that connect and say nothing, that send a byte now and then,
that ask for the page and never read it, that come without the token, from another origin, or with too much. The program
fails where a page's question is lost, and where the server's memory, threads or files grow after the first fifth of the
time.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import checkout  # noqa: F401
from store import keep

PAGES, BAD = 4, 6  # threads of either kind
TEXTS = ("causal & window({n})", "causal & same(doc)", "prefix({n}) | window(64)", "causal & windw({n})")


class Explorer:
    """The command in a process, and what Linux says of it."""

    def __init__(self) -> None:
        command = "from frisket.runtime.cli.main import main; main(['explore', 'causal', '--no-browser'])"
        self.process = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        address = urlsplit(self.process.stdout.readline().strip())
        assert address.port is not None
        self.port, self.path = address.port, address.path
        self.proc = Path("/proc", str(self.process.pid))

    def state(self) -> dict[str, float]:
        """MiB in memory, threads, open files."""
        pages = int((self.proc / "statm").read_text().split()[1])
        memory = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        return {
            "MiB": memory,
            "threads": len(os.listdir(self.proc / "task")),
            "files": len(os.listdir(self.proc / "fd")),
        }

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(30) == 0


def asks(server: Explorer, number: int, stop: threading.Event, counts: Counter[str], waits: list[float]) -> None:
    """A page: questions with growing turns, a new connection now and then."""
    draw, turn, connection = random.Random(number), 0, None
    sizes = {"q_len": 4096, "kv_len": 4096}
    while not stop.is_set():
        if draw.random() < 0.1:
            connection = None
        turn += 1
        asked = {
            "text": draw.choice(TEXTS).format(n=draw.randrange(1, 4096)),
            **sizes,
            "page": f"{number}",
            "turn": turn,
        }
        start = time.monotonic()
        for stayed in [True, False] if connection else [False]:
            connection = connection if stayed else http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            assert connection is not None
            try:
                connection.request("POST", server.path, json.dumps(asked), {"Content-Type": "application/json"})
                answer = connection.getresponse()
                found = json.loads(answer.read())
                good = answer.status == 200 and ("data" in found or "problems" in found)
                counts["answered" if good else f"lost: {answer.status} {list(found)}"] += 1
                break
            except (OSError, http.client.HTTPException) as error:
                counts["asked again" if stayed else f"lost: {type(error).__name__}"] += 1
                connection = None
        waits.append(time.monotonic() - start)
        stop.wait(draw.random() * 0.1)


def misbehaves(server: Explorer, number: int, stop: threading.Event, counts: Counter[str]) -> None:
    draw, port = random.Random(100 + number), server.port
    get = f"GET {server.path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
    held: list[tuple[socket.socket, str]] = []
    said = {
        "silent": b"",
        "slow": b"GET / HTTP/1.1\r\nX",
        "never reads": f"{get}\r\n".encode() * 50,
        "no token": f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode(),
        "another origin": f"{get}Origin: http://evil.example\r\n\r\n".encode(),
        "another host": f"GET {server.path} HTTP/1.1\r\nHost: evil.example\r\n\r\n".encode(),
        "too large a head": f"{get}Cookie: {'a' * (1 << 17)}\r\n\r\n".encode(),
        "half a body": f"POST {server.path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 9\r\n\r\n{{".encode(),
    }
    while not stop.is_set():
        kind = draw.choice(list(said))
        counts[kind] += 1
        with suppress(OSError):
            one = socket.create_connection(("127.0.0.1", port), 5)
            held.append((one, kind))
            one.setblocking(False)
            one.send(said[kind])
        for other, what in held:
            if what == "slow":
                with suppress(OSError):
                    other.send(b"a")
        while len(held) > 20:
            held.pop(draw.randrange(len(held)))[0].close()
        stop.wait(draw.random() * 0.05)
    for one, _ in held:
        one.close()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--minutes", type=float, default=10.0)
    minutes = options.parse_args().minutes
    good: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    waits: list[float] = []
    stop, server, first, most = threading.Event(), Explorer(), None, 0.0
    threads = [threading.Thread(target=asks, args=(server, i, stop, good, waits)) for i in range(PAGES)]
    threads += [threading.Thread(target=misbehaves, args=(server, i, stop, bad)) for i in range(BAD)]
    for one in threads:
        one.start()
    begin = time.monotonic()
    while (passed := time.monotonic() - begin) < 60 * minutes:
        time.sleep(1)
        most = max(most, server.state()["files"])
        if first is None and passed > 12 * minutes:
            first = server.state()
    last = server.state()
    stop.set()
    for one in threads:
        one.join()
    server.end()
    assert first is not None
    lost = sum(n for name, n in good.items() if name.startswith("lost"))
    ms = [1e3 * x for x in sorted(waits)]
    rows = {
        "questions": {
            "figures": {
                "count": {"answered": good["answered"], "asked again": good["asked again"], "lost": lost},
                "ms": {"median": ms[len(ms) // 2], "99 %": ms[len(ms) * 99 // 100], "longest": ms[-1]},
            }
        },
        "other clients": {"figures": {"count": dict(bad)}},
        "server": {"figures": {"after a fifth": first, "end": last, "most": {"files": most}}},
    }
    print(json.dumps(rows, indent=1), dict(good))
    if lost or last["MiB"] > first["MiB"] + 8 or most > first["files"] + 64:
        raise SystemExit("the server lost questions, or grew")
    keep("explorer-soak", "soak", rows, {"minutes": minutes, "pages": PAGES, "others": BAD, "rounds": 1})


if __name__ == "__main__":
    main()
