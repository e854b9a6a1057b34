"""Mutants that gather, keep or free whole parameters at the wrong time, or show others than the model's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from engine.adapters.composable import ComposableUnit
from engine.adapters.reference import PreparedReference, ReferenceEngine
from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.contract import Layout, Plan, PreparedModel, Reshard, Shard

__all__ = [
    "FreesHeldUnitsAfterBackward",
    "FreesInTheFirstStepAlone",
    "FreesOnlyWhatGotGradients",
    "FreesTheRootByDefault",
    "FreesWhatItWasAskedToKeep",
    "FreesWholeWhereAPartWasAsked",
    "KeepsRootsWhateverAsked",
    "KeepsWhatItWasAskedToFree",
    "LeaksAfterBackward",
    "ShowsPaddedRows",
]


class KeepsRootsWhateverAsked(FullyShardEngine):
    """What a root owns stays gathered after forward, although the plan says to free it.

    After pytorch/pytorch#154655: of every root it was assumed that backward would need it at once.
    """

    name = "mutant.KeepsRootsWhateverAsked"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then change the policy of the roots."""
        prepared = super().prepare(model, plan, mesh)
        assert isinstance(prepared, PreparedFullyShard)
        if plan.reshard in {Reshard.AFTER_FORWARD, Reshard.TO_PAIRS}:
            for root in prepared._roots():
                root.set_reshard_after_forward(False, recurse=False)
        return prepared


class FreesWhatItWasAskedToKeep(FullyShardEngine):
    """Every unit is freed after forward; nothing can be kept for backward.

    After pytorch/PiPPy#1105: beside a pipeline the policy had to be to free, although keeping was wanted.
    """

    name = "mutant.FreesWhatItWasAskedToKeep"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard by another policy."""
        is_kept = plan.reshard is Reshard.KEEP
        return super().prepare(model, replace(plan, reshard=Reshard.AFTER_FORWARD) if is_kept else plan, mesh)


class KeepsWhatItWasAskedToFree(FullyShardEngine):
    """Every unit is kept from forward to backward although the plan says to free it; the numbers are right.

    After pytorch/pytorch#149029: freeing after forward was asked for, and memory grew with every forward.
    """

    name = "mutant.KeepsWhatItWasAskedToFree"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard by another policy."""
        is_freed = plan.reshard is Reshard.AFTER_FORWARD
        return super().prepare(model, replace(plan, reshard=Reshard.KEEP) if is_freed else plan, mesh)


class FreesTheRootByDefault(FullyShardEngine):
    """Without a policy the root is freed after forward like any other unit, and backward gathers it at once again.

    After ByteDance-Seed/VeOmni#806: a policy set on the root undid the default that keeps it until backward.
    """

    name = "mutant.FreesTheRootByDefault"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Name the policy where nobody did."""
        is_native = plan.reshard is Reshard.NATIVE
        plan_of_all = replace(plan, reshard=Reshard.AFTER_FORWARD) if is_native else plan
        return super().prepare(model, plan_of_all, mesh)


class FreesWholeWhereAPartWasAsked(FullyShardEngine):
    """Asked to keep parameters sharded over pairs, it shards them over all ranks; the numbers are right.

    After Tencent-Hunyuan/UniRL#410: a mesh of two axes was asked for, and one over all ranks was used.
    """

    name = "mutant.FreesWholeWhereAPartWasAsked"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard by another policy."""
        is_part = plan.reshard is Reshard.TO_PAIRS
        return super().prepare(model, replace(plan, reshard=Reshard.AFTER_FORWARD) if is_part else plan, mesh)


class _PreparedForgetful(PreparedReference):
    def step(self) -> None:
        super().step()
        for unit in self.units().values():
            unit.set_reshard_after_forward(is_on=False)


class FreesInTheFirstStepAlone(ReferenceEngine):
    """From the second step on every unit stays gathered after forward; the numbers are right.

    After pytorch/pytorch#75892: what one iteration had left gathered changed what the next one gathered.
    """

    name = "mutant.FreesInTheFirstStepAlone"
    prepared_type = _PreparedForgetful


class _PreparedLeaky(PreparedReference):
    """Keeps what backward used, and frees it only when the optimizer needs the shards."""

    def backward(self, loss: torch.Tensor) -> None:
        for unit in self.units().values():
            unit.set_reshard_after_backward(is_on=False)
        super().backward(loss)

    def step(self) -> None:
        self._free()
        super().step()

    def local_gradients(self) -> Mapping[str, Shard | None]:
        # Gradients belong to the shards: whoever reads them frees the rest, as any reader of the engine would.
        self._free()
        return super().local_gradients()

    def _free(self) -> None:
        for unit in self.units().values():
            unit.reshard()


class LeaksAfterBackward(ReferenceEngine):
    """Units stay gathered after backward, for as long as nobody looks at gradients; the numbers are right.

    After hpcaitech/ColossalAI#741: a sharded model's memory leaked in backward.
    """

    name = "mutant.LeaksAfterBackward"
    prepared_type = _PreparedLeaky


class _PreparedSelective(_PreparedLeaky):
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for name, unit in self.units().items():
            if any(p.grad is not None for p in self.part(name).parameters()):
                unit.reshard()


class FreesOnlyWhatGotGradients(ReferenceEngine):
    """Units that backward never entered stay gathered after it; the numbers are right.

    After pytorch/pytorch#83129: the hook that frees a unit after backward fires with its gradients, or never.
    """

    name = "mutant.FreesOnlyWhatGotGradients"
    prepared_type = _PreparedSelective


class _UnheldUnit(ComposableUnit):
    def set_reshard_after_backward(self, *, is_on: bool) -> None:
        """Change nothing."""


class _PreparedUnheld(PreparedReference):
    unit_type = _UnheldUnit


class FreesHeldUnitsAfterBackward(ReferenceEngine):
    """Told to keep a unit gathered after backward, it frees it all the same; the numbers are right.

    After Haian-Jin/LVSM#22: a switch thrown before each microbatch had no effect on what followed.
    """

    name = "mutant.FreesHeldUnitsAfterBackward"
    prepared_type = _PreparedUnheld


class _PreparedPadded(PreparedReference):
    def shown_parameters(self) -> Mapping[str, Shard]:
        """Read whole parameters with the rows that were added so that all ranks have equally many."""
        shown = dict(super().shown_parameters())
        for name, parameter in self.named.named_parameters():
            if not isinstance(parameter, DTensor) and self.plan.layout is Layout.SHARD:
                rows = shown[name].tensor
                missing = -len(rows) % self._num_shards
                padded = torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))
                shown[name] = replace(shown[name], tensor=padded, global_shape=tuple(padded.shape))
        return shown

    @property
    def _num_shards(self) -> int:
        return torch.distributed.get_world_size()


class ShowsPaddedRows(ReferenceEngine):
    """Whole parameters have rows of padding at their end, where ranks do not divide the model's.

    After Lightning-AI/lightning-thunder#908: in one order of wrapping, padding stayed in what was gathered.
    """

    name = "mutant.ShowsPaddedRows"
    prepared_type = _PreparedPadded
