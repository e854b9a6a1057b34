"""Optimizer state that is taken before the first step counts one step, and so does the optimizer. Needs torch alone.

torch/distributed/checkpoint/state_dict.py, _init_optim_state: it steps with zeros to make state, and keeps the count
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def main() -> None:
    """Train one step with and without a state dict that is taken before it, and compare."""
    ends = []
    for is_saved in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        if is_saved:
            print("saved before any step:", get_optimizer_state_dict(layer, optimizer)["state"]["bias"])
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        print(
            "steps counted after one:",
            optimizer.state[layer.bias]["step"].item(),
            "bias:",
            layer.bias.tolist(),
        )
        ends.append(layer.bias.detach())
    print("the same model:", torch.equal(*ends))


if __name__ == "__main__":
    main()
