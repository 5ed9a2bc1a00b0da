"""The table of claimed requests: how much room is left, and who is let in when."""

import asyncio

import msgspec
import pytest

from workers.claims import Claim, Claims
from workers.protocol import FinishReason, GenerateRequest, OutputDelta, SamplingParams


def claim(name: str, n: int = 1) -> Claim:
    request = GenerateRequest(
        request_id=name, model="m", reply_to="r", prompt_token_ids=[1], n=n,
        sampling=SamplingParams(max_tokens=1),
    )  # fmt: skip
    return Claim(request, [name.encode()])


async def test_each_choice_takes_room_and_a_release_gives_it_back():
    claims = Claims(4)
    claims.add(claim("a", n=3))
    assert claims.num_free == 1
    claims.add(claim("b", n=2))
    assert claims.num_free == 0
    claims.release("a")
    assert (claims.num_free, len(claims)) == (2, 1)


async def test_a_release_of_what_is_not_there_changes_nothing():
    claims = Claims(1)
    assert claims.release("never") is None
    assert claims.num_free == 1


async def test_whoever_waits_for_room_is_let_in_when_there_is_some():
    claims = Claims(1)
    claims.add(claim("a"))
    waiting = asyncio.create_task(claims.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    claims.release("a")
    assert await waiting is True


async def test_closing_lets_a_waiter_go_for_good():
    claims = Claims(1)
    claims.add(claim("a"))
    waiting = asyncio.create_task(claims.wait_for_room())
    claims.close()
    assert await waiting is False
    claims.release("a")
    claims.add(claim("b"))
    assert await claims.wait_for_room() is False


async def test_it_is_empty_once_the_last_claim_is_released():
    claims = Claims(2)
    await claims.wait_until_empty()
    claims.add(claim("a"))
    emptied = asyncio.create_task(claims.wait_until_empty())
    await asyncio.sleep(0)
    assert not emptied.done()
    claims.release("a")
    await emptied


@pytest.mark.parametrize("num_deltas", [0, 1])
async def test_claims_without_output_are_those_no_gateway_heard_of(num_deltas: int):
    claims = Claims(2)
    first = claim("a")
    first.num_deltas = num_deltas
    claims.add(first)
    claims.add(claim("b"))
    names = [each.request.request_id for each in claims.without_output()]
    assert names == (["b"] if num_deltas else ["a", "b"])


def deltas(*choices: int) -> list[OutputDelta]:
    """One token each; the last is the end of its choice."""
    found = [
        OutputDelta(request_id="a", seq=seq, choice=choice, text=f"{seq} ", num_tokens=1)
        for seq, choice in enumerate(choices)
    ]
    found[-1] = msgspec.structs.replace(found[-1], finish_reason=FinishReason.STOP)
    return found


async def test_what_is_read_at_its_end_is_told_at_its_end():
    whole = claim("a", n=2)
    whole.request = msgspec.structs.replace(whole.request, whole=True)
    told = [whole.to_publish(delta) for delta in deltas(0, 0, 1, 0, 1, 0)]
    assert [delta is None for delta in told] == [False, True, True, True, True, False]
    rest = whole.to_publish(deltas(1)[0])
    sent = [delta for delta in [*told, rest] if delta is not None]
    assert [(delta.seq, delta.choice, delta.text, delta.num_tokens) for delta in sent] == [
        (0, 0, "0 ", 1),
        (1, 0, "1 3 5 ", 3),
        (2, 1, "2 4 0 ", 3),
    ]
    assert [delta.finish_reason for delta in sent] == [None, FinishReason.STOP, FinishReason.STOP]
    assert whole.num_deltas == 3


async def test_deltas_around_a_boundary_tell_what_they_are_made_of():
    whole = claim("a")
    whole.request = msgspec.structs.replace(whole.request, whole=True, boundary="2 3")
    told = [whole.to_publish(delta) for delta in deltas(0, 0, 0, 0, 0)]
    assert [delta and delta.pieces for delta in told] == [(), None, None, None, ((2, 1),) * 4]
    whole.request = msgspec.structs.replace(whole.request, boundary="x")
    assert [delta.pieces for delta in map(whole.to_publish, deltas(0)) if delta] == [()]
    cut = msgspec.structs.replace(deltas(0)[0], finish_reason=FinishReason.LENGTH)
    assert [delta.pieces for delta in map(whole.to_publish, [cut]) if delta] == [((2, 1),)]


async def test_a_stream_is_told_token_by_token():
    streamed = claim("a")
    assert [streamed.to_publish(delta) for delta in deltas(0, 0, 0)] == deltas(0, 0, 0)
