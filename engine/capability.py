"""The capabilities that an engine declares, and the error that it raises to refuse a plan."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class Capability(Enum):
    """One promise that an adapter can make; reports show the value."""

    # Layouts.
    REPLICATE = "replicates parameters on a 1-D mesh"
    SHARD = "shards parameters on a 1-D mesh"
    MIXED = "shards some units of a model and replicates others"
    ZERO1 = "keeps parameters whole and shards optimizer state (ZeRO-1)"
    ZERO2 = "keeps parameters whole and shards gradients and optimizer state (ZeRO-2)"
    HYBRID = "shards within a group and replicates across groups (2-D mesh)"
    SHARD_DIM = "shards each parameter on the requested dim"
    IGNORE = "ignores the listed parameters: neither shards nor reduces them"
    TENSOR_PARALLEL = "accepts parameters that a tensor-parallel mesh axis already shards"
    MESH_DIMS = "accepts parameters on a mesh of all axes, with the names of the data-parallel ones"
    EXPERTS = "shards the listed parameters on a mesh of their own, in one unit with others"
    COMPARES_RANKS = "refuses, on every rank, a model whose parameters differ between ranks"
    PIPELINE = "trains one stage of a pipeline under a schedule of microbatches"
    SEVERAL_ROOTS = "trains several root modules that communicate in one order"
    # Communication.
    UNITS = "communicates in groups of parameters that the caller chooses"
    JOINT_UNITS = "makes one communication group of several modules"
    RESHARD_POLICY = "frees or keeps gathered parameters after forward, as the plan requests"
    RESHARD_PART = "keeps parameters sharded over fewer ranks after forward, as the plan requests"
    GATHER_ONCE = "omits the gather before backward for the listed units"
    PREFETCH = "prefetches gathers in the requested order"
    PACKED_GATHERS = "lets parameters pack themselves for a gather, and unpack what it delivers"
    FREES_PACKED = "frees a gathered buffer once a parameter has unpacked it, if that requests it"
    ASYNC_GATHER = "gathers without blocking the calling rank"
    ACCUMULATE = "accumulates gradients locally until the last microbatch"
    REDUCE_DTYPE = "reduces gradients in the requested dtype"
    REDUCE_AS_COMPUTED = "reduces gradients in the compute dtype by default"
    REDUCE_AS_STORED = "reduces gradients in the parameters' own dtype by default"
    GRADIENT_DTYPES = "keeps gradients in the dtype that each parameter sets for them"
    REDUCE_SUM = "reduces only by sums, and divides locally"
    BUCKETS = "reduces gradients in buckets of the requested size"
    REDUCE_BUFFERS = "bounds the number of reductions that hold their input at once"
    OVERLAP = "reduces gradients during backward or after it, as the plan requests"
    ROUND_ROBIN = "assigns shares of gradients to ranks round-robin on request"
    BUFFERS = "allocates the buffers of its collectives where the plan requests"
    GRADIENT_DIVIDE = "divides summed gradients by a factor that the caller chooses"
    # Numbers.
    COMPUTE_DTYPE = "computes in another dtype than that of the parameters"
    UNIT_DTYPES = "computes in a dtype of each unit's own, and casts its inputs and outputs as requested"
    PARAMETER_DTYPES = "computes in their own dtype with the parameters that a function chooses"
    CPU_OFFLOAD = "keeps parameters, gradients and optimizer state on the host"
    OPTIMIZER_OFFLOAD = (
        "keeps optimizer state and the gradients that it needs on the host, parameters on the device"
    )
    CONVERT = "lets the model be converted to another dtype once prepared"
    COMPLEX = "trains complex parameters"
    MIXED_DTYPES = "trains parameters of several dtypes"
    MEMORY_FORMATS = "trains parameters in any memory format, such as channels last"
    SPARSE_GRADIENTS = "reduces sparse gradients, such as those of embeddings, and keeps them sparse"
    CLIP = "clips gradients by the norm over all parameters and ranks"
    CLIP_IN_STEP = "clips gradients by that norm in each optimizer step, to a limit set in advance"
    LOSS_SCALE = (
        "trains under a gradient scaler: a step in which one rank's gradients overflow is skipped on all"
    )
    META = "allocates models that have no memory yet, and loads the first rank's state"
    START_FROM_FIRST = "starts from the first rank's parameters and buffers, whatever those of other ranks"
    ASSIGNED_WEIGHTS = (
        "trains the tensors that the caller loads in place of its parameters before the optimizer is made"
    )
    STATE = "saves and loads whole state dicts of model and optimizer"
    SHARED_STATE = "saves and loads each rank's share of the state, in memory and in files"
    CHECKPOINTS = "writes checkpoints in its own format, and reads them on the same number of ranks"
    RESIZED_CHECKPOINTS = "reads its own checkpoints on another number of ranks"
    PARAMETER_ORDER = "passes the optimizer each trained parameter, or a piece of it, in the model's order"
    PARAMETER_SHAPES = "passes the optimizer parameters with as many dims as the model's"
    LATE_PARAMETERS = "takes parameters that join the optimizer between steps, as a group of their own"
    SEVERAL_OPTIMIZERS = "lets several optimizers update parts of the model"
    OWN_BUFFERS = "keeps on each rank the buffers of its own forwards"
    # The caller controls one unit.
    UNIT_STATE = "reports and changes whether a unit is gathered"
    UNIT_SYNC = "holds back single units' reductions"
    FINALIZE = "lets the caller finalize backwards, which reduces the held gradients once"
    REPLICA_SYNC = "holds back only the reduction across replicas"
    KEEP_AFTER_BACKWARD = "keeps gathered parameters after backward on request"
    WRAPPER = "has the options and methods of FullyShardedDataParallel"
    DATA_PARALLEL = "has the options and methods of DistributedDataParallel"
    COMPOSABLE = "has the functions fully_shard and replicate, and the methods that they add"
    KEEP_STORAGE = "keeps the memory of gathered parameters allocated while they are sharded, on request"
    # Training loops other than forward, backward, step.
    SUM_OF_FORWARDS = "lets one backward follow the forwards of several microbatches"
    INTERLEAVE = "lets forwards of later microbatches precede backwards of earlier ones"
    PARTS = "lets parts of the model be called directly"
    FORWARD_METHODS = "lets methods other than forward start a unit's forward"
    UNUSED = "lets parameters have no gradient in a step"
    FREEZE = "lets parameters be frozen and unfrozen between steps"
    GRADIENT_HOOKS = "calls a hook on a parameter once its gradient is reduced"
    EDIT_GRADIENTS = "uses gradients as the caller edits them between backwards"
    PENDING_APART = (
        "keeps gradients that wait for their reduction separate from those that the caller sees and clears"
    )
    LOADED_WEIGHTS = "trains on from weights that the caller loads into the module between steps"
    RECONVERT = "lets the model be converted to another dtype and back in the middle of training"
    RANK_DEPENDENT = "lets ranks use different parameters in one step"
    RANK_DEPENDENT_UNITS = "lets ranks call different units in one step"
    RANK_DEPENDENT_ORDER = "lets ranks use the parts of one unit in different orders"
    RECOVER = "continues training after an exception in forward"
    RECOVER_KEEPING = "keeps the gradients of earlier backwards after an exception in forward"
    GRAPHS = "lets forward and backward be captured in a CUDA graph, and replayed"
    STEP_EVENT = "lets gathers wait for an event recorded after the optimizer step"


class UnsupportedError(Exception):
    """An engine refuses a plan; usual cause: the plan needs a capability that the adapter does not declare."""

    def __init__(self, missing: Iterable[Capability]) -> None:
        self.missing = tuple(missing)
        super().__init__(self.missing)

    def __str__(self) -> str:
        promises = "; ".join(f"{c.name} ({c.value})" for c in self.missing)
        return f"this engine does not declare: {promises}"


class MissingMethodError(Exception):
    """An adapter declares a capability and lacks the method behind it; implement the method named here."""

    def __init__(self, method: str, capability: Capability) -> None:
        self.method = method
        self.capability = capability
        super().__init__(method, capability)

    def __str__(self) -> str:
        return (
            f"PreparedModel.{self.method}: expected an implementation because the adapter declares "
            f"{self.capability.name}, got the default; implement it or drop the capability"
        )
