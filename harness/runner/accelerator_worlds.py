"""The worlds that this machine's accelerator allows, and the best of them, which the command line calls ``gpu``.

Backends such as nccl refuse two ranks on one device. So where a machine has one device, ranks are threads of one
process, each with a stream of its own, and exchange data in the device's memory.
"""

from __future__ import annotations

from shardproof.harness.errors import UsageError
from shardproof.harness.worlds.spec import WorldKind, WorldSpec

__all__ = ["BEST", "accelerator_worlds", "parse_world"]

BEST = "gpu"
_MOST_RANKS = 4  # two replicas of two shards; more show nothing else in the bundled cases


def accelerator_worlds(deadline_s: float = 60.0) -> tuple[WorldSpec, ...]:
    """Return the worlds for this machine's accelerator, the best one first; none without an accelerator."""
    import torch  # here, because other worlds are parsed without it

    from shardproof.harness.torch_compat.accelerators import num_devices

    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return ()
    size = min(num_devices(found.type), _MOST_RANKS)
    processes = WorldSpec(kind=WorldKind.PROCESSES, size=size, device=found.type, deadline_s=deadline_s)
    threads = WorldSpec(kind=WorldKind.THREADS, size=2, device=found.type, deadline_s=deadline_s)
    return (processes, threads) if size > 1 else (threads, processes)


def parse_world(text: str, *, deadline_s: float = 60.0) -> WorldSpec:
    """Parse what `WorldSpec.parse` does, and ``gpu``; raises UsageError for it where there is no accelerator."""
    if text != BEST:
        return WorldSpec.parse(text, deadline_s=deadline_s)
    worlds = accelerator_worlds(deadline_s)
    if not worlds:
        raise UsageError(
            f"--world {BEST}",
            expected="an accelerator that torch finds on this machine",
            got="none",
            hint="`shardproof doctor`, or --world threads:2, which needs none",
        )
    return worlds[0]
