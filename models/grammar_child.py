"""The process that compiles grammars to see whether they do; `models.grammar_check` starts it.

Of stdin it reads `[kind, text]`, a line each, and writes null or what is wrong, a line each. It ends with its
stdin. It bounds its own memory, stack and processor time, and a grammar that goes beyond ends it.
"""

import json
import resource
import signal
import sys
import threading

PROCESSOR_S = 2.0
"""For one grammar."""
MEMORY_BYTES = 1 << 30
STACK_BYTES = 2 << 20
"""A quarter of what a thread of an engine has: what compiles here compiles there."""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    # A signal to the group of the terminal is for the gateway, which lets answers end first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    # Imported by gateways for its name; the library is for the child.
    from models.grammars import check

    for line in sys.stdin.buffer:
        kind, text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, PROCESSOR_S)
        error = check(kind, text)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(error) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
