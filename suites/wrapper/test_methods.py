"""The wrapper's own methods: reaching through it, listing units, names, calls, conversions."""

from __future__ import annotations

import pytest

from shardproof import Trial
from suites.wrapper import access
from suites.wrapper.access import Conversion
from suites.wrapper.exercised import hold
from suites.wrapper.specimens import Form

FORMS = pytest.mark.parametrize("form", Form, ids=lambda form: form.name.lower())


@pytest.mark.api("module")
@pytest.mark.kills("WrapsItsModuleAgain")
def test_shows_the_module_that_it_wraps(trial: Trial) -> None:
    hold(trial, access.reach_module, "the module of the root", "the module of a unit")


@pytest.mark.api("__getattr__")
@pytest.mark.kills("HidesAttributes")
def test_passes_on_attributes(trial: Trial) -> None:
    subjects = ("a submodule", "a plain attribute", "a method", "a buffer", "an attribute that nobody has")
    hold(trial, access.reach_attributes, *subjects)


@pytest.mark.api("__getitem__")
@pytest.mark.kills("CountsItemsFromOne")
def test_passes_on_items(trial: Trial) -> None:
    hold(trial, access.reach_items, "an item", "a slice")


@pytest.mark.api("check_is_root")
@pytest.mark.kills("KnowsNoRootBeforeForward")
def test_tells_who_is_the_root(trial: Trial) -> None:
    subjects = ("the root before forward", "the root after forward", "a unit that is asked first")
    hold(trial, access.tell_the_root, *subjects)


@pytest.mark.api("fsdp_modules")
@pytest.mark.kills("TakesUnitsForRoots")
def test_lists_units_in_the_order_of_modules(trial: Trial) -> None:
    hold(trial, access.list_units, "all units", "the units of a unit", "the root alone", "their class")


@pytest.mark.api("fsdp_modules")
@pytest.mark.kills("TakesUnitsForRoots")
def test_lists_units_of_a_model_that_is_not_wrapped_itself(trial: Trial) -> None:
    hold(trial, access.list_units_of_others, "all units below", "the roots below", "units of a model without")


@pytest.mark.api("apply")
@pytest.mark.kills("AppliesToShards", "ForgetsWhatWasApplied")
def test_applies_to_whole_parameters_and_keeps_what_it_did(trial: Trial) -> None:
    subjects = ("what it returns", "shapes that it saw", "weights afterwards", "an output afterwards")
    hold(trial, access.apply_to_all, *subjects)


@pytest.mark.api("apply")
@pytest.mark.kills("AppliesInSilence")
def test_refuses_to_apply_in_forward(trial: Trial) -> None:
    hold(trial, access.apply_while_it_runs, "apply in forward")


@pytest.mark.api("forward")
@pytest.mark.kills("DropsKeywords")
def test_passes_keywords_and_containers_through_forward(trial: Trial) -> None:
    subjects = ("the containers", "a text in them", "their sum", "what they taught")
    hold(trial, access.call_with_keywords, *subjects)


@pytest.mark.api("named_parameters")
@pytest.mark.kills("KeepsItsPrefixInside", "StripsItsPrefixAlways")
def test_names_parameters_as_the_model_does_inside_summon(trial: Trial) -> None:
    subjects = (
        "names outside",
        "names outside tell of the wrapper",
        "names inside",
        "names inside with a prefix",
        "names of its own",
        "names outside again",
    )
    hold(trial, access.name_parameters, *subjects)


@pytest.mark.api("named_parameters", "FlatParameter")
@pytest.mark.kills("KeepsItsPrefixInside")
def test_shows_one_flat_parameter_for_each_unit_outside_summon(trial: Trial) -> None:
    subjects = (
        "one for each unit",
        "their class",
        "values inside",
        "flat ones inside",
        "the same ones afterwards",
    )
    hold(trial, access.name_flat_parameters, *subjects)


@pytest.mark.api("named_buffers")
@pytest.mark.kills("KeepsItsPrefixOfBuffersInside")
def test_names_buffers_as_the_model_does_inside_summon(trial: Trial) -> None:
    hold(trial, access.name_buffers, "names outside", "buffers inside", "names inside with a prefix")


@FORMS
@pytest.mark.api("to")
@pytest.mark.kills("CastsInputsInsteadOfItself")
@pytest.mark.parametrize("how", Conversion, ids=lambda how: how.name.lower())
def test_trains_in_the_dtype_that_it_was_converted_to(trial: Trial, how: Conversion, form: Form) -> None:
    subjects = ("what it returns", "the output's dtype", "dtypes of gradients", "parameters afterwards")
    hold(trial, access.convert, *subjects, arguments=(how, form))


@pytest.mark.api("to")
@pytest.mark.kills("CastsInputsInsteadOfItself")
def test_can_be_converted_after_a_forward_too(trial: Trial) -> None:
    subjects = ("what it returns", "the output's dtype", "dtypes of gradients", "parameters afterwards")
    hold(trial, access.convert_after_a_forward, *subjects)
