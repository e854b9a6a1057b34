"""The bodies of ranks: what each rank of a world does, from the engine's preparation to saving the observation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardproof.engine.contract import (
    Capability,
    Cut,
    Engine,
    Offload,
    Plan,
    PreparedModel,
)
from shardproof.engine.registry import resolve
from shardproof.harness.cases.training import (
    Training,
    Watch,
    apart,
)
from shardproof.harness.cases.user_model import (
    UserModel,
    definition,
    has_level_memory,
    is_communicating,
    needs_of,
)
from shardproof.harness.records.observation import (
    Observation,
    digest,
    save_observation,
)
from shardproof.harness.records.saved_result import arcs_path, observation_path, probes_path, wrapper_path
from shardproof.harness.torch_compat.profiler_labels import idle_labels
from shardproof.harness.tracing.arcs import counting_arcs
from shardproof.harness.tracing.collectives.model_code import ModelCode
from shardproof.harness.tracing.ledger import Phase
from shardproof.harness.tracing.memory.census import Census
from shardproof.harness.tracing.races.fake_cuda import cuda_stand_in
from shardproof.harness.tracing.unit_hooks import watching_states, watching_units
from shardproof.harness.tracing.wrapping import WrapperCalls
from shardproof.harness.training.callers_module import Preparation
from shardproof.harness.training.engine_loop import RefusedError, refusing, train, train_and_save
from shardproof.harness.training.layout_memory import Form, explained_in_filling
from shardproof.harness.training.rank_probes import RankProbes
from shardproof.harness.training.reads import read_declared
from shardproof.harness.training.watches import Watches, watching
from shardproof.harness.worlds.rank import RankContext
from shardproof.harness.worlds.spec import DEVICES_OF_CUDA

BEFORE = "before"  # the folder of the previous world, below that of a world

# If an engine draws from the default generator, ranks draw differently unless the engine seeds it.
_RANK_SEED = 1000


def drive_rank(
    context: RankContext, training: Training, engine: str, before: Path | None = None
) -> str | None:
    """Train on this rank with the engine of that name and save the observation; a world's rank body.

    ``before`` is the folder with the saved state of the previous world, if there was one.

    Returns the engine's message if it refused the plan, which it may do until it has an optimizer, else None. A refusal
    is not raised: that would stop the other ranks, and the verdict depends on whether they refuse too.
    """
    adapter = resolve(engine)
    is_counted = Watch.ARCS in training.watch and context.rank == 0  # one counter to a process
    with counting_arcs(adapter, arcs_path(context.folder)) if is_counted else nullcontext():
        return _unfit(context, adapter) or _refusal_of(partial(_drive, context, training, adapter, before))


def leave_state(context: RankContext, training: Training, engine: str) -> str | None:
    """Train in the previous world and save its state; a world's rank body. Returns what `drive_rank` does.

    Nothing is observed: an error here shows in the training that starts from the saved state.
    """
    adapter = resolve(engine)
    return _unfit(context, adapter) or _refusal_of(partial(_leave_state, context, training, adapter))


def _unfit(context: RankContext, adapter: Engine) -> str | None:
    """Return why the engine cannot run in this world."""
    if adapter.needs_processes and context.shares_a_process:
        return "NeedsProcesses: ranks of this world are threads of one process"
    if adapter.insists_on_cuda and context.device.type not in DEVICES_OF_CUDA:
        return f"NeedsCuda: ranks of this world are on {context.device.type}"
    return None


def _refusal_of(body: Callable[[], None]) -> str | None:
    """Return the engine's message if it refuses in ``body``."""
    try:
        body()
    except RefusedError as refusal:
        return str(refusal)
    return None


def _leave_state(context: RankContext, training: Training, adapter: Engine) -> None:
    before, origin = training.before, training.origin
    assert before is not None
    assert origin is not None
    with idle_labels, _device_of(context, adapter):
        torch.manual_seed(_RANK_SEED + context.rank)
        preparation = _prepare(context, before, adapter, before.plan)
        train_and_save(preparation, before, context, origin.form)


def _device_of(context: RankContext, adapter: Engine) -> AbstractContextManager[object]:
    is_stood_in = adapter.insists_on_cuda and context.device.type == "cpu"
    return cuda_stand_in() if is_stood_in else nullcontext()


def _drive(context: RankContext, training: Training, adapter: Engine, before: Path | None) -> None:
    # On a device the heap holds the driver's context and none of the parameters.
    has_heap = context.device.type == "cpu" and not context.shares_a_process
    is_measured = Watch.ALLOCATOR in training.watch and has_heap
    is_probed = Watch.PLACES in training.watch
    is_counted = (training.is_explained or has_level_memory(training)) and not is_probed
    census = Census(context.recorder, is_process_measured=is_measured) if is_counted else None
    schedule = training.schedule
    with (
        watching(training.watch, context.recorder, context.device.type, census=census) as watches,
        idle_labels,
        _device_of(context, adapter),
        _probing(context, training) if is_probed else nullcontext() as probes,
    ):
        watches.probes = probes
        # The values of a simulated rank are meaningless, but its final tensors show where its shards are.
        reads = [not context.is_simulated] + [schedule.are_repeats_read] * (schedule.repeats - 1)
        # Counts read the engine too.
        uncounted = watches if schedule.are_repeats_read else replace(watches, census=None)
        first, *others = (
            _run(context, training, adapter, uncounted if n else watches, before, is_read=read)
            for n, read in enumerate(reads)
        )
    repeated = (first, *others) if others else ()
    observation = replace(
        first,
        repeat_digests=tuple(
            digest(seen if schedule.are_repeats_read else _end_of(seen)) for seen in repeated
        ),
        race_report=None if watches.races is None else watches.races.report(),
        lifetime_report=None if watches.lifetimes is None else watches.lifetimes.report(),
    )
    save_observation(observation, observation_path(context.folder, context.rank))


@contextmanager
def _probing(context: RankContext, training: Training) -> Iterator[RankProbes]:
    rank = training.plan.data_rank(context.rank, context.size)
    path = probes_path(context.folder, context.rank)
    probes = RankProbes(context, path, rank, sees_backward=not training.schedule.steps_in_backward)
    try:
        yield probes
    finally:
        probes.close()


def _end_of(observation: Observation) -> Observation:
    """Return the observations that are read only at the end of a training."""
    *steps, last = observation.steps
    unread = tuple(replace(step, gradients={}, parameters={}) for step in steps)
    return replace(observation, initial={}, steps=(*unread, replace(last, gradients={})))


def _run(
    context: RankContext,
    training: Training,
    adapter: Engine,
    watches: Watches,
    before: Path | None,
    *,
    is_read: bool,
) -> Observation:
    torch.manual_seed(_RANK_SEED + context.rank)
    with ExitStack() as watched:

        def prepare(plan: Plan) -> Preparation:
            """Prepare a model, and watch its units instead of those of the model before."""
            watched.close()
            preparation = _prepare(context, training, adapter, plan, watches)
            prepared = preparation.prepared
            watched.enter_context(watching_units(prepared.named, plan.units, context.recorder))
            if plan.asks_for_dtypes:
                watched.enter_context(watches.dtypes.watching(prepared.named, plan))
            has_turns = training.has_turns and Capability.UNIT_STATE in adapter.capabilities
            if Watch.UNITS in training.watch or has_turns:
                watched.enter_context(watching_states(prepared.units(), context.recorder))
            return preparation

        return train(prepare, training, context, watches, before=before, is_read=is_read)


def _prepare(
    context: RankContext, training: Training, adapter: Engine, plan: Plan, watches: Watches | None = None
) -> Preparation:
    # The engine does not have to explain the memory of the user's mesh.
    with context.recorder.during(Phase.OBSERVE):
        mesh = _mesh(context, plan)
    data = mesh if mesh.mesh_dim_names == plan.data_axes else mesh[plan.data_axes]
    with refusing():
        if plan.pipeline_stages > 1:
            from shardproof.harness.training.pipeline import (
                prepare_pipeline,  # here, because that part of torch imports slowly
            )

            pipeline = prepare_pipeline(context, training, adapter, mesh, data)
            return Preparation(pipeline, None)
        if watches is not None and watches.census is not None:
            watches.census.measure_process()
        has_memory = Capability.META not in plan.demands
        model, state, unsaved = training.problem.build(), dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        if has_memory:
            model = model.to(context.device)
        else:
            state, unsaved = _without_memory(model)
        if Capability.START_FROM_FIRST in plan.demands and context.rank:
            _set_apart(model)
        if Capability.ASSIGNED_WEIGHTS in plan.demands:
            _double(model)
        if is_communicating(training.problem):
            context.recorder.tell_apart(_code_of(training, model, adapter).is_calling)
        if plan.cut_axis is not None and training.problem.parallelize is not None:
            training.problem.parallelize(model, mesh[plan.cut_axis])
        if watches is not None:
            watches.form = Form.of(model, training)
            if watches.probes is not None:
                watches.probes.name(model)
        if training.is_by_default and plan.needs <= adapter.capabilities:
            plan = replace(plan, demands=plan.demands - needs_of(training.problem))
        with _noting_calls(context, training, model):
            prepared = adapter.prepare(model, plan, data)
        if not has_memory:
            is_on_host = plan.offload in {Offload.CPU, Offload.PINNED}
            place = torch.device("cpu") if is_on_host else context.device
            with _counting(watches, training, context, prepared, (*state.values(), *unsaved.values())):
                prepared.materialize(place, {} if context.rank else state, unsaved)
            if is_on_host:
                _move_buffers(prepared.module, context.device)
        if Capability.ASSIGNED_WEIGHTS in plan.demands:
            _assign_halves(prepared.module)
        return Preparation(prepared, model)


def _double(model: nn.Module) -> None:
    """Double a model's parameters, which is exact."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


def _assign_halves(module: nn.Module) -> None:
    """Load halves of the parameters that are shown in place of these; what is tied stays tied."""
    shown = dict(module.named_parameters(remove_duplicate=False))
    halves = {p: nn.Parameter(p.detach() * 0.5, requires_grad=p.requires_grad) for p in shown.values()}
    module.load_state_dict({name: halves[p] for name, p in shown.items()}, assign=True, strict=False)


def _without_memory(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Move a model to the meta device, and return its state dict and the buffers that this lacks.

    What is tied stays tied, unlike after ``Module.to``.
    """
    state = dict(model.state_dict())
    unsaved = {name: buffer for name, buffer in model.named_buffers() if name not in state}
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module.named_parameters, module.named_buffers):
            for name, tensor in list(tensors(recurse=False)):
                empty = torch.empty_like(tensor, device="meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                like = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
                setattr(module, name, moved.setdefault(tensor, like))
    return state, unsaved


@contextmanager
def _counting(
    watches: Watches | None,
    training: Training,
    context: RankContext,
    prepared: PreparedModel,
    given: Iterable[torch.Tensor],
) -> Iterator[None]:
    """Count the memory of a rank that fills its first model, beside the tensors that it is given."""
    census, form = (None, None) if watches is None else (watches.census, watches.form)
    if census is None or form is None or census.peak is not None or not training.is_explained:
        yield
        return
    census.holds(given)
    cut = read_declared(prepared, "cut", Cut)
    with census.filling(explained_in_filling(form, training, context.size, cut=cut).num_bytes):
        yield


def _set_apart(model: nn.Module) -> None:
    """Change a model's parameters and buffers from the first rank's."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(apart(tensor))


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers of a model whose parameters may stay on the host: forward runs on the device."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))


def _code_of(training: Training, model: nn.Module, adapter: Engine) -> ModelCode:
    assert isinstance(training.problem, UserModel)
    return ModelCode(model, definition(training.problem.spec).loss, [inspect.getsourcefile(type(adapter))])


@contextmanager
def _noting_calls(context: RankContext, training: Training, model: nn.Module) -> Iterator[None]:
    """Write the calls that wrap a user's model, once for each training: reports show what was judged."""
    path = wrapper_path(context.folder)
    if context.rank or not isinstance(training.problem, UserModel) or path.exists():
        yield
        return
    calls = WrapperCalls(model)
    with calls.watching():
        yield
    path.write_text(str(calls))


def _mesh(context: RankContext, plan: Plan) -> DeviceMesh:
    """Create the mesh of all axes; the engine receives its own axes, without those of tensor parallelism and stages."""
    axes = plan.axes(context.size)
    mesh = init_device_mesh(
        context.device.type,
        tuple(axis.size for axis in axes),
        mesh_dim_names=tuple(axis.name for axis in axes),
    )
    context.recorder.name_axes({mesh.get_group(axis.name).group_name: axis.name for axis in axes})
    return mesh
