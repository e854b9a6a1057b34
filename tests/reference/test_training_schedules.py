"""Forwards and backwards in every order that autograd allows: twice, interleaved, partial, without a graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.worlds.spec import WorldKind
from tests.reference.front_doors import FrontDoor
from tests.reference.models import (
    MLP,
    TRANSFORMER,
    ChunkedHead,
    Fork,
    Mlp,
    Rooted,
    Unwrapping,
    stack,
    tensors_of,
)
from tests.reference.oracle import (
    HYBRID,
    Args,
    Plan,
    Schedule,
    Training,
    cases,
    in_turn,
    local,
    loss_of,
    run_world,
    tokens,
    train_beside_oracle,
)

Losses = list[torch.Tensor]


def child_alone(model: nn.Module, batches: Sequence[Args], door: FrontDoor | None) -> Losses:
    """Train the first child through itself; the root does not run."""
    return in_turn(model.get_submodule("0"), batches, door)


def root_then_child(model: nn.Module, batches: Sequence[Args], door: FrontDoor | None) -> Losses:
    return [*in_turn(model, batches, door), *child_alone(model, batches, door)]


def all_forwards_first(
    model: nn.Module, batches: Sequence[Args], door: FrontDoor | None, *, backwards: int = 1
) -> Losses:
    """Run every forward, then every backward, in the order of the forwards or (-1) against it."""
    losses = [loss_of(model(*args)) / len(batches) for args in batches]
    for loss in losses[::backwards]:
        loss.backward()
    return [loss.detach() for loss in losses]


def one_loss_of_all(model: nn.Module, batches: Sequence[Args], door: FrontDoor | None) -> Losses:
    """Run every forward, then a single backward through all of them."""
    first, *others = (loss_of(model(*args)) for args in batches)
    loss = (first - torch.stack(others).sum()).square()
    loss.backward()
    return [loss.detach()]


def backward_twice(model: nn.Module, batches: Sequence[Args], door: FrontDoor | None) -> Losses:
    """Walk one graph twice: the gradients double."""
    losses = []
    for args in batches:
        loss = loss_of(model(*args))
        loss.backward(retain_graph=True)
        loss.backward()
        losses.append(loss.detach())
    return losses


def two_losses_of_one_forward(model: nn.Module, batches: Sequence[Args], door: FrontDoor | None) -> Losses:
    """Backward through one output, then through the other."""
    losses: Losses = []
    for args in batches:
        parts = [loss_of(tensor) for tensor in tensors_of(model(*args))]
        parts[0].backward(retain_graph=True)
        parts[1].backward()
        losses.extend(part.detach() for part in parts)
    return losses


def first_output_only(model: nn.Module, batches: Sequence[Args], door: FrontDoor | None) -> Losses:
    losses = []
    for args in batches:
        loss = loss_of(tensors_of(model(*args))[0])
        loss.backward()
        losses.append(loss.detach())
    return losses


def with_input_gradients(model: nn.Module, batches: Sequence[Args], door: FrontDoor | None) -> Losses:
    """Let gradients flow into the inputs; they are nobody's to average."""
    inputs = [args[0].clone().requires_grad_() for args in batches]
    losses = in_turn(model, [(x,) for x in inputs], door)
    return [*losses, *(x.grad for x in inputs if x.grad is not None)]


def grad_of_inputs(model: nn.Module, batches: Sequence[Args], door: FrontDoor | None) -> Losses:
    """Ask autograd for input gradients alone, which leaves parameters without; then train as usual."""
    asked = []
    for args in batches:
        x = args[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(model(x)), [x])
        asked.append(gradient)
        if door is not None:  # the oracle's may hold what another rank's data left
            assert all(p.grad is None or not local(p.grad).any() for p in model.parameters())
    return [*asked, *in_turn(model, batches, door)]


def evaluate_first(
    model: nn.Module,
    batches: Sequence[Args],
    door: FrontDoor | None,
    *,
    guard: type[torch.no_grad | torch.inference_mode],
) -> Losses:
    """Look at the outputs without a graph, in eval mode, then train: what eval left behind must not matter."""
    model.eval()
    with guard():
        before = [loss_of(model(*args)) for args in batches]
    model.train()
    return [*(loss.clone() for loss in before), *in_turn(model, batches, door)]


def evaluate_between(model: nn.Module, batches: Sequence[Args], door: FrontDoor | None) -> Losses:
    """Run a forward without a graph between a forward and its backward."""
    losses = []
    for args in batches:
        loss = loss_of(model(*args))
        with torch.no_grad():
            losses.append(loss_of(model(*args)))
        loss.backward()
        losses.append(loss.detach())
    return losses


def forward_and_forget(model: nn.Module, batches: Sequence[Args], door: FrontDoor | None) -> Losses:
    """Run a forward with a graph that no backward ever walks, then train."""
    thrown_away = [loss_of(model(*args)).detach() for args in batches]
    return [*thrown_away, *in_turn(model, batches, door)]


def trunk_twice(model: nn.Module, batches: Sequence[Args], door: FrontDoor | None) -> Losses:
    """Run a forward that leaves a part of a unit out, twice, and one backward (upstream row T23)."""
    loss = torch.stack([loss_of(model(*args)) for args in batches]).sum()
    loss.backward()
    return [loss.detach()]


LAYERS = ("layers.0", "layers.1", "layers.2", "")
PAIRS = ("0", "1", "2", "")
KEEP, RESHARD = ({"reshard_after_forward": flag} for flag in (False, True))
PLANS = {
    "units": Plan(units=LAYERS),
    "single": Plan(),
    "reshard": Plan(units=LAYERS, options=RESHARD),
    "keep": Plan(units=LAYERS, options=KEEP),
}
SCHEDULES: dict[str, Schedule] = {
    "forwards_then_backwards": all_forwards_first,
    "forwards_then_backwards_reversed": partial(all_forwards_first, backwards=-1),
    "one_loss_of_all": one_loss_of_all,
    "backward_twice": backward_twice,
    "input_gradients": with_input_gradients,
    "grad_of_inputs": grad_of_inputs,
    "no_grad_first": partial(evaluate_first, guard=torch.no_grad),
    "inference_mode_first": partial(evaluate_first, guard=torch.inference_mode),
    "evaluate_between": evaluate_between,
    "forward_and_forget": forward_and_forget,
}
INFERENCE = (
    "it keeps the gathered tensors that the forward under inference_mode made, and the next training forward "
    "raises `Inplace update to inference tensor outside InferenceMode is not allowed`"
)
TORCH_FAILS = {"inference_mode_first": INFERENCE}
TRAININGS: dict[str, Training] = {
    **{
        f"{name}_{layout}": Training(
            model=MLP, plan=plan, schedule=schedule, num_microbatches=2, torch_fails=TORCH_FAILS.get(name, "")
        )
        for name, schedule in SCHEDULES.items()
        for layout, plan in PLANS.items()
    },
    # T12
    "child_after_root": Training(
        model=partial(stack, 5), plan=Plan(units=PAIRS), then=(child_alone, in_turn), num_steps=5
    ),
    "child_and_root": Training(model=partial(stack, 5), plan=Plan(units=PAIRS), schedule=root_then_child),
    # T22
    "nested_twice": Training(
        model=TRANSFORMER,
        draw=tokens,
        plan=Plan(units=("blocks.0.attention", "blocks.0.feed", "blocks.0", "blocks.1", "")),
        schedule=one_loss_of_all,
        num_microbatches=2,
    ),
    # T23
    "trunk_twice": Training(
        model=ChunkedHead,
        draw=tokens,
        plan=Plan(units=(("norm", "head"), "")),
        schedule=trunk_twice,
        num_microbatches=2,
        idle=("head",),
    ),
    "two_losses_of_one_forward": Training(
        model=Fork, plan=Plan(units=("left", "right", "")), schedule=two_losses_of_one_forward
    ),
    "two_losses_of_one_unit": Training(model=Fork, schedule=two_losses_of_one_forward),
    "part_of_the_outputs": Training(
        model=Fork, plan=Plan(units=("left", "right", "")), schedule=first_output_only, idle=("right",)
    ),
    "part_of_one_unit": Training(model=Fork, schedule=first_output_only, idle=("right",)),
    "then_all_outputs": Training(
        model=Fork,
        plan=Plan(units=("left", "right", "")),
        schedule=first_output_only,
        then=(in_turn,),
        idle=("right",),
        num_steps=4,
    ),
    "part_of_a_dict": Training(
        model=partial(Unwrapping, "dict", returns="dict"),
        plan=Plan(units=("entry", "inner", "outer", "")),
        schedule=first_output_only,
        idle=("outer.right",),
    ),
    "rooted_input_gradients": Training(
        model=partial(Rooted, 5),
        plan=Plan(units=("pairs.0", "pairs.1", "pairs.2", "")),
        schedule=with_input_gradients,
    ),
}
HYBRIDS = {
    name: Training(
        model=partial(Mlp, 5, 6, 7, 3),
        plan=Plan(units=LAYERS),
        schedule=SCHEDULES[name],
        mesh=HYBRID,
        num_microbatches=3,
    )
    for name in ("forwards_then_backwards", "one_loss_of_all", "backward_twice", "no_grad_first")
}
PARTLY = {
    name: Training(
        model=MLP,
        plan=Plan(units=LAYERS, options={"reshard_after_forward": 2}),
        schedule=SCHEDULES[name],
        num_microbatches=2,
        torch_fails=TORCH_FAILS.get(name, ""),
    )
    for name in ("forwards_then_backwards_reversed", "evaluate_between", "inference_mode_first")
}


@pytest.mark.parametrize(("name", "door"), cases(TRAININGS))
def test_an_order_of_passes_changes_no_number(name: str, door: str, tmp_path: Path) -> None:
    run_world(WorldKind.THREADS, 2, train_beside_oracle, door, TRAININGS[name], folder=tmp_path)


@pytest.mark.parametrize(("name", "door"), cases(HYBRIDS))
def test_nor_does_it_over_replicas_of_shards(name: str, door: str, tmp_path: Path) -> None:
    run_world(WorldKind.THREADS, 4, train_beside_oracle, door, HYBRIDS[name], folder=tmp_path)


@pytest.mark.parametrize(("name", "door"), cases(PARTLY))
def test_nor_does_it_over_smaller_groups(name: str, door: str, tmp_path: Path) -> None:
    run_world(WorldKind.THREADS, 4, train_beside_oracle, door, PARTLY[name], folder=tmp_path)


@pytest.mark.parametrize(("name", "door"), cases(TRAININGS, "forwards_then_backwards_units", "nested_twice"))
def test_nor_does_it_in_processes(name: str, door: str, tmp_path: Path) -> None:
    run_world(WorldKind.PROCESSES, 2, train_beside_oracle, door, TRAININGS[name], folder=tmp_path)
