"""The engine's own thread: it loads the engine, then feeds and steps it until told to stop.

Commands come in by a thread-safe queue; what happens goes to the listener, always on the event loop's
thread. While the engine has nothing to do the thread sleeps on its queue.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

from workers.chip_time import MAX_SPAN_S
from workers.engine.interface import Engine, EngineFactory, EngineStats, LoadedEngine
from workers.errors import HopelessLoadError, LoadError, RequestError
from workers.meter import Meter
from workers.protocol import (
    AbortRequest,
    FinishReason,
    GenerateRequest,
    OutputDelta,
    Usage,
)

ENGINE_FAILED = "The model's engine failed; the request was not finished."

log = logging.getLogger("worker")


class EngineListener(Protocol):
    """Told of everything on the event loop's thread, in order."""

    def on_progress(self, what: str, share: float) -> None: ...

    def on_loaded(self, loaded: LoadedEngine) -> None: ...

    def on_load_failed(self, error: str, *, is_hopeless: bool) -> None: ...

    def on_deltas(self, deltas: list[OutputDelta]) -> None: ...

    def on_crashed(self) -> None:
        """The engine failed as a whole; every request's terminal delta was delivered before."""
        ...


class _FailAll(str):
    """A command: end everything with this error."""


Command = GenerateRequest | AbortRequest | _FailAll | None


def terminal(
    request: GenerateRequest,
    reason: FinishReason,
    error: str | None = None,
    param: str | None = None,
) -> list[OutputDelta]:
    """The deltas of a request that ends before it began: one for each choice, the last with usage."""
    num_choices = max(1, request.n)
    usage = Usage(prompt_tokens=len(request.prompt_token_ids), completion_tokens=0)
    return [
        OutputDelta(
            request_id=request.request_id,
            seq=choice,
            choice=choice,
            finish_reason=reason,
            error=error,
            usage=usage if choice == num_choices - 1 else None,
            param=param,
        )
        for choice in range(num_choices)
    ]


class EngineThread:
    def __init__(self, factory: EngineFactory, listener: EngineListener, meter: Meter) -> None:
        self._factory = factory
        self._listener = listener
        self._meter = meter
        self._loop = asyncio.get_running_loop()
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self._news: deque[list[OutputDelta]] = deque()
        self._is_told = False
        """The loop will deliver the news; whatever comes before it does goes with them."""
        self.stats = EngineStats()
        """The newest snapshot; replaced as a whole, so any thread may read it."""

    def start(self) -> None:
        self._thread.start()

    def add(self, request: GenerateRequest) -> None:
        self._inbox.put(request)

    def abort(self, request_id: str) -> None:
        self._inbox.put(AbortRequest(request_id))

    def fail_all(self, error: str) -> None:
        self._inbox.put(_FailAll(error))

    def stop(self) -> None:
        """Ask the thread to end after its current step; a load that is under way is not interrupted."""
        self._stopping = True
        self._inbox.put(None)

    @property
    def num_queued(self) -> int:
        """Commands that the engine has not seen yet."""
        return self._inbox.qsize()

    async def join(self, timeout_s: float) -> None:
        await asyncio.to_thread(self._thread.join, timeout_s)

    def _run(self) -> None:
        loaded = self._load()
        if loaded is None:
            return
        try:
            self._serve(loaded.engine)
        except Exception:  # noqa: BLE001  the worker loop is a supervisor: any failure ends in answers
            log.exception("The engine failed; every request it held gets an error.")
            self._fail(loaded.engine)
            self._tell(self._listener.on_crashed)

    def _load(self) -> LoadedEngine | None:
        try:
            loaded = self._factory(self._progress, self._meter)
        except LoadError as error:
            self._tell_load_failed(str(error), is_hopeless=isinstance(error, HopelessLoadError))
            return None
        except Exception:  # noqa: BLE001  as above
            log.exception("The engine could not be built.")
            self._tell_load_failed("The model could not be loaded (see the log).")
            return None
        self._meter.loaded()
        self._tell(self._listener.on_loaded, loaded)
        return loaded

    def _serve(self, engine: Engine) -> None:
        while not self._stopping:
            deltas = self._take_commands(engine)
            if engine.has_work() and not self._stopping:
                deltas += engine.step()
            self.stats = engine.stats()
            if deltas:
                self._report(deltas)

    def _take_commands(self, engine: Engine) -> list[OutputDelta]:
        deltas: list[OutputDelta] = []
        while True:
            is_idle = not (deltas or self._stopping or engine.has_work())
            if is_idle:
                self._meter.rest()
            try:
                command = self._inbox.get(block=is_idle, timeout=MAX_SPAN_S if is_idle else None)
            except Empty:
                if is_idle:
                    continue
                return deltas
            deltas += self._obey(engine, command)

    def _obey(self, engine: Engine, command: Command) -> list[OutputDelta]:
        match command:
            case GenerateRequest():
                return self._add(engine, command)
            case AbortRequest():
                return engine.abort(command.request_id)
            case _FailAll():
                return engine.fail_all(str(command))
            case None:
                return []

    def _add(self, engine: Engine, request: GenerateRequest) -> list[OutputDelta]:
        try:
            engine.add(request)
        except RequestError as error:
            return terminal(request, FinishReason.ERROR, str(error), error.param)
        self._meter.joined(request)
        return []

    def _fail(self, engine: Engine) -> None:
        try:
            deltas = engine.fail_all(ENGINE_FAILED)
        except Exception:  # noqa: BLE001  a broken engine may fail here too; the service ends the rest
            log.exception("The engine could not end its requests.")
            return
        self._report(deltas)

    def _report(self, deltas: list[OutputDelta]) -> None:
        """To wake the loop for each step costs more than steps of a small model do."""
        self._news.append(
            [delta if delta.usage is None else self._meter.ended(delta) for delta in deltas]
        )
        if not self._is_told:
            self._is_told = True
            self._tell(self._deliver)

    def _deliver(self) -> None:
        """On the loop's thread."""
        self._is_told = False
        deltas: list[OutputDelta] = []
        while self._news:
            deltas += self._news.popleft()
        if deltas:
            self._listener.on_deltas(deltas)

    def _tell_load_failed(self, error: str, *, is_hopeless: bool = False) -> None:
        self._tell(partial(self._listener.on_load_failed, error, is_hopeless=is_hopeless))

    def _progress(self, what: str, share: float) -> None:
        self._meter.progress(what)
        self._tell(self._listener.on_progress, what, share)

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            # The loop is closed: the process is ending and nobody listens any more.
            self._stopping = True
