"""A state that loads beside an empty parameter group takes the options of later groups away. Needs torch alone.

torch/distributed/checkpoint/state_dict.py, _split_optim_state_dict
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a layer, and an optimizer with a group for its matrix, one for nothing, and one for its vector."""
    layer = nn.Linear(2, 2)
    groups = [{"params": [layer.weight]}, {"params": []}, {"params": [layer.bias], "lr": 0.5}]
    return layer, torch.optim.AdamW(groups, lr=0.25)


def step(layer: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train one step."""
    optimizer.zero_grad()
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def main() -> None:
    """Train one step, load its state into a fresh model, and print what each group is left with."""
    layer, optimizer = made()
    step(layer, optimizer)
    model_state, optimizer_state = get_state_dict(layer, optimizer)
    fresh, fresh_optimizer = made()
    set_state_dict(fresh, fresh_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for number, group in enumerate(fresh_optimizer.param_groups):
        print(f"group {number}: lr {group.get('lr')}, {len(group)} entries")
    try:
        step(fresh, fresh_optimizer)
    except KeyError as error:
        print(f"the next step raises KeyError: {error}")


if __name__ == "__main__":
    main()
