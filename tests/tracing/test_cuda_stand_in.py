"""Engines see the stand-in for torch.cuda, torch does not, and the watch finds races through it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardproof import Layout, Phase, Plan, Schedule, Training, Watch, WorldSpec, launch
from shardproof.fixtures.chain import CHAIN
from shardproof.fixtures.optimizers import SGD
from shardproof.harness.records.saved_result import keep_result, load_kept
from shardproof.harness.runner.engines import EngineDescription
from shardproof.harness.tracing.races.fake_cuda import cuda_stand_in
from shardproof.harness.tracing.races.race_report import RaceKind, RaceReport
from shardproof.harness.tracing.recorder import Recorder
from shardproof.harness.training.rank_body import drive_rank
from shardproof.harness.training.watches import watching

RAW = RaceKind.READ_AFTER_WRITE
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="torch.cuda is the real one here")


@without_gpu
def test_an_engine_sees_a_device_and_torch_does_not() -> None:
    with cuda_stand_in():
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1
        assert torch.cuda.get_device_capability() == (9, 0)
        assert torch.cuda.memory_allocated() == 0
        torch.manual_seed(0)  # asks torch.cuda as well
        assert torch.empty(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"
        assert torch.ones(2).to(torch.device("cuda", 0)).cuda().device.type == "cpu"
        assert torch.ones(2).to(dtype=torch.float64).dtype is torch.float64
    assert not torch.cuda.is_available()


@without_gpu
def test_nothing_of_it_is_left() -> None:
    before = (torch.cuda.Stream, torch.cuda.Event, torch.empty, torch.Tensor.to, torch.Tensor.record_stream)
    with cuda_stand_in(), cuda_stand_in():
        assert torch.cuda.Stream is not before[0]
    now = (torch.cuda.Stream, torch.cuda.Event, torch.empty, torch.Tensor.to, torch.Tensor.record_stream)
    assert all(a is b for a, b in zip(before, now, strict=True))


@without_gpu
@pytest.mark.parametrize("is_watched", [False, True])
def test_the_current_stream_is_the_one_selected(is_watched: bool) -> None:
    def look() -> None:
        with cuda_stand_in():
            outer = torch.cuda.current_stream()
            side = torch.cuda.Stream()
            assert outer == torch.cuda.current_stream() != side
            with torch.cuda.stream(side):
                assert torch.cuda.current_stream() == side
                with outer:
                    assert torch.cuda.current_stream() == outer
            assert torch.cuda.current_stream() == outer
            event = side.record_event()
            event.wait()
            assert event.query()
            assert torch.cuda.Event(enable_timing=True).elapsed_time(event) == 0

    if is_watched:
        with watching(frozenset({Watch.RACES}), Recorder()):
            look()
    else:
        look()


def test_a_record_names_the_stand_in() -> None:
    engine = EngineDescription(capabilities=frozenset(), version="fairscale 0.4.13", insists_on_cuda=True)
    assert engine.version_on("cpu") == "fairscale 0.4.13+cuda.stand.in"
    assert engine.version_on("cuda") == "fairscale 0.4.13"
    local = EngineDescription(capabilities=frozenset(), version="torch 2.13.0+cpu", insists_on_cuda=True)
    assert local.version_on("cpu") == "torch 2.13.0+cpu.cuda.stand.in"
    plain = EngineDescription(capabilities=frozenset(), version="torch 2.13.0+cpu")
    assert plain.version_on("cpu") == "torch 2.13.0+cpu"


def _reports(engine: str, folder: Path) -> list[RaceReport]:
    training = Training(
        problem=CHAIN,
        optimizer=SGD,
        plan=Plan(layout=Layout.REPLICATE),
        schedule=Schedule(steps=2),
        watch=frozenset({Watch.RACES}),
    )
    keep_result(launch(WorldSpec.parse("threads:2"), drive_rank, training, engine, folder=folder), folder)
    found = [rank.race_report for rank in load_kept(folder).ranks]
    return [report for report in found if report is not None]


@without_gpu
@pytest.mark.slow
def test_an_engine_that_insists_on_cuda_is_watched(tmp_path: Path) -> None:
    honest = _reports("tests.tracing.cuda_engine:InsistsOnCuda", tmp_path / "honest")
    assert [report.races for report in honest] == [(), ()]
    assert all(report.num_streams == 2 for report in honest)
    hasty = _reports("tests.tracing.cuda_engine:StepsTooEarly", tmp_path / "hasty")
    assert len(hasty) == 2
    for report in hasty:
        first, *_ = report.races
        assert (first.kind, first.first.operator, first.second.operator) == (RAW, "copy_", "clone")
        assert first.second.phase is Phase.STEP
        assert "(stream)" in first.first.stream
        assert first.second.stream == "the default stream"
