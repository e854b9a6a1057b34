"""The model of the cases: the one of ``--model``, else a small decoder of ours."""

from __future__ import annotations

import pytest

from shardproof import NamedOptimizer, UsageError, UserModel, known_model
from shardproof.fixtures.optimizers import ADAMW, COARSE_ADAMW, SGD
from shardproof.fixtures.user_model import USER_MODEL
from shardproof.harness.runner.plugin import CELLS


def _named(spec: str, limit_s: float, num_ranks: int) -> tuple[UserModel, NamedOptimizer]:
    try:
        model, optimizer = known_model(spec, limit_s, num_ranks)
    except UsageError as error:
        raise pytest.Collector.CollectError(str(error)) from None
    return model, optimizer or default_optimizer(model)


def default_optimizer(model: UserModel) -> NamedOptimizer:
    """Return the model's default optimizer; AdamW takes larger steps where a parameter has fewer bits than float32."""
    if model.default_optimizer == "SGD":
        return SGD
    return COARSE_ADAMW if model.is_narrow else ADAMW


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize each case with the model and its optimizer."""
    if "own" in metafunc.fixturenames:
        spec: str | None = metafunc.config.getoption("shardproof_model")
        limit_s: float = metafunc.config.getoption("shardproof_deadline")
        num_ranks = min(cell.world.size for cell in metafunc.config.stash[CELLS])
        own = _named(spec, limit_s, num_ranks) if spec else (USER_MODEL, ADAMW)
        metafunc.parametrize("own", [pytest.param(own, id=own[0].name)])
