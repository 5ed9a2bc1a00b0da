"""Text to token ids and back, with the `tokenizers` library alone (no transformers, no model files).

Prompts of a chat template already hold their special tokens as text; plain prompts do not. So nothing is
added while encoding, except the BOS token where the model's own post-processor would put one (`add_bos`).
"""

import zlib
from collections.abc import Sequence

from tokenizers import Tokenizer

from models.errors import ModelCorruptError


class TextTokenizer:
    """A model's tokenizer. Thread-safe, and `encode` frees the interpreter lock while it works."""

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

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised as such."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if add_bos and self._bos_id is not None:
            ids.insert(0, self._bos_id)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `token_ids`; bytes that are no whole character become U+FFFD."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
