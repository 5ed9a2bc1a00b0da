"""The gateway's end of the wire, by hand: what tests of a worker process talk to it with."""

import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from workers.protocol import (
    PAYLOAD_FIELD,
    WORKERS_SET,
    AbortRequest,
    GenerateRequest,
    OutputDelta,
    SamplingParams,
    StepDeltas,
    WorkerState,
    WorkerStatus,
    aborts_stream,
    decode,
    encode,
    replies_stream,
    requests_stream,
    worker_key,
)

PATIENCE_S = 30.0
"""After this a test gives up; nothing that works comes near it."""


class Heard(NamedTuple):
    worker_id: str
    delta: OutputDelta


def wait_until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE_S) -> Any:
    """The first true value of `condition`; fails the test if there is none in time."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"gave up waiting until {what}")


class GatewayPeer:
    """Enqueues requests as a gateway does and reads its own reply stream."""

    def __init__(self, url: str, model: str = "m-small") -> None:
        self.model = model
        self.reply_to = replies_stream(uuid.uuid4().hex)
        self.stream = requests_stream(model)
        self.redis = redis.Redis.from_url(url, retry=Retry(ConstantBackoff(0.1), 50))
        self.heard: dict[str, list[Heard]] = defaultdict(list)
        self._last_id: bytes | str = "0"

    def close(self) -> None:
        self.redis.close()

    def request(
        self, script: Iterable[bytes] | None, *, max_tokens: int = 1000, stop: tuple[str, ...] = (),
        **fields: Any,
    ) -> GenerateRequest:  # fmt: skip
        return GenerateRequest(
            **{
                "request_id": uuid.uuid4().hex,
                "model": self.model,
                "reply_to": self.reply_to,
                "prompt_token_ids": [1, 2, 3],
                "sampling": SamplingParams(max_tokens=max_tokens, stop=stop),
                "script": None if script is None else tuple(script),
                **fields,
            }
        )

    def enqueue(self, script: Iterable[bytes] | None, **fields: Any) -> str:
        request = self.request(script, **fields)
        self.add(encode(request))
        return request.request_id

    def add(self, payload: bytes) -> bytes:
        return self.redis.xadd(self.stream, {PAYLOAD_FIELD: payload})

    def abort(self, request_id: str) -> None:
        self.redis.xadd(
            aborts_stream(self.model), {PAYLOAD_FIELD: encode(AbortRequest(request_id))}
        )

    def listen(self) -> None:
        """Read what is there, waiting a moment for the first."""
        reply = self.redis.xread({self.reply_to: self._last_id}, block=100)
        for entry_id, fields in reply[0][1] if reply else []:
            self._last_id = entry_id
            step = decode(StepDeltas, fields[PAYLOAD_FIELD])
            for delta in step.deltas:
                self.heard[delta.request_id].append(Heard(step.worker_id, delta))

    def wait_for_start(self, request_id: str) -> Heard:
        def started() -> Heard | None:
            if not self.heard[request_id]:
                self.listen()
            return self.heard[request_id][0] if self.heard[request_id] else None

        return wait_until(started, "the request's first delta is there")

    def wait_for_end(self, request_id: str) -> list[Heard]:
        def is_over() -> bool:
            heard = self.heard[request_id]
            return bool(heard) and heard[-1].delta.usage is not None

        def ended() -> bool:
            if not is_over():
                self.listen()
            return is_over()

        wait_until(ended, "the request's last delta is there")
        return self.heard[request_id]

    def text(self, request_id: str, choice: int = 0) -> str:
        heard = self.wait_for_end(request_id)
        return "".join(h.delta.text for h in heard if h.delta.choice == choice)

    def statuses(self) -> dict[str, WorkerStatus]:
        names = [name.decode() for name in self.redis.smembers(WORKERS_SET)]
        payloads = {name: self.redis.get(worker_key(name)) for name in names}
        return {name: decode(WorkerStatus, p) for name, p in payloads.items() if p is not None}

    def wait_for_ready(self, worker_id: str) -> None:
        def ready() -> bool:
            status = self.statuses().get(worker_id)
            return status is not None and status.state is WorkerState.READY

        wait_until(ready, f"{worker_id} is ready")

    def num_entries(self) -> int:
        return self.redis.xlen(self.stream)

    def num_pending(self) -> int:
        return self.redis.xpending(self.stream, "workers")["pending"]
