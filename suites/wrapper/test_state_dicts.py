"""State dicts of a wrapped model: names, sizes and values as if nobody had wrapped it, and who is given them."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import ShardingStrategy, StateDictType

from shardproof import SEVERAL, Trial
from suites.wrapper import saved_models
from suites.wrapper.exercised import hold
from suites.wrapper.specimens import Form, Wrapping

SHARDS, FLAT = Wrapping(), Wrapping(form=Form.FLAT)
KEPT = Wrapping(strategy=ShardingStrategy.SHARD_GRAD_OP)
WHOLE = Wrapping(strategy=ShardingStrategy.NO_SHARD)
WHOLE_FLAT = Wrapping(strategy=ShardingStrategy.NO_SHARD, form=Form.FLAT)
OTHER_UNITS = Wrapping(units=("head",))
HYBRID = Wrapping(strategy=ShardingStrategy.HYBRID_SHARD)
MESH, MESH_ROOT = Wrapping(by_mesh=True), Wrapping(by_mesh=True, units=())
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
LOADED = ("what loading says", "parameters afterwards", "buffers afterwards", "an output afterwards")


@pytest.mark.api("state_dict", "StateDictType")
@pytest.mark.kills("NamesTheWrapperInStates", "MixesUpBuffers")
@pytest.mark.parametrize("wrapping", [SHARDS, FLAT, KEPT, WHOLE, WHOLE_FLAT, HYBRID], ids=str)
def test_saves_the_model_as_if_nobody_had_wrapped_it(trial: Trial, wrapping: Wrapping) -> None:
    subjects = ("the state at first", "the state after training")
    hold(trial, saved_models.save_full, *subjects, arguments=(wrapping,))


@pytest.mark.api("state_dict", "StateDictType")
@pytest.mark.kills("NamesTheWrapperInStates")
def test_saves_parts_and_prefixes(trial: Trial) -> None:
    hold(trial, saved_models.save_in_part, "the state of a unit", "the state under a prefix")


@pytest.mark.api("state_dict", "StateDictType")
@pytest.mark.kills("ReusesWhatItSaved")
def test_saves_a_copy(trial: Trial) -> None:
    hold(trial, saved_models.copy_it, "what was saved")


@pytest.mark.api("FullStateDictConfig")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SavesOnEveryRank")
def test_gives_the_state_to_rank_0_alone(trial: Trial) -> None:
    hold(trial, saved_models.save_on_rank_0, "what the rank is given", "parameters afterwards")


@pytest.mark.api("FullStateDictConfig", "StateDictConfig")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SpoilsWhatGoesToTheHost")
def test_gives_the_state_to_the_host(trial: Trial) -> None:
    hold(trial, saved_models.save_to_host, "where it is", "what it is")


@pytest.mark.api("ShardedStateDictConfig", "StateDictConfig")
@pytest.mark.kills("IgnoresShardedStates")
def test_gives_shards_to_the_host(trial: Trial) -> None:
    hold(trial, saved_models.save_shards_to_host, "elsewhere than on the host", "parameters afterwards")


@pytest.mark.api("state_dict", "StateDictType", "ShardedStateDictConfig")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.parametrize(
    "wrapping",
    [
        pytest.param(SHARDS, marks=pytest.mark.kills("SavesWholesAsShards")),
        pytest.param(FLAT, marks=pytest.mark.kills("SavesWholesAsShards")),
        pytest.param(MESH, marks=pytest.mark.kills("SavesWholesAsShards")),
        pytest.param(WHOLE, marks=pytest.mark.kills("NamesTheWrapperInStates")),
    ],
    ids=str,
)
def test_saves_each_element_on_one_rank(trial: Trial, wrapping: Wrapping) -> None:
    subjects = ("names", "sizes", "values", "elements of all ranks")
    hold(trial, saved_models.save_sharded, *subjects, arguments=(wrapping,))


@pytest.mark.api("state_dict", "load_state_dict", "StateDictType")
@pytest.mark.kills("LoadsParametersAlone")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (SHARDS, FLAT),
        (FLAT, KEPT),
        (KEPT, WHOLE),
        (WHOLE, WHOLE_FLAT),
        (WHOLE_FLAT, OTHER_UNITS),
        (OTHER_UNITS, HYBRID),
        (HYBRID, SHARDS),
    ],
    ids=str,
)
def test_loads_what_another_wrapping_saved(trial: Trial, before: Wrapping, after: Wrapping) -> None:
    hold(trial, saved_models.resume_in, *LOADED, arguments=(FULL, before, after))


@pytest.mark.api("state_dict", "load_state_dict", "StateDictType")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("IgnoresShardedStates")
@pytest.mark.parametrize(
    ("before", "after"),
    [(SHARDS, Wrapping(form=Form.FLAT, units=("head",))), (FLAT, SHARDS), (KEPT, SHARDS), (MESH, MESH_ROOT)],
    ids=str,
)
def test_loads_shards_that_another_wrapping_saved(trial: Trial, before: Wrapping, after: Wrapping) -> None:
    hold(trial, saved_models.resume_in, *LOADED, arguments=(SHARDED, before, after))


@pytest.mark.api("state_dict", "load_state_dict", "StateDictType", "LocalStateDictConfig")
@pytest.mark.kills("IgnoresLocalStates")
@pytest.mark.parametrize("form", Form, ids=lambda form: form.name.lower())
def test_loads_what_each_rank_saved_of_its_own(trial: Trial, form: Form) -> None:
    subjects = ("what loading says", "parameters afterwards", "buffers afterwards")
    hold(trial, saved_models.hand_over_local, *subjects, arguments=(form,))


@pytest.mark.api("state_dict", "load_state_dict", "StateDictType")
@pytest.mark.kills("LoadsParametersAlone")
@pytest.mark.parametrize("wrapping", [SHARDS, FLAT, WHOLE], ids=str)
def test_exchanges_states_with_a_model_that_nobody_wrapped(trial: Trial, wrapping: Wrapping) -> None:
    subjects = ("parameters of the wrapped", "parameters of the plain", "buffers of the plain")
    hold(trial, saved_models.exchange_with_a_plain_model, *subjects, arguments=(wrapping,))
