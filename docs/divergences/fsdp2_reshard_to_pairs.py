"""FSDP2 with units that forward leaves sharded over pairs of ranks (reshard_after_forward=2). Needs torch alone.

torch/distributed/fsdp/_fully_shard: _fsdp_collectives.py, foreach_all_gather_copy_out; _fsdp_param.py, to_sharded
Run: torchrun --nproc-per-node 4 fsdp2_reshard_to_pairs.py
"""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard


def layers() -> nn.Sequential:
    """Make two layers, each to be a unit."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))


def sharded(model: nn.Sequential, dim: int) -> nn.Sequential:
    """Shard each layer along a dim, over pairs between forward and backward."""
    for layer in model:
        fully_shard(layer, reshard_after_forward=2, shard_placement_fn=lambda _: Shard(dim))
    return fully_shard(model, reshard_after_forward=False)


def by_columns() -> str:
    """Train layers that are sharded along their second dim; compare a gradient with that of one process."""
    rows, alone, model = torch.ones(3, 8), layers(), sharded(layers(), dim=1)
    alone(rows).square().sum().backward()
    try:
        model(rows).square().sum().backward()
    except (IndexError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    found, expected = model[0].weight.grad, alone[0].weight.grad
    assert isinstance(found, DTensor)
    assert expected is not None
    return f"gradients are {'right' if torch.allclose(found.full_tensor(), expected) else 'wrong'}"


def without_a_backward() -> str:
    """Freeze the first layer, which backward never reaches; count the elements that a rank still has for it."""
    model = layers()
    model[0].requires_grad_(False)
    model = sharded(model, dim=0)
    model(torch.ones(3, 8)).square().sum().backward()
    managed = [found for found in gc.get_objects() if type(found).__name__ == "FSDPParam"]
    (frozen,) = (param for param in managed if param.sharded_param is model[0].weight)
    left = frozen._sharded_post_forward_param_data
    return (
        f"{frozen.sharded_state}, and {0 if left is None else left.numel()} elements beside the shard of 16"
    )


def main() -> None:
    """Show both."""
    dist.init_process_group("gloo")
    for name, told in (("second dim", by_columns()), ("frozen layer", without_a_backward())):
        if dist.get_rank() == 0:
            print(f"{name}: {told}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
