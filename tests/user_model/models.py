"""A user's model that is right, as the text of a file, and the command that judges it."""

from __future__ import annotations

from pathlib import Path

from shardproof.harness.cli.main import main

GOOD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.normed = nn.Linear(6, 6)
        self.out = nn.Linear(6, 2)

    def forward(self, x, *, scale):
        for block in self.blocks:
            x = torch.tanh(block(x)) * scale["of"]
        hidden = self.normed(x)
        return {"y": self.out(hidden - hidden.mean(0, keepdim=True))}

class Mine:
    units = ("blocks.*",)
    def build(self):
        return Net()
    def batch(self, generator):
        return {"x": torch.randn(4, 6, generator=generator), "scale": {"of": 0.5}}
    def loss(self, output, batch):
        return (output["y"] - batch["x"][:, :2]).square().mean()
"""

LOSS = "    def loss("


def with_optimizer(text: str) -> str:
    """Return the text of a method that returns this optimizer, and the head of the loss after it."""
    return f"    def optimizer(self, p):\n        return {text}\n{LOSS}"


def run_check(file: Path, engine: str, *options: str, model: str = "Mine") -> int:
    """Run the command beside the file; returns its exit code."""
    out = str(file.parent / "run")
    return main(["check", f"{file}:{model}", "--engine", engine, "--out", out, *options])
