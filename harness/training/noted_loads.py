"""Loads of state into a rank's model, and the facts that they leave for laws."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from shardproof.engine.contract import OptimizerFactory, PreparedModel
from shardproof.harness.cases.training import (
    AFTER_LOADING,
    AS_HANDED_OUT,
    AS_HELD,
    BEFORE_LOADING,
    HANDED_OUT,
    KNOWN,
    LOADED,
    OF_ALL_RANKS,
    RANDOM,
    RATES,
    TAKEN,
    UNCHANGED,
    Training,
)
from shardproof.harness.cases.user_model import written_by_forward
from shardproof.harness.records.observation import Fact
from shardproof.harness.training.reads import calling, read_shards
from shardproof.harness.training.watches import Watches, observing
from shardproof.harness.training.whole_state import (
    changed,
    copied,
    difference_of_state,
    digests_of,
    tensors_of,
)
from shardproof.harness.worlds.rank import RankContext


def to_be_loaded(factory: OptimizerFactory, *, lacks_schedules: bool = False) -> OptimizerFactory:
    """Return a factory of optimizers whose options, such as the learning rate, a load must replace.

    They are not zeros: a step that an engine takes to create state shows. The rates at which groups began are right,
    because an engine may make of these groups the optimizer that is scheduled.
    """

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = factory(parameters)
        for group in optimizer.param_groups:
            if lacks_schedules:
                group.pop("initial_lr", None)
            options = {name: value for name, value in group.items() if isinstance(value, float)}
            group.update({name: value / 2 for name, value in options.items() if name != "initial_lr"})
        return optimizer

    return make


class NotedLoads:
    """One rank's loads; ``facts`` are those since they were last taken, and ``num`` counts the loads in the loop."""

    def __init__(self, training: Training, context: RankContext, watches: Watches | None) -> None:
        self.facts: list[Fact] = []
        self.num = 0
        self._training, self._context, self._watches = training, context, watches

    def note(self, subject: str, value: str, moment: str = "") -> None:
        """Add a fact."""
        self.facts.append(Fact(moment=moment, subject=subject, value=value))

    def take(self) -> list[Fact]:
        """Return the facts, and begin anew."""
        facts, self.facts = self.facts, []
        return facts

    @contextmanager
    def noting_generator(self) -> Iterator[None]:
        """Note the state of the rank's default generator, from which dropout draws on a CPU, around a load."""
        self._note_generator(BEFORE_LOADING)
        yield
        self._note_generator(AFTER_LOADING)

    def _note_generator(self, moment: str) -> None:
        state = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:8]
        self.note(RANDOM, state, moment)

    # Any: states are nested dicts and lists of tensors and other values.
    def load_whole(
        self, prepared: PreparedModel, state: dict[str, Any], step: int, noted: Mapping[str, str]
    ) -> None:
        """Load a state; record, with ``noted``, whether ranks then hold its values and whether loading changed it."""
        kept = copied(state)
        with calling("load_full_state"):
            prepared.load_full_state(state)
        lost = changed(tensors_of(kept), tensors_of(state))
        taken = self.difference_from(prepared, kept, step)
        found = {LOADED: f"{lost} changed" if lost else UNCHANGED, TAKEN: taken or AS_HANDED_OUT}
        for subject, value in {**noted, **found}.items():
            self.note(subject, value)

    def difference_from(self, prepared: PreparedModel, state: dict[str, Any], step: int) -> str:
        """Return the first difference between a whole state and this rank's shards, by the model's own names."""
        with observing(self._context, self._watches, step):
            return difference_of_state(prepared, state, self._names_of_state)

    def handed_out(self, prepared: PreparedModel, state: dict[str, Any], step: int) -> dict[str, str]:
        """Return notes of a whole state that the model has handed out: what its rank holds else, and its digests."""
        difference = self.difference_from(prepared, state, step)
        with observing(self._context, self._watches, step):
            alike = read_shards(prepared, "local_parameters").keys() - written_by_forward(
                self._training.problem
            )
            return {HANDED_OUT: difference or AS_HELD, OF_ALL_RANKS: digests_of(state, alike)}

    def note_rates(self, prepared: PreparedModel) -> None:
        """Note whether each group of a loaded optimizer has the rate at which it began, from which schedules go on."""
        groups = enumerate(prepared.built_optimizer().param_groups)
        lacking = (f"group {n} without initial_lr" for n, group in groups if "initial_lr" not in group)
        self.note(RATES, next(lacking, KNOWN))

    @cached_property
    def _names_of_state(self) -> frozenset[str]:
        return frozenset(self._training.problem.build().state_dict())
