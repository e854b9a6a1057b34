"""State dicts of a wrapped model: full, sharded and local, and other models that load them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullStateDictConfig, ShardedStateDictConfig
from torch.distributed.fsdp import StateDictConfig, StateDictType
from torch.distributed.tensor import DTensor

from shardproof import SEVERAL
from shardproof.suites.params import param, parametrize
from shardproof.suites.wrapper.expect import Bench, expects
from shardproof.suites.tower import LR, Tower, batch, blank, parameters
from shardproof.suites.wrapper.wrapping import EACH_FORM, FLAT, HYBRID, KEPT, MESH, MESH_ROOT
from shardproof.suites.wrapper.wrapping import OTHER_UNITS, SHARDS, WHOLE, WHOLE_FLAT, Form, Wrapping
from shardproof.suites.tower import tower, trained_alone

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)
LOADED = ("what loading says", "parameters afterwards", "buffers afterwards")


@pytest.mark.api("state_dict", "StateDictType")
@pytest.mark.kills("NamesTheWrapperInStates", "MixesUpBuffers")
@parametrize("wrapping", SHARDS, FLAT, KEPT, WHOLE, WHOLE_FLAT, HYBRID)
@expects("the state at first", "the state after training")
def test_saves_the_model_as_if_it_were_not_wrapped(bench: Bench, wrapping: Wrapping) -> None:
    root = bench.wrapped_by(wrapping, tower())
    bench.same("the state at first", _sorted(_saved(bench, root)), _sorted(tower().state_dict()))
    _train(bench, root)
    expected = _sorted(_trained(bench).state_dict())
    bench.same("the state after training", _sorted(_saved(bench, root)), expected)


@pytest.mark.api("state_dict", "StateDictType")
@pytest.mark.kills("NamesTheWrapperInStates")
@expects("the state of a unit", "the state under a prefix")
def test_saves_parts_and_prefixes(bench: Bench) -> None:
    root, whole = bench.wrapped_by(Wrapping(), tower()), _sorted(tower().state_dict())
    root.check_is_root()  # a unit that is called first would treat itself as the root
    with bench.api.state_dict_type(root, FULL):
        unit, prefixed = root.middle.state_dict(), root.state_dict(prefix="model.")
    own = {name.removeprefix("middle."): value for name, value in whole.items() if name.startswith("middle.")}
    bench.same("the state of a unit", _sorted(unit), own)
    expected = {f"model.{name}": value for name, value in whole.items()}
    bench.same("the state under a prefix", _sorted(prefixed), expected)


@pytest.mark.api("state_dict", "StateDictType")
@pytest.mark.kills("ReusesWhatItSaved")
@expects("what was saved")
def test_saves_a_copy(bench: Bench) -> None:
    root = bench.wrapped_by(Wrapping(), tower())
    saved = _saved(bench, root)
    _train(bench, root)
    bench.same("what was saved", _sorted(saved), _sorted(tower().state_dict()))


@pytest.mark.api("FullStateDictConfig")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SavesOnEveryRank")
@expects("what the rank has", "parameters afterwards")
def test_saves_on_rank_0_alone(bench: Bench) -> None:
    root = bench.wrapped_by(Wrapping(), tower())
    saved = _saved(bench, root, FULL, FullStateDictConfig(rank0_only=True))
    expected = _sorted(tower().state_dict()) if bench.rank == 0 else {}
    bench.same("what the rank has", _sorted(saved), expected)
    _train(bench, root)
    bench.same("parameters afterwards", bench.summoned(root), parameters(_trained(bench)))


@pytest.mark.api("FullStateDictConfig", "StateDictConfig")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SpoilsWhatGoesToTheHost")
@expects("where it is", "what it is")
def test_saves_to_the_host(bench: Bench) -> None:
    root = bench.wrapped_by(Wrapping(), tower())
    saved = _saved(bench, root, FULL, FullStateDictConfig(offload_to_cpu=True))
    bench.same("where it is", {value.device.type for value in saved.values()}, {"cpu"})
    bench.same("what it is", _sorted(saved), _sorted(tower().state_dict()))


@pytest.mark.api("ShardedStateDictConfig", "StateDictConfig")
@pytest.mark.kills("IgnoresShardedStates")
@expects("elsewhere than on the host", "parameters afterwards")
def test_saves_shards_to_the_host(bench: Bench) -> None:
    root, other = bench.wrapped_by(Wrapping(), tower()), bench.wrapped_by(Wrapping(), blank())
    config = ShardedStateDictConfig(offload_to_cpu=True)
    saved = _saved(bench, root, SHARDED, config)
    elsewhere = {place for value in saved.values() for place in _places(value)} - {"cpu"}
    bench.same("elsewhere than on the host", elsewhere, set())
    with bench.api.state_dict_type(other, SHARDED, config):
        other.load_state_dict(saved)
    bench.same("parameters afterwards", bench.summoned(other), parameters(tower()))


@pytest.mark.api("state_dict", "StateDictType", "ShardedStateDictConfig")
@pytest.mark.worlds(SEVERAL)
@parametrize(
    "wrapping",
    param(SHARDS, kills="SavesWholesAsShards"),
    param(FLAT, kills="SavesWholesAsShards"),
    param(MESH, kills="SavesWholesAsShards"),
    param(WHOLE, kills="NamesTheWrapperInStates"),
)
@expects("names", "sizes", "values", "elements of all ranks")
def test_saves_each_element_on_one_rank(bench: Bench, wrapping: Wrapping) -> None:
    saved = _saved(bench, bench.wrapped_by(wrapping, tower()), SHARDED)
    whole = tower().state_dict()
    bench.same("names", sorted(saved), sorted(whole))
    if saved.keys() != whole.keys():
        return  # there is nothing to compare by name
    sizes = {name: list(saved[name].size()) for name in sorted(saved)}
    bench.same("sizes", sizes, {name: list(value.shape) for name, value in _sorted(whole).items()})
    held = [_held(saved[name], whole[name]) for name in parameters(tower())]
    bench.same("values", [h.got for h in held], [h.right for h in held])
    owned = sum(h.numel for h in held)
    shares = bench.summed([owned if bench.rank == 0 or wrapping.is_sharded else 0])
    bench.same("elements of all ranks", shares, [sum(p.numel() for p in tower().parameters())])


RIGHT_FORM = pytest.mark.kills("GivesShardsForWholes")


@pytest.mark.api("StateDictType", "FullStateDictConfig", "ShardedStateDictConfig")
@pytest.mark.worlds(SEVERAL)
@parametrize(
    "kind, config",
    param(FULL, FullStateDictConfig(), id="full", marks=RIGHT_FORM),
    param(FULL, FullStateDictConfig(rank0_only=True), id="rank0", kills="IgnoresStateConfigs"),
    param(SHARDED, ShardedStateDictConfig(), id="sharded", kills="GivesWholesForShards"),
    param(
        FULL,
        FullStateDictConfig(offload_to_cpu=True),
        id="host",
        marks=[RIGHT_FORM, pytest.mark.api("StateDictConfig")],
    ),
)
@expects("names", "sizes")
def test_saves_in_the_form_set(bench: Bench, kind: StateDictType, config: StateDictConfig) -> None:
    saved = _saved(bench, bench.wrapped_by(MESH, tower()), kind, config)
    is_empty = getattr(config, "rank0_only", False) and bench.rank != 0
    expected = {} if is_empty else {name: p.numel() for name, p in parameters(tower()).items()}
    names = saved.keys() - dict(tower().named_buffers()).keys()
    bench.same("names", sorted(names), sorted(expected))
    bench.same("sizes", bench.sizes_of(saved, list(expected), is_sharded=kind is SHARDED), expected)


@pytest.mark.api("state_dict", "load_state_dict", "StateDictType")
@pytest.mark.kills("LoadsParametersAlone")
@parametrize(
    "before, after",
    (SHARDS, FLAT),
    (FLAT, KEPT),
    (KEPT, WHOLE),
    (WHOLE, WHOLE_FLAT),
    (WHOLE_FLAT, OTHER_UNITS),
    (OTHER_UNITS, HYBRID),
    (HYBRID, SHARDS),
)
@expects(*LOADED, "an output afterwards")
def test_loads_what_another_wrapping_saved(bench: Bench, before: Wrapping, after: Wrapping) -> None:
    _hand_over(bench, FULL, before, after)


@pytest.mark.api("state_dict", "load_state_dict", "StateDictType")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("IgnoresShardedStates")
@parametrize(
    "before, after",
    (SHARDS, Wrapping(form=Form.FLAT, units=("head",))),
    (FLAT, SHARDS),
    (KEPT, SHARDS),
    (MESH, MESH_ROOT),
)
@expects(*LOADED, "an output afterwards")
def test_loads_shards_that_another_wrapping_saved(bench: Bench, before: Wrapping, after: Wrapping) -> None:
    _hand_over(bench, SHARDED, before, after)


@pytest.mark.api("state_dict", "load_state_dict", "StateDictType", "LocalStateDictConfig")
@pytest.mark.kills("IgnoresLocalStates")
@EACH_FORM
@expects(*LOADED)
def test_loads_what_each_rank_saved_of_its_own(bench: Bench, form: Form) -> None:
    _hand_over(bench, LOCAL, Wrapping(form=form), Wrapping(form=form))


def _hand_over(bench: Bench, kind: StateDictType, before: Wrapping, after: Wrapping) -> None:
    """Train, save, load into a model of other values with another wrapping; claim that all arrived."""
    first, second = bench.wrapped_by(before, tower()), bench.wrapped_by(after, blank())
    _train(bench, first)
    saved = _saved(bench, first, kind)
    with bench.api.state_dict_type(second, kind):
        # For local states, keys that do not fit are returned and not raised: the claim then names them.
        result = second.load_state_dict(saved, strict=kind is not LOCAL)
    keys = [list(result.missing_keys), list(result.unexpected_keys)]
    bench.same("what loading says", keys, [[], []])
    bench.same("parameters afterwards", bench.summoned(second), parameters(_trained(bench)))
    bench.same("buffers afterwards", _buffers(second), _buffers(tower()))
    if kind is not LOCAL:
        alone = _trained(bench)(batch(bench.rank)).detach()
        bench.same("an output afterwards", second(batch(bench.rank)).detach(), alone)


@pytest.mark.api("state_dict", "load_state_dict", "StateDictType")
@pytest.mark.kills("LoadsParametersAlone")
@parametrize("wrapping", SHARDS, FLAT, WHOLE)
@expects("parameters of the wrapped", "parameters of the plain", "buffers of the plain")
def test_exchanges_states_with_a_model_that_is_not_wrapped(bench: Bench, wrapping: Wrapping) -> None:
    root, plain = bench.wrapped_by(wrapping, blank()), blank()
    with bench.api.state_dict_type(root, FULL):
        root.load_state_dict(tower().state_dict())
    bench.same("parameters of the wrapped", bench.summoned(root), parameters(tower()))
    _train(bench, root)
    plain.load_state_dict(_saved(bench, root))
    bench.same("parameters of the plain", parameters(plain), parameters(_trained(bench)))
    bench.same("buffers of the plain", _buffers(plain), _buffers(tower()))


# Any: engines have no common base class, and cases test what they save.
def _train(bench: Bench, root: Any) -> None:
    optimizer = torch.optim.SGD(root.parameters(), lr=LR)
    bench.train(root)
    optimizer.step()
    optimizer.zero_grad()


def _trained(bench: Bench) -> Tower:
    model = tower()
    model.load_state_dict(trained_alone(bench.ranks), strict=False)
    return model


def _saved(
    bench: Bench, root: Any, kind: StateDictType = FULL, config: StateDictConfig | None = None
) -> dict[str, Any]:
    with bench.api.state_dict_type(root, kind, config):
        saved: dict[str, Any] = root.state_dict()
    return saved


def _sorted(state: Any) -> dict[str, Any]:
    return {name: state[name] for name in sorted(state)}


def _buffers(model: Any) -> list[torch.Tensor]:
    """Copy the saved buffers."""
    return [model.offset.detach().clone().cpu(), model.middle.calls.detach().clone().cpu()]


def _places(saved: Any) -> set[str]:
    """Return the devices of this rank's part of a tensor."""
    held = [shard.tensor for shard in saved.local_shards()] if hasattr(saved, "local_shards") else [saved]
    return {tensor.device.type for tensor in held}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Held:
    """The part of a saved tensor that a rank can read, its right value, and how many elements are the rank's own."""

    got: list[torch.Tensor]
    right: list[torch.Tensor]
    numel: int


def _held(saved: Any, whole: torch.Tensor) -> _Held:
    if isinstance(saved, DTensor):
        return _Held(got=[saved.full_tensor()], right=[whole], numel=saved.to_local().numel())
    if not hasattr(saved, "local_shards"):
        return _Held(got=[saved], right=[whole], numel=saved.numel())
    got, right = [], []
    for shard in saved.local_shards():  # none, on a rank without rows
        piece = whole
        for dim, start in enumerate(shard.metadata.shard_offsets):
            piece = piece.narrow(dim, start, shard.metadata.shard_sizes[dim])
        got.append(shard.tensor.detach().clone())
        right.append(piece)
    return _Held(got=got, right=right, numel=sum(tensor.numel() for tensor in got))
