"""llm-comply's checks of each surface against the published specifications that it brings with it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from server import BASE_URL, KEY, MODEL

PROGRAM = str(Path(sys.executable).with_name("llm-comply"))
CALL = {"name": "get_weather", "arguments": {"location": "San Francisco"}}


def failures(form, tests, answer):
    """The program splits headers at commas, so the answer is one token in hexadecimal."""
    header = f"x-model-script-hex:{answer.encode().hex()}"
    ran = subprocess.run(
        [PROGRAM, "--format", form, "-u", BASE_URL, "-k", KEY, "-m", MODEL, "--json"]
        + ["-f", ",".join(tests), "-H", header],
        capture_output=True,
        text=True,
        timeout=120,
    )
    results = json.loads(ran.stdout)["results"]
    assert len(results) == len(tests), ran.stdout
    return [result for result in results if result["status"] != "passed"]


@pytest.mark.parametrize(
    ("form", "prefix"),
    [("openai-chat", "chat-"), ("open-responses", ""), ("anthropic", "anth-")],
)
def test_texts(form, prefix):
    names = ["basic-response", "system-prompt", "multi-turn", "streaming-response"]
    names += ["streaming-usage", "error-handling"]
    assert failures(form, [prefix + name for name in names], "It is Paris.") == []


@pytest.mark.parametrize(
    ("form", "test"),
    [
        ("openai-chat", "chat-tool-calling"),
        ("open-responses", "tool-calling"),
        ("anthropic", "anth-tool-calling"),
    ],
)
def test_tools(form, test):
    call = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
    assert failures(form, [test], call) == []
