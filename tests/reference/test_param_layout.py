"""Whole parameters lie in one block of memory, or several on the host; reductions reuse the memory of their inputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shardproof.engine.reference import fully_shard
from shardproof.engine.reference.collectives import DefaultReduceScatter
from shardproof.engine.reference.param_layout import carved
from shardproof.harness.worlds.rank import RankContext
from tests.reference.models import WIDTH, assert_gradients, inputs_of, mean_gradients, train
from tests.reference.ranks import Ranks

MIB = 2**20
_ROWS = 10 * MIB // (4 * WIDTH)


@pytest.mark.parametrize(
    ("device", "sizes", "expected"),
    [
        ("cpu", [6, 6, 3], [15]),
        ("cpu", [10, 10, 6, 40, 1], [10, 16, 40, 1]),
        ("cpu", [], [0]),
        ("meta", [10, 10, 6, 40, 1], [67]),
    ],
)
def test_memory_on_the_host_is_cut_between_parameters(
    device: str, sizes: list[int], expected: list[int]
) -> None:
    """Sizes are in MiB: a parameter is never cut, and other devices allocate blocks of any size."""
    blocks, views = carved(
        [size * MIB // 4 for size in sizes], [torch.float32] * len(sizes), torch.device(device)
    )
    assert [block.numel() // MIB for block in blocks] == expected
    assert [view.nbytes // MIB for view in views] == sizes
    bases = {block.untyped_storage()._cdata for block in blocks}
    assert all(view.untyped_storage()._cdata in bases for view in views)


def _joint(context: RankContext) -> None:
    """Train a unit of two weights of 10 MiB each, and all of them again after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, _ROWS, bias=False), nn.Linear(_ROWS, WIDTH, bias=False))
    plain = copy.deepcopy(model)
    unit: Any = fully_shard([*model])[0]
    root: Any = fully_shard(model)
    unit.unshard()
    wholes = [layer.weight for layer in root]
    assert len({whole.untyped_storage().data_ptr() for whole in wholes}) == 2
    unit.reshard()
    for _ in range(2):
        root.zero_grad()
        train(context, root)
        assert_gradients(root, mean_gradients(plain, range(context.size)))
        assert [whole.untyped_storage().nbytes() for whole in wholes] == [0, 0]


def test_parameters_in_several_blocks_train_the_same(ranks: Ranks) -> None:
    ranks.run(2, _joint)


class _Noting(DefaultReduceScatter):
    """Keeps the inputs alive, so that no two have one id."""

    def __init__(self) -> None:
        self.inputs: list[torch.Tensor] = []

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **options: Any
    ) -> Any:
        self.inputs.append(input_tensor)
        return super().__call__(output_tensor, input_tensor, *args, **options)


def _scattered(context: RankContext) -> list[int]:
    model, noting = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), _Noting()
    for layer in model:
        unit: Any = fully_shard(layer)
        unit.set_custom_reduce_scatter(noting)
    root: Any = fully_shard(model)
    root(inputs_of(context.rank)).sum().backward()
    return [len(noting.inputs), len(set(map(id, noting.inputs)))]


def test_reductions_of_equal_units_take_turns_in_one_buffer(ranks: Ranks) -> None:
    """Fresh memory costs as much as its first write: the kernel clears each of its pages."""
    assert ranks.run(2, _scattered) == [[4, 1]] * 2
