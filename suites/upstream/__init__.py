"""What torch promises, line by line: its own tests, and the interface of FSDP1. Data only; no torch here."""

from collections.abc import Mapping

from harness.audit.upstream_coverage import Table
from suites.upstream.fully_shard_comm import ROWS as _COMM
from suites.upstream.fully_shard_training import ROWS as _TRAINING
from suites.upstream.replicate_training import ROWS as _REPLICATE
from suites.upstream.row import UpstreamRow
from suites.upstream.wrapper_configs import ROWS as _CONFIGS
from suites.upstream.wrapper_constructor import ROWS as _CONSTRUCTOR
from suites.upstream.wrapper_methods import ROWS as _METHODS

__all__ = ["FSDP1", "TABLES", "TESTS", "UPSTREAM", "WRAPPER", "UpstreamRow"]

UPSTREAM: tuple[UpstreamRow, ...] = (*_TRAINING, *_COMM, *_REPLICATE)
WRAPPER: tuple[UpstreamRow, ...] = (*_CONSTRUCTOR, *_METHODS, *_CONFIGS)

TESTS = Table(
    mark="rows",
    rows=UPSTREAM,
    column="upstream test",
    ids="ids of upstream tests",
    example='@pytest.mark.rows("T07", "R05")',
    command="shardproof coverage",
)
FSDP1 = Table(
    mark="api",
    rows=WRAPPER,
    column="name in torch.distributed.fsdp",
    ids="names of the interface of FSDP1",
    example='@pytest.mark.api("no_sync", "use_orig_params")',
    command="shardproof coverage --api fsdp1",
)
TABLES: Mapping[str, Table] = {"fsdp1": FSDP1}  # by the name that --api takes
