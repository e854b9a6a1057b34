"""ZeRO-2 over whole parameters: each rank reduces, keeps and updates a piece of every parameter, then shares it.

A piece is a view of the flattened parameter, so the optimizer writes into the parameter itself. With offload it is a
copy on the host, and so are its gradient and state. All pieces of a parameter have equal length, except that the last
is shorter if the ranks do not divide the parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

# torch 2.13 renamed the flat collectives and deprecated these names (pytorch#186123); older releases have only these.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True, eq=False)
class OwnPiece:
    """A parameter, the piece of it that this rank updates, and the piece's start in the flattened parameter.

    Rank 0 has piece number ``turn``, and each rank has the piece after the previous rank's.
    """

    parameter: nn.Parameter
    own: nn.Parameter
    start: int
    length: int
    turn: int


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """A reduction in flight, its input, and its output: the sum over ranks."""

    piece: OwnPiece
    work: dist.Work
    inputs: torch.Tensor
    total: torch.Tensor


class Zero2:
    """A module whose gradients and optimizer state are sharded over the ranks of a group.

    ``overlaps``: each gradient is reduced as soon as backward has computed it, else all after backward.
    ``takes_turns``: the ranks' pieces shift by one from each parameter to the next, to distribute the short pieces.
    ``offloads``: the optimizer updates copies on the host, which are then copied to the parameters. They are taken
    anew in each step, so weights that were loaded into the module before it count.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        *,
        overlaps: bool = False,
        takes_turns: bool = False,
        offloads: bool = False,
    ) -> None:
        self.module = module
        self._offloads = offloads
        self._group = group
        self._is_synchronising = True
        self._pending: list[Reduction] = []
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.pieces: Mapping[str, OwnPiece] = {
            name: self._piece(parameter, index % group.size() if takes_turns else 0)
            for index, (name, parameter) in enumerate(trained)
        }
        # Equal on all ranks, and roughly the order in which backward computes gradients.
        self._order = tuple(reversed(self.pieces.values()))
        self._arrived: set[int] = set()
        for name, piece in self.pieces.items() if overlaps else ():
            hook = partial(_reduce_early, weakref.ref(self), name)
            piece.parameter.register_post_accumulate_grad_hook(hook)

    @property
    def rank(self) -> int:
        """The number of this rank in its group."""
        return self._group.rank()

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward; outside `no_sync` reduce the accumulated gradients, and keep only this rank's pieces."""
        loss.backward()
        if self._is_synchronising:
            self.reduce()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate whole gradients locally for the time being."""
        self._is_synchronising = False
        try:
            yield
        finally:
            self._is_synchronising = True

    def reduce_early(self, piece: OwnPiece) -> None:
        """Start to reduce accumulated gradients as they arrive, unless `no_sync` holds them back.

        A gradient waits for its predecessors in the common order, because ranks may use parameters in different orders.
        """
        if not self._is_synchronising:
            return
        self._arrived.add(id(piece))
        for following in self._order[len(self._pending) :]:
            if id(following) not in self._arrived:
                return
            self._pending.append(self.reduction(following))

    def reduce(self) -> None:
        """Average whole gradients into those of the pieces, and free them."""
        # Issued together and waited for together, so that they overlap each other.
        late = [self.reduction(piece) for piece in self._order[len(self._pending) :]]
        for reduction in (*self._pending, *late):
            reduction.work.wait()
            self.keep(reduction)
        self._pending.clear()
        self._arrived.clear()

    def take_weights(self) -> None:
        """Take the weights that the module has now, because the caller may have loaded others or moved them."""
        for piece in self.pieces.values():
            own = self._part(piece.parameter, piece.start, piece.own.numel())
            if self._offloads:
                piece.own.detach().copy_(own)
            else:
                piece.own.data = own

    def keep(self, reduction: Reduction) -> None:
        """Add the mean to the gradient of a piece."""
        own = reduction.piece.own
        mean = (reduction.total[: own.numel()] / self._group.size()).to(own.device)
        own.grad = mean if own.grad is None else own.grad + mean

    def clip(self, max_norm: float) -> None:
        """Scale the pieces' gradients so that their norm over all parameters and ranks is at most ``max_norm``."""
        gradients = [piece.own.grad for piece in self.pieces.values() if piece.own.grad is not None]
        squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        dist.all_reduce(squares, group=self._group)
        factor = (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1)
        for gradient in gradients:
            gradient.mul_(factor)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the pieces from the weights that the module has now, and share them.

        Raises RuntimeError if a parameter was replaced or converted: the optimizer knows pieces of it as it was.
        """
        self._refuse_replaced()
        self.take_weights()
        optimizer.step()
        self._share()

    def _refuse_replaced(self) -> None:
        parameters = dict(self.module.named_parameters())
        for name, piece in self.pieces.items():
            if parameters.get(name) is not piece.parameter or piece.parameter.dtype is not piece.own.dtype:
                raise RuntimeError(
                    f"{name!r} was replaced after the engine was built, and a step would not update what the module "
                    "has now; load weights with assign=False, and convert the module before"
                )

    @torch.no_grad()
    def _share(self) -> None:
        """Gather on all ranks the pieces that each rank's optimizer has updated."""
        pending = [(piece, *self._gather(piece)) for piece in self.pieces.values()]
        for piece, work, whole in pending:
            work.wait()
            whole = whole.roll(piece.turn * piece.length)
            piece.parameter.copy_(whole[: piece.parameter.numel()].view_as(piece.parameter))

    def _piece(self, parameter: nn.Parameter, turn: int) -> OwnPiece:
        length = -(-parameter.numel() // self._group.size())
        number = (self._group.rank() + turn) % self._group.size()
        start = min(length * number, parameter.numel())
        own = self._part(parameter, start, length)
        if self._offloads:
            own = own.to("cpu", copy=True)
        return OwnPiece(parameter, nn.Parameter(own), start, length, turn)

    @staticmethod
    def _part(parameter: nn.Parameter, start: int, length: int) -> torch.Tensor:
        parameter.data = parameter.data.contiguous()  # pieces are views of it
        return parameter.detach().view(-1)[start : start + length]

    def reduction(self, piece: OwnPiece) -> Reduction:
        """Start to sum a gradient over the ranks, each of which is sent its piece; frees the gradient."""
        inputs, total = self.by_rank(piece), piece.parameter.new_empty(piece.length)
        work = _reduce_scatter(total, inputs, group=self._group, async_op=True)
        piece.parameter.grad = None
        return Reduction(piece, work, inputs, total)

    def by_rank(self, piece: OwnPiece) -> torch.Tensor:
        """Return a copy of a gradient, flat and padded, that begins with the piece of rank 0."""
        parameter = piece.parameter
        # Where the loss did not reach a parameter this rank still takes part, with zeros: the others wait for it.
        padded = parameter.new_zeros(piece.length * self._group.size())
        if parameter.grad is not None:
            padded[: parameter.numel()].copy_(parameter.grad.reshape(-1))
        return padded.roll(-piece.turn * piece.length)

    def _gather(self, piece: OwnPiece) -> tuple[dist.Work, torch.Tensor]:
        padded = piece.parameter.new_zeros(piece.length)
        padded[: piece.own.numel()].copy_(piece.own)
        whole = piece.parameter.new_empty(piece.length * self._group.size())
        return _all_gather(whole, padded, group=self._group, async_op=True), whole


def _reduce_early(reference: weakref.ref[Zero2], name: str, _: torch.Tensor) -> None:
    """Reduce by an engine that a parameter's hook does not keep: Python's collector sees no cycle through autograd."""
    engine = reference()
    if engine is not None:
        engine.reduce_early(engine.pieces[name])
