"""The parts of a chat as a response of output items, whole or in events."""

import time
from typing import Any

import msgspec

from gateway.domain.openai.events import Event, Finish
from gateway.domain.openai.parts import Part, Reasoning, Text, ToolArguments, ToolCall
from gateway.domain.openai.plan import Plan, Total
from gateway.domain.openai.prompts import new_request_id
from gateway.domain.responses.schemas import ResponsesRequest
from gateway.errors import GatewayError

_DELTAS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


class Draft:
    """A response that grows part by part; says what is new of it as events of a stream."""

    def __init__(self, body: ResponsesRequest, plan: Plan) -> None:
        self._number = 0
        self._pieces: list[str] = []
        """Text of the last item."""
        self._is_open = False
        """The last item grows."""
        self.output: list[dict[str, Any]] = []
        self.response = _envelope(body, plan)
        self.response["output"] = self.output
        self.headers: list[tuple[bytes, bytes]] = []
        """Of the answer, once it has ended."""

    @property
    def id(self) -> str:
        return str(self.response["id"])

    def begin(self) -> bytes:
        self.response["status"] = "in_progress"
        return b"".join(
            self._event(name, {"response": self.response})
            for name in ("response.created", "response.in_progress")
        )

    def take(self, event: Event) -> list[bytes]:
        if isinstance(event, list):
            return [written for part in event for written in self._add(part)]
        if isinstance(event, Finish):
            is_cut = event.reason == "length"
            closed = self._close("incomplete" if is_cut else "completed")
            self.response["status"] = "incomplete" if is_cut else "completed"
            if is_cut:
                self.response["incomplete_details"] = {"reason": "max_output_tokens"}
            return closed
        if isinstance(event, Total):
            self.response["usage"] = _usage(event)
            self.headers = event.cost.headers()
            if self.response["status"] == "completed":
                self.response["completed_at"] = int(time.time())
        else:
            self.output.clear()
            self._pieces, self._is_open = [], False
        return []

    def end(self) -> bytes:
        return self._event(f"response.{self.response['status']}", {"response": self.response})

    def fail(self, error: GatewayError) -> bytes:
        """The events of a stream that ends with an error."""
        fields = {"code": error.code or error.type, "message": error.message, "param": error.param}
        told = self._event("error", fields)
        failed(self.response, error.message)
        return told + self._event("response.failed", {"response": self.response})

    def _add(self, part: Part) -> list[bytes]:
        if isinstance(part, ToolCall):
            return self._open(
                {
                    "id": "fc_" + new_request_id(),
                    "type": "function_call",
                    "call_id": part.id,
                    "name": part.name,
                    "arguments": "",
                    "status": "in_progress",
                }
            )
        if not part.text:
            return []
        opened: list[bytes] = []
        if isinstance(part, Text) and not self._grows("message"):
            message = {"id": "msg_" + new_request_id(), "type": "message", "role": "assistant"}
            opened = self._open({**message, "content": [], "status": "in_progress"})
        elif isinstance(part, Reasoning) and not self._grows("reasoning"):
            thought = {"id": "rs_" + new_request_id(), "type": "reasoning", "summary": []}
            opened = self._open({**thought, "content": [], "status": "in_progress"})
        assert self._is_open or not isinstance(part, ToolArguments), "a call precedes its arguments"
        self._pieces.append(part.text)
        item = self.output[-1]
        fields = {**self._place(item), "delta": part.text}
        if item["type"] == "message":
            fields["logprobs"] = []
        return [*opened, self._event(_DELTAS[item["type"]] + ".delta", fields)]

    def _grows(self, kind: str) -> bool:
        return self._is_open and self.output[-1]["type"] == kind

    def _open(self, item: dict[str, Any]) -> list[bytes]:
        events = self._close("completed")
        self.output.append(item)
        self._pieces, self._is_open = [], True
        added = {"output_index": len(self.output) - 1, "item": item}
        events.append(self._event("response.output_item.added", added))
        if item["type"] != "function_call":
            part = {**self._place(item), "part": _part(item, "")}
            events.append(self._event("response.content_part.added", part))
        return events

    def _close(self, status: str) -> list[bytes]:
        if not self._is_open:
            return []
        self._is_open = False
        item, text = self.output[-1], "".join(self._pieces)
        item["status"] = status
        place = self._place(item)
        done = _DELTAS[item["type"]] + ".done"
        if item["type"] == "function_call":
            item["arguments"] = text
            fields = {**place, "arguments": text, "name": item["name"]}
            events = [self._event(done, fields)]
        else:
            part = _part(item, text)
            item["content"] = [part]
            fields = {**place, "text": text}
            if item["type"] == "message":
                fields["logprobs"] = []
            events = [
                self._event(done, fields),
                self._event("response.content_part.done", {**place, "part": part}),
            ]
        whole = {"output_index": len(self.output) - 1, "item": item}
        return [*events, self._event("response.output_item.done", whole)]

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        place = {"item_id": item["id"], "output_index": len(self.output) - 1}
        return place if item["type"] == "function_call" else {**place, "content_index": 0}

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        numbered = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(numbered))


def failed(response: dict[str, Any], message: str) -> dict[str, Any]:
    """The response, ended by a failure of the server."""
    response["status"] = "failed"
    response["error"] = {"code": "server_error", "message": message}
    return response


def _part(item: dict[str, Any], text: str) -> dict[str, Any]:
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(total: Total) -> dict[str, Any]:
    fields: dict[str, Any] = total.fields()
    return {
        "input_tokens": fields["prompt_tokens"],
        "input_tokens_details": {**fields["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": fields["completion_tokens"],
        "output_tokens_details": fields["completion_tokens_details"],
        "total_tokens": fields["total_tokens"],
        "cost": fields["cost"],
        "cost_details": fields["cost_details"],
    }


def _envelope(body: ResponsesRequest, plan: Plan) -> dict[str, Any]:
    given = body.text and body.text.format
    kind = {"type": "text"}
    if given is not None:
        kind = given.model_dump(by_alias=True, exclude_none=True)
    reasoning = body.reasoning
    return {
        "id": plan.id.replace("chatcmpl-", "resp_", 1),
        "object": "response",
        "created_at": plan.created_s,
        "status": "in_progress",
        "background": bool(body.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "frequency_penalty": 0.0,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": plan.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": 0.0,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": kind, "verbosity": "medium"},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }
