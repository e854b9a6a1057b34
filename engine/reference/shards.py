"""A group's shards on this rank, side by side in one buffer: what the gather sends needs no copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.reference.parameter import ShardedParameter

__all__ = ["Shards"]


class Shards:
    """The memory in which the local tensors of a group's sharded parameters live.

    Where all have one dtype (``flat`` is not None) the buffer is the gather's input as it stands. Loading,
    casting or materialising may give a parameter other memory; ``settle`` brings it home again.
    """

    def __init__(self, parameters: Sequence[ShardedParameter], *, device: torch.device, pinned: bool) -> None:
        self._parameters = parameters
        self._device = device
        self._pinned = pinned
        self.flat: torch.Tensor | None = None
        self._homes: list[torch.Tensor] = []
        self._pointers: list[int] = []
        self.settle()

    @property
    def homes(self) -> list[torch.Tensor]:
        """The padded shard of each parameter: 1-D, ``geometry.padded_numel`` elements."""
        return self._homes

    @property
    def version(self) -> int:
        """A number that changes whenever a shard is written to, as by an optimizer.

        A write through the DTensor counts on the DTensor alone, one to its local tensor on that alone.
        """
        return sum(p.sharded._version + p.local._version for p in self._parameters)

    @property
    def is_meta(self) -> bool:
        """Whether the shards have no memory yet."""
        return any(home.is_meta for home in self._homes)

    @torch.no_grad()
    def settle(self) -> bool:
        """Bring every shard home; say whether the homes themselves are new."""
        locals_ = [p.local for p in self._parameters]
        is_new = not self._fits(locals_)
        if is_new:
            self._build(locals_)
            self._pointers = [-1] * len(locals_)
        for i, local in enumerate(locals_):
            if local.data_ptr() != self._pointers[i]:
                own = self._parameters[i].geometry.own_part(self._homes[i])
                own.copy_(local)
                local.data = own
                self._pointers[i] = own.data_ptr()
        return is_new

    def wire(self, dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
        """Give this rank's input of the gather: 1-D, on ``device``, cast to ``dtype`` if that is not None.

        Shards whose dtypes differ after the cast travel as bytes.
        """
        if self.flat is not None:
            return self.flat.to(device=device, dtype=_cast(self.flat, dtype), non_blocking=True)
        homes = [h.to(device=device, dtype=_cast(h, dtype), non_blocking=True) for h in self._homes]
        if len({h.dtype for h in homes}) > 1:
            homes = [h.view(torch.uint8) for h in homes]
        return torch.cat(homes)

    def _fits(self, locals_: list[torch.Tensor]) -> bool:
        return len(self._homes) == len(locals_) and all(
            home.dtype == local.dtype and home.is_meta == local.is_meta
            for home, local in zip(self._homes, locals_, strict=True)
        )

    def _build(self, locals_: list[torch.Tensor]) -> None:
        sizes = [p.geometry.padded_numel for p in self._parameters]
        dtypes = {local.dtype for local in locals_}
        if len(dtypes) == 1:
            self.flat = self._zeros(sum(sizes), locals_[0])
            self._homes = list(self.flat.split(sizes))
        else:
            self.flat = None
            self._homes = [self._zeros(n, local) for n, local in zip(sizes, locals_, strict=True)]

    def _zeros(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        # Outside inference mode, or every later in-place update of these parameters would be refused.
        with torch.inference_mode(False):
            if like.is_meta:
                return torch.zeros(numel, dtype=like.dtype, device="meta")
            zeros = torch.zeros(numel, dtype=like.dtype, device=self._device)
            return zeros.pin_memory() if self._pinned else zeros


def _cast(home: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and home.is_floating_point() else home.dtype
