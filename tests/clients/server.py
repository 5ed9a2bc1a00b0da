"""Where the suites of this folder find the gateway, and how they say what the scripted model answers."""

import json
import os

URL = os.environ["TPUGATE_TEST_URL"]
KEY = os.environ["TPUGATE_TEST_KEY"]
MODEL = "m-small"
BASE_URL = URL + "/v1"


def script(*tokens: str) -> dict[str, str]:
    """Headers: the answer, token by token."""
    return {"x-model-script": json.dumps(tokens)}


def call_script(name: str, arguments: dict[str, object]) -> dict[str, str]:
    """Headers: the answer is one call of a tool, in the format of the scripted model."""
    call = json.dumps({"name": name, "arguments": arguments})
    return script("<tool_call>", "\n", *call, "\n", "</tool_call>")
