"""Refusals of the reference engine name the wrong value and a remedy, and leave other models alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardproof.engine.reference import zero_checkpoint
from shardproof.engine.reference.zero import Zero2
from shardproof.harness.records.record import Verdict
from shardproof.harness.records.run import read_run
from shardproof.harness.runner.invoke import call_pytest
from shardproof.harness.worlds.rank import RankContext
from shardproof.suites.composable.refusals import SCENARIOS
from tests.reference.models import BY_NAME, WIDTH, Chain, apply_to, each_api, inputs_of
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


# ZeRO-2.


def _assign(model: nn.Linear) -> None:
    model.load_state_dict(model.state_dict(), assign=True)


def _convert(model: nn.Linear) -> None:
    model.double()


def _step_on_others(context: RankContext, replace: Callable[[nn.Linear], None], offloads: bool) -> None:
    group, model = dist.group.WORLD, nn.Linear(4, 4)
    assert group is not None
    engine = Zero2(model, group, offloads=offloads)
    engine.backward(model(torch.ones(2, 4)).sum())
    replace(model)
    with pytest.raises(RuntimeError, match=r"'(weight|bias)' was replaced .* load weights with assign=False"):
        engine.step(torch.optim.SGD([piece.own for piece in engine.pieces.values()], lr=0.1))


@pytest.mark.parametrize(("replace", "offloads"), list(product((_assign, _convert), (False, True))))
def test_a_step_on_replaced_parameters_is_refused(
    replace: Callable[[nn.Linear], None], offloads: bool, ranks: Ranks
) -> None:
    ranks.run(2, _step_on_others, replace, offloads)


def _step_on_moved(context: RankContext) -> bool:
    group, model = dist.group.WORLD, nn.Linear(4, 4)
    assert group is not None
    engine = Zero2(model, group)
    optimizer = torch.optim.SGD([piece.own for piece in engine.pieces.values()], lr=0.5)
    for _ in range(2):
        model.bias.data = torch.ones(4)  # its gradient is the number of rows
        engine.backward(model(torch.ones(2, 4)).sum())
        engine.step(optimizer)
        optimizer.zero_grad()
    return bool((model.bias == 0).all())


def test_a_step_updates_parameters_where_they_are_now(ranks: Ranks) -> None:
    assert ranks.run(2, _step_on_moved) == [True] * 2


def _save_what_was_loaded(context: RankContext, folder: Path) -> bool:
    group, model = dist.group.WORLD, nn.Linear(4, 4)
    assert group is not None
    engine = Zero2(model, group, offloads=True)
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    zero_checkpoint.save(engine, torch.optim.SGD(model.parameters(), lr=0.1), folder)
    saved = torch.load(zero_checkpoint.file_of(folder, engine.rank))["pieces"].values()
    return all(bool((piece["value"] == 1).all()) for piece in saved)


def test_copies_on_the_host_are_saved_as_they_were_loaded(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, _save_what_was_loaded, tmp_path) == [True, True]


def _load_into_two_groups(context: RankContext, folder: Path) -> bool:
    group = dist.group.WORLD
    assert group is not None
    engine = Zero2(nn.Linear(4, 4), group)
    pieces = [piece.own for piece in engine.pieces.values()]
    zero_checkpoint.save(engine, torch.optim.SGD(pieces, lr=0.1), folder)
    dist.barrier()
    before = [p.detach().clone() for p in engine.module.parameters()]
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.add_(1)
    other = torch.optim.SGD([{"params": pieces[:1]}, {"params": pieces[1:]}], lr=0.2)
    with pytest.raises(ValueError, match="expected 2 parameter groups, got 1; build the optimizer as it was"):
        zero_checkpoint.load(engine, other, folder)
    kept = zip(before, engine.module.parameters(), strict=True)
    return all(torch.equal(old + 1, new) for old, new in kept) and other.param_groups[0]["lr"] == 0.2


def test_other_parameter_groups_are_refused_before_any_change(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, _load_into_two_groups, tmp_path) == [True, True]


# Cases of the suites.


# By engine and file: words of the cases, none for all of the file.
CASES = {
    "reference": {
        "sharding_state/test_policy.py": "what_the_policy_says",
        "sharding_state/test_control.py": "holds_the_head",
        "accumulation/test_holding_back.py": "shards_reduce_as_told",
        "communication/test_hybrid.py": "within_and_across_replicas",
        "precision/test_compute.py": "test_reduces_in",
        "composable/test_training.py": "without_memory or are_each_ranks_own or first_rank or is_deleted",
        "composable/test_units.py": "stay_what_they_were or across_replicas",
        "interventions/test_freezing.py": "freezes_and_unfreezes and later",
        "interventions/test_gradients.py": "hooks_see or backward_is_one",
        "placement/test_largest_dim.py": "",
        "state/test_resume.py": "tied",
    },
    "reference.wrapper": {
        "precision/test_scaler.py": "",
        "wrapper/test_optim_state.py": "not_wrapped or another_wrapping",
        "wrapper/test_state_dicts.py": "not_wrapped or another_wrapping",
    },
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", CASES)
def test_conforms(engine: str, tmp_path: Path) -> None:
    words = (f"{Path(file).stem} and ({chosen or 'test'})" for file, chosen in CASES[engine].items())
    files = [f"suites/{file}" for file in CASES[engine]]
    options = [f"--engine={engine}", "--world=threads:4", f"--out={tmp_path}", "-k", " or ".join(words)]
    assert call_pytest([*files, *options]) == 0
    records = read_run(tmp_path).records
    assert {record.verdict for record in records} <= {Verdict.PASSED, Verdict.UNSUPPORTED}
    passed = {record.case.split("::")[0] for record in records if record.verdict is Verdict.PASSED}
    assert passed == set(CASES[engine])
