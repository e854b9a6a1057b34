"""The result of a check of a user's own model, on one screen: proven and how precisely, not proven and why, broken."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from shardproof.harness.records.proof import is_proof, unproven
from shardproof.harness.records.record import LeftOut, Record, Verdict, VisibleError
from shardproof.harness.records.run import Run
from shardproof.reports.matrix import label
from shardproof.reports.summary import conclude, limited, tally
from shardproof.reports.text import duration, one_line, rough

_WIDTH = 100
_INDENT = " " * 16
_MOST_NAMES = 3
_WEAK = (
    0.05  # of a gradient or an update: a pass that would not have seen a larger error hardly shows anything
)
_SHARPER = {"gradient": "give batch() more rows", "update": "take larger steps"}


def render(run: Run, *, width: int = _WIDTH) -> str:
    """Render the run in lines of ``width``: a block for each engine in each world, then the conclusion."""
    cells: dict[tuple[str, str], list[Record]] = {}
    for record in run.records:
        cells.setdefault((record.engine, record.world), []).append(record)
    blocks = [
        "\n".join(_wrapped(line, width) for line in _block(run, engine, world, records))
        for (engine, world), records in cells.items()
    ]
    took = f", in {duration(run.footer.duration_s)}" if run.footer else ""
    score = f"{conclude(run).value}: {tally(run.records).score}{took}"
    return "\n\n".join([*blocks, *map(one_line, limited(run)), score]) + "\n"


def _block(run: Run, engine: str, world: str, records: Sequence[Record]) -> list[str]:
    passed = [record for record in records if record.verdict is Verdict.PASSED]
    not_run = [record for record in records if record.verdict is Verdict.NOT_RUN]
    broken = [record for record in records if not record.verdict.is_conforming and record not in not_run]
    left_out = [
        out
        for out in (run.footer.left_out if run.footer else ())
        if (out.engine, out.world) == (engine, world)
    ]
    lines = [f"{one_line(engine)} in {one_line(world)}"]
    lines += [_line("NOT PROVEN", found.why) for found in unproven(run.header.options, records)]
    lines += _wrapping(records)
    lines += _proven(passed, is_wide="float64" in run.header.model.get("reference", ""))
    lines += _precision(passed)
    lines += _undeclared(records)
    lines += _known(records)
    lines += _alike(("not run", _promise(r), one_line(r.headline, limit=400)) for r in not_run)
    lines += _alike(("left out", _promise(out), one_line(out.why)) for out in left_out)
    lines += [_line("not proven", "; ".join((*_unreached(passed), *_beyond(run, world))))]
    lines += _failures(broken)
    places = dict.fromkeys(r.located.sentence for r in broken if r.located is not None)
    lines += [_line("first wrong", one_line(place, limit=600)) for place in places]
    lines += [_line("repeat", record.command) for record in broken[:1]]
    return lines


def _failures(broken: Sequence[Record]) -> Iterator[str]:
    """Return each cause once, with the promises that it breaks."""
    return _alike((str(r.verdict), _promise(r), one_line(r.headline, limit=400)) for r in broken)


def _alike(found: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Yield a line for each word and cause, with all promises that share them."""
    promises: dict[tuple[str, str], list[str]] = {}
    for word, promise, cause in found:
        promises.setdefault((word, cause), []).append(promise)
    for (word, cause), those in promises.items():
        yield _line(word, f"{'; '.join(those)}: {cause}")


def _wrapping(records: Sequence[Record]) -> Iterator[str]:
    """Yield the call that was judged, by the case of plain training if it ran, and how the engine's default did."""
    judged = next((r for r in sorted(records, key=lambda r: not is_proof(r)) if r.wrapper), None)
    if judged is None:
        return
    yield _line("wrapped by", one_line(judged.wrapper, limit=400))
    if judged.by_default:
        yield _line("by default", one_line(judged.by_default, limit=400))


def _proven(passed: Sequence[Record], *, is_wide: bool) -> Iterator[str]:
    """Yield the promises that were proven; where too large an error would have passed, that error, and what to try."""
    weak = dict[str, None]()
    for record in passed:
        least = max(record.visible, key=lambda error: error.share, default=None)
        if least is None or least.share <= _WEAK:
            yield _line("proven", _promise(record))
            continue
        where = f"in the {least.quantity} of {one_line(least.name)!r}"
        yield _line(
            "weak", f"{_promise(record)}: an error of {_percent(least.share)} {where} would have passed"
        )
        weak[_SHARPER[least.quantity]] = None
    if weak:
        wider = () if is_wide else ("build the model in float32",)
        yield _line("to see less", "; or ".join([*wider, *weak]))


def _promise(case: Record | LeftOut) -> str:
    """Format the id of a case as a sentence; leaves out the model's name, which all have."""
    name, _, parameters = label(case.case, case.suite).rpartition("::")[2].partition("[")
    _, _, own = parameters.removesuffix("]").partition("-")
    return name.replace("_", " ") + (f" ({own})" if own else "")


def _undeclared(records: Sequence[Record]) -> Iterator[str]:
    """Return the capabilities that the engine does not declare, with the promises that need them."""
    refused = [record for record in records if record.verdict is Verdict.UNSUPPORTED]
    return _alike(("not declared", _promise(r), one_line(r.headline.partition(";")[0])) for r in refused)


def _known(records: Sequence[Record]) -> Iterator[str]:
    """Return the failures that the user's file of known failures excuses."""
    excused = [record for record in records if record.verdict is Verdict.KNOWN_FAILURE]
    return _alike(
        ("known", _promise(r), f"{one_line(r.expectation.reason)} ({one_line(r.expectation.link)})")
        for r in excused
        if r.expectation is not None
    )


def _precision(passed: Sequence[Record]) -> list[str]:
    """Format the smallest error that every proven case would have detected, and the tensor that came closest."""
    shares: dict[tuple[str, str], VisibleError] = {}
    for error in (error for record in passed for error in record.visible):
        key = (error.quantity, error.name)
        if key not in shares or shares[key].share < error.share:
            shares[key] = error
    lines = []
    for quantity in dict.fromkeys(quantity for quantity, _ in shares):
        least = sorted((e for e in shares.values() if e.quantity == quantity), key=lambda e: -e.share)[:2]
        which = ", ".join(f"{one_line(e.name)!r} {_percent(e.share)}" for e in least)
        text = f"an error of {_percent(least[0].share)} of any {quantity} would have failed; least visible: {which}"
        lines.append(_line("precision", text))
    tensors = [record.worst for record in passed if record.worst is not None]
    if tensors:
        worst = max(tensors, key=lambda tensor: tensor.ratio)
        text = (
            f"{worst.quantity} {one_line(worst.name)!r} was off by {_percent(worst.ratio)} of what is allowed"
        )
        lines.append(_line("closest", text))
    return lines


def _percent(share: float) -> str:
    return f"{rough(100 * share)}%"


def _unreached(passed: Sequence[Record]) -> Iterator[str]:
    """Yield the parameters that the losses of no proven case reached."""
    names = (
        [name for name in passed[0].unreached if all(name in r.unreached for r in passed)] if passed else []
    )
    if names:
        listed = [one_line(name) for name in names[:_MOST_NAMES]]
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        yield f"what no loss reached, as experts without a token: {', '.join(listed)}{more}"


def _beyond(run: Run, world: str) -> Iterator[str]:
    """Yield the promises that no case of this run covered."""
    if not run.header.is_thorough:
        yield "order of streams and lifetimes of memory (--thorough)"
    if world.startswith("threads"):
        yield "ranks as processes (--world processes:2)"
    if world.count(":") < 2:
        yield "GPUs and other accelerators"
    yield "other numbers of ranks, steps and rows; speed"


def _line(word: str, text: str) -> str:
    return f"  {word:<14}{text}"


def _wrapped(line: str, width: int) -> str:
    """Wrap a line but for a command; links and commands stay in one piece, so that they can be copied."""
    if line.startswith(_line("repeat", "")):
        return line
    return textwrap.fill(
        line, width, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False
    )
