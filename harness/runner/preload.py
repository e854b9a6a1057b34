"""What the fork server imports once, so that no rank pays for it again; imported for its effect only."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import pkgutil
import sys
from importlib import import_module

import pytest  # noqa: F401  # what cases send to their worlds may stand beside their tests, in files that import it
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
    # The ranks that need this engine say why; others do without.
    with contextlib.suppress(EngineNotFoundError):
        resolve(name)
# What cases send to their worlds comes from these; each world would else import them anew.
for package in map(import_module, ("shardproof.fixtures", "shardproof.harness.cases.scripts")):
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        import_module(module.name)
random_operators()  # looks at every operator that there is, and remembers
make_operators()  # as do worlds that watch operators, of which each would take tens of milliseconds


def _leave() -> None:
    """End the server without taking its modules apart, which takes long and which some of them complain about."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


atexit.register(_leave)

# torch draws the seed of a new process at random. Ranks that seed nothing shall start alike in every run, from either
# server, so all start where a new generator does.
torch.manual_seed(torch.Generator().initial_seed())
# A fork of a process whose OpenMP pool has run with more threads hangs in its first parallel region.
torch.set_num_threads(1)
# What is here stays: the collector of a fork need not look at it again, and so does not copy its pages.
gc.freeze()
gc.enable()  # the reaper's module, which is imported first, has disabled it
