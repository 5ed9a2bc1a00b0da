"""The worker's end of the wire, by hand: it answers every request with one word and the same chip-time."""

import threading
from types import TracebackType

import redis

from workers.engine.scripted import scripted_card
from workers.protocol import (
    MODELS_SET,
    PAYLOAD_FIELD,
    WORKERS_SET,
    FinishReason,
    GenerateRequest,
    OutputDelta,
    StepDeltas,
    Usage,
    WorkerState,
    WorkerStatus,
    card_key,
    decode,
    encode,
    requests_stream,
    worker_key,
)


class WorkerPeer:
    """Of one model; what a request takes can be set to anything."""

    def __init__(self, url: str, model: str, usage: Usage) -> None:
        self.usage = usage
        self.model = model
        self.heard: list[GenerateRequest] = []
        self._redis = redis.Redis.from_url(url)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "WorkerPeer":
        self._redis.set(card_key(self.model), encode(scripted_card(self.model)))
        self._redis.sadd(MODELS_SET, self.model)
        self._redis.sadd(WORKERS_SET, self.model)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._redis.close()

    def _run(self) -> None:
        last: bytes | str = "0"
        ready = WorkerStatus(worker_id=self.model, model=self.model, state=WorkerState.READY)
        while not self._is_over.is_set():
            self._redis.set(worker_key(self.model), encode(ready), ex=5)
            stream = requests_stream(self.model)
            for _, entries in self._redis.xread({stream: last}, block=50):
                for last, fields in entries:
                    self._answer(decode(GenerateRequest, fields[PAYLOAD_FIELD]))
                    self._redis.xdel(stream, last)

    def _answer(self, request: GenerateRequest) -> None:
        self.heard.append(request)
        deltas = [
            OutputDelta(
                request_id=request.request_id,
                seq=choice,
                choice=choice,
                text="word",
                num_tokens=1,
                finish_reason=FinishReason.STOP,
                usage=self.usage if choice == request.n - 1 else None,
            )
            for choice in range(request.n)
        ]
        step = StepDeltas(worker_id=self.model, deltas=deltas)
        self._redis.xadd(request.reply_to, {PAYLOAD_FIELD: encode(step)})
