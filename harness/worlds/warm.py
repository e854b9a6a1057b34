"""What the fork server imports once, so that no rank pays for it again; imported for its effect only."""

from __future__ import annotations

import torch
import torch._dynamo  # torch.optim and DDP import it on first use, a second each time
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn.parallel
from torch.distributed._composable import replicate_with_fsdp  # noqa: F401

import harness.drive
import harness.worlds.host  # noqa: F401

# A fork of a process whose OpenMP pool has run with more threads hangs in its first parallel region.
torch.set_num_threads(1)
