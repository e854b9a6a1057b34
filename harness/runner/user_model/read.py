"""Studies a user's model in a process of its own before it is judged; mistakes get an error message.

The model's code runs in that process, in the oracle's and in ranks, never in the process that judges.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import json
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardproof.engine.import_by_name import LoadError
from shardproof.engine.names import absolute
from shardproof.harness.cases.batch import Batch, arguments_of, tensors_of
from shardproof.harness.cases.units import matching_units
from shardproof.harness.cases.user_model import UserModel, UserOptimizer, definition, outline_of
from shardproof.harness.errors import ModelError, ModuleGivenError, UsageError
from shardproof.harness.runner.user_model.model_summary import model_lines
from shardproof.harness.runner.user_model.own_communication import own_communication
from shardproof.harness.runner.user_model.step_study import study_step
from shardproof.harness.runner.user_model.study import ModelStudy, called, study
from shardproof.harness.tracing.codec import UNREADABLE, decode, encode
from shardproof.harness.worlds.processes.fresh_process import NoAnswerError, ask
from shardproof.harness.worlds.threads.together import own_rank, together

_LONGEST_ANSWER = 2**24
_METHODS = ("build", "batch")
_TRAINING = ("loss", "step")  # one of them
_CALLED, _PLAIN = "called", "plain"
_READ = {
    _CALLED: (*_METHODS, *_TRAINING, "optimizer", "optimizers", "scheduler"),
    _PLAIN: ("units", "float64"),
}
_NEARLY = 0.85  # as near as "unit" and "optimiser" are
_SIZES = (3, 3, 4)  # steps, microbatches and ranks whose batches are compared
_HINT = "see `shardproof check --help` for what a model defines"


def read_model(spec: str, *, limit_s: float, num_ranks: int = 2) -> tuple[UserModel, UserOptimizer | None]:
    """Return the model that ``spec`` names, and its optimizer if it has one of its own.

    One that communicates is studied as ``num_ranks`` ranks.
    Raises UsageError, with the cause, for a model that cannot be judged.
    """
    spec = absolute(spec)
    try:
        answer = json.loads(ask(limit_s, _LONGEST_ANSWER, _answer, spec, num_ranks))
        if "problem" in answer:
            raise _refusal(spec, str(answer["problem"]), is_module=answer.get("is_module") is True)
        study = decode(ModelStudy, answer)
    except NoAnswerError as error:
        raise _refusal(spec, f"a process that {error}; try a smaller configuration, or --deadline") from None
    except UNREADABLE as error:
        raise _refusal(spec, f"an answer that cannot be read: {error!r}") from error
    _pass_s[spec] = study.pass_s
    model = replace(study.model, spec=spec)
    return model, replace(study.optimizer, spec=spec) if study.optimizer else None


_pass_s: dict[str, float] = {}  # not part of a model: an equal one may take longer


_known: dict[str, tuple[UserModel, UserOptimizer | None]] = {}


class _GivenModuleError(ValueError):
    """The class is a module itself."""


def known_model(spec: str, limit_s: float, num_ranks: int = 2) -> tuple[UserModel, UserOptimizer | None]:
    """Return the result of `read_model`, read once per process: the command and the suite use the same model.

    Their other arguments may differ, which matters only the first time.
    """
    spec = absolute(spec)
    if spec not in _known:
        _known[spec] = read_model(spec, limit_s=limit_s, num_ranks=num_ranks)
    return _known[spec]


def described(spec: str) -> dict[str, str]:
    """Return what was found about a model, for reports; only its name if this process has not read it."""
    found = _known.get(absolute(spec))
    return {"file": spec, **(model_lines(*found, pass_seconds(spec)) if found else {})}


def pass_seconds(spec: str) -> float:
    """Return how long one forward and backward of a model took when it was read [s]; 0 if it was not read."""
    return _pass_s.get(absolute(spec), 0.0)


def _refusal(spec: str, got: str, *, is_module: bool = False) -> UsageError:
    kind, hint = (ModuleGivenError, f"shardproof init {spec}") if is_module else (ModelError, _HINT)
    return kind(f"model {spec}", expected="a model that can be judged", got=got, hint=hint)


def _answer(spec: str, num_ranks: int) -> bytes:
    torch.compiler.set_stance("force_eager")  # as the oracle does
    try:
        with _noticing_draws() as drawn:
            found = facts_of(spec, num_ranks)
        if drawn and not found.model.facts.unthreaded:
            shared = f"it draws from the generator of {drawn[0]}, which threads share"
            facts = replace(found.model.facts, unthreaded=(shared, "draws by torch"))
            found = replace(found, model=replace(found.model, facts=facts))
        plain = encode(found)
    except (LoadError, ValueError) as error:
        plain = {"problem": str(error), "is_module": isinstance(error, _GivenModuleError)}
    return json.dumps(plain).encode()


@contextmanager
def _noticing_draws() -> Iterator[list[str]]:
    """Yield a list that then names the modules other than torch from whose generators the block drew."""
    modules = [sys.modules[name] for name in ("random", "numpy.random") if name in sys.modules]
    for module in modules:
        module.random()  # so that the state is not the one in which an earlier pass has left it
    before, drawn = [repr(_state(module)) for module in modules], list[str]()
    yield drawn
    drawn += [m.__name__ for m, state in zip(modules, before, strict=True) if repr(_state(m)) != state]


# Any: a module that the type checker does not know.
def _state(module: Any) -> object:
    if module is random:
        return random.getstate()
    _, keys, *others = module.get_state()
    return keys.tolist(), others


def facts_of(spec: str, num_ranks: int = 2) -> ModelStudy:
    """Study the model in this process, where the model's code runs; `read_model` calls this in another process."""
    defined = called("making it", lambda: definition(spec))
    has_loss, has_step = (callable(getattr(defined, name, None)) for name in _TRAINING)
    missing = [name for name in _METHODS if not callable(getattr(defined, name, None))]
    missing += [] if has_loss or has_step else ["loss"]
    if missing and isinstance(defined, nn.Module):
        raise _GivenModuleError("a torch.nn.Module alone, without data and loss")
    if missing:
        raise ValueError(f"{spec.rpartition(':')[2]} without {', '.join(f'{name}()' for name in missing)}")
    source = inspect.getsourcefile(inspect.getmodule(defined.build) or type(defined))
    digest = hashlib.sha256(Path(source).read_bytes()).hexdigest() if source else ""
    _check_names(type(defined))
    if has_loss and has_step:
        raise ValueError("loss() and step(): a step computes its losses itself; leave one of them out")
    problem = UserModel(spec=spec, name=spec.rpartition(":")[2], digest=digest, units=(), has_step=has_step)
    has_several = callable(getattr(defined, "optimizers", None))
    has_optimizer = has_several or callable(getattr(defined, "optimizer", None))
    if hasattr(defined, "scheduler") and not has_optimizer:
        raise ValueError("scheduler() without optimizer(), whose steps it follows")
    # First, because libraries may remember whether there were ranks when they were first asked.
    communicates = "" if has_step else own_communication(problem)
    model = _built_alike(problem)
    units = matching_units(model, _patterns(defined))
    _check_batches(problem)
    names = tuple(name for name, _ in model.named_parameters()) if has_several else ()
    optimizer = UserOptimizer(spec=spec, digest=digest, names=names) if has_optimizer else None
    if has_step:
        return study_step(problem, units, outline_of(model), optimizer)

    def of_rank(_: int = 0) -> ModelStudy:
        _check_shapes(problem, model)
        return study(problem, units, outline_of(model), optimizer, communicates)

    return together(num_ranks, of_rank)[0] if communicates else of_rank()


def _check_names(defined: type) -> None:
    """Raise ValueError for an attribute that nothing reads, and whose name is nearly one that is read."""
    known = {name: kind for kind, names in _READ.items() for name in names}
    for base in defined.__mro__[:-1]:
        for name, value in vars(base).items():
            near = difflib.get_close_matches(name, known, n=1, cutoff=_NEARLY)
            if name in known or not near or near[0] in vars(base):
                continue
            # A method beside an inherited one, such as batches() beside batch(), may be a helper.
            is_helper = hasattr(defined, near[0]) and callable(value) != (known[near[0]] is _CALLED)
            if not is_helper:
                raise ValueError(f"{defined.__name__}.{name} is read by nothing; did you mean {near[0]!r}?")


def _built_alike(problem: UserModel) -> nn.Module:
    """Build the model twice; raises ValueError unless both have parameters, and the same."""
    model: nn.Module
    again: nn.Module
    model, again = (called("build()", problem.build) for _ in range(2))
    parameters, others = dict(model.named_parameters()), dict(again.named_parameters())
    if not parameters:
        raise ValueError("build() returned a model without parameters")
    elsewhere = next(
        (f"{n!r} is on {p.device}" for n, p in parameters.items() if p.device.type != "cpu"), None
    )
    if elsewhere:
        raise ValueError(
            f"build() returned a model that is not on the CPU: {elsewhere}; each rank moves it itself"
        )
    shared = next((name for name, p in parameters.items() if others.get(name) is p), None)
    if shared:
        raise ValueError(
            f"build() returned the same parameter {shared!r} twice: every rank and the reference need a model of "
            "their own; make it inside build()"
        )
    for name, parameter in parameters.items():
        if name not in others or not torch.equal(parameter, others[name]):
            raise ValueError(
                f"build() returned other values of {name!r} the second time: every rank and the reference must build "
                "the same model; draw from torch's default generator, which is seeded"
            )
    return model


def _patterns(defined: object) -> tuple[str, ...]:
    """Return the patterns of the user's ``units``; a string is one pattern."""
    units = getattr(defined, "units", ())
    patterns = (units,) if isinstance(units, str) else tuple(units)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"units {patterns!r}, which are not patterns for names of submodules")
    return patterns


def _check_batches(problem: UserModel) -> None:
    """Raise ValueError if ranks, steps or microbatches have equal data: a missing reduction would not show.

    Repeated data of one place must be equal, because the reference draws them again.
    """
    first = _batch(problem)
    if not list(tensors_of(first)):
        raise ValueError("batch() returned no tensor")
    if not _are_equal(first, _batch(problem)):
        raise ValueError(
            "batch() returned other data in a second call for the same step, microbatch and rank: the reference needs "
            "the data of the ranks; draw from the generator that is passed"
        )
    others: Mapping[str, Mapping[str, int]] = {
        "ranks": {"rank": 1},
        "steps": {"step": 1},
        "microbatches": {"microbatch": 1},
    }
    for what, place in others.items():
        if _are_equal(first, _batch(problem, **place)):
            raise ValueError(
                f"batch() returned equal data for two {what}, so that a missing reduction could not show; draw from "
                "the generator that is passed"
            )


def _check_shapes(problem: UserModel, model: nn.Module) -> None:
    """Raise ValueError if batch(), or forward with a batch of other shapes than before, fails at some place."""
    seen: set[tuple[torch.Size, ...]] = set()
    own = own_rank()
    for step, microbatch, rank in product(*map(range, _SIZES)):
        where = f"step {step}, microbatch {microbatch}, rank {rank}"
        batch: Batch = called(
            f"batch() of {where}",
            lambda s=step, m=microbatch, r=own + rank: problem.batch(step=s, microbatch=m, rank=r),
        )
        shapes = tuple(tensor.shape for tensor in tensors_of(batch))
        if shapes not in seen or dist.is_initialized():  # ranks that communicate call it alike
            args, kwargs = arguments_of(batch.inputs)
            what = f"the model's forward with the batch of {where}, of shapes {', '.join(str(list(s)) for s in shapes)}"
            with torch.no_grad():
                called(what, lambda a=args, k=kwargs: model(*a, **k))
        seen.add(shapes)


def _batch(problem: UserModel, step: int = 0, microbatch: int = 0, rank: int = 0) -> Batch:
    batch: Batch = called("batch()", lambda: problem.batch(step=step, microbatch=microbatch, rank=rank))
    return batch


def _are_equal(one: Batch, other: Batch) -> bool:
    ones, others = list(tensors_of(one)), list(tensors_of(other))
    return len(ones) == len(others) and all(
        a.shape == b.shape and torch.equal(a, b) for a, b in zip(ones, others, strict=True)
    )
