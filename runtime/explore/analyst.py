"""Answers from a process of their own: one that takes too long, or that nobody waits for any more, is ended.

with Analyst({}) as analyst:
    analyst.ask("a page", 1, {"text": "causal"})["data"]

Nothing in Python stops a computation that is under way; ending its process does, and frees its memory.
"""

from __future__ import annotations

import gc
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from .answer import answer

Array = NDArray[Any]
LIMIT = 8.0  # seconds for one answer
START = 60.0  # and for a process to begin
MEMORY = 4 << 30  # bytes for it
LOOK = 0.02  # seconds between looks for a newer question
PAGES = 64  # pages whose newest question is remembered
ABANDONED = {"abandoned": True}


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
            stop = time.monotonic() + self.limit
            while (message := self.worker.received(LOOK)) is None:
                late = time.monotonic() > stop
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
        command = [sys.executable, "-P", "-c", f"from frisket.runtime.explore.analyst import work; work({memory})"]
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
