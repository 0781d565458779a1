"""The explorer's server: one page and one endpoint, for the browser on this machine and nobody else.

    with Server(Analyst({}), page) as server:
        print(server.url)
        server.serve_forever()

The page is that of a layout with an editor above its map, and sliders beside it. The server listens on 127.0.0.1 alone.
The path holds a random token; requests that come from another origin, or under another name of the host (DNS
rebinding), are refused, and so is what is too large or no JSON. Connections are few, and each has a deadline. Where all
places are taken, a newcomer gets that of the connection that has been silent longest: among those that never sent the
token, while there are several.
"""

from __future__ import annotations

import io
import json
import math
import re
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from time import monotonic
from typing import Any, ClassVar

from frisket import grammar
from frisket.dsl import ir
from frisket.dsl.library import Entry, library
from frisket.dsl.operators import BUILT_IN, CONSTANTS
from frisket.runtime.draw import html

from .analyst import Analyst
from .answer import LONGEST

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
        """Refuse whoever is not our page, or a person who types its address."""
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
        self.server.due(self.connection, math.inf)  # the analyst has limits of its own
        answer = self.server.analyst.ask(page, turn, question)
        self.send(200, "application/json", json.dumps(answer, separators=(",", ":")))

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


ROOM = str(__package__)
SCORES = ("Positions in scores", "Scores")  # the parts of the library that hold score mods
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
        ("variable.language", _words([*ir.COORDINATES, *ir.SIZES, "score"])),
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
    return data | {"score": e.section in SCORES}
