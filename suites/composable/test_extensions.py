"""Shards that pack themselves for a gather: the arguments of pack, the bytes sent, and the unpacked parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardproof import EVEN, FOUR_OR_MORE_EVEN, Capability, Op, Watch
from shardproof.suites.composable import bench as benches
from shardproof.suites.composable.bench import STEP, Bench
from shardproof.suites.params import param, parametrize
from shardproof.suites.tower import LR, batch, copies, gradients, tower

pytestmark = pytest.mark.worlds(EVEN)

# The watch sees on which stream shards pack themselves.
expects = partial(
    benches.expects, beside=frozenset({Capability.PACKED_GATHERS}), watch=frozenset({Watch.RACES})
)
TOLD, CALLS, BYTES = "what pack is told", "calls", "bytes"
NUM_STEPS = 2


class _Wire:
    """Sends values without their fractions, in 16 bits, padded to the rows of the largest shard."""

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards
        self.told: list[Any] = []  # Any: the engine's arguments
        self.calls: list[str] = []
        self.num_bytes = 0
        self.gathered: list[torch.UntypedStorage] = []

    def num_bytes_held(self) -> int:
        """Count the bytes that the last gather still holds."""
        return self.gathered[-1].nbytes()

    # Any: the policy's type is the engine's own.
    def pack(
        self,
        shard: torch.Tensor,
        mesh: DeviceMesh,
        size: torch.Size,
        stride: tuple[int, ...],
        module: nn.Module,
        policy: Any,
    ) -> tuple[tuple[torch.Tensor, ...], int]:
        """Round down and pad."""
        self.calls.append("pack")
        self.told.append((mesh.mesh.tolist(), size, stride, module))
        payload = torch.zeros(
            (-(-size[0] // self.num_shards), *size[1:]), dtype=torch.float16, device=shard.device
        )
        payload[: len(shard)] = shard.floor()
        self.num_bytes += payload.nbytes * self.num_shards
        return (payload,), size[0]

    def unpack(
        self,
        gathered: tuple[torch.Tensor, ...],
        num_rows: int,
        dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Widen and drop the padding, into an existing output if there is one."""
        self.calls.append("unpack")
        self.gathered = [gathered[0].untyped_storage()]
        values = gathered[0][:num_rows].to(dtype)
        if out is None:
            return values, (values,)
        out.data.copy_(values)  # without a new version, which counts changes since forward
        return None


class _Boxed(torch.Tensor):
    """A tensor around another, whose class packs and unpacks, as do tensors derived from it."""

    plain: torch.Tensor
    wire: _Wire

    # Any: arguments of any operator, and the engine's arguments.
    def __new__(cls, plain: torch.Tensor, wire: _Wire) -> Any:
        tensor: Any = torch.Tensor  # whose constructor of such classes has no type
        form = {"dtype": plain.dtype, "device": plain.device, "strides": plain.stride()}
        boxed = tensor._make_wrapper_subclass(cls, plain.shape, **form)
        boxed.plain, boxed.wire = plain, wire
        return boxed

    # Torch calls it on the class, and declares it as a method of tensors.
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        wires: list[_Wire] = []

        def opened(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(map(opened, value))
            if not isinstance(value, cls):
                return value
            wires.append(value.wire)
            return value.plain

        def boxed(value: Any) -> Any:
            return cls(value, wires[0]) if isinstance(value, torch.Tensor) else value

        named = {name: opened(value) for name, value in (kwargs or {}).items()}
        made = func(*opened(args), **named)
        return type(made)(map(boxed, made)) if isinstance(made, list | tuple) else boxed(made)

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        return self.wire.pack(self.plain, mesh, size, stride, module, policy)

    def fsdp_post_all_gather(self, gathered: Any, num_rows: Any, dtype: Any, *, out: Any = None) -> Any:
        return self.wire.unpack(gathered, num_rows, dtype, out=out)


@pytest.mark.kills("GathersWithoutPacking", "PacksOnceForAll")
@parametrize("frees", True, False, ids=["freed", "kept"])
@parametrize(
    "layout",
    param("shards", kills="PacksWhereNoGatherWaits"),
    param("hybrid", kills="TellsPackTheWholeMesh"),
    "alone",
)
@expects(STEP, TOLD, CALLS, BYTES)
def test_shards_pack_themselves(bench: Bench, layout: str, frees: bool) -> None:
    num_replicas = {"shards": 1, "hybrid": 2, "alone": bench.size}[layout]
    mesh = bench.mesh(None if layout == "shards" else num_replicas)
    model, wires = tower(), _wires(bench.size // num_replicas)
    bench.shard(model, mesh=mesh, reshard_after_forward=frees)
    for name, shard in _shards(model).items():
        shard.fsdp_pre_all_gather = partial(wires[name].pack, shard)
        shard.fsdp_post_all_gather = wires[name].unpack
    _train_packed(bench, model, wires)


@pytest.mark.kills("GathersWithoutPacking", "PacksOnceForAll")
@parametrize("frees", True, False, ids=["freed", "kept"])
@parametrize("start", "stored", "empty_in_bfloat16")
@expects(STEP, TOLD, CALLS, BYTES)
def test_classes_of_shards_pack_them(bench: Bench, start: str, frees: bool) -> None:
    is_empty = start != "stored"
    with torch.device("meta" if is_empty else bench.device):
        model = tower()
    wires = _wires(bench.size)
    for name, parameter in list(model.named_parameters()):
        module, _, own = name.rpartition(".")
        boxed = nn.Parameter(_Boxed(parameter.detach(), wires[name]))
        model.get_submodule(module).register_parameter(own, boxed)
    policy = bench.api.mixed_precision(torch.bfloat16 if is_empty else None, torch.float32)
    bench.shard(model, reshard_after_forward=frees, mp_policy=policy)
    if is_empty:
        model.to_empty(device=bench.device)
        model.load_state_dict(dict(tower().named_buffers()), strict=False)
    _train_packed(bench, model, wires)


_RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
_frees = partial(benches.expects, beside=frozenset({Capability.PACKED_GATHERS, Capability.FREES_PACKED}))


@pytest.mark.rows("E04", "C34")
@pytest.mark.kills("KeepsWhatWasUnpacked")
@parametrize("frees", True, False, ids=["freed", "kept"])
@_frees(STEP, TOLD, CALLS, BYTES, "bytes once unpacked", "values once sharded")
def test_gathered_bytes_are_freed_once_they_are_unpacked(bench: Bench, frees: bool) -> None:
    model, wires = bench.shard(tower(), reshard_after_forward=frees), _wires(bench.size)
    for name, shard in _shards(model).items():
        shard.fsdp_pre_all_gather = partial(wires[name].pack, shard)
        shard.fsdp_post_all_gather = wires[name].unpack
        setattr(shard, _RELEASE, lambda: True)
    model.unshard()
    bench.same("bytes once unpacked", [w.num_bytes_held() for w in wires.values() if w.gathered], [0] * 4)
    whole = [model.stem.weight, model.head.weight]
    model.reshard()
    bench.same("values once sharded", [p.untyped_storage().nbytes() for p in whole], [0, 0])
    _train_packed(bench, model, wires)


@pytest.mark.rows("C34")
@pytest.mark.kills("KeepsWhatWasUnpacked")
@parametrize("reason", "no_bool", "no_pair", param("a_part_is_kept", worlds=FOUR_OR_MORE_EVEN))
@_frees("the refusal")
def test_refuses_to_free(bench: Bench, reason: str) -> None:
    def prepare_and_run() -> None:
        model = tower()
        wire = _Wire(bench.size)
        bench.shard(model, (), reshard_after_forward=2 if reason == "a_part_is_kept" else True)
        shard = _shards(model)["stem.weight"]
        if reason != "no_pair":
            shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = partial(wire.pack, shard), wire.unpack
        setattr(shard, _RELEASE, lambda: 1 if reason == "no_bool" else True)
        model(batch(bench.rank).to(bench.device))

    error = NotImplementedError if reason == "a_part_is_kept" else AssertionError
    bench.refuses("the refusal", prepare_and_run, error)


def _wires(num_shards: int) -> dict[str, _Wire]:
    return {name: _Wire(num_shards) for name, _ in tower().named_parameters()}


def _shards(model: nn.Module) -> dict[str, Any]:  # Any: tensors that gain attributes
    """Return the engine's own tensors; to_local() would return views of them."""
    return {name: p._local_tensor for name, p in model.named_parameters() if isinstance(p, DTensor)}


def _train_packed(bench: Bench, model: nn.Module, wires: dict[str, _Wire]) -> None:
    """Claim that a model whose shards have fractions trains like one process that computes without them."""
    num_shards = wires["head.bias"].num_shards
    index = bench.rank % num_shards
    values = {name: value + 0.25 for name, value in copies(tower().named_parameters()).items()}
    shapes = {name: (value.shape, value.stride()) for name, value in values.items()}
    for name, shard in _shards(model).items():
        shard.copy_(_part(values[name], index, num_shards))
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
    held = {name: getattr(shard, "plain", shard) for name, shard in _shards(model).items()}
    bench.same(STEP, held, {name: _part(value, index, num_shards) for name, value in values.items()})
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


def _part(value: torch.Tensor, index: int, num_shards: int) -> torch.Tensor:
    parts = value.chunk(num_shards)
    return parts[index] if index < len(parts) else value[:0]
