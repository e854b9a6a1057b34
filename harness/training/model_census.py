"""Counts of the memory of one rank's model, at moments of its loop, beside what its layout explains."""

from __future__ import annotations

import hashlib
from functools import partial

from shardproof.engine.contract import Copies, Cut, Layout, NoGradient, PreparedModel
from shardproof.harness.cases.training import Training
from shardproof.harness.cases.user_model import has_level_memory
from shardproof.harness.torch_compat.dtypes import num_bytes_of
from shardproof.harness.tracing.memory.memory_report import CensusTime
from shardproof.harness.training.engine_actor import EngineActor
from shardproof.harness.training.layout_memory import Form, HeldGradients, explained
from shardproof.harness.training.reads import read_declared, read_presence, read_shards
from shardproof.harness.training.watches import Watches, observing
from shardproof.harness.worlds.rank import RankContext


class ModelCensus:
    """Counts a rank's model, if the watches have a census and the form of the model."""

    def __init__(self, training: Training, context: RankContext, watches: Watches | None) -> None:
        self._training, self._context, self._watches = training, context, watches

    def take(self, prepared: PreparedModel, actor: EngineActor, moment: CensusTime, num_loads: int) -> None:
        """Count at a moment of the actor's step, after so many loads of state."""
        watches, training = self._watches, self._training.at(actor.step)
        if watches is None or watches.census is None or watches.form is None or not actor.is_at_rest:
            return
        form = watches.form
        # Engines that shard optimizer state alone may keep buffers of whole gradients, as DDP below them does.
        is_sharded = training.plan.layout in {Layout.SHARD, Layout.HYBRID}
        is_between = moment is CensusTime.BETWEEN
        if is_between and not is_sharded:
            return
        with observing(self._context, watches, actor.step):
            gradients = HeldGradients.at(moment, actor.step, training)
            is_before_updates = actor.step == 0 and moment in {CensusTime.BETWEEN, CensusTime.REDUCED}
            is_shown = has_level_memory(training) and not is_between
            explains = partial(self._explained, prepared, form, training, gradients)
            watches.census.take(
                actor.step,
                moment,
                explains if training.is_explained else None,
                state_bytes=_state_bytes(prepared) if is_sharded and is_before_updates else None,
                kind=(gradients, is_before_updates, num_loads),
                shown=partial(self._shown, prepared, moment, actor.step) if is_shown else None,
                num_loads=num_loads,
            )

    def _shown(self, prepared: PreparedModel, moment: CensusTime, step: int) -> str:
        """Return a digest of the names of the gradients and the state that the engine shows.

        A rank of frozen pieces never shows any, but may hold the padding of others' gradients: there the moment counts,
        as it does where zeros are shown for gradients that are none; there what the loop clears them to counts too.
        """
        reads = ("local_gradients", "local_optimizer_state")
        found = [read_presence(prepared, read) for read in reads]
        names = [sorted(presence) for presence in found]
        shows_zeros = read_declared(prepared, "no_gradient", NoGradient) is not NoGradient.NONE
        if shows_zeros or not any(has_rows for presence in found for has_rows in presence.values()):
            names.append([moment.name])
        if shows_zeros:
            names.append([str(self._training.schedule.clears_to_none(n)) for n in (step - 1, step)])
        return hashlib.sha256(repr(names).encode()).hexdigest()[:8]

    def _explained(
        self, prepared: PreparedModel, form: Form, training: Training, gradients: HeldGradients
    ) -> int:
        """Return the bytes that the layout and the reported optimizer state explain; a law checks the report itself."""
        size, cut = self._context.size, read_declared(prepared, "cut", Cut)
        state, copies = _state_bytes(prepared), read_declared(prepared, "copies", Copies)
        return explained(
            form, training, size, cut=cut, state=state, copies=copies, gradients=gradients
        ).num_bytes


def _state_bytes(prepared: PreparedModel) -> int:
    return sum(
        num_bytes_of(shard.tensor) for shard in read_shards(prepared, "local_optimizer_state").values()
    )
