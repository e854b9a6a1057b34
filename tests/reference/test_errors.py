"""Refusals of the reference engine name the wrong value and a remedy, and leave other models alone."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardproof.harness.worlds.rank import RankContext
from shardproof.suites.composable.refusals import SCENARIOS
from tests.reference.apis import BY_NAME, each_api
from tests.reference.models import WIDTH, Chain, apply_to, inputs_of
from tests.reference.ranks import Ranks, each

SIZE = 4


class Refusal(Exception):  # noqa: N818 - it reports the absence of a refusal
    """Raised by the test if the engine accepts an input that it must refuse."""


def _provoke(api: str, name: str) -> str:
    SCENARIOS[name][0](BY_NAME[api])
    raise Refusal("nothing was refused")


def _provoke_each(context: RankContext) -> dict[str, str]:
    return each([*SCENARIOS], lambda name: _provoke("reference", name))


def test_refusals_name_the_expected_value_the_actual_one_and_a_remedy(ranks: Ranks) -> None:
    for observed in ranks.run(SIZE, _provoke_each):
        curt = {name: text for name, text in observed.items() if len(text.partition(": ")[2]) < 30}
        assert curt == {}


def _recover(context: RankContext, api: str) -> None:
    """Provoke an error at the first forward of one model; another model trains normally."""
    for name in ("a weight tied across groups", "a child before its root", "two dtypes in a group"):
        observed = each([name], lambda name: _provoke(api, name))
        assert "Refusal" not in observed[name]
        model = apply_to(Chain(), BY_NAME[api].fully_shard)
        model(inputs_of(0)).sum().backward()
        assert all(param.grad is not None for param in model.parameters())


@each_api
def test_a_refusal_leaves_other_models_alone(api: str, ranks: Ranks) -> None:
    ranks.run(2, _recover, api)


def _accept(context: RankContext, api: str) -> list[bool]:
    """Shard over a mesh of one axis without a name; groups of one rank mean False, of all ranks True."""
    mesh = init_device_mesh("cpu", (SIZE,))
    BY_NAME[api].fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh)(inputs_of(0))
    BY_NAME[api].replicate(nn.Linear(WIDTH, WIDTH), mesh=mesh)(inputs_of(0))
    is_kept = []
    for reshard in (1, SIZE):
        model = BY_NAME[api].fully_shard(nn.Linear(WIDTH, WIDTH), reshard_after_forward=reshard)
        model(inputs_of(0))
        is_kept.append(type(model.weight) is nn.Parameter)
    return is_kept


@each_api
def test_one_axis_needs_no_name_and_a_number_at_either_end_is_a_bool(api: str, ranks: Ranks) -> None:
    assert ranks.run(SIZE, _accept, api) == [[True, False]] * SIZE
