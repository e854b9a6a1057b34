"""The definition of a training: one problem, under one plan, on one schedule, driven by one script. Values only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.contract import Accumulation, Capability, Layout, Plan, Roots
from shardproof.harness.cases.batch import Batch
from shardproof.harness.cases.script import EachMicrobatch, Script
from shardproof.harness.cases.state_form import StateForm


class Problem(Protocol):
    """A model with its data and loss; implemented in ``fixtures``, picklable, the same on every rank."""

    @property
    def name(self) -> str:
        """Short id used in case names."""

    @property
    def units(self) -> tuple[str, ...]:
        """Submodule names that are natural communication groups."""

    @property
    def is_exact(self) -> bool:
        """Whether every intermediate is an integer multiple of a power of two that float32 holds exactly."""

    @property
    def idle(self) -> tuple[str, ...]:
        """The parameters that have no gradient in any step: frozen ones, and unused ones."""

    @property
    def is_widened(self) -> bool:
        """Whether the oracle computes in float64, not in the dtypes that the model is built with."""

    @property
    def parallelize(self) -> Callable[[nn.Module, DeviceMesh], None] | None:
        """Cut the model's tensors over a 1D mesh, for tensor or expert parallelism; None if it has no such cut."""

    @property
    def stages(self) -> Callable[[nn.Module, int], tuple[nn.Module, ...]] | None:
        """Cut the model into this many consecutive modules, names kept; None if it has no such cut."""

    def build(self) -> nn.Module:
        """Build the model with the same float32 values every time, whatever the default RNG's state."""

    def num_items(self, *, step: int, microbatch: int, rank: int) -> int:
        """Return how many items (rows, tokens) this microbatch averages over."""

    def batch(self, *, step: int, microbatch: int, rank: int) -> Batch:
        """Make the microbatch, different for each (step, microbatch, rank), floats in float32."""

    # Any: the output is the model's return value.
    def loss_sum(self, output: Any, batch: Batch) -> torch.Tensor:
        """Sum the loss over the microbatch's items; a scalar in the output's dtype."""


class NamedOptimizer(Protocol):
    """An optimizer factory with an id; implemented in ``fixtures``, picklable."""

    @property
    def name(self) -> str:
        """Short id used in case names."""

    def __call__(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Build the optimizer."""


class LoopOrder(Enum):
    """Where the loop clears gradients."""

    STEP_THEN_ZERO = "step, then clear: what a training loop does"
    ZERO_THEN_STEP = "clear, then step: nothing is ever learnt, so nothing can be proven"


class ZeroGrad(Enum):
    """How the loop clears gradients."""

    SET_TO_NONE = "always to None"
    ALTERNATE = "to None after even steps, to zeros after odd ones"


_CLIP_EPSILON = 1e-6  # which torch adds to the norm before it divides by it


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Clips gradients before each optimizer step; the norm is over all parameters, with this exponent."""

    max_norm: float
    norm_type: float = 2.0

    def factor(self, norm: float) -> float:
        """Return the factor of gradients that have this norm, as torch.nn.utils.clip_grad_norm_ documents it."""
        return min(1.0, self.max_norm / (norm + _CLIP_EPSILON))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaling:
    """Losses are multiplied by a factor, and gradients divided by it before they are clipped or used.

    The factor doubles after ``growth_interval`` steps without an overflow. If a gradient of any rank is not finite, all
    ranks skip the step and the factor halves. In the step ``overflows_at`` the gradient of the first column of the
    model's output, a single tensor, is infinite on the last rank alone; with ``in_one_piece`` one element of a reduced
    gradient is, on the ranks that hold it.
    """

    init_scale: float = 2.0**10
    growth_interval: int = 2
    overflows_at: int | None = None
    in_one_piece: bool = False

    def after(self, step: int) -> float:
        """Return the factor after a step, as torch's ``GradScaler`` documents it."""
        scale, num_good = self.init_scale, 0
        for done in range(step + 1):
            is_skipped = done == self.overflows_at
            num_good = 0 if is_skipped else num_good + 1
            if is_skipped:
                scale /= 2
            elif num_good == self.growth_interval:
                scale, num_good = scale * 2, 0
        return scale


LOSS_SCALE = "the loss scale"  # the loop notes it after each step
INFINITE_NORM = "the norm of gradients of which one element is infinite"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The length of a training and how it is divided.

    ``repeats`` runs it again from the same start. ``are_repeats_read``: repeats are read in each step, as the first run
    is. Otherwise they are read at their end, and only ends are compared. ``steps_in_backward``: each parameter has an
    optimizer of its own, and a hook steps it as soon as the gradient is reduced. ``short_steps`` have one microbatch
    fewer, as the last step of an epoch may. In ``skipped_steps`` the loop clears gradients, and steps no optimizer.
    """

    steps: int = 3
    microbatches: int = 1
    order: LoopOrder = LoopOrder.STEP_THEN_ZERO
    zero_grad: ZeroGrad = ZeroGrad.ALTERNATE
    clip: Clip | None = None
    repeats: int = 1
    are_repeats_read: bool = True
    steps_in_backward: bool = False
    scaling: LossScaling | None = None
    short_steps: tuple[int, ...] = ()
    skipped_steps: tuple[int, ...] = ()

    def microbatches_in(self, step: int) -> int:
        """Return the number of microbatches of a step."""
        return self.microbatches - (step in self.short_steps)

    def is_skipped(self, step: int) -> bool:
        """Return whether no parameter changes in a step: a gradient overflows, or the loop takes no step."""
        return step in self.skipped_steps or (self.scaling is not None and self.scaling.overflows_at == step)

    def loss_scale(self, step: int) -> float:
        """Return the factor of the losses of a step; 1 if they are not scaled."""
        return 1.0 if self.scaling is None else self.scaling.after(step - 1)

    def clears_to_none(self, step: int) -> bool:
        """Return whether gradients are None, not zeros, once this step has cleared them; None before the first."""
        return self.zero_grad is ZeroGrad.SET_TO_NONE or step % 2 == 0 or step < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """After ``after_steps`` steps a fresh model, prepared under ``plan``, takes over the state.

    Without a plan the same model loads it from files, after its parameters were lost, under a new optimizer. If it
    ``freezes_first``, what a move `Freeze` freezes in the next step is frozen before the state loads.
    If it ``undoes_a_step``, the model takes the next step between save and load, which must leave no trace. If it
    ``schedules_later``, the new optimizer's groups lack what a learning rate schedule adds to them, before the load.
    """

    after_steps: int
    plan: Plan | None
    form: StateForm = StateForm.WHOLE
    freezes_first: bool = False
    undoes_a_step: bool = False
    schedules_later: bool = False


class RanksBefore(Enum):
    """The number of ranks of a world whose state another one takes over."""

    ONE_MORE = "one more"
    HALF = "half as many"

    def of(self, num_ranks: int) -> int:
        """Return that number, where the later world has ``num_ranks``."""
        return num_ranks + 1 if self is RanksBefore.ONE_MORE else num_ranks // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A world of another size took ``steps`` steps and ended; a training starts from its files.

    That world's plan is ``plan``, or the training's own. For state in whole tensors the first rank writes the file.
    """

    steps: int
    ranks: RanksBefore
    form: StateForm
    plan: Plan | None = None

    @property
    def demands(self) -> frozenset[Capability]:
        """The capabilities that it needs of an engine."""
        is_own = self.form is StateForm.CHECKPOINT
        return self.form.demands | ({Capability.RESIZED_CHECKPOINTS} if is_own else set())


HANDED_OUT = "a whole state that was handed out"  # the subject of the loop's note in the next step
AS_HELD = "what the ranks hold"
OF_ALL_RANKS = (
    "its parameters and optimizer state"  # the subject of a note beside that one, alike on all ranks
)
LOADED = "a state that was loaded"  # the subject of the loop's note in the next step
UNCHANGED = "unchanged"
TAKEN = "what the ranks hold once they have loaded a whole state"  # likewise
AS_HANDED_OUT = "what was handed out"
RATES = "the rate at which each loaded group began"  # the subject of a note before schedules are made
KNOWN = "known"
HELD = "what the module itself holds"  # the loop notes it whenever it reads parameters
AS_SHOWN = "what is shown"  # begins the note
COMPUTED_IN = "the dtype in which a unit computes"
RANDOM = "the state of the rank's random number generator"  # the loop notes it at the two moments below
BEFORE_LOADING, AFTER_LOADING = "before loading", "after loading"
IGNORED_GRADIENTS = "the gradient of an ignored parameter, once the last backward is over"
OF_EACH_RANK, ALIKE = "each rank's own", "alike on all ranks"

# With these the loop itself, not a layout, determines which parameters are whole, or what becomes of gradients.
_KEEPS = frozenset(
    {
        Capability.UNIT_STATE,
        Capability.UNIT_SYNC,
        Capability.REPLICA_SYNC,
        Capability.KEEP_AFTER_BACKWARD,
        Capability.GRAPHS,
        Capability.MIXED,
        Capability.EDIT_GRADIENTS,
    }
)


# Capabilities whose exercises make models beside the one that is trained.
_INTERFACES = frozenset({Capability.WRAPPER, Capability.COMPOSABLE, Capability.DATA_PARALLEL})


class Watch(Enum):
    """An additional watch, too expensive for every case."""

    RACES = "every operator's memory accesses, and the streams that order them"
    LIFETIMES = "every storage from its allocation to its end, and its purpose"
    ALLOCATOR = "the bytes allocated by the C allocator, if a rank has a process of its own"
    UNITS = "which units are whole, whenever a collective is issued or a unit's turn begins or ends"
    ARCS = "the code of the engine that the first rank runs, as arcs from line to line"
    PLACES = "the values at the boundaries of modules and of the parts of a step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """All inputs of a run's observation, except the engine and the world.

    Its plans demand what the rest of the training needs of an engine, too. The model is converted to ``convert`` once
    prepared, and the data follow. ``schedules`` is the minimum number of schedules that run where ranks are threads;
    see `harness.runner.options`. If ``is_by_default``, an engine that declares what a user's model needs is not told
    so, and wraps the model as it does without any option.
    """

    problem: Problem
    optimizer: NamedOptimizer
    plan: Plan = field(default_factory=Plan)
    schedule: Schedule = field(default_factory=Schedule)
    script: Script = field(default_factory=EachMicrobatch)
    convert: torch.dtype | None = None
    resume: Resume | None = None
    origin: Origin | None = None
    watch: frozenset[Watch] = frozenset()
    schedules: int = 1
    is_by_default: bool = False

    @property
    def needs(self) -> frozenset[Capability]:
        """The capabilities that the training needs, including those of plans before and after."""
        before = None if self.origin is None else self.origin.plan
        after = None if self.resume is None else self.resume.plan
        plans = [plan for plan in (self.plan, before, after) if plan is not None]
        return frozenset[Capability]().union(*(plan.needs for plan in plans))

    @property
    def before(self) -> Training | None:
        """The training of the earlier world, whose schedule has the steps that it took; None where there was none."""
        if self.origin is None:
            return None
        return replace(
            self,
            plan=self.origin.plan or self.plan,
            schedule=replace(self.schedule, steps=self.origin.steps, repeats=1),
            resume=None,
            origin=None,
            watch=frozenset(),
            schedules=1,
        )

    @property
    def is_counted(self) -> bool:
        """Whether each rank's memory is counted in each step, and compared with that of the steps before."""
        makes_models = bool(_INTERFACES & self.script.demands)
        return not (self.plan.pipeline_stages > 1 or makes_models or self.plan.needs & _KEEPS)

    @property
    def is_explained(self) -> bool:
        """Whether that memory is compared with the plan's layout too."""
        has_layout = self.plan.layout is not Layout.NATIVE
        return self.is_counted and has_layout and self.plan.cut_axis is None

    @property
    def has_turns(self) -> bool:
        """Whether plan and calls alone decide which units are whole, so that a law may judge it after each event."""
        plan, demands = self.plan, self.script.demands
        is_cut = plan.layout in {Layout.SHARD, Layout.HYBRID} and plan.pipeline_stages == 1
        # Each of several roots keeps what it likes; a root that is replicated may leave each unit a root.
        is_cut = is_cut and plan.roots is Roots.MODEL and "" not in plan.replicated
        # Nothing shows the turns of a unit that is called by another method than forward.
        is_cut = is_cut and Capability.FORWARD_METHODS not in plan.needs
        return is_cut and not demands & (_INTERFACES | {Capability.UNIT_STATE, Capability.PARTS})

    def at(self, step: int) -> Training:
        """Return the training with the plan under which the model of a step was prepared."""
        resume = self.resume
        if resume is None or resume.plan is None or step < resume.after_steps:
            return self
        return replace(self, plan=resume.plan)

    def __post_init__(self) -> None:
        """Complete the demands of its plans; raise ValueError where parts of the training contradict each other."""
        object.__setattr__(self, "plan", self._completed(self.plan))
        if self.resume is not None and self.resume.plan is not None:
            later = replace(self.resume, plan=self._completed(self.resume.plan))
            object.__setattr__(self, "resume", later)
        if self.origin is not None and self.origin.plan is not None:
            earlier = replace(self.origin, plan=self._completed(self.origin.plan))
            object.__setattr__(self, "origin", earlier)
        if self.schedule.scaling is not None and self.schedule.steps_in_backward:
            raise ValueError(
                "Training: a loss scale needs a step after backward; leave steps_in_backward out"
            )
        if self.plan.cut_axis is not None and self.problem.parallelize is None:
            raise ValueError(f"Training: problem {self.problem.name!r} does not say how its tensors are cut")
        if self.plan.pipeline_stages > 1:
            self._check_pipeline()
        if self.origin is not None:
            self._check_origin(self.origin)

    def _completed(self, plan: Plan) -> Plan:
        return plan if self._demands <= plan.demands else replace(plan, demands=plan.demands | self._demands)

    @property
    def _demands(self) -> frozenset[Capability]:
        """The capabilities that all but the plan needs of an engine."""
        wanted = {
            Capability.CLIP: self.schedule.clip is not None,
            Capability.LOSS_SCALE: self.schedule.scaling is not None,
            Capability.CONVERT: self.convert is not None,
            Capability.UNIT_STATE: Watch.UNITS in self.watch,
            Capability.GRADIENT_HOOKS: self.schedule.steps_in_backward,
        }
        state = frozenset() if self.resume is None else self.resume.form.demands
        earlier_state = frozenset() if self.origin is None else self.origin.demands
        return (
            self.script.demands | state | earlier_state | {c for c, is_wanted in wanted.items() if is_wanted}
        )

    def _check_origin(self, origin: Origin) -> None:
        """Raise ValueError for features that cannot move from one world to another, or have no reference yet."""
        plans = [plan for plan in (self.plan, origin.plan) if plan is not None]
        wants = {
            "state in whole tensors or files": origin.form is not StateForm.SHARES,
            "data of its own on each rank": all(p.cut_axis is None and p.pipeline_stages == 1 for p in plans),
            "computation in the parameters' dtype": all(plan.compute_dtype is None for plan in plans),
            "no loss scaling": self.schedule.scaling is None,
        }
        missing = [what for what, is_so in wants.items() if not is_so]
        if missing:
            raise ValueError(f"Training: expected of an origin in another world {'; '.join(missing)}")

    def _check_pipeline(self) -> None:
        """Raise ValueError for features that a pipeline lacks, or that its stages would have to do together."""
        wants = {
            "a problem with stages": self.problem.stages is not None,
            "a script that takes microbatches through them": Capability.PIPELINE in self.script.demands,
            "accumulation until the last microbatch": self.plan.accumulation is Accumulation.LAST_MICROBATCH,
            "no clipping": self.schedule.clip is None,
            "no loss scaling": self.schedule.scaling is None,
            "no conversion": self.convert is None,
            "resumption from files, if any": self.resume is None or self.resume.form is StateForm.FILES,
        }
        missing = [what for what, is_so in wants.items() if not is_so]
        if missing:
            raise ValueError(f"Training: expected of a pipeline {'; '.join(missing)}")


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return what ranks other than the first start with, where an engine must give them the first rank's tensors."""
    return tensor * 3 + 1


def loss_weight(training: Training, world_size: int, step: int) -> float:
    """Return the factor of ``loss_sum`` on each rank with which averaging over ranks gives the global mean.

    The global mean divides by the items of all ranks and microbatches of the step. An engine averages gradients over
    ranks, hence the factor ``world_size``. A plan with a divide factor of its own changes neither data nor loss: its
    gradient is then that of the global mean times ``world_size`` / factor.
    """
    problem = training.problem
    total = sum(
        problem.num_items(step=step, microbatch=microbatch, rank=rank)
        for microbatch in range(training.schedule.microbatches_in(step))
        for rank in range(world_size)
    )
    return world_size / total
