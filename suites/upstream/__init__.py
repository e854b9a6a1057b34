"""What torch's own tests promise: 86 rows that suites stand for. Data only; no torch here."""

from suites.upstream.fully_shard_comm import ROWS as _COMM
from suites.upstream.fully_shard_training import ROWS as _TRAINING
from suites.upstream.replicate_training import ROWS as _REPLICATE
from suites.upstream.row import UpstreamRow

__all__ = ["UPSTREAM", "UpstreamRow"]

UPSTREAM: tuple[UpstreamRow, ...] = (*_TRAINING, *_COMM, *_REPLICATE)
