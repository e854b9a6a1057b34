"""The layout of a group's parameters: as shards in communication, and as whole tensors in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from shardproof.engine.reference.extensions import Extension, has_extension
from shardproof.engine.reference.mesh import DataMesh
from shardproof.engine.reference.parameter import FSDPParam, ShardedParam
from shardproof.engine.reference.policies import DTypes
from shardproof.engine.reference.torch_private import after_accumulation, chunk_cat

_ALIGNMENT_BYTES = 64  # a cache line; also suits vectorised kernels
# glibc takes more than 32 MiB from the kernel at each allocation, which then clears every page (mallopt(3)).
_HOST_BLOCK_BYTES = 2**24


class UnshardedMemory:
    """Whole parameters as views of one block of memory, or of several.

    Without ``blocks`` they are views of the shards' memory, because a replicated parameter exists once. ``targets``
    are (ranks, ...) views of each parameter's whole memory, ``numels`` the elements of each that a rank sends,
    ``dtypes`` their dtypes; ``is_flat``: each target is a row per rank. A gather writes directly into ``single``, if
    there is one, because no data has to be rearranged.
    """

    def __init__(
        self,
        blocks: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        *,
        numels: Sequence[int],
        dtypes: Sequence[torch.dtype],
        is_flat: bool,
        single: torch.Tensor | None,
        extensions: Sequence[Extension] = (),
    ) -> None:
        self._blocks = blocks
        self._targets = list(targets)
        self._ranks = targets[0].shape[0] if targets else 1
        self._dtypes = list(dtypes)
        self._travels_as_bytes = len(set(dtypes)) > 1
        self._is_flat = is_flat
        width = [d.itemsize if self._travels_as_bytes else 1 for d in dtypes]
        self._sizes = [n * w for n, w in zip(numels, width, strict=True)]
        self._single = single
        self._extensions = extensions
        self.free()

    @property
    def wire_numel(self) -> int:
        """The number of elements that a rank sends."""
        return sum(self._sizes)

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype in communication; groups with several dtypes are sent as bytes."""
        return torch.uint8 if self._travels_as_bytes or not self._dtypes else self._dtypes[0]

    @property
    def is_shared(self) -> bool:
        """Whether this memory is the shards' own."""
        return not self._blocks

    @property
    def is_direct(self) -> bool:
        """Whether gathers write to this memory without a buffer."""
        return self._single is not None

    def direct(self) -> torch.Tensor | None:
        """Return allocated memory for a gather to write to directly; None if its output must be rearranged."""
        if self._single is None:
            return None
        self._allocate()
        return self._single

    def is_in(self, gathered: torch.Tensor) -> bool:
        """Whether ``gathered`` is this memory, and not a buffer to recycle."""
        return self.is_shared or gathered is self._single

    def copy_out(self, gathered: torch.Tensor) -> None:
        """Copy a gather's output (1-D: rank by rank, all parameters' padded shards) to the whole parameters."""
        if self.is_in(gathered):
            return
        self._allocate()
        parts = gathered.view(self._ranks, -1)
        if self._is_flat and not self._travels_as_bytes:
            torch.split_with_sizes_copy(parts, self._sizes, dim=1, out=self._targets)
        else:
            for target, part, dtype in zip(
                self._targets, parts.split(self._sizes, dim=1), self._dtypes, strict=True
            ):
                typed = part.contiguous().view(dtype) if part.dtype != dtype else part
                target.copy_(typed.reshape(target.shape))
        for extension in self._extensions:
            extension.unpack()

    def part(self, index: int, parts: int) -> torch.Tensor:
        """Copy the ``index``-th of ``parts`` equal parts of the gathered data, in the layout of the gather's output."""
        if any(extension.releases for extension in self._extensions):
            raise NotImplementedError(
                "reshard_after_forward: expected True or False where gathered bytes are freed once they are unpacked, "
                f"got a split among {parts} parts, which are cut from those bytes"
            )
        rows = self._ranks // parts
        cut = [t[index * rows : (index + 1) * rows].reshape(rows, -1) for t in self._targets]
        if self._travels_as_bytes:
            cut = [c.view(torch.uint8) for c in cut]
        return torch.cat(cut, dim=1).view(-1)

    def free(self) -> None:
        """Free the memory; tensors that autograd saved keep their identity and see the next gather's data."""
        for block in self._blocks:
            block.untyped_storage().resize_(0)
        for extension in self._extensions:
            extension.free()

    def _allocate(self) -> None:
        for block in self._blocks:
            storage = block.untyped_storage()
            if storage.size() != block.numel():
                storage.resize_(block.numel())
        for extension in self._extensions:
            extension.allocate()


def carved(
    numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Lay typed views over blocks of bytes, each aligned: one block, or on the host as many as it allocates quickly."""
    most = _HOST_BLOCK_BYTES if device.type == "cpu" else sys.maxsize
    ends, places = [0], []
    for numel, dtype in zip(numels, dtypes, strict=True):
        size = numel * dtype.itemsize
        padded = -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if ends[-1] and ends[-1] + padded > most:
            ends.append(0)
        places.append((len(ends) - 1, ends[-1], size))
        ends[-1] += padded
    with torch.inference_mode(False):
        blocks = [torch.empty(end, dtype=torch.uint8, device=device) for end in ends]
        views = [
            blocks[index][start : start + size].view(dtype)
            for (index, start, size), dtype in zip(places, dtypes, strict=True)
        ]
    return blocks, views


Allocate = Callable[[int], torch.Tensor]


class ParamLayout(Protocol):
    """One way to lay out a group's parameters. All ranks of a group use the same."""

    @property
    def parameters(self) -> Sequence[FSDPParam]: ...

    @property
    def keeps_apart(self) -> bool:
        """Whether one parameter's gradient can be written without the others'."""
        ...

    @property
    def packs(self) -> bool:
        """Whether some parameter packs itself, so that the gathered sizes are known only after its first packing."""
        return False

    @property
    def signature(self) -> tuple[object, ...]:
        """A key for the memory of whole parameters; it changes when shards are moved or cast."""
        ...

    @property
    def is_meta(self) -> bool:
        """Whether some shard has no memory yet."""
        ...

    def reset_sharded_params(self) -> None:
        """Adopt parameters that were replaced, moved or cast, as by loading."""

    def init_unsharded(
        self,
        *,
        dtype: torch.dtype | None,
        device: torch.device,
        on_gradient: Callable[[torch.Tensor], None],
        where_gathers_start: Callable[[], AbstractContextManager[object]],
    ) -> UnshardedMemory:
        """Allocate whole parameters on ``device``, in ``dtype`` if they are floating-point.

        What packs itself does so for the next gather, in the context in which that starts.
        """
        ...

    def copy_in(self, out: torch.Tensor) -> None:
        """Copy this rank's shards into ``out`` (1-D), cast to its dtype."""

    def copy_in_gradients(
        self, parameters: Sequence[FSDPParam], gradients: list[torch.Tensor], allocate: Allocate
    ) -> torch.Tensor:
        """Copy whole gradients (plain, one per parameter) rank by rank into memory (1-D) from ``allocate``.

        Empties the list.
        """
        ...

    def parts(
        self, parameters: Sequence[FSDPParam], reduced: torch.Tensor
    ) -> Iterator[tuple[FSDPParam, torch.Tensor]]:
        """Yield each parameter with a view (1-D) of its part of this rank's reduced row."""
        ...

    def write_gradients(self, parameters: Sequence[FSDPParam], reduced: torch.Tensor) -> None:
        """Add a reduced row to the gradients of the optimizer's parameters; missing gradients become views of it."""


class PerParameterLayout:
    """Cuts each parameter separately; a rank sends its padded shards one after the other."""

    keeps_apart = True

    def __init__(self, parameters: Sequence[ShardedParam], mesh: DataMesh, dtypes: DTypes) -> None:
        self.parameters = tuple(parameters)
        self._mesh = mesh
        self._ranks = mesh.shard_size
        self._dtypes = dtypes
        self._extensions: dict[FSDPParam, Extension] = {}
        self._wire_dtypes: dict[FSDPParam, torch.dtype] = {}
        self._packs: bool | None = None
        self._adopt()

    @property
    def packs(self) -> bool:
        """Whether some parameter packs itself, so that the gathered sizes are known only after its first packing."""
        if self._packs is None:
            self._packs = any(self.packs_itself(p) for p in self.parameters)
        return self._packs

    def packs_itself(self, parameter: ShardedParam) -> bool:
        """Whether this parameter packs itself."""
        return has_extension(parameter)

    def reset_sharded_params(self) -> None:
        changed = [parameter for parameter in self.parameters if parameter.reset_sharded_param()]
        if changed:
            self._adopt()

    def _adopt(self) -> None:
        """Compute which tensors gathers copy, once until the shards change again."""
        self._packs = None  # to be recomputed
        self.is_meta = any(p.local.is_meta for p in self.parameters)
        # A cast needs memory of its own, of which open graphs may have views.
        is_cast = any(_gathered_dtype(p, self._dtypes.param_dtype) != p.local.dtype for p in self.parameters)
        self.signature = storage_signature(self.parameters, is_shared=self._ranks == 1 and not is_cast)
        is_simple = all(
            p.geometry.is_even and type(p.local) is torch.Tensor and p.local.is_contiguous()
            for p in self.parameters
        )
        with torch.no_grad():
            self._flat_shards = [p.local.view(-1) for p in self.parameters] if is_simple else []

    def init_unsharded(
        self,
        *,
        dtype: torch.dtype | None,
        device: torch.device,
        on_gradient: Callable[[torch.Tensor], None],
        where_gathers_start: Callable[[], AbstractContextManager[object]],
    ) -> UnshardedMemory:
        """Allocate one block for all parameters; without gather and cast, use the shards' own memory."""
        packed = [p for p in self.parameters if self.packs_itself(p)]
        with where_gathers_start():
            self._extensions = {p: Extension(p, self._mesh, self._dtypes) for p in packed}
        plain = [p for p in self.parameters if p not in self._extensions]
        dtypes = [_gathered_dtype(p, dtype) for p in plain]
        self._wire_dtypes = dict(zip(plain, dtypes, strict=True))
        blocks: list[torch.Tensor] = []
        if (
            self._ranks == 1
            and not packed
            and all(
                d == p.local.dtype and p.local.device == device for d, p in zip(dtypes, plain, strict=True)
            )
        ):
            views = [p.local.view(-1) for p in plain]
        else:
            blocks, views = carved([self._ranks * p.geometry.padded_numel for p in plain], dtypes, device)
        targets: dict[FSDPParam, list[torch.Tensor]] = {
            p: extension.init_targets(device, on_gradient) for p, extension in self._extensions.items()
        }
        for parameter, view in zip(plain, views, strict=True):
            parameter.init_unsharded_param(view, on_gradient)
            targets[parameter] = [parameter.geometry.by_rank(view)]
        in_order = [target for p in self.parameters for target in targets[p]]
        is_flat = all(p.geometry.dim == 0 for p in self.parameters)
        return UnshardedMemory(
            blocks,
            in_order,
            numels=[target.numel() // self._ranks for target in in_order],
            dtypes=[target.dtype for target in in_order],
            is_flat=is_flat,
            single=views[0] if len(views) == 1 and is_flat and blocks and not packed else None,
            extensions=tuple(self._extensions.values()),
        )

    def copy_in(self, out: torch.Tensor) -> None:
        """Copy shards side by side, each padded to the size of the largest, as raw bytes if ``out`` is bytes.

        ``out`` is this rank's part of the gather's output, so that the gather needs no input of its own.
        """
        as_bytes = out.dtype == torch.uint8
        is_simple = bool(self._flat_shards) and not self._extensions and not as_bytes
        if is_simple and self._flat_shards[0].device == out.device:
            torch.cat(self._flat_shards, out=out)
            return
        start = 0
        for sent, numel in self._sent(casts=as_bytes):
            flat = sent.reshape(-1).view(torch.uint8) if as_bytes else sent.reshape(-1)
            width = sent.element_size() if as_bytes else 1
            end = start + numel * width
            out[start : start + flat.numel()].copy_(flat, non_blocking=True)
            out[start + flat.numel() : end].zero_()
            start = end

    def _sent(self, *, casts: bool) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the tensors that this rank sends, each with its number of elements in communication."""
        for parameter in self.parameters:
            local = parameter.local
            if extension := self._extensions.get(parameter):
                yield from ((payload, payload.numel()) for payload in extension.take())
            else:
                sent = local.to(self._wire_dtypes[parameter]) if casts else local
                yield sent, parameter.geometry.padded_numel

    def copy_in_gradients(
        self, parameters: Sequence[FSDPParam], gradients: list[torch.Tensor], allocate: Allocate
    ) -> torch.Tensor:
        """Fill one row per rank with all parameters' padded shards."""
        chosen = _sharded(parameters)
        sizes = [p.geometry.padded_numel for p in chosen]
        flat = allocate(self._ranks * sum(sizes))
        pairs = zip(chosen, gradients, strict=True)
        by_chunks = [p.geometry.shards_first(gradient) for p, gradient in pairs if gradient.numel()]
        if by_chunks:
            chunk_cat(by_chunks, flat.view(self._ranks, sum(sizes)))
        gradients.clear()
        return flat

    def parts(
        self, parameters: Sequence[FSDPParam], reduced: torch.Tensor
    ) -> Iterator[tuple[FSDPParam, torch.Tensor]]:
        """Yield each parameter with its padded shard."""
        chosen = _sharded(parameters)
        yield from zip(chosen, reduced.split([p.geometry.padded_numel for p in chosen]), strict=True)

    def write_gradients(self, parameters: Sequence[FSDPParam], reduced: torch.Tensor) -> None:
        """Write to each parameter its part, without the padding."""
        chosen = _sharded(parameters)
        # If only some gradients exist, a view as a missing one would keep the memory of all.
        is_copied = [p.sharded.grad is None for p in chosen]
        is_copied = [False] * len(chosen) if all(is_copied) else is_copied
        parts = reduced.split([p.geometry.padded_numel for p in chosen])
        for parameter, part, is_copy in zip(chosen, parts, is_copied, strict=True):
            own = parameter.geometry.own_part(part)
            parameter.accumulate_sharded_grad(own.clone() if is_copy else own)
            after_accumulation(parameter.sharded)


def _gathered_dtype(parameter: ShardedParam, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the whole parameter where the unit computes in ``dtype``."""
    local = parameter.local
    return dtype if dtype and local.is_floating_point() and not parameter.keeps_dtype else local.dtype


def storage_signature(parameters: Sequence[FSDPParam], *, is_shared: bool) -> tuple[object, ...]:
    """Return a key of the shards, with their addresses if whole parameters may share their memory."""
    locals_ = [p.local for p in parameters]
    if is_shared:
        return tuple((local.dtype, local.device, local.data_ptr()) for local in locals_)
    return tuple((local.dtype, local.is_meta) for local in locals_)


def _sharded(parameters: Sequence[FSDPParam]) -> list[ShardedParam]:
    return [p for p in parameters if isinstance(p, ShardedParam)]
