"""An OpenAI server that answers at once, to put behind a proxy: `uvicorn benchmarks.instant_upstream:app`."""

import json
from typing import Any

NUM_TOKENS = 32
_WORDS = [f"w{number} " for number in range(NUM_TOKENS)]
_HEAD = {"id": "chatcmpl-instant", "created": 1, "model": "instant"}
_USAGE = {
    "prompt_tokens": NUM_TOKENS,
    "completion_tokens": NUM_TOKENS,
    "total_tokens": 2 * NUM_TOKENS,
}
_MESSAGE = {"role": "assistant", "content": "".join(_WORDS)}


def _chunk(delta: dict[str, str], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    fields = {**_HEAD, "object": "chat.completion.chunk", "choices": [choice]}
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


_WHOLE = json.dumps(
    {
        **_HEAD,
        "object": "chat.completion",
        "choices": [{"index": 0, "message": _MESSAGE, "finish_reason": "stop"}],
        "usage": _USAGE,
    }
).encode()
_CHUNKS = [
    _chunk({"role": "assistant", "content": ""}),
    *(_chunk({"content": word}) for word in _WORDS),
    _chunk({}, "stop"),
    b"data: [DONE]\n\n",
]


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:  # noqa: ANN401
    """ASGI; every path answers."""
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    streams = bool(json.loads(body or b"{}").get("stream"))
    kind = b"text/event-stream" if streams else b"application/json"
    headers = [(b"content-type", kind)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for piece in _CHUNKS if streams else [_WHOLE]:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
