"""`frisket explore EXPR`: the mask in a browser, to edit."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from contextlib import suppress

from rich.console import Console

from frisket.dsl.errors import FrisketError, ParameterError
from frisket.dsl.types import FLOAT
from frisket.runtime.explore.analyst import Analyst
from frisket.runtime.explore.answer import slider
from frisket.runtime.explore.server import Server, page

from .answer import CommandResult, add_sizes, add_subject, examples, natural, rows
from .show import LENGTH, counted, scalar, source, table


def add_explore(p: argparse.ArgumentParser) -> None:
    add_subject(p, expand=False)
    add_sizes(p)
    served = p.add_argument_group("the server")
    served.add_argument("--port", type=natural, default=0, metavar="N", help="on 127.0.0.1; default: one that is free")
    served.add_argument("--no-browser", action="store_true", help="print the address, and open nothing")
    examples(
        p,
        "frisket explore 'causal & window(w)' --set w=4096 --q-len 131072",
        "frisket explore 'causal & same(doc)' --no-browser",
        "frisket explore causal --score 'alibi then softcap(50)' --heads 8 --port 8765",
    )


def explore(args: argparse.Namespace, console: Console) -> CommandResult:
    """Serve the page until Ctrl-C. A text with mistakes is served too: they are shown where they can be mended."""
    text, _ = source(args.expr, args.score)
    tables, values = dict(map(table, args.table)), dict(map(scalar, args.set))
    for name, x in values.items():
        slider(name, FLOAT, x, x)  # an error where the page has none
    q_len = args.q_len or LENGTH
    state = {"text": text.strip(), "values": values, "q_len": q_len, "kv_len": args.kv_len or q_len}
    state |= {"batch": args.batch, "heads": args.heads, "block": list(args.block), "documents": 8}
    if args.port > 65535:
        raise ParameterError(f"--port {args.port}: ports end at 65535")
    with Analyst(tables) as analyst:
        try:
            server = Server(analyst, lambda nonce: page(state, tables, nonce), args.port)
        except OSError as error:
            raise FrisketError(f"cannot listen on port {args.port}: {error.strerror}; give another --port") from None
        with server:
            # with --json the object comes at the end, when the page is no longer served
            print(f"{server.url}\nCtrl-C ends it.", file=sys.stderr if args.json else sys.stdout, flush=True)
            if not args.no_browser:
                webbrowser.open(server.url)
            with suppress(KeyboardInterrupt):
                server.serve_forever()
            ended = rows([("ended", f"{counted(analyst.answered, 'answer')} given")])
            return CommandResult({"url": server.url, "answers": analyst.answered}, ended)
