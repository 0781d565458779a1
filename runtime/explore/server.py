"""The explorer's server: one page and one endpoint, for the browser on this machine alone.

    with Server(Analyst({}), page) as server:
        print(server.url)
        server.serve_forever()

The page is that of a layout with an editor above its map, and sliders. The server listens on 127.0.0.1 alone.
The path holds a random token. Requests that come from another origin, or under another name of the host (DNS
rebinding), are refused, and so is what is too large or no JSON. Connections are few, and each has a deadline. Where all
places are taken, a newcomer gets that of the connection that has been silent longest: among those that never sent the
token, while there are several.

Answers come from a separate process: one that takes too long, or whose page went away, is ended.

    with Analyst({}) as analyst:
        analyst.ask("a page", 1, {"text": "causal"})["data"]

Nothing in Python stops a computation that is under way; ending its process does, and frees its memory.
"""

from __future__ import annotations

import gc
import io
import json
import math
import os
import pickle
import queue
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from time import monotonic
from typing import Any, ClassVar

from frisket import grammar
from frisket.dsl import ir
from frisket.dsl.library import Entry, library
from frisket.dsl.operators import BUILT_IN, CONSTANTS, SUMS
from frisket.runtime.draw import html

from .answer import LONGEST, Array, answer

HOST = "127.0.0.1"
PATH = 2 << 10  # bytes of an address
HEAD = 64 << 10  # bytes of a request before its body; browsers send the cookies of every local server
BODY = 256 << 10  # bytes of a question
REQUEST = 10.0  # seconds a whole request may take to come, a connection's first one with the wait for it
TAKEN = 20.0  # seconds a browser may take to read an answer
IDLE = 60.0  # seconds between two requests of a connection
CONNECTIONS = 64
OF_ONE = 48  # connections of one address; browsers open six
STRANGERS = 36  # connections that have not sent the token and are waited for before one that has is ended
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
Page = Callable[[str], str]  # of a nonce for its scripts
LIMIT = 8.0  # seconds for one answer
START = 60.0  # and for a process to begin
MEMORY = 4 << 30  # bytes for it
LOOK = 0.02  # seconds between looks for a newer question
PAGES = 64  # pages whose newest question is remembered
ABANDONED = {"abandoned": True}


@dataclass
class ConnectionPlace:
    """An open connection: whose it is, whether it has sent the token, when it was last active and when it ends."""

    address: str
    active: float
    until: float
    known: bool = False


class Server(ThreadingHTTPServer):
    """Serves `page` and answers from `analyst`; `url` is where. Port 0 takes a free one. Closing ends every
    connection, and waits for their threads."""

    daemon_threads = False  # `server_close` joins them
    block_on_close = True
    request_queue_size = 4 * CONNECTIONS

    def __init__(self, analyst: Analyst, page: Page, port: int = 0) -> None:
        self.analyst, self.page, self.token = analyst, page, secrets.token_urlsafe(24)
        self.open: dict[socket.socket, ConnectionPlace] = {}
        self.leaving: set[socket.socket] = set()  # shut down; their threads are about to end
        self.noting = threading.Lock()
        super().__init__((HOST, port), Handler)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's asks a name server what 127.0.0.1 is called
        self.server_name, self.server_port = HOST, self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.noting:
            if admitted := self._room(client_address[0]):
                self.open[request] = ConnectionPlace(client_address[0], now := monotonic(), now + REQUEST)
        if admitted:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def _room(self, address: str) -> bool:
        """Whether a connection from `address` has a place, if need be that of one which waits for nothing of ours."""
        siblings = [c for c, place in self.open.items() if place.address == address]
        if len(siblings) < OF_ONE and len(self.open) < CONNECTIONS:
            return True
        crowd = siblings if len(siblings) >= OF_ONE else self.open
        idle = [c for c in crowd if self.open[c].until < math.inf]
        if not idle or len(self.leaving) >= CONNECTIONS:
            return False
        strangers = [c for c in idle if not self.open[c].known]
        self._end(min(strangers if len(strangers) >= STRANGERS else idle, key=lambda c: self.open[c].active))
        return True

    def _end(self, connection: socket.socket) -> None:
        """Wake the thread of a connection, which closes it."""
        del self.open[connection]
        self.leaving.add(connection)
        with suppress(OSError):  # the other side was faster
            connection.shutdown(socket.SHUT_RDWR)

    def service_actions(self) -> None:
        """End the connections whose time is over: `serve_forever` asks twice a second."""
        now = monotonic()
        with self.noting:
            for connection in [c for c, place in self.open.items() if place.until < now]:
                self._end(connection)

    def due(self, connection: socket.socket, seconds: float, known: bool = False) -> None:
        """A connection has just been active, and has so long for what comes next."""
        with self.noting:
            if (place := self.open.get(connection)) is not None:
                place.active, place.known = monotonic(), place.known or known
                place.until = place.active + seconds

    def shutdown_request(self, request: Any) -> None:
        with self.noting:
            self.open.pop(request, None)
            self.leaving.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        self.analyst.close()
        with self.noting:
            for connection in list(self.open):
                self._end(connection)
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away while it is answered is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class HttpRefusal(Exception):  # noqa: N818 (not an error of the server)
    """A refusal instead of an answer: a status, and a sentence for people."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


class HeadReader(io.BufferedReader):
    """The bytes that a connection sends; the head of a request ends at `HEAD` of them."""

    head = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        before, line = self.head, super().readline(size)
        self.head += len(line)
        if before and self.head > HEAD:  # of the first line BaseHTTPRequestHandler sees to it
            raise LineTooLong("head")  # it answers with 431
        return line


class Handler(BaseHTTPRequestHandler):
    server: Server
    rfile: HeadReader
    server_version, sys_version = "frisket", ""
    protocol_version = "HTTP/1.1"  # connections stay: a keystroke does not wait for a new one
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body leave together
    HEADERS: ClassVar[dict[str, str]] = {
        "Cache-Control": "no-store",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    def setup(self) -> None:
        super().setup()
        self.rfile = HeadReader(self.rfile.detach())

    def handle_one_request(self) -> None:
        if not self.rfile.peek(1):  # the other side has gone
            self.close_connection = True
            return
        self.server.due(self.connection, REQUEST)
        self.rfile.head = 0
        super().handle_one_request()
        self.server.due(self.connection, IDLE)

    def do_GET(self) -> None:
        self.handled(self.get)

    def do_POST(self) -> None:
        self.handled(self.post)

    def handled(self, method: Callable[[], None]) -> None:
        try:
            self.check()
            method()
        except HttpRefusal as no:
            self.close_connection = True  # what is left of the request is not read
            self.send(no.status, "text/plain; charset=utf-8", no.why + "\n")

    def check(self) -> None:
        """Refuse requests that come from other pages than ours."""
        if len(self.path) > PATH:
            raise HttpRefusal(414, f"an address has at most {PATH:,} bytes")
        ours = [f"{name}:{self.server.server_port}" for name in (HOST, "localhost")]
        named = self.headers.get_all("Host") or []
        if len(named) != 1 or named[0] not in ours:
            raise HttpRefusal(421, f"this server is called {ours[0]}")
        from_us = self.headers["Origin"] in (None, f"http://{named[0]}")
        if not from_us or not (self.headers["Sec-Fetch-Site"] in (None, "none", "same-origin") or self.opened()):
            raise HttpRefusal(403, "pages of other origins are refused")
        token = self.path.partition("?")[0].strip("/").encode("latin-1", "replace")
        if not secrets.compare_digest(token, self.server.token.encode()):
            raise HttpRefusal(404, "there is nothing here; `frisket explore` prints the whole address, with its token")
        self.server.due(self.connection, REQUEST, known=True)

    def opened(self) -> bool:
        """Whether a person follows a link, say in a terminal that is a page itself: the token is what lets in."""
        how = self.headers["Sec-Fetch-Mode"], self.headers["Sec-Fetch-Dest"]
        return self.command == "GET" and how == ("navigate", "document")

    def get(self) -> None:
        nonce = secrets.token_urlsafe(16)
        page = self.server.page(nonce)
        self.send(200, "text/html; charset=utf-8", page, {"Content-Security-Policy": POLICY.format(nonce=nonce)})

    def post(self) -> None:
        if self.headers.get_content_type() != "application/json":
            raise HttpRefusal(415, "a question is application/json")
        length = self.headers["Content-Length"] or ""
        if not length.isdecimal() or self.headers["Transfer-Encoding"]:
            raise HttpRefusal(411, "a question says how long it is: Content-Length")
        if len(length) > 9 or int(length) > BODY:
            raise HttpRefusal(413, f"a question has at most {BODY:,} bytes")
        try:
            question = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise HttpRefusal(400, "this is not JSON") from None
        page, turn = (question.pop(n, None) for n in ("page", "turn")) if isinstance(question, dict) else (None, None)
        if not isinstance(page, str) or len(page) > 64 or type(turn) is not int:
            raise HttpRefusal(400, "a question is an object with a `page` and a `turn`")
        self.server.due(self.connection, math.inf)  # the analyst has separate limits
        data = self.server.analyst.ask(page, turn, question)
        self.send(200, "application/json", json.dumps(data, separators=(",", ":")))

    def send(self, status: int, kind: str, text: str, more: dict[str, str] | None = None) -> None:
        body = text.encode()
        self.server.due(self.connection, TAKEN)
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **self.HEADERS}.items():
            self.send_header(name, value)
        for name, value in (more or {}).items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is for the address."""


# -- answers from a process of its own ----------------------------------------------------------------


class Analyst:
    """Answers one question at a time. `ask` may be called from any thread."""

    def __init__(self, tables: Mapping[str, Array], limit: float = LIMIT, memory: int = MEMORY) -> None:
        self.tables, self.limit, self.memory = dict(tables), limit, memory
        self.turns: dict[str, int] = {}  # page -> its newest question
        self.noting, self.busy = threading.Lock(), threading.Lock()
        self.closed, self.answered = False, 0
        self.worker = Worker(self.tables, memory)

    def __enter__(self) -> Analyst:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, page: str, turn: int, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to `question`; `{"abandoned": True}` once the same page has asked with a higher turn."""
        with self.noting:
            # set again, so that the page that has been silent longest comes first
            self.turns[page] = max(turn, self.turns.pop(page, turn))
            if len(self.turns) > PAGES:
                self.turns.pop(next(iter(self.turns)))
        with self.busy:
            return ABANDONED if self._abandoned(page, turn) else self._answer(page, turn, question)

    def _abandoned(self, page: str, turn: int) -> bool:
        return self.closed or self.turns.get(page, turn) > turn

    def _answer(self, page: str, turn: int, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self.worker.begin()
            self.worker.send(question)
            stop = monotonic() + self.limit
            while (message := self.worker.received(LOOK)) is None:
                late = monotonic() > stop
                if late or self._abandoned(page, turn):
                    self._anew()
                    return failed("BudgetError", f"this takes longer than {self.limit:g} s") if late else ABANDONED
            self.answered += 1
            return dict(message)
        except EOFError:
            self._anew()
            return failed("MemoryError", "the analysis ended by itself, perhaps for want of memory")

    def _anew(self) -> None:
        self.worker.end()
        if not self.closed:
            self.worker = Worker(self.tables, self.memory)

    def close(self) -> None:
        """End the process; a question under way is abandoned."""
        self.closed = True
        with self.busy:
            self.worker.end()


def failed(name: str, message: str) -> dict[str, Any]:
    return {"error": name, "message": f"{message}\n  ask for smaller lengths, or larger tiles", "problems": []}


class Worker:
    """One process that answers: pickles to its standard input, pickles from its standard output."""

    def __init__(self, tables: Mapping[str, Array], memory: int) -> None:
        command = [sys.executable, "-P", "-c", f"from frisket.runtime.explore.server import work; work({memory})"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.came: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.reader = threading.Thread(target=self._read, name="frisket-analyst")
        self.reader.start()
        self.begun = False
        self.tables = tables

    def begin(self) -> None:
        """Give it the tables, once, and wait until it has imported what it needs."""
        if not self.begun:
            self.send(self.tables)
            if self.received(START) is None:
                raise EOFError
            self.begun = True

    def send(self, what: Any) -> None:
        assert self.process.stdin is not None
        try:
            pickle.dump(what, self.process.stdin)
            self.process.stdin.flush()
        except OSError:
            raise EOFError from None

    def received(self, patience: float) -> Any:
        """The worker's next message, or None after `patience` seconds; EOFError when it is gone."""
        try:
            message = self.came.get(timeout=patience)
        except queue.Empty:
            return None
        if isinstance(message, EOFError):
            raise message
        return message

    def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            while True:
                self.came.put(pickle.load(self.process.stdout))
        except (EOFError, OSError, pickle.UnpicklingError):
            self.came.put(EOFError())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:  # what was still to be written to it
                continue


def bounded(memory: int) -> None:
    """Limit this process to `memory` more bytes, on Linux: a `MemoryError` is an answer, and swapping is none."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # another system
        return
    import resource

    used = int(status.partition("VmData:")[2].split()[0]) << 10
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard == resource.RLIM_INFINITY or used + memory < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (used + memory, hard))


def work(memory: int) -> None:
    """The process: tables, then questions, until its input ends. Ctrl-C is for the one who asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what somebody prints goes where people look

    def say(what: Any) -> None:
        pickle.dump(what, out)
        out.flush()

    tables = pickle.load(sys.stdin.buffer)
    for table in tables.values():
        table.flags.writeable = False  # so that no mask makes a copy
    answer({"text": "causal", "q_len": 256, "kv_len": 256}, {})  # imports and fills what is kept from then on
    bounded(memory)
    gc.collect()
    gc.freeze()  # what is there by now stays: it need not be looked through again
    say("ready")
    while True:
        try:
            question = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        say(answer(question, tables))


ROOM = str(__package__)
# sections of the library that have no masks
KINDS = {"Positions in scores": "score", "Scores": "score", "Weights": "weight"}
# for use in other definitions
PARTS = ("tiled_row", "tiled_col", "morton_col", "morton_row", "t5_bucket", "tanh_fraction", "document_start")
# arguments that are no plain number or table: what is written in their place
HELP = '    <button id="help" aria-haspopup="dialog">Help</button>\n'
PUNCTUATION = ("(", ")", "[", "]", ",", ":")
TYPES = ("bool", "float", "int", "sorted")
WRITTEN = {"m": "causal", "f": "relu(score)", "e": "0.001", "is_causal": "true", "seed": "7"}


def page(state: Mapping[str, Any], tables: Mapping[str, Any], nonce: str) -> str:
    """HTML for a browser that asks `./` for the rest. `state` is the first request; `tables` those from files."""
    begin = {"state": state, "longest": LONGEST}
    begin["library"] = [shown(e) for e in library().values() if e.name not in PARTS]
    begin["files"] = {name: f"{t.dtype}[{', '.join(map(str, t.shape))}]" for name, t in tables.items()}
    begin["tokens"] = token_classes()
    files = {"style": "explore.css", "editor": "editor.html", "controls": "controls.html", "more": "more.html"}
    parts = {name: html.file(ROOM, file) for name, file in files.items()}
    parts["start"] = "\n".join(html.file(ROOM, f"{name}.js") for name in ("library", "controls", "complete", "explore"))
    parts |= {"title": "frisket explore", "buttons": HELP, "nonce": f' nonce="{nonce}"', "data": html.script(begin)}
    return html.filled(**parts)


def token_classes() -> list[tuple[str, str]]:
    """(TextMate scope, pattern) of every kind of token, all terminals of the grammar, in order; "" is white space."""
    tables = json.loads(html.file(grammar.__name__, "mask.json"))
    signs, patterns = tables["signs"], tables["patterns"]
    space, comment = patterns["SPACE"].split("|", 1)
    operators = [s for s in signs if not s.isalpha() and s not in PUNCTUATION]
    return [
        ("comment.line.number-sign", comment),
        ("", rf"{space}|{patterns['NL']}"),
        ("keyword.control", _words(s for s in signs if s.isalpha())),
        ("storage.type", rf"{_words(TYPES)}(?!\s*\()"),
        ("variable.language", _words([*ir.COORDINATES, *ir.SIZES, "score", *SUMS])),
        ("constant.language", _words(CONSTANTS)),
        ("support.function", _words({*BUILT_IN, *(e.name for e in library().values())})),
        ("constant.numeric.float", patterns["FLOAT"]),
        ("constant.numeric.integer", patterns["INT"]),
        ("variable.other", patterns["NAME"]),
        ("keyword.operator", "|".join(map(re.escape, operators))),
        ("punctuation", "|".join(map(re.escape, PUNCTUATION))),
    ]


def _words(names: Iterable[str]) -> str:
    return rf"\b(?:{'|'.join(sorted(names, key=lambda n: (-len(n), n)))})\b"


def shown(e: Entry) -> dict[str, Any]:
    """An entry to choose: `text` is what is written for it."""
    arguments = ", ".join(WRITTEN.get(p, p) for p in e.params)
    data: dict[str, Any] = {"name": e.name, "signature": e.signature, "sentence": e.sentence, "formula": e.formula}
    data |= {"section": e.section, "text": f"{e.name}({arguments})" if e.params else e.name}
    return data | {"kind": KINDS.get(e.section, "mask")}
