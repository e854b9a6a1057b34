"""Having something done before or after the calls of a method, of one object alone; no engine here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["after", "before"]

# Any, throughout: the holders are insides of engines, which have no public types.


def after(holder: Any, method: str, sin: Callable[[Any], None]) -> None:
    """Have ``sin`` done to the holder after each call of its method."""
    honest = getattr(holder, method)

    def both(*args: Any, **kwargs: Any) -> Any:
        result = honest(*args, **kwargs)
        sin(holder)
        return result

    setattr(holder, method, both)


def before(holder: Any, method: str, sin: Callable[[Any], None]) -> None:
    """Have ``sin`` done to the holder before each call of its method."""
    honest = getattr(holder, method)

    def both(*args: Any, **kwargs: Any) -> Any:
        sin(holder)
        return honest(*args, **kwargs)

    setattr(holder, method, both)
