"""litellm as a client: its counts of tokens are ours, and its price is that of our counts."""

import litellm
import pytest
from server import BASE_URL, KEY, MODEL, script

NAME = f"openai/{MODEL}"
MESSAGES = [{"role": "user", "content": "What is it?"}]
PRICES = {"input_cost_per_token": 3e-6, "output_cost_per_token": 15e-6}
ASK = {
    "model": NAME,
    "messages": MESSAGES,
    "api_base": BASE_URL,
    "api_key": KEY,
    "max_retries": 0,
    "extra_headers": script("Par", "is"),
}


@pytest.fixture(autouse=True, scope="module")
def prices():
    litellm.telemetry = False
    litellm.register_model({NAME: {**PRICES, "litellm_provider": "openai", "mode": "chat"}})


def cost(usage):
    spent = usage.prompt_tokens * PRICES["input_cost_per_token"]
    return spent + usage.completion_tokens * PRICES["output_cost_per_token"]


def test_counts_and_cost_agree():
    answer = litellm.completion(**ASK)
    assert answer.choices[0].message.content == "Paris"
    assert answer.usage.completion_tokens == 2
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 2
    assert litellm.completion_cost(answer, model=NAME) == pytest.approx(cost(answer.usage))


def test_a_stream_counts_and_costs_the_same():
    whole = litellm.completion(**ASK)
    chunks = list(litellm.completion(**ASK, stream=True, stream_options={"include_usage": True}))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert rebuilt.choices[0].message.content == "Paris"
    assert rebuilt.choices[0].finish_reason == "stop"
    assert rebuilt.usage.prompt_tokens == whole.usage.prompt_tokens
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens
    assert litellm.completion_cost(rebuilt, model=NAME) == pytest.approx(cost(whole.usage))


async def test_async():
    answer = await litellm.acompletion(**ASK)
    assert answer.choices[0].message.content == "Paris"


def test_text_completion():
    ask = {key: value for key, value in ASK.items() if key != "messages"}
    ask["model"] = f"text-completion-openai/{MODEL}"
    assert litellm.text_completion(**ask, prompt="It is").choices[0].text == "Paris"


def test_refusals_become_its_own_errors():
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**ASK, "max_tokens": 10**6})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**ASK, "model": "openai/nope"})
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**ASK, "api_key": "tpg-wrong-wrong-wrong"})
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**{**ASK, "n": 129})
