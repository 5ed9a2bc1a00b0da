"""Protects what a client may see: whole characters, no part of a stop string, nothing lost at the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.output_processor import BytesDetokenizer, ChoiceOutput, StopStrings
from workers.protocol import FinishReason, SamplingParams


def answer(pieces: list[bytes], **sampling: object) -> tuple[list[str], FinishReason, object]:
    params = SamplingParams(**{"max_tokens": 100, **sampling})
    choice = ChoiceOutput(params, BytesDetokenizer(tuple(pieces)), frozenset(), params.max_tokens)
    texts: list[str] = []
    for token in range(len(pieces)):
        emission = choice.push(token)
        texts.append(emission.text)
        if emission.finish_reason:
            return texts, emission.finish_reason, emission.stop_reason
    emission = choice.finish()
    return [*texts, emission.text], emission.finish_reason, emission.stop_reason


def test_a_character_made_of_three_tokens_is_sent_once_and_whole() -> None:
    texts, _, _ = answer([b"Crab ", b"\xf0\x9f", b"\xa6", b"\x80"])
    assert texts == ["Crab ", "", "", "\U0001f980", ""]


def test_a_half_character_at_the_end_is_dropped() -> None:
    texts, _, _ = answer([b"ok", b"\xf0\x9f"])
    assert "".join(texts) == "ok"


def test_no_part_of_a_stop_string_leaks() -> None:
    pieces = [b"first ", b"<<", b"EN", b"D>", b">", b" second"]
    assert answer(pieces, stop=("<<END>>",)) == (
        ["first ", "", "", "", ""],
        FinishReason.STOP,
        "<<END>>",
    )


def test_text_that_only_looked_like_a_stop_string_is_let_go() -> None:
    texts, reason, _ = answer([b"a<", b"<E", b"x"], stop=("<<END>>",))
    assert ("".join(texts), reason) == ("a<<Ex", FinishReason.STOP)


def test_the_length_limit_lets_go_what_was_held_back() -> None:
    texts, reason, _ = answer([b"a", b"<<"], stop=("<<END>>",), max_tokens=2)
    assert ("".join(texts), reason) == ("a<<", FinishReason.LENGTH)


def test_the_earliest_stop_string_wins() -> None:
    texts, _, stop = answer([b"one two three"], stop=("three", "two"))
    assert ("".join(texts), stop) == ("one ", "two")


@given(
    text=st.text(alphabet="ab<", max_size=40),
    stop=st.text(alphabet="ab<", min_size=1, max_size=5),
    data=st.data(),
)
def test_any_split_gives_the_text_before_the_stop_string(
    text: str, stop: str, data: st.DataObject
) -> None:
    checker, sent, rest = StopStrings((stop,)), "", text
    while rest and checker.found is None:
        size = data.draw(st.integers(1, len(rest)))
        sent += checker.push(rest[:size])
        rest = rest[size:]
        assert stop not in sent
    if checker.found is None:
        sent += checker.flush()
    assert sent == text.split(stop)[0]


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_a_stop_token_ends_a_choice_only_after_min_tokens(min_tokens: int) -> None:
    params = SamplingParams(max_tokens=9, stop_token_ids=(1,), min_tokens=min_tokens)
    choice = ChoiceOutput(params, BytesDetokenizer((b"a", b"b")), frozenset(), 9)
    emissions = [choice.push(token) for token in (0, 1)]
    assert (emissions[-1].finish_reason is FinishReason.STOP) == (min_tokens == 0)
