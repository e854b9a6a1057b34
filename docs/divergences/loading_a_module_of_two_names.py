"""A whole state with both names of one module does not load into a wrapped model. Needs torch alone.

torch/distributed/checkpoint/state_dict.py, _iterate_valid_model_state: it visits each module once, so that the second
name keeps what the caller gave: a key without the wrapper's prefix, or a whole tensor where the model has a shard
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WHOLE = StateDictOptions(full_state_dict=True)


class Model(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.tail = self.head

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Use the layer once."""
        out: torch.Tensor = self.head(rows)
        return out


def main() -> None:
    """Load into a wrapped model what it has saved."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for wrapped in (DistributedDataParallel(Model()), fully_shard(Model())):
        state = get_model_state_dict(wrapped, options=WHOLE)
        print(type(wrapped).__name__, "saved", sorted(state))
        try:
            set_model_state_dict(wrapped, state, options=WHOLE)
            print("and loaded")
        except RuntimeError as error:
            print("and raises RuntimeError:", str(error)[:300])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
