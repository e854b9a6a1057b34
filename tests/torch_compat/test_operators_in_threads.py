"""Threads may call an operator together for the first time under dispatch modes, which crashes plain torch."""

from __future__ import annotations

from tests.shell import python

PROGRAM = """
import sys, threading, torch
from torch.utils._python_dispatch import TorchDispatchMode
from shardproof.harness.torch_compat.dispatch import make_operators

names = [f"first_call_{i}" for i in range(400)]
library = torch.library.Library("threads_of_a_test", "FRAGMENT")
for name in names:
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x + 1, "CPU")
make_operators()

class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

def call_all():
    with Mode():
        for name in names:
            barrier.wait()
            for _ in range(3):
                getattr(torch.ops.threads_of_a_test, name)(torch.ones(3))

sys.setswitchinterval(1e-6)
barrier = threading.Barrier(4)
threads = [threading.Thread(target=call_all) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_operators_are_made_before_threads_ask_for_them() -> None:
    finished = python("-c", PROGRAM)
    assert finished.returncode == 0, finished.stderr
