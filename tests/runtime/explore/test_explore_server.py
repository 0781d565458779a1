"""The explorer's server and the process behind it, without a browser: who is refused, what ends, what is left."""

import http.client
import json
import math
import socket
import sys
import threading
import time
from contextlib import chdir, closing, contextmanager, suppress
from pathlib import Path

import pytest

from frisket.runtime.cli import explain as cli_explain
from frisket.runtime.cli.main import main
from frisket.runtime.explore import server as server_module
from frisket.runtime.explore.server import ABANDONED, BODY, Analyst, Server


class Echo:
    """Answers with the question."""

    def __init__(self):
        self.asked, self.closed = [], False

    def ask(self, page, turn, asked):
        self.asked.append((page, turn, asked))
        return {"text": asked.get("text")}

    def close(self):
        self.closed = True


@contextmanager
def serving(analyst, page=lambda nonce: f"<script nonce={nonce}></script>"):
    before = set(threading.enumerate())
    server = Server(analyst, page)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        assert set(threading.enumerate()) <= before


@pytest.fixture(scope="module")
def server():
    with serving(Echo()) as server:
        yield server


def ask(server, method="POST", path=None, body='{"page": "p", "turn": 1, "text": "causal"}', **headers):
    """(status, headers, body) of one request; `Host=None` leaves a header out."""
    named = {"Host": f"127.0.0.1:{server.server_port}", "Content-Type": "application/json"}
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)) as connection:
        connection.putrequest(method, f"/{server.token}/" if path is None else path, skip_host=True)
        named.setdefault("Content-Length", str(len(body.encode())))
        for name, value in named.items():
            if value is not None:
                connection.putheader(name, value)
        connection.endheaders(body.encode() if method == "POST" else None)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()


def test_explorer_page_has_a_content_security_policy(server):
    status, headers, text = ask(server, "GET")
    nonce = text.partition("nonce=")[2].partition(">")[0]
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert f"script-src 'nonce-{nonce}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy.partition("script-src")[2].partition(";")[0]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers
    assert nonce not in ask(server, "GET")[2]


def test_a_question_is_answered(server):
    status, headers, text = ask(server)
    assert (status, headers["Content-Type"], json.loads(text)) == (200, "application/json", {"text": "causal"})
    ours = f"http://127.0.0.1:{server.server_port}"
    assert ask(server, Origin=ours, Sec_Fetch_Site="same-origin")[0] == 200
    other = f"localhost:{server.server_port}"
    assert ask(server, Host=other, Origin=f"http://{other}")[0] == 200


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/", "//", "/token/", "/x/../", "/%2e%2e/etc/passwd", "/index.html"])
def test_explorer_server_requires_the_token(server, method, path):
    status, _, text = ask(server, method, path)
    assert status == 404
    assert server.token not in text
    assert ask(server, method, f"/{server.token}x/")[0] == 404
    assert ask(server, method, f"/{server.token[:-1]}/")[0] == 404


def test_explorer_token_is_long_and_compared_in_constant_time(server, monkeypatch):
    seen = []
    monkeypatch.setattr(server_module.secrets, "compare_digest", lambda a, b: seen.append((a, b)) or False)
    assert ask(server)[0] == 404
    assert seen == [(server.token.encode(),) * 2]
    assert len(server.token) >= 32


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "evil.example:80"}, 421),
        ({"Host": "127.0.0.1"}, 421),
        ({"Host": None}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": None}, 415),
        ({"Content_Length": None}, 411),
        ({"Content_Length": "-1"}, 411),
        ({"Content_Length": "many"}, 411),
        ({"Content_Length": str(BODY + 1)}, 413),
        ({"Content_Length": "9" * 40}, 413),
        ({"Transfer_Encoding": "chunked"}, 411),
    ],
)
def test_explorer_server_refuses_other_origins(server, headers, status):
    before = len(server.analyst.asked)
    assert ask(server, **headers)[0] == status
    assert len(server.analyst.asked) == before


def test_a_link_may_be_followed_from_a_page(server):
    """A terminal in a browser, for one; a frame or a script may not."""
    followed = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert ask(server, "GET", Sec_Fetch_Dest="document", **followed)[0] == 200
    assert ask(server, "GET", Sec_Fetch_Dest="iframe", **followed)[0] == 403


@pytest.mark.parametrize(
    "body", ["", "{", "[]", "3", "null", "{}", '{"page": "p"}', '{"page": 3, "turn": 1}', '{"page": "p", "turn": "1"}',
             '{"page": "p", "turn": true}', json.dumps({"page": "p" * 65, "turn": 1}), "[" * 100_000, "\ud7ff"],
)  # fmt: skip
def test_explorer_server_refuses_malformed_requests(server, body):
    status, headers, text = ask(server, body=body)
    assert status == 400
    assert headers["Connection"] == "close"
    assert text.count("\n") == 1


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "HEAD", "CONNECT"])
def test_explorer_server_has_get_and_post_alone(server, method):
    assert ask(server, method)[0] == 501


def test_a_body_that_does_not_come_ends_with_the_connection(server):
    with socket.create_connection(("127.0.0.1", server.server_port)) as silent:
        silent.sendall(f"POST /{server.token}/ HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n".encode())
        silent.sendall(b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
        assert ask(server)[0] == 200  # others are served meanwhile


def connected(server, count, source="127.0.0.1"):
    where = "127.0.0.1", server.server_port
    return [socket.create_connection(where, 20, (source, 0)) for _ in range(count)]


def soon(holds):
    """Whether `holds` becomes true within some seconds."""
    end = time.monotonic() + 20
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def ended(connection):
    """Whether the server ends a connection within 20 seconds, whatever it says before."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def head(server, *lines, token=None):
    """The head of a question, as bytes."""
    path = server.token if token is None else token
    start = [f"POST /{path}/ HTTP/1.1", f"Host: 127.0.0.1:{server.server_port}", "Content-Type: application/json"]
    return "\r\n".join([*start, *lines, "\r\n"]).encode()


@pytest.mark.parametrize("said", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: "])
def test_idle_connections_do_not_keep_others_out(said):
    """Nobody waits for their end, which comes after 10 s."""
    with serving(Echo()) as server:
        held = connected(server, 2 * server_module.CONNECTIONS)
        for one in held:
            with suppress(ConnectionError):  # its place is another's by now
                one.sendall(said)
        for _ in range(3):
            assert ask(server)[0] == 200
        assert len(server.open) <= server_module.OF_ONE
        for one in held:
            one.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="127.0.0.2 is this machine on Linux")
def test_connections_of_one_address_are_limited():
    with serving(Echo()) as server:
        ours = connected(server, 3)
        for one in ours:
            one.sendall(head(server, "Content-Length: 22") + b'{"page":"p","turn": 1}')
            assert one.recv(15) == b"HTTP/1.1 200 OK"
        theirs = connected(server, server_module.OF_ONE + 24, "127.0.0.2")
        assert soon(lambda: len(server.open) == 3 + server_module.OF_ONE and not server.leaving)
        more = [c for i in (3, 4) for c in connected(server, server_module.OF_ONE + 12, f"127.0.0.{i}")]
        assert soon(lambda: not server.leaving)
        assert len(server.open) <= server_module.CONNECTIONS
        assert sum(place.known for place in server.open.values()) == 3, "those that sent the token stay"
        for one in ours + theirs + more:
            one.close()


def test_newcomers_get_time_to_send_the_token(monkeypatch):
    """Where every place is held with the token, the silent one of them goes, and not the one that has just come."""
    monkeypatch.setattr(server_module, "OF_ONE", 4)
    with serving(Echo()) as server:
        held = connected(server, 4)
        for one in held:
            one.sendall(head(server, "Content-Length: 22") + b'{"page":"p","turn": 1}')
            assert one.recv(15) == b"HTTP/1.1 200 OK"
        assert soon(lambda: all(place.until - place.active > server_module.TAKEN for place in server.open.values()))
        new = connected(server, 3)
        assert soon(lambda: sum(not place.known for place in server.open.values()) == 3)
        for one in new:
            one.sendall(head(server, "Content-Length: 22") + b'{"page":"p","turn": 1}')
            assert one.recv(15) == b"HTTP/1.1 200 OK"
        for one in held + new:
            one.close()


def test_questions_under_way_keep_their_places(monkeypatch):
    """Where each place has a question under way, a newcomer is refused, and no question is lost."""
    go, echo = threading.Event(), Echo()
    monkeypatch.setattr(server_module, "OF_ONE", 4)
    echo.ask = lambda page, turn, asked: go.wait(20) and {"text": "answered"}
    with serving(echo) as server:
        held = connected(server, 4)
        for one in held:
            one.sendall(head(server, "Content-Length: 22") + b'{"page":"p","turn": 1}')
        assert soon(lambda: sum(place.until == math.inf for place in server.open.values()) == 4)
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
            ask(server)
        go.set()
        for one in held:
            assert one.recv(15) == b"HTTP/1.1 200 OK"
            one.close()


@pytest.mark.parametrize("trickle", ["silence", "head", "body"])
def test_a_request_that_comes_slowly_ends_with_its_time(monkeypatch, trickle):
    monkeypatch.setattr(server_module, "REQUEST", 0.3)
    with serving(Echo()) as server:
        (slow,) = connected(server, 1)
        if trickle == "body":
            slow.sendall(head(server, "Content-Length: 4000"))

        def drip():
            with suppress(OSError):
                for byte in b"GET /" + b"a" * 400 if trickle == "head" else b"{" * 400 if trickle == "body" else b"":
                    slow.send(bytes([byte]))  # a time limit for each byte would never end it
                    time.sleep(0.05)

        dripping = threading.Thread(target=drip)
        dripping.start()
        assert ended(slow)
        assert soon(lambda: not server.open and not server.leaving)
        dripping.join()
        slow.close()
        assert server.analyst.asked == []


@pytest.mark.parametrize("sips", [0, 1])
def test_a_reader_that_does_not_read_is_dropped(monkeypatch, sips):
    """At all, or a byte now and then."""
    monkeypatch.setattr(server_module, "REQUEST", 60.0)
    monkeypatch.setattr(server_module, "TAKEN", 0.3)
    with serving(Echo(), lambda nonce: "x" * (32 << 20)) as server:
        (lazy,) = connected(server, 1)
        lazy.sendall(f"GET /{server.token}/ HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())
        assert lazy.recv(1) == b"H"
        if sips:
            assert soon(lambda: not server.open or not lazy.recv(1))
        assert soon(lambda: not server.open and not server.leaving)
        assert ask(server, "POST")[0] == 200
        lazy.close()


def test_a_silent_connection_ends_after_its_answer(monkeypatch):
    monkeypatch.setattr(server_module, "IDLE", 0.3)
    with serving(Echo()) as server:
        (idle,) = connected(server, 1)
        idle.sendall(head(server, "Content-Length: 22") + b'{"page":"p","turn": 1}')
        assert idle.recv(15) == b"HTTP/1.1 200 OK"
        assert ended(idle)
        idle.close()


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, {"Cookie": "a" * (server_module.HEAD // 2)}),
        (431, {"Cookie": "a" * server_module.HEAD}),
        (431, {f"X_{i}": "a" * (server_module.HEAD // 50) for i in range(60)}),
        (200, {f"X_{i}": "a" for i in range(60)}),
        (431, {f"X_{i}": "a" for i in range(120)}),
        (414, {"path": f"/{'a' * server_module.PATH}/"}),
        (414, {"path": f"/{'a' * (1 << 17)}"}),
    ],
)
def test_explorer_server_limits_address_and_headers(server, status, headers):
    before = len(server.analyst.asked)
    try:
        assert ask(server, **headers)[0] == status
    except ConnectionError:  # it is refused before it has been sent
        assert status != 200
    assert len(server.analyst.asked) == before + (status == 200)


def test_closing_ends_connections_that_stay_open():
    echo = Echo()
    with serving(echo) as server:
        idle = http.client.HTTPConnection("127.0.0.1", server.server_port)
        idle.request("GET", f"/{server.token}/", headers={"Host": f"127.0.0.1:{server.server_port}"})
        assert idle.getresponse().read()
    assert echo.closed
    assert idle.sock.recv(1) == b""
    idle.close()


def test_explorer_server_listens_on_localhost_alone(server):
    assert server.socket.getsockname()[0] == "127.0.0.1"


# -- the process ------------------------------------------------------------------------------------------------

SLOW = {"text": "(q * k) % 7919 < 3000 ^ (q * q + k) % 104729 < 50000", "q_len": 1 << 17, "kv_len": 1 << 17}
QUICK = {"text": "causal", "q_len": 256, "kv_len": 256}


@pytest.fixture(scope="module")
def analyst(tmp_path_factory):
    """Begun where a file is called as a module is: it is none of ours."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "queue.py").write_text("raise SystemExit('the file of a folder')")
    with chdir(folder):
        analyst = Analyst({})
    with analyst:
        yield analyst
    assert analyst.worker.process.poll() is not None
    assert not analyst.worker.reader.is_alive()


def test_a_newer_question_ends_the_older(analyst):
    assert "data" in analyst.ask("p", 1, QUICK)
    process, found = analyst.worker.process, []
    older = threading.Thread(target=lambda: found.append(analyst.ask("p", 2, SLOW)))
    older.start()
    end = time.monotonic() + 20
    while not analyst.busy.locked() and time.monotonic() < end:
        time.sleep(0.005)
    assert "data" in analyst.ask("p", 3, QUICK)
    older.join()
    assert found == [ABANDONED]
    assert process.poll() is not None
    assert analyst.ask("p", 1, QUICK) == ABANDONED  # it came late
    assert "data" in analyst.ask("another page", 1, QUICK)


def test_explorer_request_over_the_time_limit_is_ended(analyst, monkeypatch):
    analyst.ask("p", 4, QUICK)
    monkeypatch.setattr(analyst, "limit", 0.05)
    found = analyst.ask("p", 5, SLOW)
    assert found["error"] == "BudgetError"
    assert found["message"].startswith("this takes longer than 0.05 s\n")


@pytest.mark.exhaustive
def test_a_process_that_dies_is_an_answer_and_another_one_begins(analyst):
    analyst.ask("p", 6, QUICK)
    analyst.worker.process.kill()
    analyst.worker.process.wait()
    assert analyst.ask("p", 7, QUICK)["error"] == "MemoryError"
    assert "data" in analyst.ask("p", 8, QUICK)


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux counts memory")
def test_an_answer_takes_only_so_much_memory():
    large = {"text": "morton(1024, 1024, 13, 13)", "q_len": 1 << 20, "kv_len": 1 << 20, "block": [128, 128]}
    with Analyst({}, limit=60, memory=32 << 20) as analyst:
        found, process = analyst.ask("p", 1, large), analyst.worker.process
        assert found["error"] == "MemoryError"
        assert found["message"].startswith("not enough memory\n")
        assert "data" in analyst.ask("p", 2, QUICK)
        assert analyst.worker.process is process


def test_only_so_many_pages_are_remembered(monkeypatch):
    monkeypatch.setattr(server_module, "Worker", lambda *given: None)
    many = Analyst({})
    monkeypatch.setattr(many, "_answer", lambda *asked: {})
    for i in range(200):
        many.ask(f"page {i}", 1, {})
    assert len(many.turns) == server_module.PAGES


# -- the command ------------------------------------------------------------------------------------------------


def test_explore_command_serves_until_interrupted(monkeypatch, capsys):
    opened, pages = [], []

    def served(server):
        pages.append(ask(server, "GET")[2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", lambda self: run(self, served))
    monkeypatch.setattr(cli_explain.webbrowser, "open", opened.append)
    assert main(["explore", "causal & windw(3)", "--q-len", "4096", "--set", "w=3"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[:2] == [opened[0], "Ctrl-C ends it."]
    assert err == ""
    assert main(["explore", "causal", "--no-browser", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"url": err.splitlines()[0], "answers": 0}
    assert len(opened) == 1
    assert "causal & windw(3)" in pages[0]  # a text with a mistake is served, too


def run(server, check):
    """`serve_forever` in a thread, while this one looks."""
    thread = threading.Thread(target=super(Server, server).serve_forever, args=(0.01,))
    thread.start()
    try:
        check(server)
    finally:
        server.shutdown()
        thread.join()


def test_a_port_that_is_taken_and_one_that_is_none(server, capsys):
    assert main(["explore", "causal", "--no-browser", "--port", str(server.server_port)]) == 2
    assert f"cannot listen on port {server.server_port}" in capsys.readouterr().err
    assert main(["explore", "causal", "--no-browser", "--port", "70000"]) == 2
    assert "ports end at 65535" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["inf", "nan", "-1e301"])
def test_a_value_that_the_page_has_no_slider_for(capsys, monkeypatch, value):
    monkeypatch.setattr(Server, "serve_forever", pytest.fail)
    assert main(["explore", "causal & q - k < w", "--no-browser", "--set", f"w={value}"]) == 2
    assert "`w` is not a number from -1e+300 to 1e+300" in capsys.readouterr().err
