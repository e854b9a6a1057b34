"""The engine's DistributedDataParallel on one rank, for the bodies of cases."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from shardproof import Capability, InterfaceBench
from shardproof.suites.expect import Claims, expects_of


class Bench(Claims):
    """One rank with an engine's own class; ``api`` is the engine's ``DistributedDataParallel``."""

    def __init__(self, bench: InterfaceBench) -> None:
        super().__init__(bench)
        self.api = bench.prepared.data_parallel()

    # Any: engines have no common base class, and cases test the options.
    def wrap(self, module: nn.Module, **options: Any) -> Any:
        """Wrap a module on the rank's device."""
        return self.api(module.to(self.device), **options)


expects = partial(expects_of, Capability.DATA_PARALLEL, Bench)
