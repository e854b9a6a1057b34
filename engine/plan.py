"""The request to an engine for one case: layout, communication units, policies. Contains values only."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import Enum

import torch

from shardproof.engine.capability import Capability, UnsupportedError
from shardproof.engine.wrapper import Wrapper

__all__ = [
    "Accumulation",
    "Axis",
    "Buffers",
    "Grouping",
    "Layout",
    "Offload",
    "Placement",
    "Plan",
    "Prefetch",
    "Replicas",
    "Reshard",
    "Roots",
    "Tuning",
    "UnitDtypes",
    "Wire",
]


class Layout(Enum):
    """How parameters are laid out over the ranks."""

    NATIVE = "the engine's default on a 1-D mesh"
    REPLICATE = "every rank holds every parameter"
    SHARD = "every rank holds its share of every parameter"
    ZERO1 = "every rank holds every parameter, and its share of the optimizer state"
    ZERO2 = "every rank holds every parameter, and its share of gradients and optimizer state"
    HYBRID = "replicas, each sharded over its share of the ranks; Replicas says how many"


class Replicas(Enum):
    """The number of replicas of a hybrid layout; each member names its (replicate, shard) mesh for n ranks."""

    ONE = "(1, n): one, sharded over all ranks; no two ranks hold the same rows"
    TWO = "(2, n / 2): two, each sharded over half of the ranks"
    PAIRS = "(n / 2, 2): each pair of ranks is one, sharded over the two"
    SINGLES = "(n, 1): each rank is one, and holds everything"


class Reshard(Enum):
    """What the engine does with gathered parameters between forward and backward."""

    NATIVE = "the engine's default"
    AFTER_FORWARD = "freed after forward, gathered again for backward"
    KEEP = "kept from forward to backward"
    TO_PAIRS = "sharded over pairs of ranks, and gathered from the pair for backward"


class Accumulation(Enum):
    """When gradients of several microbatches are communicated."""

    EVERY_MICROBATCH = "after each microbatch"
    LAST_MICROBATCH = "once, after the last microbatch"


class Grouping(Enum):
    """Whether the engine must follow the units of a plan."""

    HINT = "an engine that groups differently still trains the same model"
    REQUIRED = "each unit is one communication group, the root takes the rest"


class Placement(Enum):
    """Which dim of a parameter is sharded."""

    FIRST = "the first"
    LARGEST = "the largest, the first of several; it must divide by the number of shards"


class Offload(Enum):
    """Where parameters, gradients and optimizer state are kept between steps."""

    NONE = "on the device"
    OPTIMIZER = (
        "optimizer state, and the gradients that it is updated from, on the host; the rest on the device"
    )
    CPU = "on the host, in memory that is not pinned"
    PINNED = "on the host, in pinned memory, from which a GPU copies without waiting"


class Buffers(Enum):
    """The memory for the inputs and outputs of collectives."""

    NATIVE = "wherever the engine allocates"
    GROUP = "in memory that the process group allocates"
    SYMMETRIC = "in memory that all ranks of the group can address"


class Wire(Enum):
    """The reduction that runs between ranks."""

    NATIVE = "the engine's choice"
    SUM = "only sums: division happens on the ranks"


class Tuning(Enum):
    """When gradients are reduced, and to which ranks; no member changes the results."""

    NATIVE = "the engine's default"
    OVERLAPPED = "while backward computes; buckets are so small that some are full before its end"
    IN_SEQUENCE = "while nothing computes: backward waits for each, or is done"
    ROUND_ROBIN = "each to the next rank in turn"


class Roots(Enum):
    """Which module the training loop calls, and which finishes each backward."""

    MODEL = "the model"
    EACH_UNIT = "each unit is a root of its own; the engine does not receive the model itself"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """The gathers to issue ahead of use: ``(unit, units that it prefetches)``, in forward and in backward.

    Units that are not listed keep the engine's default order.
    """

    forward: tuple[tuple[str, tuple[str, ...]], ...] = ()
    backward: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def by_distance(cls, units: Sequence[str], *, forward: int = 0, backward: int = 0) -> Prefetch:
        """Let each unit prefetch the next ``forward`` units in forward, the previous ``backward`` in backward."""
        ahead = tuple((u, tuple(units[i + 1 : i + 1 + forward])) for i, u in enumerate(units))
        behind = tuple((u, tuple(reversed(units[max(0, i - backward) : i]))) for i, u in enumerate(units))
        return cls(
            forward=tuple((u, targets) for u, targets in ahead if targets),
            backward=tuple((u, targets) for u, targets in behind if targets),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitDtypes:
    """The dtypes of one unit, in place of the plan's; ``casts_inputs``: whether inputs get the compute dtype."""

    unit: str
    compute_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    casts_inputs: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of the device mesh: its name and its number of ranks."""

    name: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One request to an engine.

    ``units`` names the submodules that each form one communication group; names joined by commas form one group
    together. The root takes the remaining parameters. ``grouping`` states whether the engine may ignore the units.
    ``replicas`` applies only to ``Layout.HYBRID``. ``compute_dtype`` is the dtype of forward and backward; parameters
    are cast to it, buffers are not. ``output_dtype`` is the dtype of the root's outputs. ``reduce_dtype`` is the dtype
    of gradients in communication. None means the parameters' own dtype, and for the reduction the compute dtype.
    ``divide_factor`` divides the sum of gradients over ranks; None means the number of ranks. ``clip_in_step`` is
    the maximum 2-norm to which the engine's own step clips gradients. ``gathered_once`` names units whose parameters
    backward does not need. ``bucket_bytes`` is the size at which a bucket of gradients is closed and reduced.
    ``max_reduce_buffers`` limits the number of reductions that hold their input at once. ``ignored`` names parameters
    that the engine leaves alone, also the gradients of those that train. ``replicated`` names units, ``""`` for the
    root, that are replicated where the others are sharded. ``experts`` names parameters that the model has cut over
    ``expert_parallel`` ranks, each with data of its own. The engine is then given the mesh ``(data, expert)``: experts
    are sharded and averaged over ``data`` only, all other parameters over both axes. ``forward_methods`` are pairs
    ``(module, method)``; the method starts that module's forward. ``wrapper`` has the options that only
    ``FullyShardedDataParallel`` has; None leaves them to the adapter. ``demands`` are the capabilities that training
    needs beyond forward, backward and step.
    """

    layout: Layout = Layout.NATIVE
    replicas: Replicas = Replicas.TWO
    placement: Placement = Placement.FIRST
    offload: Offload = Offload.NONE
    roots: Roots = Roots.MODEL
    tensor_parallel: int = 1
    expert_parallel: int = 1
    experts: tuple[str, ...] = ()
    pipeline_stages: int = 1
    units: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    grouping: Grouping = Grouping.HINT
    reshard: Reshard = Reshard.NATIVE
    gathered_once: tuple[str, ...] = ()
    prefetch: Prefetch | None = None
    accumulation: Accumulation = Accumulation.EVERY_MICROBATCH
    compute_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    unit_dtypes: tuple[UnitDtypes, ...] = ()
    reduce_dtype: torch.dtype | None = None
    wire: Wire = Wire.NATIVE
    tuning: Tuning = Tuning.NATIVE
    bucket_bytes: int | None = None
    max_reduce_buffers: int | None = None
    buffers: Buffers = Buffers.NATIVE
    divide_factor: float | None = None
    clip_in_step: float | None = None
    forward_methods: tuple[tuple[str, str], ...] = ()
    wrapper: Wrapper | None = None
    demands: frozenset[Capability] = frozenset()

    def __post_init__(self) -> None:
        if self.layout is not Layout.HYBRID and self.replicas is not Replicas.TWO:
            raise ValueError(
                f"Plan.replicas: expected Layout.HYBRID beside {self.replicas}, got {self.layout}; "
                "try layout=Layout.HYBRID"
            )
        if (self.expert_parallel > 1) != bool(self.experts):
            raise ValueError(
                f"Plan.experts: expected names of parameters where expert_parallel is beyond 1, and none elsewhere, "
                f"got {self.experts} and {self.expert_parallel}"
            )
        if self.experts and (self.layout is not Layout.SHARD or self.tensor_parallel > 1):
            raise ValueError(
                f"Plan.experts: expected Layout.SHARD without tensor parallelism, got {self.layout} and "
                f"tensor_parallel={self.tensor_parallel}"
            )
        if self.divide_factor is not None and not 0 < self.divide_factor < math.inf:
            raise ValueError(
                f"Plan.divide_factor: expected a positive number, got {self.divide_factor}; "
                "try None to divide by the number of ranks"
            )

    def axes(self, world_size: int) -> tuple[Axis, ...]:
        """Return the mesh axes for ``world_size`` ranks; raises ValueError when the layout does not divide it."""
        return (*self._outer_axes(), *self._data_axes(self.data_size(world_size)), *self._inner_axes())

    def data_size(self, world_size: int) -> int:
        """Return the number of ranks with their own data; raises ValueError when the plan does not divide the ranks."""
        model_size = self.tensor_parallel * self.pipeline_stages
        if world_size % model_size:
            raise ValueError(
                f"Plan: expected a world size that {model_size} divides (tensor parallel {self.tensor_parallel}, "
                f"pipeline stages {self.pipeline_stages}), got {world_size}; try --world threads:{model_size * 2}"
            )
        return world_size // model_size

    def data_rank(self, rank: int, world_size: int) -> int:
        """Return the index of a rank's data: stages are the outermost mesh axis, tensor parallelism the innermost."""
        return rank % (world_size // self.pipeline_stages) // self.tensor_parallel

    def _outer_axes(self) -> tuple[Axis, ...]:
        return (Axis(name="pipe", size=self.pipeline_stages),) if self.pipeline_stages > 1 else ()

    def _inner_axes(self) -> tuple[Axis, ...]:
        return (Axis(name="tensor", size=self.tensor_parallel),) if self.tensor_parallel > 1 else ()

    def _data_axes(self, world_size: int) -> tuple[Axis, ...]:
        if self.experts:
            if world_size % self.expert_parallel:
                raise ValueError(
                    f"Plan.expert_parallel: expected a divisor of the {world_size} ranks that have data of their own, "
                    f"got {self.expert_parallel}; try --world threads:{2 * self.expert_parallel}"
                )
            return (
                Axis(name="data", size=world_size // self.expert_parallel),
                Axis(name="expert", size=self.expert_parallel),
            )
        if self.layout is not Layout.HYBRID:
            return (Axis(name="data", size=world_size),)
        is_halved = self.replicas in {Replicas.TWO, Replicas.PAIRS}
        if is_halved and world_size % 2:
            raise ValueError(
                f"Layout.HYBRID with {self.replicas}: expected an even world size, got {world_size}; "
                f"try --world threads:{world_size + 1}, or Replicas.ONE or SINGLES, which any size allows"
            )
        num_replicas = {
            Replicas.ONE: 1,
            Replicas.TWO: 2,
            Replicas.PAIRS: world_size // 2,
            Replicas.SINGLES: world_size,
        }[self.replicas]
        return (
            Axis(name="replicate", size=num_replicas),
            Axis(name="shard", size=world_size // num_replicas),
        )

    def divisor(self, world_size: int) -> float:
        """Return the divisor of the sum of gradients over ``world_size`` ranks."""
        return world_size if self.divide_factor is None else self.divide_factor

    @property
    def asks_for_dtypes(self) -> bool:
        """Whether units are to compute in other dtypes than their parameters', which no function chooses for each."""
        is_chosen = Capability.PARAMETER_DTYPES in self.demands
        return not is_chosen and (self.compute_dtype is not None or bool(self.unit_dtypes))

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Return the names of the mesh axes that an engine gets, without those of pipeline and tensor parallelism."""
        if self.experts:
            return ("data", "expert")
        return ("replicate", "shard") if self.layout is Layout.HYBRID else ("data",)

    @property
    def cut_axis(self) -> str | None:
        """The mesh axis over which the model is already cut when an engine gets it."""
        if self.experts:
            return "expert"
        return "tensor" if self.tensor_parallel > 1 else None

    @property
    def reduction_dtype(self) -> torch.dtype | None:
        """The dtype of gradients in communication; None means that of the parameters."""
        if self.reduce_dtype is None and Capability.REDUCE_AS_STORED in self.demands:
            return None
        return self.reduce_dtype or self.compute_dtype

    @property
    def needs(self) -> frozenset[Capability]:
        """The capabilities that this plan needs."""
        layout = {
            Layout.NATIVE: None,
            Layout.REPLICATE: Capability.REPLICATE,
            Layout.SHARD: Capability.SHARD,
            Layout.ZERO1: Capability.ZERO1,
            Layout.ZERO2: Capability.ZERO2,
            Layout.HYBRID: Capability.HYBRID,
        }[self.layout]
        is_binding = self.grouping is Grouping.REQUIRED
        wanted = {
            layout: layout is not None,
            Capability.SHARD_DIM: self.placement is not Placement.FIRST,
            Capability.OPTIMIZER_OFFLOAD: self.offload is Offload.OPTIMIZER,
            Capability.CPU_OFFLOAD: self.offload in {Offload.CPU, Offload.PINNED},
            Capability.SEVERAL_ROOTS: self.roots is not Roots.MODEL,
            Capability.TENSOR_PARALLEL: self.tensor_parallel > 1,
            Capability.EXPERTS: bool(self.experts),
            Capability.PIPELINE: self.pipeline_stages > 1,
            Capability.UNITS: is_binding,
            Capability.JOINT_UNITS: is_binding and any("," in unit for unit in self.units),
            Capability.MIXED: bool(self.replicated),
            Capability.IGNORE: bool(self.ignored),
            Capability.RESHARD_POLICY: self.reshard is not Reshard.NATIVE,
            Capability.RESHARD_PART: self.reshard is Reshard.TO_PAIRS,
            Capability.GATHER_ONCE: bool(self.gathered_once),
            Capability.PREFETCH: self.prefetch is not None,
            Capability.ACCUMULATE: self.accumulation is Accumulation.LAST_MICROBATCH,
            Capability.COMPUTE_DTYPE: self.compute_dtype is not None or self.output_dtype is not None,
            Capability.UNIT_DTYPES: bool(self.unit_dtypes),
            Capability.REDUCE_DTYPE: self.reduce_dtype is not None,
            Capability.REDUCE_SUM: self.wire is not Wire.NATIVE,
            Capability.OVERLAP: self.tuning in {Tuning.OVERLAPPED, Tuning.IN_SEQUENCE},
            Capability.ROUND_ROBIN: self.tuning is Tuning.ROUND_ROBIN,
            Capability.BUCKETS: self.bucket_bytes is not None,
            Capability.REDUCE_BUFFERS: self.max_reduce_buffers is not None,
            Capability.BUFFERS: self.buffers is not Buffers.NATIVE,
            Capability.GRADIENT_DIVIDE: self.divide_factor is not None,
            Capability.CLIP_IN_STEP: self.clip_in_step is not None,
            Capability.FORWARD_METHODS: bool(self.forward_methods),
            Capability.WRAPPER: self.wrapper is not None,
        }
        return self.demands | {c for c, is_wanted in wanted.items() if c is not None and is_wanted}

    def refuse_beyond(self, declared: Set[Capability]) -> None:
        """Raise UnsupportedError when this plan needs more than ``declared``: an adapter's first line."""
        missing = self.needs - declared
        if missing:
            raise UnsupportedError(sorted(missing, key=lambda c: c.name))

    def refuse_options_of_shards(self) -> None:
        """Raise ValueError for options of sharding; adapters call it where every rank holds the whole parameters."""
        asked = {
            "placement": self.placement is not Placement.FIRST,
            "reshard": self.reshard not in {Reshard.NATIVE, Reshard.KEEP},
        }
        wrong = [option for option, is_asked in asked.items() if is_asked]
        if wrong:
            raise ValueError(
                f"plan: expected no {' and no '.join(wrong)} for parameters that every rank holds whole, got "
                f"{self.placement} and {self.reshard}; try Layout.SHARD"
            )
