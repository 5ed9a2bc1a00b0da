"""/tokenize and /detokenize, as vLLM has them: what a prompt looks like to the model, without asking it."""

import asyncio
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gateway.directory import ServedModel
from gateway.dispatch import Dispatcher
from gateway.domain.openai.bodies import aside
from gateway.domain.openai.prompts import render_chat
from gateway.domain.openai.schemas import ChatCompletionRequest
from gateway.domain.openai.services import HttpRequest, read_body
from gateway.domain.openai.tools.offer import shown_tools
from gateway.domain.openai.validation import parse, validated
from gateway.errors import BadRequestError
from gateway.settings import GatewaySettings


class TokenizeRequest(BaseModel):
    """A text, or a chat with the fields of a chat completion that shape its prompt."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: str = Field(min_length=1)
    prompt: str | None = None
    messages: list[Any] | None = None
    """Checked as those of a chat completion, with `tools`, `chat_template_kwargs` and so on."""
    add_special_tokens: bool | None = None
    """Whether the model's BOS token goes in front: as a rule before a text, not before a chat."""
    return_token_strs: bool | None = None


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    """The model's context length."""
    tokens: list[int]
    token_strs: list[str] | None
    """With `return_token_strs`; bytes that are no whole character are spelled out, `\\\\xf0`."""


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: str = Field(min_length=1)
    tokens: list[int]


class DetokenizeResponse(BaseModel):
    prompt: str


class TokenizationService:
    """Counts what is longer than the context too; a body's size is the limit. Works in threads."""

    def __init__(self, settings: GatewaySettings, dispatcher: Dispatcher) -> None:
        self._settings = settings
        self._dispatcher = dispatcher

    async def tokenize(self, request: HttpRequest) -> TokenizeResponse:
        """Raises what a chat completion of the same messages would raise, but for the context's length."""
        content = await read_body(request, self._settings)
        body = await aside(len(content), validated, TokenizeRequest, content)
        if (body.prompt is None) == (body.messages is None):
            raise BadRequestError(
                "Either 'prompt' or 'messages' is needed, and not both.",
                param="prompt",
                code="invalid_value" if body.prompt is not None else "missing_required_parameter",
            )
        chat = None
        if body.messages is not None:
            chat = await aside(len(content), parse, ChatCompletionRequest, content)
        served = self._dispatcher.lookup(body.model)
        return await asyncio.to_thread(_tokenized, served, body, chat)

    async def detokenize(self, request: HttpRequest) -> DetokenizeResponse:
        """The text of token ids; the parts of a character that are no whole one become U+FFFD."""
        content = await read_body(request, self._settings)
        body = await aside(len(content), validated, DetokenizeRequest, content)
        served = self._dispatcher.lookup(body.model)
        last = served.card.vocab_size - 1
        if any(not 0 <= token <= last for token in body.tokens):
            raise BadRequestError(
                f"Invalid 'tokens': token ids of this model are 0 to {last}.",
                param="tokens",
                code="invalid_value",
            )
        return DetokenizeResponse(
            prompt=await asyncio.to_thread(served.tokenizer.decode, body.tokens)
        )


def _tokenized(
    served: ServedModel, body: TokenizeRequest, chat: ChatCompletionRequest | None
) -> TokenizeResponse:
    if chat is None:
        text, add_bos = body.prompt or "", served.card.add_bos
        if body.add_special_tokens is False:
            add_bos = False
    else:
        # A template writes the BOS token itself.
        text, add_bos = (
            render_chat(served, chat, shown_tools(chat)),
            body.add_special_tokens is True,
        )
    tokens = served.tokenizer.encode(text, add_bos=add_bos)
    strings = None
    if body.return_token_strs:
        strings = [
            served.tokenizer.token_bytes(token).decode(errors="backslashreplace")
            for token in tokens
        ]
    return TokenizeResponse(
        count=len(tokens),
        max_model_len=served.card.context_len,
        tokens=tokens,
        token_strs=strings,
    )
