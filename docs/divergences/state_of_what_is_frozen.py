"""State dicts drop the optimizer state of a parameter that is frozen when they load it. Needs torch alone.

torch/distributed/checkpoint/state_dict.py, _split_optim_state_dict
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a layer and its optimizer."""
    layer = nn.Linear(2, 2)
    return layer, torch.optim.AdamW(layer.parameters())


def main() -> None:
    """Train one step, and load its state into a fresh model whose weight is frozen for now."""
    layer, optimizer = made()
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(layer, optimizer)
    print("saved state of", sorted(optimizer_state["state"]))
    for title, loads in (
        ("load_state_dict", lambda fresh, own: own.load_state_dict(optimizer.state_dict())),
        (
            "set_state_dict",
            lambda fresh, own: set_state_dict(
                fresh, own, model_state_dict=model_state, optim_state_dict=optimizer_state
            ),
        ),
    ):
        fresh, own = made()
        fresh.weight.requires_grad_(False)
        loads(fresh, own)
        print(f"{title}: state of", sorted(name for name, p in fresh.named_parameters() if own.state[p]))


if __name__ == "__main__":
    main()
