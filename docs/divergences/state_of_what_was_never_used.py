"""State dicts refuse an optimizer that has no state for some parameter, or make up state for it. Needs torch alone.

torch/distributed/checkpoint/state_dict.py, _split_optim_state_dict and _init_optim_state
"""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict


class Model(nn.Module):
    """A layer that forward uses, and one that it does not use yet."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.later = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Run the first layer."""
        output: torch.Tensor = self.used(rows)
        return output


def made() -> tuple[Model, torch.optim.Optimizer]:
    """Return a model and its optimizer."""
    model = Model()
    return model, torch.optim.AdamW(model.parameters())


def main() -> None:
    """Train one step, and load the whole state into a fresh model, strictly and not."""
    whole = StateDictOptions(full_state_dict=True)
    model, optimizer = made()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved, saved_optimizer = get_state_dict(model, optimizer, options=whole)
    print("saved state of", list(saved_optimizer["state"]))
    plain, plain_optimizer = made()
    plain_optimizer.load_state_dict(optimizer.state_dict())
    print("load_state_dict: state of", [n for n, p in plain.named_parameters() if plain_optimizer.state[p]])
    for strict in (True, False):
        fresh, fresh_optimizer = made()
        try:
            set_state_dict(
                fresh,
                fresh_optimizer,
                model_state_dict=saved,
                optim_state_dict=saved_optimizer,
                options=StateDictOptions(full_state_dict=True, strict=strict),
            )
        except RuntimeError as error:
            print(f"strict={strict}: {error}")
            continue
        steps = {name: fresh_optimizer.state[p].get("step") for name, p in fresh.named_parameters()}
        print(f"strict={strict}: steps taken {steps}")


if __name__ == "__main__":
    main()
