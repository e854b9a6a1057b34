"""Two engines with one interface, name for name: torch's composable FSDP2 and the reference engine."""

from __future__ import annotations

import pytest

from shardproof.engine.adapters.reference import REFERENCE_API
from shardproof.engine.adapters.torch_fsdp2 import FSDP2_API

BY_NAME = {"reference": REFERENCE_API, "torch": FSDP2_API}
each_api = pytest.mark.parametrize("api", sorted(BY_NAME))
