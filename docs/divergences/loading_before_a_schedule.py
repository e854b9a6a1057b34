"""An option that only the saved parameter groups have makes a whole optimizer state raise. Needs torch alone.

torch/distributed/checkpoint/state_dict.py, _load_optim_state_dict: the state is unflattened by the names of the new one
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

WHOLE = StateDictOptions(full_state_dict=True)


def main() -> None:
    """Save after one scheduled step, and load before the new schedule is made: it needs ``initial_lr`` to go on."""
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    for options in (None, WHOLE):
        state = get_optimizer_state_dict(layer, optimizer, options=options)
        fresh = torch.optim.AdamW(layer.parameters())
        try:
            set_optimizer_state_dict(layer, fresh, state, options=options)
            print("loaded", {name: fresh.param_groups[0].get(name) for name in ("lr", "initial_lr")})
        except KeyError as error:
            print("a whole state raises KeyError:", error)


if __name__ == "__main__":
    main()
