"""Text becomes the ids the model was trained on, with BOS only where it belongs, and damage is told."""

import zlib

import pytest

from models.errors import ModelCorruptError
from models.tokenizer import TextTokenizer
from workers.engine.scripted import scripted_tokenizer

JSON = scripted_tokenizer().to_str().encode()


@pytest.mark.parametrize("payload", [JSON, zlib.compress(JSON)])
def test_plain_and_compressed(payload: bytes):
    tokenizer = TextTokenizer(payload)
    ids = tokenizer.encode("crab \U0001f980")
    assert len(ids) == 9
    assert tokenizer.decode(ids) == "crab \U0001f980"
    assert tokenizer.vocab_size == 258


def test_special_tokens_in_the_text_are_one_token():
    tokenizer = TextTokenizer(JSON)
    ids = tokenizer.encode("<|im_start|>a")
    assert len(ids) == 2
    assert tokenizer.decode(ids) == "<|im_start|>a"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"


def test_bos_is_added_on_request_only():
    tokenizer = TextTokenizer(JSON, bos_token="<|im_start|>")
    bare = tokenizer.encode("a")
    assert tokenizer.encode("a", add_bos=True) == [*tokenizer.encode("<|im_start|>"), *bare]
    assert TextTokenizer(JSON).encode("a", add_bos=True) == bare


@pytest.mark.parametrize("payload", [b"", b"nonsense", b"{}", zlib.compress(b"{}"), JSON[:-100]])
def test_what_is_no_tokenizer(payload: bytes):
    with pytest.raises(ModelCorruptError, match="tokenizer cannot be read"):
        TextTokenizer(payload)
