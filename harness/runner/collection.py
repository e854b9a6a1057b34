"""Wrong marks: ends a session that found one while collecting, in this process or in a worker of xdist."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof.harness.errors import UsageError

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


def refuse(config: pytest.Config, items: list[pytest.Item], error: UsageError) -> None:
    """End the session for ``error``, with nothing collected; otherwise an empty run would be kept.

    A worker passes the error on, because xdist would report its exception as an internal error.
    """
    items.clear()
    if not hasattr(config, "workeroutput"):
        raise pytest.UsageError(str(error)) from error
    config.workeroutput[_FROM_WORKER] = str(error)
