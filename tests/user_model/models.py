"""A user's model that is right, as the text of a file, and the command that judges it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardproof.engine.registry import shipped_mutants
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


class Check:
    """The command on one file."""

    def __init__(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.file, self._capsys, self._num_runs = file, capsys, 0

    def __call__(self, engine: str, *options: str, text: str = "", model: str = "Mine", code: int = 0) -> str:
        """Judge an engine, or a mutant by its name, by this text; returns the screen, whose spaces are single."""
        if text:
            self.file.write_text(text)
        out = self.file.with_name(f"run{self._num_runs or ''}")
        self._num_runs += 1
        specs = {mutant.name: mutant.engine_spec for mutant in shipped_mutants()}
        where = ["--engine", specs.get(engine, engine), "--out", str(out)]
        assert main(["check", f"{self.file}:{model}", *where, *options]) == code
        printed = self._capsys.readouterr()
        return " ".join((printed.err if code == 2 else printed.out).split())
