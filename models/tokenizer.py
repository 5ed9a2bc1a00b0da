"""Text to token ids and back, with the `tokenizers` library alone (no transformers, no model files).

Prompts of a chat template already hold their special tokens as text; plain prompts do not. So nothing is
added while encoding, except the BOS token where the model's own post-processor would put one (`add_bos`).
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from models.errors import ModelCorruptError
from models.token_pieces import TokenPieces

_KEEPING_STEPS = frozenset({"ByteLevel", "Split", "Digits", "Punctuation", "Metaspace"})
"""Pre-tokenizers that drop nothing unless their behaviour is `Removed`."""
_NFC_SHRINKS = 4
"""Bytes of text over bytes of its NFC form, at most: 3 for U+212A, rounded up."""


class TextTokenizer:
    """A model's tokenizer. Thread-safe; other threads run while `encode` works."""

    def __init__(self, tokenizer_json: bytes, *, bos_token: str | None = None) -> None:
        """`tokenizer_json` is plain or zlib-compressed; raises `ModelCorruptError` if it is no tokenizer."""
        try:
            if not tokenizer_json.lstrip().startswith(b"{"):
                tokenizer_json = zlib.decompress(tokenizer_json)
            self._tokenizer = Tokenizer.from_str(tokenizer_json.decode())
        except Exception as error:  # noqa: BLE001  the library raises bare Exception
            raise ModelCorruptError(f"the tokenizer cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._bos_id = self._tokenizer.token_to_id(bos_token) if bos_token else None
        self._max_bytes_per_token = _max_bytes_per_token(self._tokenizer)
        self._pieces = TokenPieces(self._tokenizer)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def may_fit(self, text: str, num_tokens: int) -> bool:
        """False if `text` surely has more tokens than `num_tokens`; told by its length alone, without encoding."""
        longest = self._max_bytes_per_token
        return longest is None or len(text.encode()) <= num_tokens * longest

    def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised as such."""
        # `Tokenizer.encode` keeps the interpreter lock; the batch's version frees it.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if add_bos and self._bos_id is not None:
            ids.insert(0, self._bos_id)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `token_ids`; bytes that are no whole character become U+FFFD."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of UTF-8 text that a token stands for, perhaps a part of a character; b"" for an unused id."""
        return self._pieces[token_id]

    def token_id(self, token: str) -> int | None:
        """The id of the one token that is written so in the vocabulary."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves it out of texts."""
        return token_id in self._pieces.special_ids


def _max_bytes_per_token(tokenizer: Tokenizer) -> int | None:
    """The most UTF-8 bytes of text that one token can stand for; None if there may be no such bound.

    There is one for a BPE that knows every byte, if no step before it drops or shortens text.
    """
    layout: dict[str, Any] = json.loads(tokenizer.to_str())
    model, added = layout["model"], layout["added_tokens"]
    before = list(_steps(layout["pre_tokenizer"], "pretokenizers"))
    normalizers = list(_steps(layout["normalizer"], "normalizers"))
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    is_byte_level = any(step["type"] == "ByteLevel" for step in before)
    every_byte = (
        ByteLevel.alphabet() if is_byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    )
    is_complete = (
        model.get("type") == "BPE"
        and (is_byte_level or bool(model.get("byte_fallback")))
        and all(byte in vocab for byte in every_byte)
    )
    keeps = all(
        step["type"] in _KEEPING_STEPS and step.get("behavior") != "Removed" for step in before
    )
    strips = any(token["lstrip"] or token["rstrip"] for token in added)
    if not is_complete or not keeps or strips or not all(map(_lengthens, normalizers)):
        return None
    # Byte-level tokens have a character for each byte.
    longest = max(len(token) if is_byte_level else len(token.encode()) for token in vocab)
    longest = max([longest, *(len(token["content"].encode()) for token in added)])
    shrinks = any(step["type"] == "NFC" for step in normalizers)
    return longest * (_NFC_SHRINKS if shrinks else 1)


def _steps(step: dict[str, Any] | None, inner: str) -> Iterator[dict[str, Any]]:
    """The simple steps that a normalizer or pre-tokenizer is made of."""
    if step is None:
        return
    if step["type"] == "Sequence":
        for part in step[inner]:
            yield from _steps(part, inner)
    else:
        yield step


def _lengthens(normalizer: dict[str, Any]) -> bool:
    """Whether its text is never shorter than what it was given, but for `_NFC_SHRINKS`."""
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return pattern is not None and len(normalizer["content"]) >= len(pattern.encode())
    return normalizer["type"] in ("NFC", "Prepend")
