"""``replicate`` trains as one plain model does, and really steps; the same scenarios as for ``fully_shard``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from harness.worlds.spec import WorldKind
from tests.reference import test_training_parity as parity
from tests.reference import test_training_schedules as schedules
from tests.reference.models import Rooted
from tests.reference.oracle import Plan, Training, cases, rows, run_world, train_beside_oracle
from tests.reference.test_training_accumulation import PAIRS, UNITS, Accumulate


def _replicated(training: Training) -> Training:
    """Turn a scenario into one of replicas; it has no options of sharding."""
    return replace(training, plan=replace(training.plan, call="replicate", options={}))


def _rooted(schedule: Accumulate, count: int = 3) -> Training:
    return Training(
        model=partial(Rooted, 5),
        plan=Plan(units=UNITS, call="replicate"),
        schedule=schedule,
        num_microbatches=count,
    )


TRAININGS: dict[str, Training] = {
    # R05 to R07, R09, R10, R13, and beyond upstream
    **{
        name: _replicated(parity.TRAININGS[name])
        for name in (
            "no_inputs",
            "single_16_15_8",
            "single_7_15_3",
            "transformer_default",
            "root_owns_some",
            "nested",
            "groups_of_several",
            "offload",
            "multi_forward",
            "multi_forward_single",
            "explicit_prefetch",
            "tied_in_root",
            "tied_in_group",
            "frozen",
            "frozen_and_idle_in_one_unit",
            "frozen_and_idle",
            "crumbs",
            "crumbs_in_units",
            "zero_size",
            "buffers",
            "passing_an_input_on",
            "rows_differ_by_rank",
            "three_microbatches",
            "tuple_inside_dict_outside",
        )
    },
    # R08 and the orders of passes
    **{
        name: _replicated(schedules.TRAININGS[name])
        for name in (
            "child_after_root",
            "child_and_root",
            "forwards_then_backwards_units",
            "forwards_then_backwards_reversed_single",
            "one_loss_of_all_units",
            "backward_twice_units",
            "input_gradients_units",
            "no_grad_first_units",
            "inference_mode_first_units",
            "evaluate_between_units",
            "forward_and_forget_units",
            "nested_twice",
            "part_of_the_outputs",
            "two_losses_of_one_unit",
            "trunk_twice",
        )
    },
    # R14, which upstream never runs
    "accumulate_all": _rooted(Accumulate()),
    "accumulate_root_only": _rooted(Accumulate(recurse=False)),
    "accumulate_some_units": _rooted(Accumulate(quiet=PAIRS[:2])),
    "accumulate_all_reduce": _rooted(Accumulate(all_reduce_only=True)),
    "accumulate_four": _rooted(Accumulate(flags_last=True), count=4),
    "accumulate_rows_differ": replace(_rooted(Accumulate()), draw=rows(5, grows=True)),
}
OTHER_WORLDS = ("transformer_default", "crumbs", "accumulate_all", "offload")


@pytest.mark.parametrize(("name", "door"), cases(TRAININGS))
def test_replicas_train_as_one_plain_model_does(name: str, door: str, tmp_path: Path) -> None:
    """Upstream rows R05 to R10, R13, R14."""
    run_world(WorldKind.THREADS, 2, train_beside_oracle, door, TRAININGS[name], folder=tmp_path)


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize(("name", "door"), cases(TRAININGS, *OTHER_WORLDS))
def test_replicas_train_alike_in_every_world(name: str, size: int, door: str, tmp_path: Path) -> None:
    run_world(WorldKind.THREADS, size, train_beside_oracle, door, TRAININGS[name], folder=tmp_path)


@pytest.mark.parametrize(("name", "door"), cases(TRAININGS, "transformer_default", "accumulate_all"))
def test_replicas_train_alike_in_processes(name: str, door: str, tmp_path: Path) -> None:
    run_world(WorldKind.PROCESSES, 2, train_beside_oracle, door, TRAININGS[name], folder=tmp_path)
