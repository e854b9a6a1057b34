"""Where gradients exist, torch loads no whole state into a new optimizer: an AssertionError. Needs torch alone.

torch/distributed/checkpoint/state_dict.py, _init_optim_state: it returns at the first parameter with a gradient
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
    """Save after a step, then load into a new optimizer of the same layer, with gradients of zeros and with none."""
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = get_optimizer_state_dict(layer, optimizer, options=WHOLE)
    for are_none in (True, False):
        layer(torch.ones(1, 2)).sum().backward()
        layer.zero_grad(set_to_none=are_none)
        fresh = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        beside = "without gradients" if are_none else "beside gradients of zeros"
        try:
            set_optimizer_state_dict(layer, fresh, state, options=WHOLE)
            print(f"{beside}: loaded the state of {len(fresh.state)} parameters")
        except AssertionError as error:
            print(f"{beside}: AssertionError: {error}")


if __name__ == "__main__":
    main()
