"""Modules that the fork server imports once, so that no rank imports them again; imported for its effect only."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import pkgutil
import sys
from importlib import import_module

import pytest  # noqa: F401 # objects that cases send to their worlds may be defined in test files that import it
import torch
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn.parallel

import shardproof.harness.training.pipeline
import shardproof.harness.training.rank_body
import shardproof.harness.worlds.processes.host_process  # noqa: F401
from shardproof.engine.registry import BUILT_IN, EngineNotFoundError, resolve
from shardproof.harness.torch_compat.dispatch import make_operators, random_operators
from shardproof.harness.torch_compat.private_names import optional

optional("torch._dynamo")  # torch.optim and DDP import it on first use, a second each time
for name in BUILT_IN:
    # The ranks that need this engine report the cause; others do without it.
    with contextlib.suppress(EngineNotFoundError):
        resolve(name)
# Objects that cases send to their worlds are defined here; each world would import them again.
for package in map(import_module, ("shardproof.fixtures", "shardproof.harness.cases.scripts")):
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        import_module(module.name)
random_operators()  # looks up every operator, and caches them
make_operators()  # as do worlds that watch operators, each of which would take tens of milliseconds


def _leave() -> None:
    """End the server without unloading its modules, which is slow, and during which some of them report errors."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


atexit.register(_leave)

# torch draws the seed of a new process at random. Ranks that do not seed must start alike in every run, from either
# server, so all start with the state of a new generator.
torch.manual_seed(torch.Generator().initial_seed())
# A fork of a process whose OpenMP pool has run with more threads hangs in its first parallel region.
torch.set_num_threads(1)
# Existing objects are permanent: the collector of a fork need not visit them, and so does not copy their pages.
gc.freeze()
gc.enable()  # the reaper's module, which is imported first, has disabled it
