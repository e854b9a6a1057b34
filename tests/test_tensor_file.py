"""Trees of tensors come back from a file as they were, and broken files are told apart from whole ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardproof.harness.records.observation import read_tree, write_tree

TENSORS = [
    torch.arange(6, dtype=torch.float32).view(2, 3),
    torch.tensor(3.5, dtype=torch.float64),
    torch.empty(0, 4),
    torch.tensor([True, False, True]),
    torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16),
    torch.arange(12).view(3, 4).t(),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype}-{list(t.shape)}")
def test_a_tensor_comes_back_beside_others(tensor: torch.Tensor, tmp_path: Path) -> None:
    write_tree(
        {"first": torch.ones(1, dtype=torch.uint8), "deep": [{"x": tensor}], "plain": None}, tmp_path / "f"
    )
    tree = read_tree(tmp_path / "f")
    found = tree["deep"][0]["x"]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)
    assert tree["plain"] is None


def test_a_tree_without_tensors_is_a_tree(tmp_path: Path) -> None:
    write_tree({"rank": 3, "facts": (1.5, "a")}, tmp_path / "f")
    assert read_tree(tmp_path / "f") == {"rank": 3, "facts": [1.5, "a"]}


def test_what_json_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="expected tensors and what JSON knows, got set"):
        write_tree({"x": {1}}, tmp_path / "f")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "f"
    write_tree(TENSORS, file)
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(RuntimeError, match="archive"):
        read_tree(file)
