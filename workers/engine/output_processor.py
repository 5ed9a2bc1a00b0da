"""From token ids to text that may be sent, and the decision that a choice is finished.

Two things are held back: bytes that are not yet a whole character, and text that may still become a
stop string. With the stop string `<<END>>` and the tokens `first `, `<<`, `EN`, `D>`, `>`:

    push("first ") -> "first "        push("<<") -> ""      push("EN") -> ""
    push("D>")     -> ""              push(">")  -> "" and the choice ends: stop string `<<END>>`

and with ` more` instead of the last token, `<<END> more` is let go at once. Nothing here knows
devices or transports, so the scripted engine uses the same code.
"""

import codecs
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from workers.protocol import FinishReason, SamplingParams

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """Turns tokens into whole characters, one token at a time."""

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        ...


class TokenizerDetokenizer:
    """Whole characters from a `tokenizers` vocabulary (byte-level or byte-fallback alike).

    `context` are the last prompt tokens: decoders that drop a leading space at the start of a text
    need to know that this is no start.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: list[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=context, skip_special_tokens=skip_special_tokens)

    def push(self, token: int) -> str:
        # Bytes that never become a character decode to U+FFFD: they are dropped, as half
        # characters are at the end of an answer.
        return (self._stream.step(self._tokenizer, token) or "").replace(REPLACEMENT, "")


class BytesDetokenizer:
    """Whole characters from a list of byte strings; token `i` is `pieces[i]`."""

    def __init__(self, pieces: tuple[bytes, ...]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._pieces[token])


class StopStrings:
    """Cuts a text before the first stop string, letting nothing of it out beforehand."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The part of the text so far that may be sent; sets `found` when a stop string is complete."""
        if not self._stops:
            return text
        self._held += text
        hits = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            at, self.found = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            sendable, self._held = self._held[:at], ""
            return sendable
        keep = max(self._overlap(stop) for stop in self._stops)
        cut = len(self._held) - keep
        sendable, self._held = self._held[:cut], self._held[cut:]
        return sendable

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def flush(self) -> str:
        """What was held back and is no stop string after all."""
        rest, self._held = self._held, ""
        return rest


class Emission(msgspec.Struct, frozen=True):
    """What a token adds to a choice's text, and whether it ends the choice."""

    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass
class ChoiceOutput:
    """The answer side of one choice: counts its tokens, assembles its text, says when it ends."""

    sampling: SamplingParams
    detokenizer: Detokenizer
    eos_token_ids: frozenset[int]
    max_tokens: int
    """What of `sampling.max_tokens` fits into the context."""
    num_tokens: int = 0
    end_token_ids: frozenset[int] = field(init=False)
    """Tokens that end the answer."""
    stops: StopStrings = field(init=False)

    def __post_init__(self) -> None:
        eos = frozenset() if self.sampling.ignore_eos else self.eos_token_ids
        self.end_token_ids = eos | frozenset(self.sampling.stop_token_ids)
        self.stops = StopStrings(self.sampling.stop)

    def push(self, token: int, *, is_last: bool = False) -> Emission:
        """Account for one generated token. Its text is not sent if the token itself ends the choice.

        With `is_last` nothing can come after it: it ends the choice, early or not.
        """
        self.num_tokens += 1
        early = self.num_tokens < self.sampling.min_tokens and not is_last
        if is_last and token in self.eos_token_ids:
            return Emission(self.stops.flush(), FinishReason.STOP)
        if not early and token in self.end_token_ids:
            stop_reason = None if token in self.eos_token_ids else token
            return Emission(self.stops.flush(), FinishReason.STOP, stop_reason)
        text = self.detokenizer.push(token)
        if not early:
            text = self.stops.push(text)
        if self.stops.found is not None:
            return Emission(text, FinishReason.STOP, self.stops.found)
        if is_last:
            return Emission(text + self.stops.flush(), FinishReason.STOP)
        if self.num_tokens >= self.max_tokens:
            return Emission(text + self.stops.flush(), FinishReason.LENGTH)
        return Emission(text)

    def finish(self) -> Emission:
        """The choice has no more tokens (a script ran out): let go what was held back."""
        return Emission(self.stops.flush(), FinishReason.STOP)
