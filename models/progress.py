"""How long work tells its caller where it is."""

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""`progress(what, share)`: a short phrase and 0 … 1. A new phrase starts again at 0."""


def silent(what: str, share: float) -> None:
    """Tells nobody."""
