"""The worlds that this machine's accelerator allows, and the best of them, which the command line calls ``gpu``.

Backends such as nccl refuse two ranks on one device. So where a machine has one device, ranks are threads of one
process, each with a stream of its own, and exchange data in the device's memory.
"""

from __future__ import annotations

from shardproof.harness.errors import UsageError
from shardproof.harness.worlds.spec import WorldKind, WorldSpec

BEST = "gpu"
_MOST_RANKS = 4  # two replicas of two shards; more show nothing else in the bundled cases


def accelerator_worlds() -> tuple[WorldSpec, ...]:
    """Return the worlds for this machine's accelerator, the best one first; none without an accelerator."""
    # Here, because other worlds are named without torch.
    from shardproof.harness.torch_compat.accelerators import accelerator, num_devices

    found = accelerator()
    if found is None:
        return ()
    size = min(num_devices(found.type), _MOST_RANKS)
    processes = WorldSpec(kind=WorldKind.PROCESSES, size=size, device=found.type)
    threads = WorldSpec(kind=WorldKind.THREADS, size=2, device=found.type)
    return (processes, threads) if size > 1 else (threads, processes)


def concrete(world: str) -> str:
    """Return the best world for ``gpu``, and any other text as it is; raises UsageError without an accelerator."""
    if world != BEST:
        return world
    worlds = accelerator_worlds()
    if not worlds:
        raise UsageError(
            f"--world {BEST}",
            expected="an accelerator that torch finds on this machine",
            got="none",
            hint="`shardproof doctor`, or --world threads:2, which needs none",
        )
    return str(worlds[0])
