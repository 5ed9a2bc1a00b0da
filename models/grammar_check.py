"""Whether a grammar is one, told by a process of its own.

A hostile grammar may take minutes, gigabytes, or a stack so deep that the process ends: limits of the library
guard neither stack nor time. The child (`models.grammar_child`) may end; what ended it is refused.
"""

import hashlib
import json
import select
import signal
import subprocess
import sys
from collections import OrderedDict

from models import grammar_child
from models.errors import GrammarError

_MOST_WALL_S = 15.0
"""For one answer of the child: it bounds its own processor time, but may get little of it."""
_MOST_VERDICTS = 1024
_CRASHES = {
    -signal.SIGPROF: "it takes too long to compile.",
    -signal.SIGSEGV: "it is nested too deeply.",
}


class GrammarChecker:
    """Starts the child when it is first needed, and again after it ended. Of one thread at a time."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()

    def check(self, kind: str, text: str) -> None:
        """Raises `GrammarError`, a sentence about the grammar."""
        verdict = self._ask(kind, text)
        key = _key(kind, text)
        self._verdicts[key] = verdict
        if len(self._verdicts) > _MOST_VERDICTS:
            self._verdicts.popitem(last=False)
        _raise(verdict)

    def knows(self, kind: str, text: str) -> bool:
        """Whether it was checked not long ago and is good. Raises `GrammarError` if it is bad. Any thread."""
        key = _key(kind, text)
        if key not in self._verdicts:
            return False
        _raise(self._verdicts.get(key))
        return True

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def _ask(self, kind: str, text: str) -> str | None:
        child = self._child = self._child or _start()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps([kind, text]).encode() + b"\n")
            child.stdin.flush()
            is_answered = bool(select.select([child.stdout], [], [], _MOST_WALL_S)[0])
            line = child.stdout.readline() if is_answered else b""
        except BrokenPipeError:
            line = b""
        if line:
            error: str | None = json.loads(line)
            return error
        self._child = None
        child.kill()
        child.communicate()
        return _CRASHES.get(child.returncode, "it takes too much to compile.")


def _start() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        # -P: the working directory is not searched for modules.
        [sys.executable, "-P", "-m", grammar_child.__name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _key(kind: str, text: str) -> bytes:
    return hashlib.sha256(f"{kind}\n{text}".encode()).digest()


def _raise(verdict: str | None) -> None:
    if verdict is not None:
        raise GrammarError(verdict)
