"""The memory beneath a group's whole parameters: filled by a gather, freed by resharding, one block for all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Unsharded", "carved"]

_ALIGNMENT_BYTES = 64  # a cache line, and what vectorised kernels like


class Unsharded:
    """Whole parameters as views of one block of memory.

    Without a ``block`` they are views of the shards' own: a replicated parameter exists once. ``targets`` are
    (ranks, ...) views of each parameter's whole memory, ``numels`` the elements that a rank sends of each,
    ``dtypes`` what they are in; ``is_flat`` tells that each target is a row per rank. A gather writes straight
    into ``single``, if there is one: nothing has to be rearranged.
    """

    def __init__(
        self,
        block: torch.Tensor | None,
        targets: Sequence[torch.Tensor],
        *,
        numels: Sequence[int],
        dtypes: Sequence[torch.dtype],
        is_flat: bool,
        single: torch.Tensor | None,
    ) -> None:
        self._block = block
        self._targets = list(targets)
        self._ranks = targets[0].shape[0] if targets else 1
        self._dtypes = list(dtypes)
        self._travels_as_bytes = len(set(dtypes)) > 1
        self._is_flat = is_flat
        width = [d.itemsize if self._travels_as_bytes else 1 for d in dtypes]
        self._sizes = [n * w for n, w in zip(numels, width, strict=True)]
        self._single = single
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
        return self._block is None

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
        return self._block is None or gathered is self._single

    def fill(self, gathered: torch.Tensor) -> None:
        """Copy a gather's output (1-D: rank by rank, all parameters' padded shards) to where it belongs."""
        if self._block is None or gathered is self._single:
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
        if self._block is not None:
            self._block.untyped_storage().resize_(0)

    def _allocate(self) -> None:
        assert self._block is not None
        storage = self._block.untyped_storage()
        if storage.size() != self._block.numel():
            storage.resize_(self._block.numel())


def carved(
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
