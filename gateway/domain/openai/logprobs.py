r"""Log-probabilities as OpenAI's objects: token ids become text and bytes.

A token that is no whole text has its bytes spelled out, as OpenAI does: `\xf0\x9f` in chats, and
`bytes:\xf0\x9f` in plain completions, which have no field for bytes. JSON knows no infinity: what is
impossible has the log-probability -9999.
"""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from models.tokenizer import TextTokenizer
from workers.protocol import TokenLogprobs

_LEAST = -9999.0
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
Fields = dict[str, object]
PromptTokens = Sequence[TokenLogprobs | None]
"""As the wire has it: one for each prompt token, None for the first."""


class _Offsets:
    """Where in a text its tokens begin, characters."""

    def __init__(self, start: int) -> None:
        self._at = start
        # A token within a character begins where the character does; bytes of none are not in the text.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")

    def of(self, piece: bytes) -> int:
        """Offset of the next token, whose bytes in the text are `piece`."""
        at = self._at
        self._at += len(self._decoder.decode(piece))
        return max(0, at)


@dataclass(frozen=True)
class Echo:
    """A prompt that its answers begin with."""

    text: str
    token_ids: list[int]
    offsets: list[int]
    """Of each token in the text."""


def echo_of(
    tokenizer: TextTokenizer, prompt: str | list[int], token_ids: list[int], *, skips_special: bool
) -> Echo:
    """`token_ids` are those of `prompt`, after the BOS token if the model wants one before a text."""
    pieces = [tokenizer.token_bytes(token_id) for token_id in token_ids]
    if isinstance(prompt, str):
        text = prompt
        # Marks that are written in a text stay; the BOS token in front of it is not written.
        if tokenizer.is_special(token_ids[0]) and not text.encode().startswith(pieces[0]):
            pieces[0] = b""
    else:
        text = tokenizer.decode(prompt, skip_special_tokens=skips_special)
        text = text.replace(_REPLACEMENT, "")
        pieces = [
            b"" if skips_special and tokenizer.is_special(token_id) else piece
            for token_id, piece in zip(token_ids, pieces, strict=True)
        ]
    # SentencePiece puts a space before a text's first word that is not in the text.
    has_space = b"".join(pieces[:2]).startswith(b" ") and not text.startswith(" ")
    offsets = _Offsets(-1 if has_space else 0)
    return Echo(text, token_ids, [offsets.of(piece) for piece in pieces])


def chat_fields(tokenizer: TextTokenizer, tokens: Iterable[TokenLogprobs], num_top: int) -> Fields:
    """OpenAI's `logprobs` of a chat's choice or chunk."""
    content = [
        {
            **_chat_token(tokenizer, token.token_id, token.logprob),
            "top_logprobs": [_chat_token(tokenizer, *pair) for pair in token.top[:num_top]],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: TextTokenizer, token_id: int, logprob: float) -> Fields:
    piece = tokenizer.token_bytes(token_id)
    text = piece.decode(errors="backslashreplace")
    return {"token": text, "logprob": _finite(logprob), "bytes": list(piece) if piece else None}


@dataclass
class TextLogprobs:
    """OpenAI's `logprobs` of a plain completion, or of a part of it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    def __add__(self, other: "TextLogprobs") -> "TextLogprobs":
        return TextLogprobs(
            self.tokens + other.tokens,
            self.token_logprobs + other.token_logprobs,
            self.top_logprobs + other.top_logprobs,
            self.text_offset + other.text_offset,
        )


class TextScorer:
    """Makes the `logprobs` of one choice of a plain completion, in one piece or in many."""

    def __init__(
        self, tokenizer: TextTokenizer, num_top: int, start: int, *, skips_special: bool
    ) -> None:
        """`start` is the length of the text before the first token, characters."""
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._skips_special = skips_special
        self._offsets = _Offsets(start)

    def score(self, tokens: Sequence[TokenLogprobs]) -> TextLogprobs:
        """The tokens that follow those of the call before."""
        return _text_logprobs(
            self._tokenizer,
            [token.token_id for token in tokens],
            tokens,
            [self._offsets.of(self._piece(token.token_id)) for token in tokens],
            self._num_top,
        )

    def _piece(self, token_id: int) -> bytes:
        is_hidden = self._skips_special and self._tokenizer.is_special(token_id)
        return b"" if is_hidden else self._tokenizer.token_bytes(token_id)


def echo_logprobs(
    tokenizer: TextTokenizer, echo: Echo, tokens: PromptTokens, num_top: int
) -> TextLogprobs:
    """What comes before the generated tokens' own."""
    return _text_logprobs(tokenizer, echo.token_ids, tokens, echo.offsets, num_top)


def _text_logprobs(
    tokenizer: TextTokenizer,
    token_ids: list[int],
    tokens: PromptTokens,
    offsets: list[int],
    num_top: int,
) -> TextLogprobs:
    return TextLogprobs(
        tokens=[_text(tokenizer, token_id) for token_id in token_ids],
        token_logprobs=[None if token is None else _finite(token.logprob) for token in tokens],
        top_logprobs=[
            None if token is None else _by_text(tokenizer, token, num_top) for token in tokens
        ],
        text_offset=offsets,
    )


def _by_text(tokenizer: TextTokenizer, token: TokenLogprobs, num_top: int) -> dict[str, float]:
    """The likeliest tokens and the one that is there; of equal texts the likelier one."""
    found: dict[str, float] = {}
    for token_id, logprob in (*token.top[:num_top], (token.token_id, token.logprob)):
        found.setdefault(_text(tokenizer, token_id), _finite(logprob))
    return found


def _text(tokenizer: TextTokenizer, token_id: int) -> str:
    piece = tokenizer.token_bytes(token_id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def prompt_fields(
    tokenizer: TextTokenizer, tokens: PromptTokens, num_top: int
) -> list[dict[int, Fields] | None]:
    """vLLM's `prompt_logprobs`: of each prompt token, then of the likeliest ones in its place.

    A rank is told only of tokens among the likeliest that the engine named.
    """
    return [None if token is None else _ranked(tokenizer, token, num_top) for token in tokens]


def _ranked(tokenizer: TextTokenizer, token: TokenLogprobs, num_top: int) -> dict[int, Fields]:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(token.top, start=1)}
    return {
        token_id: {
            "logprob": _finite(logprob),
            "rank": ranks.get(token_id),
            "decoded_token": tokenizer.token_bytes(token_id).decode(errors="backslashreplace"),
        }
        for token_id, logprob in ((token.token_id, token.logprob), *token.top[:num_top])
    }


def _finite(logprob: float) -> float:
    # Not max(): a NaN would pass.
    return logprob if logprob > _LEAST else _LEAST
