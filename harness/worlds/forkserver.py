"""The fork server: one warm process per session, of which every host is a fork."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["forkserver_context", "started", "warm_up"]

_KEEPER = "harness.worlds.keeper"
_WARM = "harness.worlds.warm"
_ROOT = Path(__file__).resolve().parents[2]


@cache
def forkserver_context() -> ForkServerContext:
    """Return the context whose processes are forks of a warm server; starts the server on first use.

    The server's environment is set for it alone: one OpenMP thread, because a fork of a process that ran an
    OpenMP region with more threads hangs; and a path on which our own package is found, because the server
    does not take over the parent's.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_KEEPER, _WARM])  # in this order: see [Note: the keeper]
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    wanted = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


def started(function: Callable[..., None], *args: Any) -> ForkServerProcess:
    """Start ``function(*args)`` in a fork of the server.

    The fork does not import the caller's main module, as multiprocessing would have it do: a script may be slow
    to import, or not safe to. So what is sent must come from importable modules.
    """
    process = forkserver_context().Process(target=function, args=args)
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        process.start()
    finally:
        sys.modules["__main__"] = main
    return process


def warm_up() -> None:
    """Wait until the server has done its imports, so that no case is charged for them."""
    process = started(_nothing)
    process.join()
    process.close()


def _nothing() -> None:
    """Be forked, which the server does only after its imports."""
