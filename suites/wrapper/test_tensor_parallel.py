"""Wrapped models whose tensors are already sharded: trained as one model, saved and loaded under its names."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import StateDictType

from shardproof import FOURS
from shardproof.suites.composable.bench import cut, layers, train_on_shared_rows
from shardproof.suites.wrapper.expect import STEP, Bench, expects
from shardproof.suites.tower import copies, gathered
from shardproof.suites.wrapper.wrapping import EACH_FORM, Form, original

pytestmark = pytest.mark.worlds(FOURS)
NAMES, VALUES = "names", "values"


def _wrapped(bench: Bench, form: Form = Form.ORIGINAL) -> Any:
    model, mesh = cut(bench)
    return bench.wrap(model, device_mesh=mesh["data"], use_orig_params=form.use_orig_params)


def _whole(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    return gathered({original(name): value for name, value in values.items()})


def _state(bench: Bench, root: Any) -> dict[str, Any]:
    with bench.api.state_dict_type(root, StateDictType.SHARDED_STATE_DICT):
        saved: dict[str, Any] = root.state_dict()
    return saved


def _load(bench: Bench, root: Any, state: dict[str, Any]) -> None:
    with bench.api.state_dict_type(root, StateDictType.SHARDED_STATE_DICT):
        root.load_state_dict(state)


@pytest.mark.kills("SumsWhatIsWrapped")
@EACH_FORM
@expects(STEP)
def test_trains_tensors_that_are_cut(bench: Bench, form: Form) -> None:
    root, alone = _wrapped(bench, form), layers()
    train_on_shared_rows(bench, root, alone, 2)
    with bench.api.summon_full_params(root, writeback=False):
        shown = _whole(dict(root.named_parameters()))
    bench.near(STEP, shown, copies(alone.named_parameters()), tolerance=1e-5)


@pytest.mark.kills("LoadsTheFirstPieceEverywhere")
@EACH_FORM
@expects(NAMES, VALUES, "values that were loaded")
def test_saves_and_loads_tensors_that_are_cut(bench: Bench, form: Form) -> None:
    root, alone = _wrapped(bench, form), layers()
    train_on_shared_rows(bench, root, alone, 2)
    state = _state(bench, root)
    bench.same(NAMES, list(state), list(alone.state_dict()))
    bench.near(VALUES, _whole(state), copies(alone.named_parameters()), tolerance=1e-5)
    other = _wrapped(bench, form)
    _load(bench, other, state)
    bench.same("values that were loaded", _whole(_state(bench, other)), _whole(state))


@pytest.mark.kills("LoadsTheFirstPieceEverywhere")
@EACH_FORM
@expects("moments")
def test_saves_and_loads_moments_of_tensors_that_are_cut(bench: Bench, form: Form) -> None:
    roots, moments = [_wrapped(bench, form) for _ in range(2)], []
    optimizers = [torch.optim.SGD(root.parameters(), lr=0.5, momentum=0.5) for root in roots]
    train_on_shared_rows(bench, roots[0], layers(), 2)
    optimizers[0].step()
    for root, optimizer in zip(roots, optimizers, strict=True):
        with bench.api.state_dict_type(root, StateDictType.SHARDED_STATE_DICT):
            state = bench.api.optim_state_dict(root, optimizer)
            if root is roots[0]:
                loadable = bench.api.optim_state_dict_to_load(roots[1], optimizers[1], state)
                optimizers[1].load_state_dict(loadable)
        moments.append(_whole({name: held["momentum_buffer"] for name, held in state["state"].items()}))
    bench.same("moments", moments[1], moments[0])


@pytest.mark.kills("LoadsTheFirstPieceEverywhere")
@expects(VALUES)
def test_loads_from_files_what_one_axis_saved(bench: Bench) -> None:
    before, after = bench.wrap(layers()), _wrapped(bench)
    with torch.no_grad():
        for parameter in after.parameters():
            parameter.zero_()
    folder = [tempfile.mkdtemp(prefix="shardproof-") if bench.rank == 0 else ""]
    distributed.broadcast_object_list(folder)
    save(_state(bench, before), checkpoint_id=folder[0])
    state = _state(bench, after)
    load(state, checkpoint_id=folder[0])
    distributed.barrier()
    if bench.rank == 0:
        shutil.rmtree(folder[0])
    _load(bench, after, state)
    bench.same(VALUES, _whole(_state(bench, after)), copies(layers().named_parameters()))
