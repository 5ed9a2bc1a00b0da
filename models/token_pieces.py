"""What single tokens stand for, as exact bytes.

A tokenizer's own `decode` gives text, in which a part of a character is lost as U+FFFD, and drops the
space in front of a first word. Three kinds of vocabularies are told apart by their decoder: byte-level
ones write every byte as a character of its own; SentencePiece's write a space as U+2581 and bytes without
a piece as `<0xE2>`; for the rest it is the text that the token adds to another one.
"""

import json
import re
from typing import Any

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's table: printable characters stand for themselves, the other bytes for those from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


_BYTES = _bytes_of_characters()


class TokenPieces(dict[int, bytes]):
    """Bytes by token id, worked out when first asked for. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._tokenizer = tokenizer
        self._added = {i: token.content for i, token in added.items()}
        self._decoders = _decoders(json.loads(tokenizer.to_str())["decoder"])

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._piece(token_id)
        return piece

    def _piece(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if "ByteLevel" in self._decoders and all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        if "ByteFallback" in self._decoders and (byte := _BYTE.fullmatch(token)):
            return bytes.fromhex(byte[1])
        if _SPACE in token:
            return token.replace(_SPACE, " ").encode()
        return self._added_text(token_id)

    def _added_text(self, token_id: int) -> bytes:
        once = self._tokenizer.decode([token_id], skip_special_tokens=False)
        twice = self._tokenizer.decode([token_id, token_id], skip_special_tokens=False)
        return str(twice[len(once) :] if twice.startswith(once) else once).encode()


def _decoders(layout: dict[str, Any] | None) -> frozenset[str]:
    """Types of all steps that a decoder is made of."""
    if layout is None:
        return frozenset()
    if layout["type"] == "Sequence":
        return frozenset().union(*(_decoders(part) for part in layout["decoders"]))
    return frozenset({layout["type"]})
