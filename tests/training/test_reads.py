"""A failing read of a prepared model is the engine's fault; the headline has the read's name and the engine's text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Rows

from shardproof import Clip, Plan, Resume, Schedule, Training, TrialSession
from shardproof.engine.contract import PreparedModel, Shard, shard_of
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.harness.cases.training import AS_SHOWN
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.torch_compat.process_groups import HashStore
from shardproof.harness.training.callers_module import Preparation
from tests import judging
from tests.training import misread

TRAINING = Training(
    problem=MLP_EVEN,
    optimizer=SGD,
    schedule=Schedule(steps=2, clip=Clip(max_norm=0.1)),
)
LOST = "raised LookupError: my index is gone, in PreparedModel."
FIRST = "raised EngineError: PreparedModel.local_parameters() of 'layers.0.weight': expected"
HEADLINES = {
    "RaisingParameters": f"{LOST}local_parameters()",
    "RaisingGradients": f"{LOST}local_gradients()",
    "RaisingState": f"{LOST}local_optimizer_state()",
    "RaisingBuffers": f"{LOST}local_buffers()",
    "RaisingItems": f"{LOST}local_parameters()",
    "NoParameters": "EngineError: PreparedModel.local_parameters(): expected a mapping from names to shards, got None",
    "PlainTensors": "local_gradients() of 'layers.0.weight': expected a Shard, got a value of type Tensor",
    "FloatOffsets": f"{FIRST} offsets that are integers, got (0.0, 0.0)",
    "TensorOffsets": f"{FIRST} offsets that are integers, got a value of type Tensor",
    "NoOffsets": f"{FIRST} offsets that are integers, got None",
    "FloatShape": f"{FIRST} global_shape that are integers, got (32.0, 16.0)",
    "TextTensor": f"{FIRST} a Shard of a plain tensor, got a value of type str",
    "NumberedNames": "local_parameters(): expected a mapping from names to shards, names being texts, got 0",
    "TextNorm": "PreparedModel.clip_grad_norm_(): expected a float, got a value of type str; try float(norm)",
    "TextCut": "EngineError: PreparedModel.cut: expected a Cut, got a value of type str; try Cut.EVENLY",
}


def judged(session: TrialSession, engine: str, world: str, training: Training = TRAINING) -> Record:
    return judging.judged(session, f"tests.training.misread:{engine}", world, training)


@pytest.mark.parametrize(
    ("engine", "world"),
    [*((name, "threads:2") for name in HEADLINES), ("RaisingGradients", "processes:2")],
)
def test_a_read_that_goes_wrong_is_the_engines_fault(session: TrialSession, engine: str, world: str) -> None:
    record = judged(session, f"{engine}Engine", world)
    assert record.verdict is Verdict.CRASHED, record.headline
    assert HEADLINES[engine] in record.headline


@pytest.mark.parametrize("name", ["full_state", "load_full_state"])
def test_a_state_dict_that_raises_is_the_engines_fault(session: TrialSession, name: str) -> None:
    resume = Resume(after_steps=1, plan=Plan())
    training = Training(problem=MLP_EVEN, optimizer=SGD, schedule=Schedule(steps=2), resume=resume)
    engine = {"full_state": "RaisingFullState", "load_full_state": "RaisingLoad"}[name]
    record = judged(session, f"{engine}Engine", "threads:2", training)
    assert record.verdict is Verdict.CRASHED
    assert record.headline.endswith(f"{LOST}{name}()")


def test_every_engine_that_misreads_is_here() -> None:
    assert {*HEADLINES, "RaisingFullState", "RaisingLoad"} == set(misread.READERS)


@pytest.mark.parametrize(
    ("engine", "world"),
    [
        ("EmptiesJson", "threads:2"),
        ("BreaksJson", "processes:2"),
        ("EmptiesFiles", "processes:2"),
        ("BreaksFiles", "threads:2"),
    ],
)
def test_json_and_torch_save_replaced_by_an_engine_write_no_file_of_ours(
    session: TrialSession, engine: str, world: str
) -> None:
    record = judged(session, engine, world)
    assert record.verdict is Verdict.PASSED, record.headline


@pytest.mark.parametrize("world", ["threads:2", "processes:2"])
def test_a_rank_that_can_send_nothing_any_more_has_crashed(session: TrialSession, world: str) -> None:
    record = judged(session, "BreaksEncoders", world)
    assert record.verdict is Verdict.CRASHED
    assert "rank 1 was killed by SIGABRT; at File " in record.headline
    assert "my index is gone" in record.output


# The caller's module.


def _shown(model: nn.Module) -> dict[str, Shard]:
    return {name: shard_of(p) for name, p in model.named_parameters()}


def _move(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


@pytest.fixture
def sharded() -> Iterator[nn.Module]:
    dist.init_process_group("fake", rank=0, world_size=2, store=HashStore())
    try:
        mesh, model = init_device_mesh("cpu", (2,)), nn.Linear(3, 4, bias=False)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Rows(0)]))
        yield model
    finally:
        dist.destroy_process_group()


def test_a_module_that_trains_holds_what_is_shown() -> None:
    model = nn.Linear(3, 4)
    preparation = Preparation(PreparedModel(model), model)
    _move(model)
    assert preparation.difference(_shown(model)) == f"{AS_SHOWN}, in 2 of 2 parameters"


def test_a_module_that_lags_is_named() -> None:
    model = nn.Linear(3, 4)
    preparation = Preparation(PreparedModel(model), model)
    _move(model)
    before = _shown(model)
    _move(model)
    assert preparation.difference(before).startswith("parameter 'weight' is ")


def test_shards_that_lag_are_named(sharded: nn.Module) -> None:
    preparation = Preparation(PreparedModel(sharded), sharded)
    _move(sharded)
    before = _shown(sharded)
    assert preparation.difference(before) == f"{AS_SHOWN}, in 1 of 1 parameters"
    _move(sharded)
    assert preparation.difference(before).startswith("parameter 'weight' is ")


def test_a_module_that_stays_as_it_was_built_proves_nothing() -> None:
    model, copy = nn.Linear(3, 4), nn.Linear(3, 4)
    preparation = Preparation(PreparedModel(model), model)
    assert preparation.difference(_shown(copy)) == f"{AS_SHOWN}, in 0 of 2 parameters"


def test_a_copy_that_trains_is_held_and_the_original_left_alone() -> None:
    model, copy = nn.Linear(3, 4), nn.Linear(3, 4)
    preparation = Preparation(PreparedModel(copy), model)
    _move(copy)
    assert preparation.difference(_shown(copy)) == f"{AS_SHOWN}, in 2 of 2 parameters"
    _move(model)
    assert preparation.difference(_shown(copy)).startswith("parameter 'weight' is ")


def test_a_unit_that_is_gathered_for_a_while_is_no_evidence(sharded: nn.Module) -> None:
    preparation = Preparation(PreparedModel(sharded), sharded)
    shown = _shown(sharded)
    sharded.weight = nn.Parameter(torch.zeros(4, 3))
    assert preparation.difference(shown) == f"{AS_SHOWN}, in 0 of 1 parameters"


def test_a_unit_that_is_gathered_along_one_of_two_axes_is_no_evidence(sharded: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    layout = (Replicate(), Rows(0))
    sharded.weight = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, layout))
    preparation = Preparation(PreparedModel(sharded), sharded)
    shown = _shown(sharded)
    sharded.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 3), mesh["tensor"], [Rows(0)]))
    assert preparation.difference(shown) == f"{AS_SHOWN}, in 0 of 1 parameters"
    sharded.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 3), mesh, layout))
    assert preparation.difference(shown).startswith("parameter 'weight' is ")


def test_an_engine_that_shards_with_its_optimizer_may_gather_a_unit_too(sharded: nn.Module) -> None:
    shown, shard = _shown(sharded), sharded.weight
    sharded.weight = nn.Parameter(torch.ones(4, 3))
    preparation = Preparation(PreparedModel(sharded), sharded)
    sharded.weight = shard
    preparation.settle()
    sharded.weight = nn.Parameter(torch.zeros(4, 3))
    assert preparation.difference(shown) == f"{AS_SHOWN}, in 0 of 1 parameters"
