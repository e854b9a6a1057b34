"""The memory beneath a group's whole parameters: filled by a gather, freed by resharding, one block for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.reference.parameter import ShardedParameter

__all__ = ["Unsharded"]

_ALIGNMENT_BYTES = 64  # a cache line, and what vectorised kernels like


class Unsharded:
    """Whole parameters as views of one block of memory.

    Where nothing is gathered and nothing cast, the block is the shards' own: a replicated parameter exists
    once. Otherwise it is allocated when filled; a single parameter is gathered straight into it.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        *,
        ranks: int,
        dtype: torch.dtype | None,
        device: torch.device,
        on_gradient: Callable[[torch.Tensor], None],
    ) -> None:
        self._ranks = ranks
        locals_ = [p.local for p in parameters]
        numels = [p.geometry.padded_numel for p in parameters]
        self._dtypes = [dtype if dtype and t.is_floating_point() else t.dtype for t in locals_]
        self._is_shared = ranks == 1 and all(
            d == t.dtype and t.device == device for d, t in zip(self._dtypes, locals_, strict=True)
        )
        if self._is_shared:
            views = [t.view(-1) for t in locals_]
        else:
            self._block, views = _carve([ranks * n for n in numels], self._dtypes, device)
        self._travels_as_bytes = len(set(self._dtypes)) > 1
        for parameter, view in zip(parameters, views, strict=True):
            parameter.dress(view, on_gradient)
        self._targets = [p.geometry.by_rank(v) for p, v in zip(parameters, views, strict=True)]
        self._is_flat = all(p.geometry.dim == 0 for p in parameters)
        width = [d.itemsize if self._travels_as_bytes else 1 for d in self._dtypes]
        self._sizes = [n * w for n, w in zip(numels, width, strict=True)]
        self._single = views[0] if len(views) == 1 and self._is_flat and not self._is_shared else None
        self.free()

    @property
    def wire_numel(self) -> int:
        """How many elements a rank sends."""
        return sum(self._sizes)

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype on the wire; groups whose dtypes differ travel as bytes."""
        return torch.uint8 if self._travels_as_bytes or not self._dtypes else self._dtypes[0]

    @property
    def is_shared(self) -> bool:
        """Whether this memory is the shards' own."""
        return self._is_shared

    @property
    def is_direct(self) -> bool:
        """Whether gathers write to this memory without a buffer between."""
        return self._single is not None

    def direct(self) -> torch.Tensor | None:
        """Give the memory that a gather may write to as it is, allocated; None if it must be rearranged."""
        if self._single is None:
            return None
        self._allocate()
        return self._single

    def is_in(self, gathered: torch.Tensor) -> bool:
        """Whether ``gathered`` is this memory, and not a buffer to give back."""
        return self._is_shared or gathered is self._single

    def fill(self, gathered: torch.Tensor) -> None:
        """Copy a gather's output (1-D: rank by rank, all parameters' padded shards) to where it belongs."""
        if self._is_shared or gathered is self._single:
            return
        self._allocate()
        parts = gathered.view(self._ranks, -1)
        if self._is_flat and not self._travels_as_bytes:
            torch.split_with_sizes_copy(parts, self._sizes, dim=1, out=self._targets)
            return
        for target, part, dtype in zip(
            self._targets, parts.split(self._sizes, dim=1), self._dtypes, strict=True
        ):
            typed = part.contiguous().view(dtype) if part.dtype != dtype else part
            target.copy_(typed.reshape(target.shape))

    def part(self, index: int, parts: int) -> torch.Tensor:
        """Copy out the ``index``-th of ``parts`` equal parts of what a gather delivered, laid out as it was."""
        rows = self._ranks // parts
        cut = [t[index * rows : (index + 1) * rows].reshape(rows, -1) for t in self._targets]
        if self._travels_as_bytes:
            cut = [c.view(torch.uint8) for c in cut]
        return torch.cat(cut, dim=1).view(-1)

    def free(self) -> None:
        """Give the memory back; tensors that autograd saved keep their identity and see the next gather's."""
        if not self._is_shared:
            self._block.untyped_storage().resize_(0)

    def _allocate(self) -> None:
        storage = self._block.untyped_storage()
        if storage.size() != self._block.numel():
            storage.resize_(self._block.numel())


def _carve(
    numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Lay typed views over one block of bytes, each aligned."""
    starts, end = [], 0
    for numel, dtype in zip(numels, dtypes, strict=True):
        starts.append(end)
        end += -(-numel * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    with torch.inference_mode(False):
        block = torch.empty(end, dtype=torch.uint8, device=device)
        views = [
            block[start : start + numel * dtype.itemsize].view(dtype)
            for start, numel, dtype in zip(starts, numels, dtypes, strict=True)
        ]
    return block, views
