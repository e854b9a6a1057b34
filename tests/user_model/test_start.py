"""`shardproof init` writes the file of a model, and `check` does so for a module."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardproof.harness.cli.main import main
from tests.shell import python

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
    def forward(self, x, scale=1.0):
        for layer in self.layers:
            x = layer(x).relu() * scale
        return x
"""
# As much of a library of models as the command looks at.
TRANSFORMERS = """
import torch
from torch import nn

__version__ = "0"

class PretrainedConfig:
    pass

class TinyConfig(PretrainedConfig):
    def __init__(self, vocab_size=50_000, hidden_size=4096, num_labels=2):
        self.vocab_size, self.hidden_size, self.num_labels = vocab_size, hidden_size, num_labels

class TinyForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size) for _ in range(2))
    def forward(self, input_ids, labels):
        hidden = self.table(input_ids)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        logits = hidden @ self.table.weight.T
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return type("Output", (), {"loss": loss})()
"""
AUTO = """
from transformers import TinyConfig, TinyForCausalLM
MODEL_FOR_CAUSAL_LM_MAPPING = {TinyConfig: TinyForCausalLM}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def test_a_module_is_judged_by_the_file_that_is_written(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judged = ["--engine", "torch.ddp", "-k", "trains", "--out"]
    assert main(["check", "net.py:Net", *judged, "run"]) == 0
    assert "wrote check_netmodel.py: its data and loss are guesses" in capsys.readouterr().err
    written = (here / "check_netmodel.py").read_text()
    assert "units = ('layers.*',)" in written
    assert '{"x": torch.randn(4, 6, generator=generator)}' in written
    assert main(["init", "net.py:Net"]) == 2
    assert "try shardproof check check_netmodel.py:NetModel, if it is" in capsys.readouterr().err
    assert main(["check", "check_netmodel.py:NetModel", *judged, "again"]) == 0


def test_a_configuration_is_judged_at_small_sizes(here: Path) -> None:
    auto = here / "transformers/models/auto"
    auto.mkdir(parents=True)
    (here / "transformers/__init__.py").write_text(TRANSFORMERS)
    (auto / "modeling_auto.py").write_text(AUTO)
    options = ("--engine", "torch.fsdp2", "-k", "trains", "--out", str(here / "run"))
    done = python("-m", "shardproof", "check", "--hf", "TinyConfig", *options, cwd=here, PYTHONPATH=str(here))
    assert done.returncode == 0, done.stdout + done.stderr
    written = (here / "check_tiny.py").read_text()
    assert "vocab_size=256," in written
    assert "num_labels" not in written
    assert "wrote check_tiny.py" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["net.py:Nothing"], "net.py, which does not define it; see"),
        (["net.py:nn"], "net.py:nn: nn is no class of torch.nn.Module; see"),
        (["--hf", "TinyConfig"], "TinyConfig: ModuleNotFoundError: No module named 'transformers'"),
    ],
)
def test_what_is_not_understood_is_told(
    here: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not list(here.glob("check_*"))
