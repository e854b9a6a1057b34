"""Ends pytest's session with a sentence of our own, for what makes all further cases senseless."""

from __future__ import annotations

from typing import NoReturn

import pytest

__all__ = ["end_session"]


# pytest prints the name of the class before the sentence: "shardproof: ...", for one without a module of its own.
_Ended: type[BaseException] = type("shardproof", (pytest.exit.Exception,), {"__module__": "builtins"})


def end_session(why: str, code: pytest.ExitCode) -> NoReturn:
    """End the session, as `pytest.exit` does."""
    raise _Ended(why, int(code))
