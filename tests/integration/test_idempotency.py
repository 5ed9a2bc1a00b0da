"""A request with an `Idempotency-Key` that is sent again is answered once, billed once, and not run again."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.gateway import (
    GatewayUnderTest,
    LeavingClient,
    assert_error,
    chat_body,
    script_header,
)
from tests.fakes.processes import WorkerUnderTest
from tests.fakes.valkey import OwnValkey
from tests.fakes.wire import wait_until
from workers.engine.scripted import FAIL, HANG

URL = "/v1/chat/completions"
Two = tuple[GatewayUnderTest, GatewayUnderTest]


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    """Two of them with a slow worker, accounts and Valkey in common."""
    folder: Path = tmp_path_factory.mktemp("idempotency")
    with (
        OwnValkey() as valkey,
        WorkerUnderTest(valkey.url, "w", folder / "worker.log", step_delay_s="0.02"),
        GatewayUnderTest(valkey.url, folder / "data", idempotency_grace_s="1") as first,
        GatewayUnderTest(valkey.url, folder / "data") as second,
    ):
        first.wait_for_ready()
        second.wait_for_ready()
        yield first, second


def ask(gateway: GatewayUnderTest, name: str, script: Any = None, **body: Any) -> httpx.Response:
    headers = {"idempotency-key": name, **script_header(script)}
    # The same bytes as a `LeavingClient` sends: a repeat is byte by byte the same.
    content = json.dumps(chat_body(**body))
    return gateway.client.post(URL, content=content, headers=headers)


def is_replay(response: httpx.Response) -> bool:
    return response.headers.get("idempotent-replayed") == "true"


def num_tokens(gateways: Two) -> float:
    return sum(gateway.metric("vllm:generation_tokens_total") for gateway in gateways)


@pytest.mark.parametrize("stream", [False, True])
def test_a_repeat_gets_the_first_answer(gateways: Two, stream: bool):
    before = num_tokens(gateways)
    first = ask(gateways[0], f"again-{stream}", stream=stream)
    assert first.status_code == 200
    assert not is_replay(first)
    for gateway in gateways:
        again = ask(gateway, f"again-{stream}", stream=stream)
        assert again.content == first.content
        assert is_replay(again)
        assert again.headers["content-type"] == first.headers["content-type"]
        assert again.headers["x-request-id"] != first.headers["x-request-id"]
    assert num_tokens(gateways) == before + 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_repeat_joins_the_answer_that_is_being_made(gateways: Two, stream: bool):
    before = num_tokens(gateways)
    script = [f"{number} " for number in range(30)]
    answers: list[httpx.Response] = []

    def run(gateway: GatewayUnderTest) -> None:
        answers.append(ask(gateway, f"join-{stream}", script, stream=stream))

    threads = [threading.Thread(target=run, args=[gateway]) for gateway in (*gateways, gateways[0])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({answer.content for answer in answers}) == 1
    assert answers[0].status_code == 200
    assert sorted(is_replay(answer) for answer in answers) == [False, True, True]
    assert num_tokens(gateways) == before + 30


def test_a_client_whose_connection_broke_comes_back(gateways: Two):
    before = num_tokens(gateways)
    script = [b"%d " % number for number in range(30)]
    broken = LeavingClient(
        gateways[0], script=script, headers={"idempotency-key": "b"}, stream=True
    )
    broken.read_until(b"2 ")
    broken.leave()
    again = ask(gateways[0], "b", script, stream=True)
    assert is_replay(again)
    assert again.text.endswith("[DONE]\n\n")
    assert num_tokens(gateways) == before + 30


def test_a_client_that_stays_away_is_given_up(gateways: Two):
    gone = LeavingClient(
        gateways[0], script=[b"a ", HANG], headers={"idempotency-key": "gone"}, stream=True
    )
    gone.read_until(b"a ")
    gone.leave()
    wait_until(lambda: gateways[0].metric("tpugate_gateway_requests_active") == 0, "it is aborted")
    assert not is_replay(ask(gateways[0], "gone", ["b"], stream=True))


def test_another_body_under_the_same_name(gateways: Two):
    assert ask(gateways[0], "other").status_code == 200
    for body in ({"stream": True}, {"max_tokens": 1}):
        refused = ask(gateways[1], "other", **body)
        assert_error(refused, 422, param="idempotency-key", code="idempotency_key_reused")
    body = {"model": "m-small", "prompt": "a"}
    elsewhere = gateways[0].client.post(
        "/v1/completions", json=body, headers={"idempotency-key": "other"}
    )
    assert_error(elsewhere, 422)


def test_names_of_another_api_key_are_other_names(gateways: Two):
    made = gateways[0].client.post("/admin/api/keys", json={"name": "o", "role": "member"}).json()
    assert ask(gateways[0], "mine").status_code == 200
    headers = {"authorization": f"Bearer {made['key']}", "idempotency-key": "mine"}
    theirs = gateways[0].client.post(URL, json=chat_body(max_tokens=1), headers=headers)
    assert theirs.status_code == 200
    assert not is_replay(theirs)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_is_not_kept(gateways: Two, stream: bool):
    failed = ask(gateways[0], f"fail-{stream}", [b"a", FAIL], stream=stream)
    assert failed.status_code == (200 if stream else 500)
    assert "engine_error" in failed.text
    assert_error(ask(gateways[0], f"bad-{stream}", n=0, stream=stream), 400, param="n")
    for name in ("fail", "bad"):
        again = ask(gateways[1], f"{name}-{stream}", ["b"], stream=stream)
        assert again.status_code == 200
        assert not is_replay(again)


@pytest.mark.parametrize("name", ["", "a b", "x" * 256])
def test_a_name_that_is_none(gateways: Two, name: str):
    assert_error(ask(gateways[0], name), 400, param="idempotency-key")


def test_other_surfaces_replay_too(gateways: Two):
    headers = {"idempotency-key": "surfaces"}
    message = {"role": "user", "content": "hi"}
    for number, (path, body) in enumerate(
        {
            "/v1/responses": {"model": "m-small", "input": "hi"},
            "/v1/messages": {"model": "m-small", "max_tokens": 5, "messages": [message]},
            "/v1/completions": {"model": "m-small", "prompt": "hi"},
        }.items()
    ):
        headers = {"idempotency-key": f"surface-{number}"}
        first, again = (gateways[0].client.post(path, json=body, headers=headers) for _ in "ab")
        assert first.status_code == 200, first.text
        assert first.content == again.content
        assert is_replay(again)


def test_a_name_of_a_gateway_that_died_can_be_used(tmp_path: Path):
    with (
        OwnValkey() as valkey,
        WorkerUnderTest(valkey.url, "w", tmp_path / "worker.log"),
        GatewayUnderTest(valkey.url, tmp_path / "data") as first,
        GatewayUnderTest(valkey.url, tmp_path / "data") as second,
    ):
        second.wait_for_ready()
        first.wait_for_ready()
        script = [b"a ", HANG]
        client = LeavingClient(first, script=script, headers={"idempotency-key": "d"})
        wait_until(lambda: first.metric("tpugate_gateway_requests_active") == 1, "it runs")
        first.kill()
        client.leave()
        assert ask(second, "d", ["b"]).json()["choices"][0]["message"]["content"] == "b"
