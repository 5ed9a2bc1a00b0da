"""schemathesis against our own OpenAPI document: no answer that it does not tell of, and no failure.

The examples and the corner cases of every route, and a few drawn at random; the model's name is set right
in all but one of ten, so that requests get past the look-up.
"""

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import (
    content_type_conformance,
    ignored_auth,
    not_a_server_error,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from server import KEY, MODEL, URL

BODIES = r"^/v1/(chat/completions|completions|messages|responses)$"
"""Routes whose bodies have so many fields that all corner cases of each take a minute."""
HEADERS = {"Authorization": f"Bearer {KEY}"}
CHECKS = [
    content_type_conformance,
    ignored_auth,
    not_a_server_error,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
]


def loaded(*, corner_cases):
    config = schemathesis.Config.from_dict({"phases": {"coverage": {"enabled": corner_cases}}})
    schema = schemathesis.openapi.from_url(URL + "/schema/openapi.json", config=config)

    @schema.hook
    def map_body(context, body):
        if isinstance(body, dict) and isinstance(body.get("model"), str) and len(str(body)) % 10:
            return {**body, "model": MODEL}
        return body

    return schema


drawn = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@loaded(corner_cases=True).exclude(path_regex=f"^/admin|{BODIES}").parametrize()
@drawn
def test_every_answer_is_documented(case):
    case.call_and_validate(headers=HEADERS, timeout=20, checks=CHECKS)


@loaded(corner_cases=False).include(path_regex=BODIES).parametrize()
@drawn
def test_every_answer_to_a_large_body_is_documented(case):
    case.call_and_validate(headers=HEADERS, timeout=20, checks=CHECKS)
