"""The table of claimed requests: how much room is left, and who is let in when."""

import asyncio

import pytest

from workers.claims import Claim, Claims
from workers.protocol import GenerateRequest, SamplingParams


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
