"""Half-written files: a file of a finished run is cut off somewhere, and every command that reads it is called."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

from campaigns.fault_checks import call, complaint
from campaigns.fault_kinds import Fault, Miss
from shardproof.harness.records.run import JUDGED, RECORDS, RUN, read_run

_OF_A_RUN = (RECORDS, RUN, "SHA256SUMS")
_OF_A_WORLD = (
    "rank0.ledger.jsonl",
    "rank1.ledger.jsonl",
    "rank0.observation",
    "rank1.observation",
    "outcomes.json",
    "engine.json",
    "SHA256SUMS",
)


def cut_one(run: Path, scratch: Path, rng: random.Random) -> Fault:
    """Truncate one file of a copy of a run that passed, read the copy, and check the loss."""
    copy = scratch / "cut"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    worlds = sorted(path.parent for path in copy.rglob("outcomes.json"))
    if rng.random() < 0.5:
        file, is_of_world = copy / rng.choice(_OF_A_RUN), False
    else:
        file, is_of_world = rng.choice(worlds) / rng.choice(_OF_A_WORLD), True
    whole = file.read_bytes()
    length = rng.randrange(len(whole))
    file.write_bytes(whole[:length])
    name = file.name.replace("rank0", "rank").replace("rank1", "rank")
    fault = Fault(kind=f"half of {name}{' of a world' if is_of_world else ''}", is_done=True)
    if is_of_world:
        _check_world(copy, worlds, file, fault)
    else:
        _check_run(run, copy, file, fault)
    return fault


def _check_run(run: Path, copy: Path, file: Path, fault: Fault) -> None:
    """Every complete record is still read, and no command reports success."""
    for arguments in (("report", str(copy)), ("diff", str(run), str(copy))):
        if wrong := complaint(*arguments):
            fault.misses.append((Miss.UNREADABLE, wrong))
        elif call(*arguments)[0] == 0:
            fault.misses.append(
                (Miss.FALSE_GREEN, f"{arguments[0]} of {file.name} cut to {file.stat().st_size}")
            )
    expected = (copy / RECORDS).read_bytes().count(b"\n")
    if expected:
        found = len(read_run(copy).records)
        if found < expected:
            fault.misses.append((Miss.LOST, f"{expected} whole records, {found} read"))


def _check_world(copy: Path, worlds: Sequence[Path], file: Path, fault: Fault) -> None:
    """Judging again judges the cases of every other world, and does not report success."""
    for arguments in (("report", str(copy)), ("judge", str(copy))):
        if wrong := complaint(*arguments):
            fault.misses.append((Miss.UNREADABLE, wrong))
            return
    again = read_run(copy / JUDGED)
    fault.verdicts += tuple(str(record.verdict) for record in again.records)
    others = [world for world in worlds if world != file.parent]
    listed = " ".join(again.problems)
    if not again.problems:
        fault.misses.append((Miss.FALSE_GREEN, f"judge of {file.name} cut to {file.stat().st_size}"))
    if len(again.records) != len(read_run(copy).records):
        fault.misses.append((Miss.LOST, f"judge kept {len(again.records)} records"))
    if others and "more" in listed:
        fault.misses.append((Miss.LOST, f"judge gave up more than one case: {listed}"))
