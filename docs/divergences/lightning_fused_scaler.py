"""A fused optimizer that Fabric wraps steps although the gradients overflow. Needs torch and lightning-fabric.

python this_file.py
"""

import math

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.amp.grad_scaler import GradScaler


def is_finite_after_an_overflow(*, by_fabric: bool) -> bool:
    """Train a model for one step whose gradients overflow; return whether its parameters are still finite."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if by_fabric:
        model, optimizer = Fabric(accelerator="cpu", devices=1).setup(model, optimizer)
    scaler = GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum() * math.inf).backward()
    scaler.step(optimizer)
    return all(bool(p.isfinite().all()) for p in model.parameters())


def main() -> None:
    """Print both."""
    for by_fabric in (False, True):
        print(f"by_fabric={by_fabric}: finite={is_finite_after_an_overflow(by_fabric=by_fabric)}")


if __name__ == "__main__":
    main()
