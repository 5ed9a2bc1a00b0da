"""Text becomes the ids the model was trained on, with BOS only where it belongs, and damage is told."""

import sys
import threading
import zlib
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers import normalizers as norm
from tokenizers.models import BPE, WordLevel

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


def test_other_threads_run_while_a_text_is_encoded():
    tokenizer, text = TextTokenizer(JSON), "x y " * 200_000
    started, done = threading.Event(), threading.Event()
    ids: list[int] = []

    def encode() -> None:
        started.set()
        ids.extend(tokenizer.encode(text))
        done.set()

    num_turns = 0
    interval_s = sys.getswitchinterval()
    # So long that a thread runs on until it gives the interpreter lock up by itself.
    sys.setswitchinterval(60)
    try:
        thread = threading.Thread(target=encode)
        thread.start()
        started.wait()
        while not done.wait(0.001):
            num_turns += 1
        thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert len(ids) == 800_000
    assert num_turns > 0


def changed(change: Any) -> TextTokenizer:
    tokenizer = scripted_tokenizer()
    change(tokenizer)
    return TextTokenizer(tokenizer.to_str().encode())


def test_a_text_that_cannot_fit_is_known_by_its_length():
    tokenizer = TextTokenizer(JSON)
    longest = len("<|im_start|>")
    assert tokenizer.may_fit("<|im_start|>" * 10, 10)
    assert len(tokenizer.encode("<|im_start|>" * 10)) == 10
    assert tokenizer.may_fit("é" * (longest // 2) * 10, 10)
    assert not tokenizer.may_fit("é" * (longest // 2) * 10 + "x", 10)


def test_composed_characters_are_allowed_for():
    tokenizer = changed(lambda t: setattr(t, "normalizer", norm.NFC()))
    text = "\u212a" * 120
    assert len(tokenizer.encode(text)) == 120
    assert tokenizer.may_fit(text, 120)
    assert not tokenizer.may_fit("x" * 4801, 100)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t, "normalizer", norm.Strip()),
        lambda t: setattr(t, "normalizer", norm.Replace("  ", "")),
        lambda t: t.add_tokens([AddedToken("<x>", lstrip=True)]),
        lambda t: setattr(t, "model", WordLevel({"[UNK]": 0}, "[UNK]")),
    ],
)
def test_no_bound_where_a_token_may_swallow_any_text(change: Any):
    assert changed(change).may_fit("x" * 100_000, 1)


def byte_fallback_tokenizer() -> Tokenizer:
    """SentencePiece's layout, as Llama 2, Mistral and Gemma have it."""
    pieces = ["<unk>", "<s>", "▁", "▁tide", "s", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer = Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


TEXTS = ["tide", " tide  s", "crab \U0001f980 é", "<|im_start|>a\n", "\x00\x7f\u2581Ġ"]


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_are_those_of_the_text(text: str):
    tokenizer = TextTokenizer(JSON)
    pieces = [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text)]
    assert b"".join(pieces) == text.encode()


def test_the_bytes_of_sentencepiece_tokens():
    tokenizer = TextTokenizer(byte_fallback_tokenizer().to_str().encode())
    crab = [5 + byte for byte in "\U0001f980".encode()]
    pieces = [tokenizer.token_bytes(token_id) for token_id in [1, 3, 4, 2, *crab, 5 + 0x0A]]
    assert pieces == [b"<s>", b" tide", b"s", b" ", b"\xf0", b"\x9f", b"\xa6", b"\x80", b"\n"]
    assert tokenizer.is_special(1)
    assert not tokenizer.is_special(3)


def test_an_id_without_a_token_has_no_bytes():
    assert TextTokenizer(JSON).token_bytes(258) == b""
