"""A parameter without elements: FSDP2's backward raises, FSDP1 hands no optimizer state out. Needs torch alone.

Run: torchrun --nproc-per-node 2 fsdp_empty_parameter.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


class Model(nn.Module):
    """A layer, and a matrix of no rows beside it, as of a vocabulary to which nothing was added."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.added = nn.Parameter(torch.zeros(0, 4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Add what the empty matrix makes of the rows: nothing."""
        return self.layer(rows) + nn.functional.linear(rows, self.added).sum()


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """Train one step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return optimizer


def fsdp2() -> None:
    """Train one step."""
    trained(fully_shard(Model()))


def fsdp1() -> None:
    """Train one step, and take the whole state."""
    model = FullyShardedDataParallel(Model(), use_orig_params=True, device_id=torch.device("cpu"))
    get_state_dict(model, trained(model), options=StateDictOptions(full_state_dict=True))


def main() -> None:
    """Print what each engine raises."""
    dist.init_process_group("gloo")
    for engine in (fsdp2, fsdp1):
        try:
            engine()
        except RuntimeError as error:
            if dist.get_rank() == 0:
                print(f"{engine.__name__} raises RuntimeError: {str(error)[:70]}")
        else:
            if dist.get_rank() == 0:
                print(f"{engine.__name__} trains")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
