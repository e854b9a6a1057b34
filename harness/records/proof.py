"""Whether records prove anything: a refusal does not, and a check has to prove that an engine trains. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardproof.harness.records.record import Record, Verdict

_TRAINS = "::test_trains_as_one_process_does["
_ELSEWHERE = re.compile(r"needs (a process for each rank|CUDA, or a CPU)")  # see EngineDescription.lacks_in
_NEEDS = re.compile(r"needs ([A-Z_0-9]+(?:, [A-Z_0-9]+)*);")
# By a capability that a model needs: the trait of the model, and what a user can do without the capability.
_TRAITS = {
    "UNUSED": ("some parameters have no gradient in a step", ""),
    "RANK_DEPENDENT": ("ranks use different parameters in one step", ""),
    "RANK_DEPENDENT_UNITS": (
        "ranks skip different units",
        "make the module around them the unit, which all ranks call",
    ),
    "OWN_BUFFERS": ("forward changes buffers", "freeze the running statistics by eval()"),
    "PARAMETER_SHAPES": (
        "the optimizer looks at whole parameters",
        "use one that updates each element by itself",
    ),
    "SEVERAL_OPTIMIZERS": ("it has several optimizers", "use one, with groups of parameters"),
    "SPARSE_GRADIENTS": ("some gradients are sparse", "build the embedding with sparse=False"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unproven:
    """An engine that was never seen to train the user's model in one world, and why."""

    engine: str
    world: str
    why: str

    def __str__(self) -> str:
        return f"NOT PROVEN: {self.engine} in {self.world}: {self.why}"


def unjudged(records: Sequence[Record]) -> tuple[str, ...]:
    """Return one sentence for each reason why a run judged nothing; empty if it judged something.

    It judged nothing if every record is of a plan that an engine may refuse, or of a case that was never reached. It
    judged nothing of an engine that can live in none of its worlds, whatever it judged of others.
    """
    by_engine: dict[str, list[Record]] = {}
    for record in records:
        by_engine.setdefault(record.engine, []).append(record)
    idle = {engine: found for engine, found in by_engine.items() if not any(map(_is_judged, found))}
    homeless = {
        engine: found for engine, found in idle.items() if all(_ELSEWHERE.match(r.headline) for r in found)
    }
    shown = idle if len(idle) == len(by_engine) else homeless
    if not shown:
        return () if records else ("no case was judged; see `shardproof list --cases`",)
    return tuple(
        f"no promise of {engine} was judged in {len(found)} cases: {found[0].headline}"
        for engine, found in shown.items()
    )


def _is_judged(record: Record) -> bool:
    return record.verdict not in {Verdict.UNSUPPORTED, Verdict.NOT_RUN}


def unproven(options: Mapping[str, str], records: Sequence[Record]) -> tuple[Unproven, ...]:
    """List the engines for which a check proved nothing and found nothing wrong.

    There are none if a run's ``options`` name no user's model. The proof is the case of plain training. Where that was
    not selected, any case that passed is one.
    """
    return tuple(_unproven(records)) if "model" in options else ()


def is_proof(record: Record) -> bool:
    """Whether a record is of the case of plain training."""
    return _TRAINS in record.case


def _unproven(records: Sequence[Record]) -> Iterator[Unproven]:
    cells: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        cells.setdefault((record.engine, record.world), []).append(record)
    for (engine, world), judged in cells.items():
        proofs = [record for record in judged if is_proof(record)] or judged
        # What does not conform is told as such.
        if all(r.verdict.is_conforming and r.verdict is not Verdict.PASSED for r in proofs):
            yield Unproven(engine=engine, world=world, why=_why(proofs))


def _why(proofs: Sequence[Record]) -> str:
    """Return why no case passed, and what to try; by the case of plain training if it was selected."""
    first = proofs[0]
    needed = _NEEDS.match(first.headline)
    if len(proofs) > 1:
        return "no selected case passed"
    if first.verdict is not Verdict.UNSUPPORTED or needed is None:
        return f"plain training is {first.verdict}"
    lacking = needed[1].split(", ")
    traits = [(name, *_TRAITS.get(name, (f"it needs {name}", ""))) for name in lacking]
    why = " and ".join(f"{trait} ({name})" for name, trait, _ in traits)
    hints = "; or ".join(hint for *_, hint in traits if hint)
    return f"cannot train it, because {why}" + (f"; try: {hints}" if hints else "")
