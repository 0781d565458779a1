"""The explorer's server: one page and one endpoint, for the browser on this machine and nobody else.

with Server(Analyst({}), page) as server:
    print(server.url)
    server.serve_forever()

It listens on 127.0.0.1 alone. The path holds a random token; requests that come from another origin, or under
another name of the host (DNS rebinding), are refused, and so is what is too large or no JSON.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, ClassVar

from .analyst import Analyst

HOST = "127.0.0.1"
BODY = 256 << 10  # bytes of a question
IDLE = 60.0  # seconds a connection may be silent
CONNECTIONS = 32
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
Page = Callable[[str], str]  # of a nonce for its scripts


class Server(ThreadingHTTPServer):
    """Serves `page` and answers from `analyst`; `url` is where. Port 0 takes a free one. Closing ends every
    connection, and waits for their threads."""

    daemon_threads = False  # `server_close` joins them
    block_on_close = True
    request_queue_size = CONNECTIONS

    def __init__(self, analyst: Analyst, page: Page, port: int = 0) -> None:
        self.analyst, self.page, self.token = analyst, page, secrets.token_urlsafe(24)
        self.open: set[socket.socket] = set()
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
            full = len(self.open) >= CONNECTIONS
            if not full:
                self.open.add(request)
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self.noting:
            self.open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        self.analyst.close()
        with self.noting:
            for connection in self.open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:  # the other side was faster
                    continue
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


class Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "frisket", ""
    protocol_version = "HTTP/1.1"  # connections stay: a keystroke does not wait for a new one
    timeout = IDLE
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body leave together
    HEADERS: ClassVar[dict[str, str]] = {
        "Cache-Control": "no-store",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

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
            asked = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise HttpRefusal(400, "this is not JSON") from None
        page, turn = (asked.pop(n, None) for n in ("page", "turn")) if isinstance(asked, dict) else (None, None)
        if not isinstance(page, str) or len(page) > 64 or type(turn) is not int:
            raise HttpRefusal(400, "a question is an object with a `page` and a `turn`")
        found = self.server.analyst.ask(page, turn, asked)
        self.send(200, "application/json", json.dumps(found, separators=(",", ":")))

    def send(self, status: int, kind: str, text: str, more: dict[str, str] | None = None) -> None:
        body = text.encode()
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
