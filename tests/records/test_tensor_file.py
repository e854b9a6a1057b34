"""A file returns a tree of tensors as it was written, and a damaged file is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardproof.harness.records.tensor_file import TensorWriter, read_tree, write_tree

TENSORS = [
    torch.arange(6, dtype=torch.float32).view(2, 3),
    torch.tensor(3.5, dtype=torch.float64),
    torch.empty(0, 4),
    torch.tensor([True, False, True]),
    torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16),
    torch.arange(12).view(3, 4).t(),
    torch.tensor([1 + 2j, 3 - 1j]).conj(),
    torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
]


LARGE = torch.randn(3, 2**18, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("is_mapped", [False, True], ids=["read", "mapped"])
@pytest.mark.parametrize("tensor", [*TENSORS, LARGE], ids=lambda t: f"{t.dtype}-{list(t.shape)}")
def test_a_tensor_comes_back_beside_others(tensor: torch.Tensor, is_mapped: bool, tmp_path: Path) -> None:
    write_tree(
        {"first": torch.ones(1, dtype=torch.uint8), "deep": [{"x": tensor, "y": 2}], "plain": None},
        tmp_path / "f",
    )
    tree = read_tree(tmp_path / "f", is_mapped=is_mapped)
    (tmp_path / "f").unlink()
    found = tree["deep"][0]["x"]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)
    assert tree["deep"][0]["y"] == 2
    assert tree["plain"] is None


def test_a_mapped_file_is_mapped_anew_each_time(tmp_path: Path) -> None:
    write_tree({"x": LARGE}, tmp_path / "f")
    tree = read_tree(tmp_path / "f", is_mapped=True)
    tree["x"].zero_()
    assert torch.equal(tree["x"], LARGE)


def test_tensors_are_kept_before_they_change(tmp_path: Path) -> None:
    large, small = LARGE.clone(), torch.ones(2)
    with TensorWriter(tmp_path / "f") as writer:
        kept = [writer.keep({"large": large, "small": small}) for _ in range(2)]
        large.zero_()
        small.zero_()
        assert torch.equal(kept[0]["large"] + kept[1]["small"][0], LARGE + 1)
        kept.append(writer.keep({"large": LARGE, "small": torch.ones(2)}))
        writer.finish({"kept": kept})
    for found in read_tree(tmp_path / "f")["kept"]:
        assert torch.equal(found["large"], LARGE)
        assert torch.equal(found["small"], torch.ones(2))


def test_a_tree_without_tensors_is_a_tree(tmp_path: Path) -> None:
    write_tree({"rank": 3, "facts": (1.5, "a")}, tmp_path / "f")
    assert read_tree(tmp_path / "f") == {"rank": 3, "facts": [1.5, "a"]}


def test_a_value_outside_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="expected tensors and JSON types, got set"):
        write_tree({"x": {1}}, tmp_path / "f")


@pytest.mark.parametrize("is_mapped", [False, True], ids=["read", "mapped"])
@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: data[:-1], "expected a complete file of tensors"),
        (lambda data: data[:20], "expected a complete file of tensors"),
        (lambda data: b"", "expected a complete file of tensors"),
        (lambda data: data.replace(b"[2, 3]", b"[9, 9]"), "expected .9, 9. of float32 at byte 32"),
        (lambda data: data.replace(b"[2, 3]", b"[-2,3]"), "expected a start and sizes"),
        (lambda data: data.replace(b"float32", b"blast32"), "expected the name of a dtype"),
    ],
    ids=["cut", "cut in the header", "empty", "too long", "negative", "no dtype"],
)
def test_a_damaged_file_is_refused(
    damage: Callable[[bytes], bytes], why: str, is_mapped: bool, tmp_path: Path
) -> None:
    file = tmp_path / "f"
    write_tree(TENSORS, file)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=why):
        read_tree(file, is_mapped=is_mapped)
