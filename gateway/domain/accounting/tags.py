"""The client's own word for what a request is spent on: a line of the cost report."""

import re
from collections.abc import Mapping

from litestar.openapi.spec import OpenAPIType, Parameter, Schema

from gateway.errors import BadRequestError

HEADER = "x-tpugate-tag"
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,63}")
"""No more than a spreadsheet, a shell and a URL take as it stands; the first character makes no formula of it."""
PARAMETER = Parameter(
    name="X-Tpugate-Tag",
    param_in="header",
    description="What the request is spent on: a line of the cost report",
    schema=Schema(type=OpenAPIType.STRING, pattern=f"^{_TAG.pattern}$"),
)
"""For the OpenAPI document."""


def tag_of(headers: Mapping[str, str]) -> str:
    """Empty if there is none. A header, as it goes with every surface alike. Raises `BadRequestError`."""
    tag = headers.get(HEADER)
    if tag is None:
        return ""
    if _TAG.fullmatch(tag) is None:
        raise BadRequestError(
            f"Invalid header '{HEADER}': 1 to 64 letters, digits and . _ : / @ + - are wanted, "
            "the first a letter or a digit.",
            param=HEADER,
            code="invalid_value",
        )
    return tag
