"""How the answer to a chat is read: as calls and reasoning too, if the chat or the model is of that kind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from gateway.directory import ServedModel
from gateway.domain.openai.grammars import checked
from gateway.domain.openai.parts import PartParser
from gateway.domain.openai.prompts import Prompt
from gateway.domain.openai.reasoning import PlainText, ReasoningParser
from gateway.domain.openai.schemas import ChatCompletionRequest
from gateway.domain.openai.tools.formats import framing
from gateway.domain.openai.tools.grammar import answer_grammar, call_grammar, schema_fault
from gateway.domain.openai.tools.offer import ToolOffer
from gateway.domain.openai.tools.parser import CallParser
from gateway.errors import BadRequestError
from models.grammar_texts import MAX_TEXT_BYTES
from models.tokenizer import TextTokenizer
from workers.protocol import Grammar

_MOST_MARK_TOKENS = 64
"""Tokens at a prompt's end that are looked at for the mark that opens reasoning."""


@dataclass(frozen=True)
class Reading:
    """Of one chat."""

    offer: ToolOffer | None
    parser: Callable[[], PartParser]
    """Makes that of one choice."""
    grammar: Grammar | None
    """What the whole of the answer must match."""
    keeps_special: bool
    """Marks are special tokens, which the text must have."""
    boundary: str
    """Ends the reasoning; "" for a model that does not reason."""

    def shaped(self, prompt: Prompt) -> Prompt:
        """The prompt with parameters that make the answer such a one."""
        if self.grammar is None and not self.keeps_special:
            return prompt
        sampling = msgspec.structs.replace(
            prompt.sampling,
            grammar=self.grammar,
            skip_special_tokens=prompt.sampling.skip_special_tokens and not self.keeps_special,
        )
        return replace(prompt, sampling=sampling)


def reading_of(
    served: ServedModel,
    body: ChatCompletionRequest,
    offer: ToolOffer | None,
    wanted: Grammar | None,
    prompt: Prompt,
) -> Reading | None:
    """None if all that the model writes is text; `wanted` is what the answer must match if it is no call."""
    form = served.format
    marks = form.reasoning
    if offer is None and marks is None:
        return None
    is_open = marks is not None and _ends_with(served.tokenizer, prompt.token_ids, marks[0])
    grammar = None
    if (offer is not None or wanted is not None) and served.card.takes_grammars:
        grammar = answer_grammar(form, offer, wanted, is_open=is_open)
    must_call = offer is not None and offer.is_required
    calls = framing(form.tools, is_bound=must_call or wanted is not None)
    is_shown = body.include_reasoning is not False

    def parser() -> PartParser:
        answer: PartParser = PlainText()
        if offer is not None:
            answer = CallParser(
                calls, offer.names, parallel=offer.parallel, is_required=offer.is_required
            )
        if marks is None:
            return answer
        return ReasoningParser(marks, answer, is_open=is_open, is_shown=is_shown)

    return Reading(
        offer,
        parser,
        grammar,
        keeps_special=bool(form.special_marks),
        boundary=marks[1] if marks else "",
    )


async def check_calls(
    served: ServedModel, body: ChatCompletionRequest, offer: ToolOffer, wanted: Grammar | None
) -> None:
    """Raises `BadRequestError` if calls are to match the tools' schemas and cannot."""
    if not (offer.is_required or offer.is_strict or wanted is not None):
        return
    if not served.card.takes_grammars:
        if not offer.is_required:
            return
        raise BadRequestError(
            "This model cannot be made to call a tool: 'tool_choice' may be 'none' or 'auto'.",
            param="tool_choice",
            code="unsupported_parameter",
        )
    if (
        len(msgspec.json.encode([function.parameters for function in offer.callable]))
        > MAX_TEXT_BYTES
    ):
        # Said at once: to write a grammar of megabytes would hold up all others.
        raise BadRequestError(
            f"Invalid 'tools': the schemas have more than {MAX_TEXT_BYTES} bytes.",
            param="tools",
            code="invalid_value",
        )
    try:
        await checked(call_grammar(served.format, offer), "tools")
    except BadRequestError as error:
        fault = schema_fault(error.message)
        if fault is None:
            raise
        number, sentence = fault
        names = [tool.function.name for tool in body.tools or ()]
        place = names.index(offer.callable[number].name)
        param = f"tools[{place}].function.parameters"
        message = f"Invalid '{param}': {sentence}"[:500]
        raise BadRequestError(message, param=param, code="invalid_value") from error


def _ends_with(tokenizer: TextTokenizer, token_ids: Sequence[int], mark: str) -> bool:
    """Whether a prompt ends with `mark`, but for white space. Cheap where it does not."""
    wanted, end = mark.encode(), b""
    for token_id in reversed(token_ids[-_MOST_MARK_TOKENS:]):
        end = (tokenizer.token_bytes(token_id) + end).rstrip()
        if len(end) >= len(wanted):
            return end.endswith(wanted)
        if not wanted.endswith(end):
            return False
    return False
