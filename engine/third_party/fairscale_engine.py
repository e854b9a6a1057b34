"""fairscale: FullyShardedDataParallel, with a stand-in for CUDA on a CPU, and ShardedDataParallel with OSS."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel, ShardedDataParallel
from fairscale.optim.oss import OSS
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.consolidation import consolidated_state
from shardproof.engine.contract import Capability, Cut, Engine, OptimizerFactory, Plan, PreparedModel, Reshard
from shardproof.engine.pieces import Piece, PreparedPieces


class PreparedFairscale(PreparedPieces):
    """Each unit is one flat parameter, cut evenly over ranks with padding at the end."""

    wrapped_as = ("_fsdp_wrapped_module", "_fpw_module")

    def __init__(self, module: Any, model: nn.Module) -> None:
        super().__init__(module, named=model)
        self._root = module

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
        """Use the engine's own."""
        return float(self._root.clip_grad_norm_(max_norm, norm_type))

    def value_of(self, piece: Piece) -> torch.Tensor:
        """Read the shard also while the flat parameter is whole."""
        value: torch.Tensor = getattr(piece.owner, "_fp32_shard", piece.owner)
        return value

    def pieces(self) -> Iterator[Piece]:
        for path, unit in self._root.named_modules():
            if isinstance(unit, FullyShardedDataParallel):
                for flat in unit.params:
                    yield from self._pieces_of(unit, flat, path)

    def _pieces_of(self, unit: Any, flat: Any, path: str) -> Iterator[Piece]:  # Any: of an untyped package
        share = -(-sum(flat.metadata()[2]) // unit.world_size)
        offset = -unit.rank * share  # of a parameter in this rank's shard
        for name, shape, numel in zip(*flat.metadata(), strict=True):
            begin, end = (min(max(bound, offset), offset + numel) for bound in (0, share))
            yield Piece(
                name=self.original_name(f"{path}.{name}").lstrip("."),
                shape=tuple(shape),
                owner=flat,
                start=begin - offset,
                offset=max(begin, 0),
                numel=end - begin,
            )
            offset += numel


class FairscaleEngine(Engine):
    """The adapter."""

    name = "fairscale.fsdp"
    package = "fairscale"
    capabilities = frozenset(
        {
            Capability.SHARD,
            Capability.UNITS,
            Capability.RESHARD_POLICY,
            Capability.ACCUMULATE,
            Capability.CLIP,
        }
    )
    insists_on_cuda = True

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap every unit of the plan, then the root."""
        plan.refuse_beyond(self.capabilities)
        # It calls collectives that torch 2.13 renamed (pytorch#186123), and older functions that are deprecated.
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*deprecated")
        warnings.filterwarnings("ignore", category=UserWarning, message="TypedStorage is deprecated")
        group = mesh.get_group()
        options = {
            # Its own cache of groups is per process, and ranks may be threads.
            "process_group": group,
            "process_group_reduce_scatter": group,
            "compute_device": next(model.parameters()).device,
            "reshard_after_forward": plan.reshard is not Reshard.KEEP,
            # By default the root keeps its gathered parameters, whatever the option is.
            "disable_reshard_on_root": plan.reshard is not Reshard.AFTER_FORWARD,
            # Its buckets have two dims, which CPU backends do not support.
            "bucket_cap_mb": 0,
        }
        for unit in plan.units:
            parent, _, name = unit.rpartition(".")
            setattr(
                model.get_submodule(parent),
                name,
                FullyShardedDataParallel(model.get_submodule(unit), **options),
            )
        return PreparedFairscale(FullyShardedDataParallel(model, **options), model)


class PreparedShardedDdp(PreparedPieces):
    """One rank has each parameter's reduced gradient and state, and sends the updated parameter to the others."""

    cut = Cut.PARAMETERS
    parameters_are_whole = True

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__(model)
        self._group = group

    def optimizer(self, factory: OptimizerFactory) -> None:
        """Create an optimizer of the requested kind for each rank's share, and wrap the model, which needs both."""
        parameters = list(self.named.parameters())

        def make(
            share: Any, **_: Any
        ) -> torch.optim.Optimizer:  # Any: groups of parameters, and their defaults
            built = factory(parameters)  # it may choose among all of them
            built.param_groups = []
            for group in share:
                built.add_param_group(group)
            return built

        maker: Any = make  # annotated as a class
        self._oss = OSS(factory(parameters).param_groups, optim=maker, group=self._group)
        self._wrapper: Any = ShardedDataParallel(
            self.named,
            self._oss,
            process_group=self._group,
            broadcast_buffers=False,
            reduce_buffer_size=0,  # buckets would persist between steps too
        )
        self.module = self._wrapper
        super().optimizer(lambda _: self._oss)

    def backward(self, loss: torch.Tensor) -> None:
        """Reduce with the last microbatch: owners would average reduced gradients again."""
        with nullcontext() if self.is_last_microbatch else self._wrapper.no_sync():
            super().backward(loss)

    def accumulating(self) -> AbstractContextManager[None]:
        """Do nothing: `backward` checks which microbatch is the last."""
        return nullcontext()

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
        """Use OSS's own: no rank has all gradients."""
        return float(self._oss.clip_grad_norm(max_norm, norm_type))

    def full_state(self) -> dict[str, Any]:
        """Gather the optimizer's state; the model is whole."""
        state = consolidated_state(self._oss, self._group)
        return {"model": self.named.state_dict(), "optimizer": state}

    def load_full_state(self, state: dict[str, Any]) -> None:
        """Load the whole state on every rank, which keeps its share."""
        self.named.load_state_dict(state["model"])
        self._oss.load_state_dict(state["optimizer"])

    def pieces(self) -> Iterator[Piece]:
        """Yield no pieces that another rank owns."""
        for name, p in self.owned_parameters().items():
            if p in self._oss._param_to_rank and p.requires_grad:
                numel = p.numel() if self._oss._param_to_rank[p] == self._group.rank() else 0
                yield Piece(name=name, shape=tuple(p.shape), owner=p, numel=numel)

    def state_of(self, piece: Piece) -> Mapping[str, Any]:  # Any: as in the base
        state: Mapping[str, Any] = self._oss.optim.state.get(piece.owner, {})
        return state


class ShardedDdpEngine(Engine):
    """ZeRO-2 in whole parameters: gradients are reduced to their owners."""

    name = "fairscale.sdp"
    package = "fairscale"
    capabilities = frozenset(
        {
            Capability.ZERO2,
            Capability.ACCUMULATE,
            Capability.CLIP,
            Capability.OWN_BUFFERS,
            Capability.STATE,
        }
    )

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        plan.refuse_beyond(self.capabilities)
        return PreparedShardedDdp(model, mesh.get_group())
