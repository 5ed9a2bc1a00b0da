"""OpenAI chat users, streamed and not, with the two times that Locust does not know.

A streamed answer reports, beside the request itself, two more rows (tables, CSV files, web page):

    TTFT         from sending the request to the first piece of text
    inter-token  from one piece of text to the next, an entry a gap

The run ends by itself, and its exit code is 1 if a request failed or none was answered.
"""

import json
import random
import time
from collections.abc import Iterator
from typing import Any

from locust import HttpUser, LoadTestShape, constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.clients import ResponseContextManager
from locust.env import Environment
from requests import RequestException

CHAT_PATH = "/v1/chat/completions"
DEFAULT_USERS = 8
DEFAULT_SPAWN_RATE = 4.0
DEFAULT_RUN_TIME_S = 30
FINISH_TIMEOUT_S = 60
"""How long users may finish the request they wait for once the run is over."""
TOPICS = ("rivers", "stars", "bread", "chess", "trains", "bees", "glass", "volcanoes", "clocks")


class AnswerError(Exception):
    """An answer with status 200 that is not what was asked for."""


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    """Options of these users, each also an environment variable."""
    parser.add_argument("--model", default="smollm2-135m-instruct", env_var="LOADTEST_MODEL")
    parser.add_argument(
        "--api-key", default="", env_var="LOADTEST_API_KEY", is_secret=True, help="A bearer token."
    )
    parser.add_argument("--max-tokens", type=int, default=64, env_var="LOADTEST_MAX_TOKENS")


@events.init.add_listener
def let_users_finish(environment: Environment, **_: object) -> None:
    environment.stop_timeout = environment.stop_timeout or FINISH_TIMEOUT_S


@events.quitting.add_listener
def fail_without_answers(environment: Environment, **_: object) -> None:
    """Locust itself ends with 1 on failures; a run that asked nothing has proved nothing either."""
    if environment.stats.total.num_requests == 0:
        environment.process_exit_code = 1


class RampAndHold(LoadTestShape):
    """`--users` at `--spawn-rate`, over after `--run-time`: like Locust's own, with an end by default."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None
        options = self.runner.environment.parsed_options
        assert options is not None
        if self.get_run_time() > (options.run_time or DEFAULT_RUN_TIME_S):
            return None
        return options.num_users or DEFAULT_USERS, options.spawn_rate or DEFAULT_SPAWN_RATE


class ChatUser(HttpUser):
    """Asks, waits for the whole answer, asks again: two thirds of the time streamed."""

    wait_time = constant(0)
    host = "http://127.0.0.1:8000"

    @task(2)
    def streamed(self) -> None:
        started = time.perf_counter()
        with self._post("chat, streamed", stream=True) as response:
            if response.status_code != 200:
                response.failure(_refusal(response))
                return
            try:
                arrivals = self._arrivals(response)
            except (AnswerError, RequestException) as error:
                response.failure(str(error))
                return
            # Locust stops its clock at the headers when the body is streamed.
            response.request_meta["response_time"] = (arrivals[-1] - started) * 1e3
            self._report("TTFT", arrivals[0] - started)
            for earlier, later in zip(arrivals, arrivals[1:], strict=False):
                self._report("inter-token", later - earlier)

    @task(1)
    def whole(self) -> None:
        with self._post("chat", stream=False) as response:
            if response.status_code != 200:
                response.failure(_refusal(response))
            elif not response.json()["choices"][0]["message"]["content"]:
                response.failure("an answer without text")

    def _post(self, name: str, *, stream: bool) -> ResponseContextManager:
        options = self.environment.parsed_options
        assert options is not None
        ask = f"Write about {random.choice(TOPICS)}, part {random.randrange(10**6)}."
        body = {
            "model": options.model,
            "messages": [{"role": "user", "content": ask}],
            "max_tokens": options.max_tokens,
            "stream": stream,
        }
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        return self.client.post(
            CHAT_PATH, name=name, json=body, headers=headers, stream=stream, catch_response=True
        )

    def _arrivals(self, response: ResponseContextManager) -> list[float]:
        """When each piece of text came, by `time.perf_counter`. Raises `AnswerError`."""
        arrivals = []
        finished = False
        for event in _events(response):
            if "error" in event:
                raise AnswerError(f"error within the stream: {event['error']}")
            for choice in event["choices"]:
                finished = finished or bool(choice["finish_reason"])
                if choice["delta"].get("content"):
                    arrivals.append(time.perf_counter())
        if not finished:
            raise AnswerError("the stream ended without a finish reason")
        if not arrivals:
            raise AnswerError("an answer without text")
        return arrivals

    def _report(self, kind: str, seconds: float) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name="chat, streamed",
            response_time=seconds * 1e3,
            response_length=0,
            exception=None,
            context={},
        )


def _refusal(response: ResponseContextManager) -> str:
    if not response.status_code:
        return f"no answer: {type(response.error).__name__}"
    return f"status {response.status_code}: {response.text[:200]}"


def _events(
    response: ResponseContextManager,
) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event, as it arrives."""
    for line in response.iter_lines():
        if line.startswith(b"data:") and not line.endswith(b"[DONE]"):
            yield json.loads(line.removeprefix(b"data:"))
