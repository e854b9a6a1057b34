"""Preloaded modules, which worlds and oracles fork, change nothing of torch: built-in engines patch nothing."""

from __future__ import annotations

from tests.shell import python

# All objects that a training could meet, by identity, before and after the imports; new names do not count.
_SCRIPT = """
import sys
import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor
import torch.optim

def seen():
    owners = {name: m for name, m in sys.modules.items() if name.partition(".")[0] == "torch" and m is not None}
    for name, module in list(owners.items()):
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                owners[f"{name}.{key}"] = value
    return {
        f"{name}:{key}": id(value)
        for name, owner in owners.items()
        for key, value in list(vars(owner).items())
        if callable(value)
    }

before = seen()
import shardproof.harness.runner.preload
after = seen()
assert len(before) > 10_000, len(before)
assert "shardproof.engine.reference" in sys.modules
print("changed", sorted(key for key, value in before.items() if after.get(key) != value))
"""


def test_preloaded_modules_change_nothing_of_torch() -> None:
    done = python("-c", _SCRIPT)
    assert done.stdout.strip() == "changed []", done.stdout[-2000:] + done.stderr[-2000:]
