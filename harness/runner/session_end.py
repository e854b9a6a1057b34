"""Ends pytest's session: its exit code, and a sentence of our own for what makes all further cases senseless."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

__all__ = ["end_session", "exit_code"]


def exit_code(so_far: int, *, is_red: bool, is_misused: bool, is_idle: bool | None) -> int:
    """Return a session's exit code.

    ``is_red``: it fails although each case did as expected. ``is_misused``: a user named an engine that is not there.
    ``is_idle``: no case judged anything; None if the run has no records.
    """
    code = pytest.ExitCode.TESTS_FAILED if is_red and so_far == pytest.ExitCode.OK else so_far
    if is_misused:
        return pytest.ExitCode.USAGE_ERROR
    if is_idle is not None and code in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}:
        return pytest.ExitCode.NO_TESTS_COLLECTED if is_idle else pytest.ExitCode.OK
    return code


# pytest prints the name of the class before the sentence: "shardproof: ...", for one without a module of its own.
_Ended: type[BaseException] = type("shardproof", (pytest.exit.Exception,), {"__module__": "builtins"})


def end_session(why: str, code: pytest.ExitCode) -> NoReturn:
    """End the session, as `pytest.exit` does."""
    raise _Ended(why, int(code))


_FROM_WORKER = "shardproof.refusal"


class Refusals:
    """A pytest plugin object that ends the session after a worker refused its marks."""

    # Any: xdist's node, whose package need not be there.
    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Refuse in this process what a worker refused."""
        refused = getattr(node, "workeroutput", {}).get(_FROM_WORKER)
        if refused is not None:
            raise pytest.UsageError(refused)


def refuse(config: pytest.Config, items: list[pytest.Item], error: Exception) -> None:
    """End the session for ``error``, with nothing collected; otherwise an empty run would be kept.

    A worker passes the error on, because xdist would report its exception as an internal error.
    """
    items.clear()
    if not hasattr(config, "workeroutput"):
        raise pytest.UsageError(str(error)) from error
    config.workeroutput[_FROM_WORKER] = str(error)
