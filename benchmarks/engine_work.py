"""The work that `engine_step` compares: one transformer, wrapped by three engines in one world, stepped in turn."""

from __future__ import annotations

import gc
import pickle
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import permutations
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardproof.engine import reference
from shardproof.harness.torch_compat.process_groups import FileStore
from shardproof.harness.tracing.collectives.interception import Interceptor, standing_in_c10d
from shardproof.harness.tracing.ledger import Entry, Ledger, Op, Phase
from shardproof.harness.tracing.recorder import Recorder
from shardproof.harness.worlds.rank import RankContext
from shardproof.harness.worlds.threads.process_group import global_ranks

VOCABULARY = 1024
NUM_HEADS = 8
# The first steps determine the order of execution, rebuild DDP's buckets and fill the dispatcher's caches.
NUM_WARM_UPS = 2
# Data-parallel engines that do the same work agree up to the order of summation in float32.
LOSS_TOLERANCE = 1e-3


class Name(StrEnum):
    """The engines, as the table spells them."""

    REFERENCE = "reference"
    FSDP2 = "FSDP2"
    DDP = "DDP"
    WRAPPER = "reference wrapper"
    FSDP1 = "FSDP1"
    FLAT_WRAPPER = "reference wrapper, flat"
    FLAT_FSDP1 = "FSDP1, flat"


COMPOSABLE = (Name.REFERENCE, Name.FSDP2, Name.DDP)
WRAPPERS = (Name.WRAPPER, Name.FSDP1)
FLAT_WRAPPERS = (Name.FLAT_WRAPPER, Name.FLAT_FSDP1)


class Reshard(StrEnum):
    """When a unit's whole parameters are freed after its forward."""

    AFTER_FORWARD = "yes"  # freed, and gathered again for backward; the root keeps its own, as usual
    KEEP = "no"  # kept until the unit's backward is over


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One configuration; ``num_blocks`` units and the root. The first of ``names`` is compared with the others."""

    names: tuple[Name, ...] = COMPOSABLE
    num_blocks: int
    width: int
    num_rows: int
    length: int
    reshard: Reshard
    num_microbatches: int
    num_rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """One engine's measurements on one rank: seconds of each round, bytes of one step, and its last loss.

    ``processor_s`` are processor seconds: of the rank's process, or of its thread if it is one. They are valid on a
    machine with other load, and exclude the time that a rank waits.
    """

    name: Name
    seconds: tuple[float, ...]
    processor_s: tuple[float, ...]
    peak_bytes: int | None  # None if the ranks share a process with the measurement
    sent_bytes: float
    least_bytes: float
    loss: float


class Transformer(nn.Module):
    """Embedding, blocks, norm and head; without dropout, so that every engine computes the same."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, work.width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                work.width, NUM_HEADS, 4 * work.width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(work.num_blocks)
        )
        self.norm = nn.LayerNorm(work.width)
        self.head = nn.Linear(work.width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contender:
    """One engine around a model of its own; ``accumulating`` keeps the gradients of a microbatch local."""

    name: Name
    module: nn.Module
    optimizer: torch.optim.Optimizer
    accumulating: Callable[[], AbstractContextManager[object]]

    def step(self, microbatches: Sequence[torch.Tensor]) -> float:
        """Train one step and return the loss of the last microbatch."""
        for tokens in microbatches[:-1]:
            with self.accumulating():
                _loss(self.module, tokens).backward()  # type: ignore[no-untyped-call]
        loss = _loss(self.module, microbatches[-1])
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


Counted = Callable[[Callable[[], object]], Ledger]


def compare_as_process(rank: int, size: int, folder: Path, work: Work) -> None:
    """Measure on a rank that is a process, and write the result to ``rank_file``.

    A plain gloo process, not one of a world: the interceptor of a world keeps the tensors of recent collectives alive,
    which would be charged to the engine. It runs only for one counted step.
    """
    store = FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    def counted(step: Callable[[], object]) -> Ledger:
        recorder = Recorder()
        with standing_in_c10d(Interceptor(recorder=lambda: recorder, ranks_of=global_ranks)):
            step()
        return recorder.ledger()

    torch.set_num_threads(1)
    peaks = {name: _peak_bytes(name, work, microbatches_of(work, rank)) for name in work.names}
    gc.collect()  # the measured modules are in reference cycles
    compared = _compare(rank, size, work, counted, time.process_time)
    taken = [replace(t, peak_bytes=peaks[t.name]) for t in compared]
    rank_file(folder, rank).write_bytes(pickle.dumps(taken))
    dist.destroy_process_group()


def compare_as_thread(context: RankContext, work: Work) -> None:
    """Measure on a rank that is a thread, and write the result to ``rank_file``.

    The body of a threads world, whose interceptor has the transport and stays.
    """

    def counted(step: Callable[[], object]) -> Ledger:
        before = len(context.recorder.ledger())
        with context.recorder.during(Phase.STEP, step=0):
            step()
        return context.recorder.ledger()[before:]

    taken = _compare(context.rank, context.size, work, counted, time.thread_time)
    rank_file(context.folder, context.rank).write_bytes(pickle.dumps(taken))


def rank_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's result."""
    return folder / f"rank{rank}.pickle"


def _compare(
    rank: int, size: int, work: Work, counted: Counted, processor_time: Callable[[], float]
) -> tuple[Taken, ...]:
    torch.set_num_threads(1)
    microbatches = microbatches_of(work, rank)
    contenders = [contender_of(name, work) for name in work.names]
    seconds: dict[Name, list[float]] = {name: [] for name in work.names}
    processor_s: dict[Name, list[float]] = {name: [] for name in work.names}
    losses: dict[Name, float] = {}
    # All orders in turn, so that no engine is always first or always after the same one.
    orders = list(permutations(contenders))
    for turn in range(NUM_WARM_UPS + work.num_rounds):
        for contender in orders[turn % len(orders)]:
            dist.barrier()  # so that a step does not include its peer's previous one
            started, processor_started = time.perf_counter(), processor_time()
            losses[contender.name] = contender.step(microbatches)
            if turn >= NUM_WARM_UPS:
                seconds[contender.name].append(time.perf_counter() - started)
                processor_s[contender.name].append(processor_time() - processor_started)
    sent = {c.name: sum(map(_sent_bytes, counted(partial(c.step, microbatches)))) for c in contenders}
    return tuple(
        Taken(
            name=name,
            seconds=tuple(seconds[name]),
            processor_s=tuple(processor_s[name]),
            peak_bytes=None,
            sent_bytes=sent[name],
            least_bytes=_least_bytes(name, work, size),
            loss=losses[name],
        )
        for name in work.names
    )


def contender_of(name: Name, work: Work, device: str = "cpu") -> Contender:
    """Wrap the model on a kind of device by one engine; all start from the same values."""
    torch.manual_seed(0)
    model = Transformer(work).to(device)
    match name:
        case Name.DDP:
            ddp = DistributedDataParallel(model)
            return Contender(name=name, module=ddp, optimizer=_sgd(ddp), accumulating=ddp.no_sync)
        case Name.FSDP2:
            return _sharded(name, model, work, fsdp.fully_shard)
        case Name.REFERENCE:
            return _sharded(name, model, work, reference.fully_shard)
        case Name.FSDP1 | Name.FLAT_FSDP1:
            return _wrapped(name, model, work, fsdp.FullyShardedDataParallel)
        case Name.WRAPPER | Name.FLAT_WRAPPER:
            return _wrapped(name, model, work, reference.FullyShardedDataParallel)


def _sharded(name: Name, model: Transformer, work: Work, fully_shard: Callable[..., Any]) -> Contender:
    """Wrap with an engine that has FSDP2's interface."""
    keep: dict[str, bool] = {"reshard_after_forward": False} if work.reshard is Reshard.KEEP else {}
    for block in model.blocks:
        fully_shard(block, **keep)
    root = fully_shard(model, **keep)  # Any: the engines share no base class

    @contextmanager
    def accumulating() -> Iterator[None]:
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    return Contender(name=name, module=model, optimizer=_sgd(model), accumulating=accumulating)


def _wrapped(name: Name, model: Transformer, work: Work, wrapper: Any) -> Contender:
    """Wrap with an engine that has FSDP1's interface; ``Any``, for the engines share no base class."""
    is_kept = work.reshard is Reshard.KEEP
    wrap = partial(
        wrapper,
        sharding_strategy=fsdp.ShardingStrategy.SHARD_GRAD_OP
        if is_kept
        else fsdp.ShardingStrategy.FULL_SHARD,
        use_orig_params=name in WRAPPERS,
        device_id=torch.device("cpu"),
    )
    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrap(block)
    root = wrap(model)
    return Contender(name=name, module=root, optimizer=_sgd(root), accumulating=root.no_sync)


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-3)


def _loss(module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = module(tokens)
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def microbatches_of(work: Work, rank: int) -> list[torch.Tensor]:
    """Return the tokens [rows, length] of each of a rank's microbatches."""
    generator = torch.Generator().manual_seed(rank)
    shape = (work.num_rows, work.length)
    return [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(work.num_microbatches)]


# --- bytes sent -------------------------------------------------------------------------------------------------


def _sent_bytes(entry: Entry) -> float:
    passed_on = (len(entry.group) - 1) / len(entry.group) * entry.num_bytes
    match entry.op:
        case Op.ALL_GATHER | Op.REDUCE_SCATTER:
            return passed_on
        case Op.ALL_REDUCE:
            return 2 * passed_on
        case Op.BARRIER:
            return 0.0
        case _:
            raise ValueError(
                f"{entry.describe()}: expected no such collective in a step; give it a bound here"
            )


def _least_bytes(name: Name, work: Work, size: int) -> float:
    """Return the bound of a policy, with P bytes of parameters of which R belong to the root.

    Replicated: one all-reduce of P a step. Sharded: one reduce-scatter of P a step, and in each of m microbatches
    one all-gather of P; where units are freed after forward, another of P - R for backward.
    """
    with torch.device("meta"):
        model = Transformer(work)
    whole = _num_bytes(model.parameters())
    blocks = _num_bytes(model.blocks.parameters())
    if name is Name.DDP:
        moved = 2 * whole
    else:
        gathered = whole + (blocks if work.reshard is Reshard.AFTER_FORWARD else 0)
        moved = whole + work.num_microbatches * gathered
    return (size - 1) / size * moved


def _num_bytes(parameters: Iterator[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


# --- peak bytes ---------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Tracks every storage that an operator touches on this thread, and the peak of live bytes.

    A storage counts by its current size, because sharding engines free memory by resizing to zero. Operators of the
    autograd engine are seen too: on a CPU it runs on the thread that called backward. Not seen: memory that no operator
    has touched yet, and a backend's own memory.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak_bytes = 0

    def reset_peak(self) -> None:
        """Restart with the memory that is alive now."""
        gc.collect()
        self.peak_bytes = self._live_bytes()

    def __torch_dispatch__(
        self,
        func: Any,  # Any, for all: torch's own signature
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor first; torch calls this mode again for the local tensors inside
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                self._follow(leaf.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self._live_bytes())
        return result

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._alive.clear()

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)  # one Python object per storage, for as long as anything references the storage
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._alive.pop(key, None))

    def _live_bytes(self) -> int:
        storages = [ref() for ref in list(self._alive.values())]
        return sum(s.nbytes() for s in storages if s is not None)


def _peak_bytes(name: Name, work: Work, microbatches: Sequence[torch.Tensor]) -> int:
    """Build an engine and train under the mode; the peak is that of one step after the warm-up."""
    live = LiveBytes()
    with live:
        contender = contender_of(name, work)
        contender.step(microbatches)
        live.reset_peak()
        contender.step(microbatches)
    return live.peak_bytes
