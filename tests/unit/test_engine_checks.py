"""Protects running requests from one that the device could not compute: it is refused by name on arrival."""

import math

import pytest

from workers.engine.checks import check_sampling
from workers.errors import RequestError
from workers.protocol import GenerateRequest, SamplingParams

VOCAB = 100


def request(prompt: tuple[int, ...] = (0, VOCAB - 1), **sampling: object) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model="m",
        reply_to="x",
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(max_tokens=5, **sampling),
    )


def test_what_a_gateway_lets_through_is_taken():
    check_sampling(request(), VOCAB)
    check_sampling(
        request(
            logit_bias=((0, -100.0), (VOCAB - 1, 100.0)),
            stop_token_ids=(0, VOCAB - 1),
            temperature=2.0,
            repetition_penalty=0.01,
            frequency_penalty=-2.0,
            top_k=2**31 - 1,
        ),
        VOCAB,
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logit_bias": ((VOCAB, 1.0),)}, "logit_bias has the token 100"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias has the token -1"),
        ({"logit_bias": ((5, math.nan),)}, "logit_bias"),
        ({"stop_token_ids": (3, VOCAB)}, "stop_token_ids has the token 100"),
        ({"prompt": (5, VOCAB)}, "The prompt has the token 100"),
        ({"prompt": (-1,)}, "The prompt has the token -1"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": math.inf}, "top_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"frequency_penalty": math.inf}, "frequency_penalty"),
        ({"presence_penalty": math.nan}, "presence_penalty"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_k": -1}, "top_k"),
    ],
    ids=str,
)
def test_what_no_device_could_compute_is_refused_by_name(fields: dict[str, object], words: str):
    with pytest.raises(RequestError, match=words) as caught:
        check_sampling(request(**fields), VOCAB)
    assert str(caught.value).endswith(".")
