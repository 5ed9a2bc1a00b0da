"""From the deltas of a job to the one JSON body that a client without streaming reads."""

import asyncio
from dataclasses import dataclass, field

import msgspec

from gateway.domain.openai.choices import ParsedChoices
from gateway.domain.openai.logprobs import PromptTokens, TextLogprobs, chat_fields, prompt_fields
from gateway.domain.openai.parts import Part, Reasoning, Text, ToolCall
from gateway.domain.openai.plan import Ledger, Plan, Total
from gateway.domain.system.services import ModelMetrics
from gateway.errors import EngineError, GatewayError
from gateway.jobs import Exchange, Job
from gateway.sse import WholeAnswer
from workers.protocol import OutputDelta, TokenLogprobs


@dataclass
class _Choice:
    parts: list[str] = field(default_factory=list)
    """Of its text."""
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[ToolCall, list[str]]] = field(default_factory=list)
    """With the pieces of their arguments."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: str | None = None

    @property
    def mean_logprob(self) -> float:
        if not self.logprobs:
            return float("-inf")
        return sum(token.logprob for token in self.logprobs) / len(self.logprobs)

    def take(self, parts: list[Part]) -> None:
        for part in parts:
            if isinstance(part, Text):
                self.parts.append(part.text)
            elif isinstance(part, Reasoning):
                self.reasoning.append(part.text)
            elif isinstance(part, ToolCall):
                self.calls.append((part, []))
            else:
                self.calls[part.index][1].append(part.text)

    def message(self) -> dict[str, object]:
        """As a chat has it; reasoning has two names, as clients read one or the other."""
        content = "".join(self.parts)
        message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning"] = message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(pieces)},
                }
                for call, pieces in self.calls
            ]
        return message


class _Answer:
    """What has come so far."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._choices: dict[int, _Choice] = {}
        self._prompts: dict[int, PromptTokens] = {}
        self._parsed = None if plan.parser is None else ParsedChoices(plan)

    def add(self, exchange: Exchange, delta: OutputDelta) -> None:
        index = self._plan.choice_index(exchange, delta.choice)
        choice = self._choices.setdefault(index, _Choice())
        if delta.prompt_logprobs is not None:
            self._prompts[exchange.index] = delta.prompt_logprobs
        if not self._plan.scores_only:
            parts = self._parsed.parts(index, delta) if self._parsed else None
            if parts is None:
                choice.parts.append(delta.text)
            else:
                choice.take(parts)
            choice.logprobs += delta.logprobs or ()
        if delta.finish_reason is None:
            return
        if self._parsed is not None:
            choice.reason = self._parsed.reason(index, delta)
        else:
            choice.reason = self._plan.reason(delta.finish_reason)

    def drop(self, exchange: Exchange) -> None:
        self._prompts.pop(exchange.index, None)
        for choice in range(self._plan.num_candidates):
            index = self._plan.choice_index(exchange, choice)
            self._choices.pop(index, None)
            if self._parsed is not None:
                self._parsed.forget(index)

    @property
    def num_reasoning_tokens(self) -> int:
        return self._parsed.num_reasoning_tokens if self._parsed else 0

    @property
    def reason(self) -> str:
        first = self._choices.get(0)
        return first.reason or "stop" if first else "stop"

    def body(self, num_prompts: int, total: Total) -> bytes:
        """Raises `EngineError` if the engine did not score a prompt as it was asked to."""
        plan = self._plan
        body = plan.envelope("chat.completion" if plan.chat else "text_completion")
        choices: list[dict[str, object]] = []
        for prompt in range(num_prompts):
            extra: dict[str, object] = {}
            if plan.num_prompt_logprobs is not None:
                # Of a chat, which has one prompt, it is told once; of plain completions in each choice.
                (body if plan.chat else extra)["prompt_logprobs"] = self._prompt_fields(prompt)
            echo = None
            if plan.echoes and plan.num_logprobs is not None:
                echo = plan.echo_logprobs(prompt, self._prompts.get(prompt))
            for choice in self._best(prompt):
                fields = self._choice_fields(prompt, choice, echo)
                choices.append({"index": len(choices), **fields, **extra})
        body["choices"] = choices
        body["usage"] = total.fields()
        return msgspec.json.encode(body)

    def _best(self, prompt: int) -> list[_Choice]:
        first = prompt * self._plan.num_candidates
        found = [
            self._choices.get(index, _Choice())
            for index in range(first, first + self._plan.num_candidates)
        ]
        if self._plan.num_candidates > self._plan.num_choices:
            found.sort(key=lambda choice: choice.mean_logprob, reverse=True)
        return found[: self._plan.num_choices]

    def _prompt_fields(self, prompt: int) -> object:
        tokens = self._prompts.get(prompt)
        if tokens is None:
            raise EngineError("The server did not score the prompt.")
        return prompt_fields(self._plan.tokenizer, tokens, self._plan.num_prompt_logprobs or 0)

    def _choice_fields(
        self, prompt: int, choice: _Choice, echo: TextLogprobs | None
    ) -> dict[str, object]:
        fields: dict[str, object] = {}
        if self._plan.chat:
            fields["message"] = choice.message()
        else:
            fields["text"] = self._plan.echo_text(prompt) + "".join(choice.parts)
        fields["logprobs"] = self._logprobs(prompt, choice, echo)
        fields["finish_reason"] = choice.reason or "stop"
        return fields

    def _logprobs(self, prompt: int, choice: _Choice, echo: TextLogprobs | None) -> object:
        plan = self._plan
        if plan.num_logprobs is None:
            return None
        if plan.chat:
            return chat_fields(plan.tokenizer, choice.logprobs, plan.num_logprobs)
        scored = plan.scorer(prompt).score(choice.logprobs)
        return scored if echo is None else echo + scored


async def collect(job: Job, plan: Plan, metrics: ModelMetrics) -> WholeAnswer:
    """The whole answer as OpenAI's JSON object; raises the `GatewayError` that ended it."""
    ledger = Ledger(plan, metrics, streaming=False)
    answer = _Answer(plan)
    try:
        while not ledger.is_complete(job):
            for exchange, delta in await job.take(3600.0):
                if delta is None:
                    answer.drop(exchange)
                    ledger.forget(exchange)
                    continue
                ledger.note(exchange, delta)
                answer.add(exchange, delta)
        total = ledger.total(answer.num_reasoning_tokens)
        body = await _encoded(answer, plan, len(job.exchanges), total)
    except GatewayError as error:
        ledger.fail(error)
        raise
    ledger.succeed(answer.reason, total)
    return WholeAnswer(body, total.cost.headers())


async def _encoded(answer: _Answer, plan: Plan, num_prompts: int, total: Total) -> bytes:
    if plan.num_logprobs is None and plan.num_prompt_logprobs is None:
        return answer.body(num_prompts, total)
    # Twenty alternatives of each token of a long prompt take a while to be named.
    return await asyncio.to_thread(answer.body, num_prompts, total)
