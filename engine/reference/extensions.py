"""Tensor subclasses that pack shards for a gather and unpack the result: ``fsdp_pre_all_gather`` and its pair."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from shardproof.engine.reference.mesh import DataMesh
from shardproof.engine.reference.parameter import ShardedParam
from shardproof.engine.reference.policies import DTypes

_PACK, _UNPACK = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


def has_extension(parameter: ShardedParam) -> bool:
    """Whether a shard packs itself; raises AssertionError if it has only one function of the pair."""
    found = [hasattr(parameter.local, name) for name in (_PACK, _UNPACK)]
    if (any(found) or hasattr(parameter.local, _RELEASE)) and not all(found):
        raise AssertionError(
            f"parameter {parameter.name!r}: expected both {_PACK} and {_UNPACK}, or neither of them and no {_RELEASE}, "
            f"got {found.count(True)} of the two; add what is missing"
        )
    return all(found)


class Extension:
    """One parameter's payloads: the packed shards of a gather, and the whole parameter made from them.

    Payloads keep their shapes and dtypes from the first gather on. ``targets`` hold the gathered payloads, (ranks,
    numel) each. The whole parameter may use the same memory, or tensors that the extension names; they are allocated
    and freed with it.
    """

    def __init__(self, parameter: ShardedParam, mesh: DataMesh, dtypes: DTypes) -> None:
        self._parameter = parameter
        self._mesh = mesh
        self._dtypes = dtypes
        self._held: list[tuple[torch.UntypedStorage, int]] = []
        self._on_gradient: Any = None  # as in `FSDPParam`
        self._is_unpacked = False
        self.releases = getattr(parameter.local, _RELEASE, bool)()
        if not isinstance(self.releases, bool):
            raise AssertionError(
                f"parameter {parameter.name!r}: expected a bool of {_RELEASE}, got {self.releases!r}"
            )
        self._payloads: tuple[torch.Tensor, ...] | None = self._packed()
        self.shapes = [payload.shape for payload in self._payloads]
        self.dtypes = [payload.dtype for payload in self._payloads]
        self.targets: list[torch.Tensor] = []

    def init_targets(self, device: torch.device, on_gradient: Any) -> list[torch.Tensor]:
        """Allocate memory for each gathered payload; the whole parameter is made when the payloads first arrive."""
        self._on_gradient = on_gradient
        ranks = self._mesh.shard_size
        with torch.inference_mode(False):
            self.targets = [
                torch.empty((ranks, shape.numel()), dtype=dtype, device=device)
                for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
            ]
        self._held = [(t.untyped_storage(), t.untyped_storage().nbytes()) for t in self.targets]
        return self.targets

    def allocate(self) -> None:
        """Allocate the memory of the gathered payloads, and of the whole parameter made from them."""
        for storage, size in self._held:
            storage.resize_(size)

    def take(self) -> tuple[torch.Tensor, ...]:
        """Return the payloads of one gather; raises AssertionError if their forms differ from the first gather's."""
        payloads = self._packed() if self._payloads is None else self._payloads
        self._payloads = None
        form = [(payload.shape, payload.dtype) for payload in payloads]
        expected = [*zip(self.shapes, self.dtypes, strict=True)]
        if form != expected:
            raise AssertionError(
                f"parameter {self._parameter.name!r}: expected payloads as of the first gather, {expected}, got {form}"
            )
        return payloads

    def unpack(self) -> None:
        """Make the whole parameter from the gathered payloads."""
        gathered = tuple(t.reshape(-1, *s[1:]) for t, s in zip(self.targets, self.shapes, strict=True))
        local = self._parameter.local
        unpack: Any = getattr(local, _UNPACK)
        dtype = (None if self._parameter.keeps_dtype else self._dtypes.param_dtype) or local.dtype
        if self._is_unpacked:
            unpack(gathered, self._metadata, dtype, out=self._parameter.unsharded_param)
        else:
            whole, inner = unpack(gathered, self._metadata, dtype)
            self._held += [(t.untyped_storage(), t.untyped_storage().nbytes()) for t in inner]
            self._parameter.init_from(whole, self._on_gradient)
            self._is_unpacked = True
        if self.releases:
            for target in self.targets:
                target.untyped_storage().resize_(0)

    def free(self) -> None:
        for storage, _ in self._held:
            storage.resize_(0)

    def _packed(self) -> tuple[torch.Tensor, ...]:
        parameter, geometry = self._parameter, self._parameter.geometry
        pack: Any = getattr(parameter.local, _PACK)
        module = parameter.locations[0].module
        given = (self._mesh.axis_of_shards, parameter.shape, geometry.whole_stride, module, self._dtypes)
        # Before torch 2.6 the function takes only the mesh.
        payloads, self._metadata = pack(*given[: len(inspect.signature(pack).parameters)])
        if not geometry.is_even and any(payload.shape != geometry.padded_shape for payload in payloads):
            raise AssertionError(
                f"parameter {parameter.name!r}: expected {_PACK} to pad the payloads of uneven shards to "
                f"{tuple(geometry.padded_shape)}, got {[tuple(payload.shape) for payload in payloads]}"
            )
        return tuple(payload.detach() for payload in payloads)
