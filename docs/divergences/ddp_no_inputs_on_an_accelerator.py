"""DDP on an accelerator cannot be called without inputs: IndexError in forward. Needs torch and any accelerator.

torch/distributed/utils.py, _to_kwargs: there is nothing to move, and the caller takes the first of what was moved
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    """A parameter, and a forward that takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self) -> torch.Tensor:
        """Return a number."""
        return self.weight.sum()


def main() -> None:
    """Call the model alone, then under DDP without a device, then with one, as on a GPU."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        raise SystemExit("expected an accelerator, found none; try a machine that has one")
    backends = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device(device.type, 0)
    model = Model().to(device)
    print("alone:", float(model()))
    print("no device_ids:", float(DistributedDataParallel(model)()))
    print("device_ids:", float(DistributedDataParallel(model, device_ids=[device])()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
