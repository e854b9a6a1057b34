"""Shards that pack themselves for a gather: what they are told, what crosses between ranks, what is made of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardproof import EVEN, Capability, Op
from shardproof.suites.composable import bench as benches
from shardproof.suites.composable.bench import STEP, Bench, whole
from shardproof.suites.wrapper.model import LR, copies, gradients, tower

expects = partial(benches.expects, beside=frozenset({Capability.PACKED_GATHERS}))
TOLD, CALLS, BYTES = "what pack is told", "calls", "bytes"
NUM_STEPS = 2


class _Wire:
    """Sends values without their fractions, in 16 bits, padded to the rows of the largest shard."""

    def __init__(self, shard: torch.Tensor, num_shards: int) -> None:
        self._shard = shard
        self._num_shards = num_shards
        self.told: list[Any] = []  # Any: what an engine hands over
        self.calls: list[str] = []
        self.num_bytes = 0

    # Any: the policy's type is the engine's own.
    def pack(
        self, mesh: DeviceMesh, size: torch.Size, stride: tuple[int, ...], module: nn.Module, policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], int]:
        """Round down and pad."""
        self.calls.append("pack")
        self.told.append((mesh.mesh.tolist(), size, stride, module))
        payload = torch.zeros(
            (-(-size[0] // self._num_shards), *size[1:]), dtype=torch.float16, device=self._shard.device
        )
        payload[: len(self._shard)] = self._shard.floor()
        self.num_bytes += payload.nbytes * self._num_shards
        return (payload,), size[0]

    def unpack(
        self,
        gathered: tuple[torch.Tensor, ...],
        num_rows: int,
        dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Widen and leave out the padding, into what there is already where there is something."""
        self.calls.append("unpack")
        values = gathered[0][:num_rows].to(dtype)
        if out is None:
            return values, (values,)
        out.data.copy_(values)  # past the version, which counts changes since forward
        return None


def _wired(model: nn.Module, num_shards: int) -> dict[str, _Wire]:
    """Hang a pack and an unpack on every shard."""
    wires = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        shard: Any = parameter._local_tensor  # to_local() returns a view of the tensor that the engine has
        wires[name] = _Wire(shard, num_shards)
        shard.fsdp_pre_all_gather = wires[name].pack
        shard.fsdp_post_all_gather = wires[name].unpack
    return wires


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("GathersWithoutPacking", "PacksOnceForAll")
@pytest.mark.parametrize("frees", [True, False], ids=["freed", "kept"])
@pytest.mark.parametrize(
    "layout",
    ["shards", pytest.param("hybrid", marks=pytest.mark.kills("TellsPackTheWholeMesh")), "alone"],
)
@expects(STEP, TOLD, CALLS, BYTES)
def test_shards_pack_themselves(bench: Bench, layout: str, frees: bool) -> None:
    num_replicas = {"shards": 1, "hybrid": 2, "alone": bench.size}[layout]
    num_shards = bench.size // num_replicas
    mesh = bench.mesh(None if layout == "shards" else num_replicas)
    model, values = tower(), copies(tower().named_parameters())
    shapes = {name: (value.shape, value.stride()) for name, value in values.items()}
    with torch.no_grad():
        for tensor in (*values.values(), *model.parameters()):
            tensor.add_(0.25)
    bench.shard(model, mesh=mesh, reshard_after_forward=frees)
    wires = _wired(model, num_shards)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR / 64)
    for step in range(NUM_STEPS):
        bench.train(model, step=step)
        optimizer.step()
        optimizer.zero_grad()
        alone = tower()
        alone.load_state_dict({n: v.floor() for n, v in values.items()}, strict=False)
        learnt = gradients(alone, bench.ranks, [step])
        values = {name: value - LR / 64 * learnt[name] for name, value in values.items()}
    gathers = [e for e in bench.ledger() if e.op is Op.ALL_GATHER]
    bench.same(STEP, whole(model), values)
    first = bench.rank // num_shards * num_shards
    told = [*range(first, first + num_shards)]
    for name, wire in wires.items():
        expected = (told, *shapes[name], model.get_submodule(name.rpartition(".")[0]))
        bench.same(TOLD, [got for got in wire.told if got != expected], [])
        bench.same(CALLS, wire.calls, ["pack", "unpack"] * (len(wire.calls) // 2))
    per_unit = [len(wires[f"{unit}.weight"].told) for unit in ("stem", "middle.0", "middle.1")]
    of_shards = num_shards > 1
    bench.same(CALLS, len(gathers), sum(per_unit) * of_shards)
    bench.same(BYTES, sum(e.num_bytes for e in gathers), sum(w.num_bytes for w in wires.values()) * of_shards)
