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
    SHARD_DIM = "shards each parameter on the dim asked for"
    IGNORE = "leaves the parameters named alone: unsharded, unreduced"
    TENSOR_PARALLEL = "takes parameters that are sharded on a tensor-parallel mesh axis already"
    MESH_DIMS = "takes parameters that lie on a mesh of all axes, and is named those of data"
    EXPERTS = "keeps the parameters named on a mesh of their own, beside others in one unit"
    COMPARES_RANKS = "refuses a model whose parameters are others on some rank, on every rank"
    PIPELINE = "takes one stage of a pipeline, driven by a schedule of microbatches"
    SEVERAL_ROOTS = "drives several modules as roots of their own that communicate in one order"
    # Communication.
    UNITS = "communicates in groups of parameters that the caller chooses"
    JOINT_UNITS = "makes one communication group of several modules"
    RESHARD_POLICY = "frees or keeps gathered parameters after forward, as asked"
    RESHARD_PART = "after forward keeps parameters sharded over fewer ranks, as asked"
    GATHER_ONCE = "leaves out the gather before backward for the units named"
    PREFETCH = "gathers ahead of use in the order asked for"
    PACKED_GATHERS = "lets parameters pack themselves for a gather, and unpack what it delivers"
    FREES_PACKED = "frees what it gathered once a parameter has unpacked it, where that asks for it"
    ASYNC_GATHER = "gathers without blocking the rank that asks"
    ACCUMULATE = "accumulates gradients locally until the last microbatch"
    REDUCE_DTYPE = "reduces gradients in the dtype asked for"
    REDUCE_AS_COMPUTED = "reduces gradients in the compute dtype where no dtype is asked for"
    REDUCE_AS_STORED = "reduces gradients in the parameters' own dtype where no dtype is asked for"
    GRADIENT_DTYPES = "keeps gradients in the dtype that each parameter sets for them"
    REDUCE_SUM = "sends nothing but sums over the wire, and divides by itself"
    BUCKETS = "reduces gradients in buckets that are closed at the size asked for"
    REDUCE_BUFFERS = "bounds the number of reductions whose input is held at once"
    OVERLAP = "reduces gradients while backward computes, or while nothing does, as asked"
    ROUND_ROBIN = "assigns shares of gradients to the ranks in turn, where asked"
    BUFFERS = "takes the memory of its collectives from where it is asked to"
    GRADIENT_DIVIDE = "divides summed gradients by a factor that the caller chooses"
    # Numbers.
    COMPUTE_DTYPE = "computes in another dtype than that of the parameters"
    UNIT_DTYPES = "computes in a dtype of each unit's own, and casts its inputs and outputs as asked"
    PARAMETER_DTYPES = "computes in their own dtype with the parameters of a unit that a function chooses"
    CPU_OFFLOAD = "keeps parameters, gradients and optimizer state on the host"
    OPTIMIZER_OFFLOAD = (
        "keeps optimizer state and the gradients that it needs on the host, parameters on the device"
    )
    CONVERT = "lets the model be converted to another dtype once prepared"
    COMPLEX = "trains parameters of complex numbers"
    SPARSE_GRADIENTS = "reduces sparse gradients, as those of embeddings, and leaves them sparse"
    CLIP = "clips gradients by the norm over all parameters and ranks"
    CLIP_IN_STEP = "clips gradients by that norm in each optimizer step, to a limit that it is prepared with"
    LOSS_SCALE = (
        "trains under a gradient scaler: a step in which one rank's gradients overflow is skipped on all"
    )
    META = "takes models without memory, and gives them memory and the state of the first rank"
    STATE = "hands out and takes whole state dicts of model and optimizer"
    SHARED_STATE = "hands out and takes each rank's share of the state, in memory and by files"
    CHECKPOINTS = "writes checkpoints in a form of its own, and reads them on as many ranks"
    RESIZED_CHECKPOINTS = "reads its own checkpoints on another number of ranks than wrote them"
    PARAMETER_SHAPES = "gives the optimizer parameters of as many dims as the model's have"
    OWN_BUFFERS = "leaves each rank the buffers that its own forwards made"
    # The caller controls one unit.
    UNIT_STATE = "reports and changes whether a unit is gathered"
    UNIT_SYNC = "holds back single units' reductions"
    FINALIZE = "lets the caller end backwards, which reduces what they left, once"
    REPLICA_SYNC = "holds back the reduction across replicas alone"
    KEEP_AFTER_BACKWARD = "keeps gathered parameters after backward, as asked"
    WRAPPER = "has the options and methods of FullyShardedDataParallel"
    DATA_PARALLEL = "has the options and methods of DistributedDataParallel"
    COMPOSABLE = "has the functions fully_shard and replicate, and the methods that they add"
    KEEP_STORAGE = "keeps the memory of gathered parameters in its place while they are sharded, as asked"
    # Training loops other than forward, backward, step.
    INTERLEAVE = "lets forwards of later microbatches precede backwards of earlier ones"
    PARTS = "lets parts of the model be called by themselves"
    FORWARD_METHODS = "lets methods other than forward start a unit's forward"
    UNUSED = "lets parameters go without a gradient for a step"
    FREEZE = "lets parameters be frozen and unfrozen between steps"
    GRADIENT_HOOKS = "calls a hook on a parameter once its gradient is reduced"
    EDIT_GRADIENTS = "goes on with gradients as the caller leaves them between backwards"
    PENDING_APART = (
        "keeps gradients that wait for their reduction apart from those that the caller sees and clears"
    )
    RECONVERT = "lets the model be converted to another dtype and back in the middle of training"
    RANK_DEPENDENT = "lets ranks use different parameters in one step"
    RANK_DEPENDENT_UNITS = "lets ranks call different units in one step"
    RANK_DEPENDENT_ORDER = "lets ranks use the parts of one unit in different orders"
    RECOVER = "trains on after an exception in forward"
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
