"""auto_wrap_policy and its policies, wrap and enable_wrap, and the warning of containers that have no forward."""

from __future__ import annotations

import pytest

from shardproof import ALONE, SEVERAL, MatchesOracle, Notes, Trial
from suites.wrapper.exercises.units import (
    UNITS,
    asks_from_the_leaves_up,
    hands_down_options,
    overrides_options_of_one,
    warns_of_containers,
    wraps_as_annotated,
    wraps_by_policy,
    wraps_everything,
)
from suites.wrapper.exercises.wrapped import GRADIENTS
from suites.wrapper.exercising import exercise

TRUE = "True"
BLOCKS = ["", "blocks.0", "blocks.1"]
FIRSTS = ["", "blocks.0.first", "blocks.1.first"]
WIDE = ["", "blocks.0.second", "blocks.1.second", "stem"]
NESTED = [
    *("", "blocks.0", "blocks.0.first", "blocks.0.second"),
    *("blocks.1", "blocks.1.first", "blocks.1.second", "head", "stem"),
]
ASKED = (
    "stem 30, blocks.0.first 49, blocks.0.second 48, blocks.0 97, "
    "blocks.1.first 49, blocks.1.second 48, blocks.1 97, blocks 0, head 21"
)

IGNORED = pytest.mark.kills("IgnoresThePolicy")


@pytest.mark.api("auto_wrap_policy")
@pytest.mark.parametrize(
    ("policy", "units"),
    [
        pytest.param("none", [""], id="none", marks=pytest.mark.kills("WrapsLayersUnasked")),
        pytest.param("a function", BLOCKS, id="function", marks=IGNORED),
        pytest.param("classes", BLOCKS, id="classes", marks=[IGNORED, pytest.mark.api("ModuleWrapPolicy")]),
        pytest.param(
            "nested classes", NESTED, id="nested", marks=[IGNORED, pytest.mark.api("ModuleWrapPolicy")]
        ),
        pytest.param("custom", WIDE, id="custom", marks=[IGNORED, pytest.mark.api("CustomPolicy")]),
        pytest.param(
            "lambda", WIDE, id="lambda", marks=[IGNORED, pytest.mark.api("lambda_auto_wrap_policy")]
        ),
        pytest.param(
            "transformer",
            BLOCKS,
            id="transformer",
            marks=[IGNORED, pytest.mark.api("transformer_auto_wrap_policy")],
        ),
        pytest.param(
            "size of a block",
            BLOCKS,
            id="large",
            marks=[IGNORED, pytest.mark.api("size_based_auto_wrap_policy")],
        ),
        # Of a block that is left without its first layer, too little remains to be a unit.
        pytest.param(
            "size of a layer",
            FIRSTS,
            id="small",
            marks=[IGNORED, pytest.mark.api("size_based_auto_wrap_policy")],
        ),
    ],
)
def test_makes_the_units_that_the_policy_names(trial: Trial, policy: str, units: list[str]) -> None:
    trial.holds(
        exercise(wraps_by_policy, policy),
        Notes(subject=UNITS, value=str(units)),
        Notes(subject=GRADIENTS, value=TRUE),
        MatchesOracle(),
    )


@IGNORED
@pytest.mark.api("auto_wrap_policy", "always_wrap_policy")
def test_makes_a_unit_of_every_module(trial: Trial) -> None:
    trial.holds(
        exercise(wraps_everything), Notes(subject=UNITS, value="['', 'first', 'second']"), MatchesOracle()
    )


@IGNORED
@pytest.mark.api("auto_wrap_policy")
def test_asks_a_policy_from_the_leaves_up(trial: Trial) -> None:
    trial.holds(exercise(asks_from_the_leaves_up), Notes(subject="asked", value=ASKED), MatchesOracle())


@pytest.mark.kills("GivesUnitsNoOptions", "AlwaysShowsNames")
@pytest.mark.api("auto_wrap_policy", "mixed_precision", "sharding_strategy", "use_orig_params")
def test_units_have_the_options_of_the_root(trial: Trial) -> None:
    trial.holds(
        exercise(hands_down_options),
        Notes(subject="dtype inside", value="torch.bfloat16"),
        Notes(subject="kept inside", value=TRUE),
        Notes(subject="flat inside", value=TRUE),
        MatchesOracle(),
    )


@pytest.mark.kills("IgnoresOverridesOfAPolicy", "IgnoresThePolicy")
@pytest.mark.api("auto_wrap_policy", "CustomPolicy")
@pytest.mark.worlds(SEVERAL)  # a lone rank frees nothing
def test_a_policy_overrides_options_of_one_unit(trial: Trial) -> None:
    trial.holds(
        exercise(overrides_options_of_one),
        Notes(subject="kept after forward", value="[True, False]"),
        Notes(subject=UNITS, value=str(BLOCKS)),
        MatchesOracle(),
    )


# Torch keeps what enable_wrap says in one place for all threads: ranks that are threads would share it.
@pytest.mark.worlds(ALONE)
@pytest.mark.kills("AlwaysShowsNames")
@pytest.mark.api("enable_wrap", "wrap")
def test_wraps_what_is_annotated(trial: Trial) -> None:
    trial.holds(
        exercise(wraps_as_annotated),
        Notes(subject="outside", value=TRUE),
        Notes(subject="inside", value=TRUE),
        Notes(subject="parameters inside", value="1"),
        Notes(subject="parameters with an option overridden", value="2"),
        Notes(subject="outside again", value=TRUE),
        MatchesOracle(),
    )


# Warnings are caught for all threads of a process: ranks that are threads would hear each other's.
@pytest.mark.worlds(ALONE)
@pytest.mark.kills("WrapsContainersSilently")
@pytest.mark.api("init.module")
@pytest.mark.parametrize("is_dict", [False, True], ids=["list", "dict"])
def test_warns_of_containers_without_a_forward(trial: Trial, is_dict: bool) -> None:
    trial.holds(
        exercise(warns_of_containers, is_dict),
        Notes(subject="warned of a container", value=TRUE),
        Notes(subject="warned of a module", value="False"),
        MatchesOracle(),
    )
