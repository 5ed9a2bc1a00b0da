"""The parts of a chat as a message of content blocks, whole or in events."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from gateway.domain.openai.events import Event, Finish
from gateway.domain.openai.parts import Part, Reasoning, Text, ToolArguments, ToolCall
from gateway.domain.openai.plan import Plan, Total
from gateway.domain.openai.services import ChatJob
from gateway.sse import WholeAnswer
from workers.protocol import Usage

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_KINDS = {"text": "text", "thinking": "thinking", "input": "partial_json"}
"""By the field of a block that grows: the field of its deltas."""


async def collect(chat: ChatJob, max_tokens: int) -> WholeAnswer:
    """The whole message; raises the `GatewayError` that ended it."""
    message = MessageDraft(chat.plan, _prompt_len(chat), max_tokens)
    async for batch in chat.events(3600.0):
        for _, event in batch:
            message.take(event)
    return WholeAnswer(msgspec.json.encode(message.whole()), message.headers)


async def stream(
    chat: ChatJob, max_tokens: int, ping_interval_s: float
) -> AsyncGenerator[bytes, None]:
    """Blocks of events, one for all that came together; raises the `GatewayError` that ended it."""
    message = MessageDraft(chat.plan, _prompt_len(chat), max_tokens)
    yield _event("message_start", {"message": message.begun()})
    async for batch in chat.events(ping_interval_s):
        written = [message.take(event) for _, event in batch]
        block = b"".join(item for events in written for item in events)
        if block or not batch:
            yield block or _PING
    yield message.end()


class MessageDraft:
    """A message that grows part by part; says what is new of it as events of a stream."""

    def __init__(self, plan: Plan, prompt_len: int, max_tokens: int) -> None:
        self._plan = plan
        self._max_tokens = max_tokens
        self._content: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        """Of the last block."""
        self._growing = ""
        """The field of the last block that grows; "" if it is closed or there is none."""
        self._finish = Finish("stop")
        self._usage = Usage(prompt_tokens=prompt_len, completion_tokens=0)
        self._cost: dict[str, object] = {}
        """Fields that the usage has at the end alone."""
        self.headers: list[tuple[bytes, bytes]] = []
        """Of the answer, once it has ended."""

    def take(self, event: Event) -> list[bytes]:
        if isinstance(event, list):
            return [written for part in event for written in self._add(part)]
        if isinstance(event, Finish):
            self._finish = event
            return self._close()
        if isinstance(event, Total):
            self._usage, self._cost = event.usage, event.cost.fields()
            self.headers = event.cost.headers()
        else:
            self._content, self._pieces, self._growing = [], [], ""
        return []

    def begun(self) -> dict[str, Any]:
        return self._envelope([], None, None)

    def whole(self) -> dict[str, Any]:
        return self._envelope(self._content, self._stop_reason(), self._finish.stop_string)

    def end(self) -> bytes:
        delta = {
            "stop_reason": self._stop_reason(),
            "stop_sequence": self._finish.stop_string,
            "stop_details": None,
            "container": None,
        }
        last = _event("message_delta", {"delta": delta, "usage": self._usage_fields()})
        return last + _event("message_stop", {})

    def _add(self, part: Part) -> list[bytes]:
        if isinstance(part, ToolCall):
            return self._open(
                "input",
                {
                    "type": "tool_use",
                    "id": part.id,
                    "name": part.name,
                    "input": {},
                    "caller": {"type": "direct"},
                },
            )
        if not part.text:
            return []
        opened: list[bytes] = []
        field = "input"
        if isinstance(part, Text):
            field = "text"
        elif isinstance(part, Reasoning):
            field = "thinking"
        if self._growing != field:
            assert not isinstance(part, ToolArguments), "a call begins before its arguments"
            rest = {"signature": ""} if field == "thinking" else {"citations": None}
            opened = self._open(field, {"type": field, field: "", **rest})
        self._pieces.append(part.text)
        kind = "input_json" if field == "input" else field
        delta = {"type": f"{kind}_delta", _KINDS[field]: part.text}
        index = len(self._content) - 1
        return [*opened, _event("content_block_delta", {"index": index, "delta": delta})]

    def _open(self, field: str, block: dict[str, Any]) -> list[bytes]:
        closed = self._close()
        self._growing, self._pieces = field, []
        index = len(self._content)
        self._content.append(block)
        begun = _event("content_block_start", {"index": index, "content_block": block})
        return [*closed, begun]

    def _close(self) -> list[bytes]:
        if not self._growing:
            return []
        text = "".join(self._pieces)
        self._content[-1][self._growing] = _json_object(text) if self._growing == "input" else text
        self._growing = ""
        return [_event("content_block_stop", {"index": len(self._content) - 1})]

    def _stop_reason(self) -> str:
        if self._finish.reason == "tool_calls":
            return "tool_use"
        if self._finish.reason == "length":
            is_full = self._usage.completion_tokens < self._max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens"
        return "end_turn" if self._finish.stop_string is None else "stop_sequence"

    def _envelope(
        self, content: list[dict[str, Any]], reason: str | None, sequence: str | None
    ) -> dict[str, Any]:
        return {
            "id": self._plan.id.replace("chatcmpl-", "msg_", 1),
            "type": "message",
            "role": "assistant",
            "model": self._plan.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "stop_details": None,
            "container": None,
            "usage": self._usage_fields(),
        }

    def _usage_fields(self) -> dict[str, object]:
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            # Required by the published specification, and of nothing that is here.
            "cache_creation": None,
            "inference_geo": None,
            "output_tokens_details": None,
            "server_tool_use": None,
            "service_tier": "standard",
            **self._cost,
        }


def _prompt_len(chat: ChatJob) -> int:
    return len(chat.job.exchanges[0].request.prompt_token_ids)


def _json_object(text: str) -> dict[str, Any]:
    """Arguments that a length limit has cut are no JSON: nothing can be told of them."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _event(name: str, fields: dict[str, Any]) -> bytes:
    data = msgspec.json.encode({"type": name, **fields})
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
