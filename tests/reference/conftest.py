"""pytest glue: cases that drive torch's own engine through the same front door are marked ``twin``.

They show that a law of these tests is FSDP2's too, and what torch gets wrong; `make twins` runs them.
"""

from __future__ import annotations

import pytest

from tests.reference.front_doors import TORCH


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark by the parameter that names the door."""
    for item in items:
        parameters = getattr(item, "callspec", None)
        if parameters is not None and parameters.params.get("door") == TORCH.name:
            item.add_marker(pytest.mark.twin)
