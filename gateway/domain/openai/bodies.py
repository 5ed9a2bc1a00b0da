"""What is asked of every body before it is validated: that this cannot take long.

To validate 4 MiB of text takes a hundredth of a second, but of empty objects many seconds, in one piece:
all other requests would wait. So the number of values is bounded, and larger bodies are looked at in a thread.
"""

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from gateway.errors import BadRequestError

MAX_VALUES = 131_072
"""Items of all lists and objects of a body together; a prompt of so many token ids fits."""
MAX_MEMBERS = 65_536
"""Fields, lists and objects together: each costs ten times what a number costs."""
INLINE_BYTES = 64 * 1024
"""Longer bodies are checked, validated and converted in a thread."""
P = ParamSpec("P")
R = TypeVar("R")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NO_NUMBER = re.compile(rb"NaN|Infinity")


async def check_body(body: bytes) -> None:
    """Raises `BadRequestError` if the body has too many values."""
    if _is_small(*_counts(body, 0, len(body))):
        return  # nor can it have them outside strings
    if len(body) > INLINE_BYTES:
        await asyncio.to_thread(_check_size, body)
    else:
        _check_size(body)


async def aside(size: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What `work` gives; in a thread if it is about that many bytes of a body, so that others go on meanwhile."""
    if size > INLINE_BYTES:
        return await asyncio.to_thread(work, *args, **kwargs)
    return work(*args, **kwargs)


def check_numbers(body: bytes) -> None:
    """Raises `BadRequestError` for NaN and Infinity, which JSON has not; fields of our own are checked before."""
    if b"NaN" not in body and b"Infinity" not in body:
        return  # five times as fast as the expression, which nothing else can run beside
    if any(_NO_NUMBER.search(body, start, end) for start, end in _between_strings(body)):
        raise BadRequestError(
            "The body must be a JSON object: NaN and Infinity are no JSON numbers."
        )


def _check_size(body: bytes) -> None:
    """A loop and no single expression, so that other threads get their turn."""
    num_values = num_members = 0
    for start, end in _between_strings(body):
        values, members = _counts(body, start, end)
        num_values += values
        num_members += members
        if not _is_small(num_values, num_members):
            raise BadRequestError(
                f"The body has more than {MAX_VALUES} values or {MAX_MEMBERS} fields, lists and objects.",
                code="too_many_values",
            )


def _between_strings(body: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    for string in _STRING.finditer(body):
        yield at, string.start()
        at = string.end()
    yield at, len(body)


def _counts(body: bytes, start: int, end: int) -> tuple[int, int]:
    """Values, and fields with lists and objects, as their marks tell."""
    values = body.count(b",", start, end)
    members = sum(body.count(mark, start, end) for mark in (b":", b"[", b"{"))
    return values, members


def _is_small(num_values: int, num_members: int) -> bool:
    return num_values <= MAX_VALUES and num_members <= MAX_MEMBERS
