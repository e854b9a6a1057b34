"""Studies a user's model in its process by a few steps: its dtypes, the parameters it uses, and its changes.

A model that cannot be judged raises ValueError with the cause.
"""

from __future__ import annotations

import inspect
import sysconfig
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardproof.engine.capability import Capability
from shardproof.engine.import_by_name import LoadError, one_line
from shardproof.harness.cases.batch import Batch, arguments_of, converted
from shardproof.harness.cases.draws import Seeds
from shardproof.harness.cases.script import evaluating
from shardproof.harness.cases.user_model import (
    ModelFacts,
    StepSchedules,
    TensorOutline,
    UserModel,
    UserOptimizer,
    definition,
)
from shardproof.harness.oracle.absolute_error import deviation, is_finite, largest
from shardproof.harness.oracle.rounding import noticing_narrow, rounding_anew
from shardproof.harness.oracle.still_elements import ZERO_BESIDE
from shardproof.harness.runner.user_model.unit_calls import NUM_RANKS, UnitCalls, calls_differ
from shardproof.harness.torch_compat.dtypes import cast, cast_module, cast_parameters, dense
from shardproof.harness.torch_compat.patching import Replacement
from shardproof.harness.torch_compat.tensor_trees import tensors_in
from shardproof.harness.verdicts.simple_defects import ZERO_BESIDE_NOISE
from shardproof.harness.worlds.threads.together import own_rank

_PLACES = tuple(product(range(3), range(NUM_RANKS)))  # steps and ranks whose gradients are looked at
_NUM_EXACT = 2  # of them, which are looked at in float64 in any case
_NUM_DISTURBED = 4
_CHANGES = 1e3  # gradients grow and shrink in training: one that is hardly above zero now may be zero then
_MOVED = 1.25  # a factor that every dtype represents
_STEPS = 3  # of a training, in which a learning rate may warm up
_UPDATES = 2  # some optimizers only begin to divide by what they keep in the second
_SMALL = 1e-3  # beside a value: ten steps at a rate of 0.1 change it by less than bfloat16 can represent
# Of a gradient, and of the largest one: threads may add in another order, and operators of few bits round.
_SAME, _SAME_AS_ZERO = 1e-2, 1e-6

_OURS, _PACKAGES = str(Path(__file__).parents[2]), sysconfig.get_path("purelib")
_NO_CUDA = "; leave .cuda() and devices out: ranks move the model and its data to their devices"

Gradients = Mapping[str, torch.Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStudy:
    """A user's model, its own optimizer if it has one, and the seconds that one forward and backward take."""

    model: UserModel
    optimizer: UserOptimizer | None
    pass_s: float


def study(
    problem: UserModel,
    units: tuple[str, ...],
    outline: Iterable[TensorOutline],
    optimizer: UserOptimizer | None,
    communicates: str,
) -> ModelStudy:
    """Find out by a few steps whether float64 can stand for the model, what it uses, and what it demands.

    ``communicates`` is the call by which it communicates, if it does. Then a thread of each rank calls this, with other
    data, and all call the model in the same order, whatever each finds.
    """
    is_narrow, changes_buffers, written = _first_step(problem, optimizer)
    wanted: bool | None = getattr(definition(problem.spec), "float64", None)
    is_widened = not is_narrow if wanted is None else wanted
    if is_widened:
        try:
            found = _exact_sizes(problem, optimizer)
        except ValueError as error:
            if wanted:
                raise ValueError(f"in float64, which it asks for, {error}") from error
            is_widened = False
    if not is_widened:
        found = _own_sizes(problem)
    if found[0] == found[1]:
        raise ValueError(
            "the gradients of two ranks are equal although their data differ, so that a missing reduction could not "
            "show: does loss() depend on the batch?"
        )
    demands = _demands([frozenset(name for name, size in sizes.items() if size is None) for sizes in found])
    if (demands or communicates) and called("the model's forward", lambda: calls_differ(problem, units)):
        demands.append(Capability.RANK_DEPENDENT_UNITS)
    demands += [Capability.OWN_BUFFERS] if changes_buffers else []
    unsaved = ""
    if optimizer is not None:
        trained = _with_gradients(problem)
        demands += demands_of(optimizer, trained)
        unsaved = "" if optimizer.names else _recast(optimizer, trained)
    facts, pass_s = called("a training step", lambda: _facts(problem, units, found))
    demands += [Capability.SPARSE_GRADIENTS] if facts.sparse else []
    model = replace(
        problem,
        units=units,
        outline=tuple(outline),
        is_widened=is_widened,
        idle=tuple(_idle(found)),
        demands=frozenset(demands),
        facts=replace(facts, written=written, communicates=communicates, unsaved=facts.unsaved or unsaved),
    )
    return ModelStudy(model=model, optimizer=optimizer, pass_s=pass_s)


# Any, here and below: the user's code takes and returns what it likes.
def called(what: str, function: Any) -> Any:
    """Call the user's code; an exception of any kind becomes a ValueError that names the call."""
    try:
        return function()
    except LoadError:
        raise
    except (Exception, SystemExit) as error:
        told = f"{what} raised {type(error).__name__}: {one_line(error)}{_root(error)}{_place(error)}"
        raise ValueError(told + (_NO_CUDA if "CUDA" in one_line(error) else "")) from error


def _place(error: BaseException) -> str:
    """Return the last line of a user's own file that an error passed, with its function."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((_OURS, _PACKAGES, "<"))]
    last = own[-1] if own else None
    return "" if last is None else f" ({Path(last.filename).name}:{last.lineno}, in {last.name})"


def _root(error: BaseException) -> str:
    """Return what an error was raised from, which libraries that import lazily hide behind one of their own."""
    root = error
    while (cause := root.__cause__) is not None and cause is not error:
        root = cause
    return "" if root is error else f" (from {type(root).__name__}: {one_line(root)})"


def _first_step(problem: UserModel, optimizer: UserOptimizer | None) -> tuple[bool, bool, tuple[str, ...]]:
    """Take one step as ranks will.

    Returns whether it computes in few bits, whether forward changes buffers, and which frozen parameters it changes.
    """
    model, narrow = problem.build(), list[bool]()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with noticing_narrow(lambda: narrow.append(True)):
        gradients = _gradients(problem, model, step=0, rank=0)
        _check_repeats(gradients, _gradients(problem, problem.build(), step=0, rank=0))
        if optimizer is not None:
            _update(model, optimizer)
    if not any(gradient is not None and bool(gradient.any()) for gradient in gradients.values()):
        raise ValueError(
            "no parameter has a gradient but zero: the loss depends on none of them, or starts where it is flat"
        )
    after = dict(model.named_buffers())
    changes_buffers = any(name in after and not torch.equal(b, after[name]) for name, b in before.items())
    return bool(narrow), changes_buffers, _written(problem, model)


def _written(problem: UserModel, model: nn.Module) -> tuple[str, ...]:
    """Name the frozen parameters that forward changes once the others have moved: a teacher starts as its student."""
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    if not frozen:
        return ()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(_MOVED)
    _gradients(problem, model, step=0, rank=0)
    return tuple(n for n, value in frozen.items() if not torch.equal(value, model.get_parameter(n)))


def _check_repeats(gradients: Gradients, again: Gradients) -> None:
    """Raise ValueError for a model that computes something else the second time: so would ranks and the reference."""
    name = _differing(gradients, again)
    if name is not None:
        raise ValueError(
            f"the gradient of {name!r} is another one the second time, for equal parameters, data and seed of "
            "torch: do forward and loss() draw from Python's or NumPy's generator, or remember earlier calls?"
        )


def _differing(gradients: Gradients, again: Gradients) -> str | None:
    """Return the first name whose gradients differ by more than rounding, or are only once there."""
    scale = max((largest(gradient) for gradient in gradients.values() if gradient is not None), default=0.0)
    for name, gradient in gradients.items():
        other = again[name]
        if gradient is None or other is None:
            differs = gradient is not other
        else:
            same = max(_SAME * largest(gradient), _SAME_AS_ZERO * scale)
            differs = largest(deviation(gradient, other)) > same
        if differs:
            return name
    return None


def _unsaved(problem: UserModel) -> str:
    """Return why a fresh model that loads another one's state does not go on as that one does."""
    trained, fresh = problem.build(), problem.build()
    _gradients(problem, trained, step=0, rank=0)
    try:
        fresh.load_state_dict(trained.state_dict())
    except Exception as error:  # the user's code, which raises what it likes
        return f"its state_dict() does not load into a fresh model: {one_line(error)}"
    after = [_gradients(problem, model, step=1, rank=0) for model in (trained, fresh)]
    if _differing(*after) is None:
        return ""
    return "forward changes something that is not in state_dict(), and goes on otherwise from a saved state"


def _update(model: nn.Module, make: UserOptimizer) -> None:
    """Raise ValueError for an optimizer that the loop cannot drive, or that updates nothing of the model."""
    schedules = StepSchedules(make)
    optimizer = called("optimizer()", lambda: schedules.factory(model.parameters()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer() returned a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer() returned {type(optimizer).__name__}, whose step() evaluates the model by a closure: its "
            "steps are not those of forward, backward and update that engines promise; use another optimizer"
        )
    own = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if not own & {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}:
        raise ValueError("optimizer() returned one that updates no parameter of the model")
    rates = [group.get("lr") for group in optimizer.param_groups]
    for _ in range(_STEPS):
        called("the optimizer's step()", optimizer.step)
        called("the scheduler's step()", schedules.step)
        rates += [group.get("lr") for group in optimizer.param_groups]
    if not any(rate is None or rate for rate in rates):
        raise ValueError(
            f"optimizer() returned {type(optimizer).__name__} with a learning rate of 0 in all of the first {_STEPS} "
            "steps: nothing would move; use one of your training"
        )


def _exact_sizes(problem: UserModel, optimizer: UserOptimizer | None) -> list[dict[str, float | None]]:
    """Return the largest gradient of each parameter at each place, zero where it is zero but for rounding.

    Only the first places are in float64 if they show a gradient of each parameter. All that the others can add then is
    where there is none, which the model's own dtypes show in a third of the time.
    """
    model = cast_module(problem.build(), torch.float64)
    found = [_sizes(problem, model, step, rank) for step, rank in _PLACES[:_NUM_EXACT]]
    zero = _zero_beside(found)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    has_all = not dist.is_initialized() and all(
        any((sizes[name] or 0.0) > zero for sizes in found) for name in trained
    )
    other = problem.build() if has_all else model
    found += [_sizes(problem, other, step, rank) for step, rank in _PLACES[_NUM_EXACT:]]
    if optimizer is not None:
        _update(model, optimizer)
    zero = _zero_beside(found)
    return [
        {n: 0.0 if size is not None and size <= zero else size for n, size in sizes.items()}
        for sizes in found
    ]


def _sizes(problem: UserModel, model: nn.Module, step: int, rank: int) -> dict[str, float | None]:
    gradients = _gradients(problem, model, step, rank)
    return {name: None if gradient is None else largest(gradient) for name, gradient in gradients.items()}


def _zero_beside(found: list[dict[str, float | None]]) -> float:
    return _CHANGES * ZERO_BESIDE * max(size or 0.0 for sizes in found for size in sizes.values())


def _own_sizes(problem: UserModel) -> list[dict[str, float | None]]:
    """Measure sizes in the model's own dtypes, where rounding shows as changes under other roundings."""
    model = problem.build()
    found = [_gradients(problem, model, step, rank) for step, rank in _PLACES]
    noise = dict.fromkeys(found[0], 0.0)
    for seed, (gradients, (step, rank)) in enumerate(zip(found, _PLACES[:_NUM_DISTURBED], strict=False)):
        for name, disturbed in _gradients(problem, model, step, rank, rounding_anew(seed)).items():
            gradient = gradients[name]
            if gradient is not None and disturbed is not None:
                noise[name] = max(noise[name], largest(deviation(disturbed, gradient)))

    def size(name: str, gradient: torch.Tensor | None) -> float | None:
        if gradient is None:
            return None
        return largest(gradient) if largest(gradient) > ZERO_BESIDE_NOISE * noise[name] else 0.0

    return [{name: size(name, gradient) for name, gradient in gradients.items()} for gradients in found]


def _gradients(
    problem: UserModel,
    model: nn.Module,
    step: int,
    rank: int,
    context: AbstractContextManager[object] | None = None,
) -> Gradients:
    """Return the gradients of one microbatch; None where there is none, an empty tensor where none is asked for."""
    dtype = next((p.dtype for p in model.parameters() if p.dtype is torch.float64), None)
    batch = called("batch()", lambda: problem.batch(step=step, microbatch=0, rank=own_rank() + rank))
    batch = converted(batch, lambda tensor: cast(tensor, dtype))
    args, kwargs = arguments_of(batch.inputs)
    model.zero_grad()
    seeds = Seeds(step=step, rank=rank)
    with nullcontext() if context is None else context:
        seeds.begin(0)
        output = called("the model's forward", lambda: model(*args, **kwargs))
        seeds.begin(0)
        loss = called("loss()", lambda: problem.loss_sum(output, batch))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ValueError(f"loss() returned {_described(loss)}, not one number that depends on the model")
        if not bool(loss.isfinite()):
            raise ValueError(f"loss() is {loss.item()} in step {step} on rank {rank}, before any training")
        called("backward", loss.backward)
    gradients = {name: _gradient(parameter) for name, parameter in model.named_parameters()}
    wild = next(
        (name for name, found in gradients.items() if found is not None and not is_finite(found)), None
    )
    if wild is not None:
        raise ValueError(
            f"the gradient of {wild!r} is not finite in step {step} on rank {rank}, before any training"
        )
    return gradients


def _gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    if not parameter.requires_grad:
        return parameter.new_zeros(0)
    own = None if parameter.grad is None else dense(parameter.grad.detach()).clone()
    if not dist.is_initialized():
        return own
    # What counts is the mean over ranks: under SyncBatchNorm that of a bias before it is zero, and no rank's own is.
    mean = torch.zeros_like(parameter.detach()) if own is None else own
    dist.all_reduce(mean)
    return None if own is None else mean.div_(dist.get_world_size())


def _attribute_bytes(model: nn.Module) -> int:
    """Count the memory of tensors that modules keep as plain attributes, as caches and pruned weights are."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    held = (t for module in model.modules() for t in tensors_in(vars(module)) if t.layout is torch.strided)
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(num_bytes for place, num_bytes in kept.items() if place not in own)


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Return whether hooks wait for a gradient, which torch keeps under no public name."""
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(parameter, name, None) for name in hooks)


def _is_sparse(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and gradient.layout is not torch.strided


def _idle(found: list[dict[str, float | None]]) -> list[str]:
    """Name the parameters that no loss reaches, but for rounding."""
    return [name for name in found[0] if not any(sizes[name] for sizes in found)]


@contextmanager
def _noticing_inductor() -> Iterator[list[str]]:
    """Yield a list that is not empty once the block has asked torch to compile by inductor, its default backend."""
    original, seen = torch.compile, list[str]()

    def compile_noticed(*args: Any, **kwargs: Any) -> Any:  # Any: the arguments are those of torch.compile
        if kwargs.get("backend", "inductor") == "inductor" and not kwargs.get("disable", False):
            seen.append("inductor")
        return original(*args, **kwargs)

    with Replacement(lambda: [(torch, "compile", compile_noticed)]):
        yield seen


def evaluating_modules(model: nn.Module) -> Iterator[str]:
    """Name the modules in evaluation mode that are not below another such, the whole model as ""."""
    found = list[str]()
    for name, module in model.named_modules():
        is_below = any(not above or name.startswith(f"{above}.") for above in found)
        if not module.training and not is_below:
            found.append(name)
            yield name


def _slow(model: nn.Module, found: list[dict[str, float | None]]) -> list[str]:
    """Name the parameters whose gradients are small beside their values."""
    return [
        name
        for name, parameter in model.named_parameters()
        if max(sizes[name] or 0.0 for sizes in found) < _SMALL * largest(parameter.detach())
    ]


def _demands(unused: list[frozenset[str]]) -> list[Capability]:
    """List the capabilities that an engine needs for parameters without a gradient at some places."""
    demands = [Capability.UNUSED] if any(unused) else []
    return demands + ([Capability.RANK_DEPENDENT] if len(set(unused)) > 1 else [])


def _with_gradients(problem: UserModel) -> nn.Module:
    model = problem.build()
    _gradients(problem, model, step=0, rank=0)
    return model


def _recast(optimizer: UserOptimizer, model: nn.Module) -> str:
    """Return why an optimizer does not go on as it was from its own saved state, as torch's NAdam with bfloat16.

    Torch casts all state but `step` to the dtype of the parameter (pytorch#75224).
    """
    trained, loaded = optimizer(model.parameters()), optimizer(model.parameters())
    trained.step()
    try:
        loaded.load_state_dict(trained.state_dict())
    except Exception as error:  # the user's code, which raises what it likes
        return f"the state_dict() of its optimizer does not load into another: {one_line(error)}"
    for parameter, state in trained.state.items():
        for key, value in state.items():
            other = loaded.state[parameter].get(key)
            if (
                isinstance(value, torch.Tensor)
                and isinstance(other, torch.Tensor)
                and value.dtype != other.dtype
            ):
                kind = type(trained).__name__
                return f"load_state_dict() of {kind} makes {key!r} {other.dtype}, which was {value.dtype}"
    return ""


def demands_of(optimizer: UserOptimizer, model: nn.Module) -> list[Capability]:
    """List the capabilities that an engine needs for an optimizer of this model, which has gradients."""
    if optimizer.names:
        return [Capability.SEVERAL_OPTIMIZERS]
    return [Capability.PARAMETER_SHAPES] if _needs_shapes(model, optimizer) else []


def _needs_shapes(model: nn.Module, optimizer: UserOptimizer) -> bool:
    """Return whether the optimizer updates flat pieces of the model's parameters unlike the parameters themselves.

    Muon takes matrices alone, Adafactor averages over rows and columns, and LAMB divides by the norm of the whole.
    """
    if any(_is_sparse(parameter.grad) for parameter in model.parameters()):
        return True  # a part of one has no form of its own
    whole = list(model.parameters())
    before = [parameter.detach().clone() for parameter in whole]
    pieces = [_piece(parameter) for parameter in whole]
    try:
        for parameters in (pieces, whole):
            updates = optimizer(parameters)
            for _ in range(_UPDATES):
                updates.step()
    except Exception:
        # The user's code may raise anything; `_first_step` has shown that it takes the model's parameters.
        return True
    for piece, parameter, start in zip(pieces, whole, before, strict=True):
        expected = parameter.detach().flatten()[: piece.numel()]
        moved = largest(deviation(expected, start.flatten()[: piece.numel()]))
        if largest(deviation(piece.detach(), expected)) > _SAME * moved:
            return True
    return False


def _piece(parameter: nn.Parameter) -> nn.Parameter:
    """Return the first half of a parameter's elements, with their gradients, as engines that flatten have it."""
    half = (parameter.numel() + 1) // 2
    piece = nn.Parameter(parameter.detach().flatten()[:half].clone(), requires_grad=parameter.requires_grad)
    if parameter.grad is not None:
        piece.grad = parameter.grad.flatten()[:half].clone()
    return piece


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}{'' if value.requires_grad else ' without a gradient'}"
    return f"a {type(value).__name__}"


def _unthreaded(*, is_compiled: bool, is_sparse: bool) -> tuple[str, ...]:
    """Return why ranks cannot be threads of one process, and what to change; empty if they can."""
    if is_compiled:
        return "inductor compiles it and threads do not compile at the same time", "backend='aot_eager'"
    if is_sparse:
        return "it has sparse gradients and threads exchange dense tensors", "sparse=False"
    return ()


def _facts(
    problem: UserModel, units: tuple[str, ...], found: list[dict[str, float | None]]
) -> tuple[ModelFacts, float]:
    """Return the facts of a model whose gradients are ``found``, and the seconds that forward and backward take."""
    with _noticing_inductor() as compiled:
        model = problem.build()
    slow, batch = tuple(_slow(model, found)), problem.batch(step=0, microbatch=0, rank=own_rank())
    watch, started = UnitCalls(model, units), time.monotonic()
    with watch.watching():
        loss = _loss(problem, model, batch)
    loss.backward()  # type: ignore[no-untyped-call]  # of torch's
    pass_s = time.monotonic() - started
    sparse = tuple(name for name, parameter in model.named_parameters() if _is_sparse(parameter.grad))
    attribute_bytes = _attribute_bytes(model)  # before parameters become bfloat16, below
    facts = ModelFacts(
        frozen=tuple(name for name, parameter in model.named_parameters() if not parameter.requires_grad),
        seldom=tuple(sorted({name for sizes in found for name, size in sizes.items() if size is None})),
        slow=slow,
        evaluating=tuple(evaluating_modules(model)),
        outside=tuple(watch.outside),
        hooked=tuple(name for name, parameter in model.named_parameters() if _has_hooks(parameter)),
        uncounted="some gradients are sparse" if sparse else _uncounted(model, units, watch.calls),
        unevaluated=_unevaluated(problem, model, batch),  # before parameters become bfloat16
        not_in_bfloat16=_not_in_bfloat16(problem, model, batch),
        unscaled=_unscaled(model),
        unsaved=_unsaved(problem),
        sparse=sparse,
        unthreaded=_unthreaded(is_compiled=bool(compiled), is_sparse=bool(sparse)),
        attribute_bytes=attribute_bytes,
    )
    return facts, pass_s


def _loss(problem: UserModel, model: nn.Module, batch: Batch) -> torch.Tensor:
    args, kwargs = arguments_of(batch.inputs)
    return problem.loss_sum(model(*args, **kwargs), batch)


def _uncounted(model: nn.Module, units: Iterable[str], calls: Counter[str]) -> str:
    """Return why the number of collectives has no closed form."""
    dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    if len(dtypes) > 1:
        return f"its parameters have several dtypes: {', '.join(sorted(dtypes))}"
    odd = next((unit for unit in units if calls[unit] != 1), None)
    return "" if odd is None else f"its unit {odd!r} is called {calls[odd]} times in one forward"


def _unscaled(model: nn.Module) -> str:
    """Return why torch's gradient scaler does not take the gradients."""
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    refused = sorted(str(d) for d in dtypes if d.is_complex or d is torch.float16)
    return f"a gradient scaler refuses gradients of {', '.join(refused)}" if refused else ""


def _unevaluated(problem: UserModel, model: nn.Module, batch: Batch) -> str:
    """Return why no loss can be computed in evaluation mode, in which some models return something else."""
    try:
        with evaluating(model), torch.no_grad():
            _loss(problem, model, batch)
    except Exception as error:  # code of the user's may raise anything
        return f"in evaluation mode it raises {type(error).__name__}: {one_line(error)[:120]}"
    return ""


def _not_in_bfloat16(problem: UserModel, model: nn.Module, batch: Batch) -> str:
    if {parameter.dtype for parameter in model.parameters()} != {torch.float32}:
        return "its parameters are not of float32"
    model.zero_grad()
    try:
        given = converted(batch, partial(cast, dtype=torch.bfloat16))
        _loss(problem, cast_parameters(model, torch.bfloat16), given).backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # code of the user's may raise anything
        return f"it raises {type(error).__name__} in bfloat16: {one_line(error)[:120]}"
    return ""
