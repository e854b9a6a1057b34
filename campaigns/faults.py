"""A campaign of faults against the harness itself: kills, stops, full disks and half-written files, drawn from a seed.

    python -m campaigns.faults --faults 1000 --seed 0

Each live run judges two honest engines on `smoke` while one thing after another is done to its processes, and at last
to the run. The exit code is 1 if any target is missed: no false green, no orphan, nothing left over, no lost record,
and every hang explained within the deadline and two seconds. Linux only.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from campaigns.fault_checks import check_end, check_worlds, records_of
from campaigns.fault_damage import cut_one
from campaigns.fault_kinds import ENDINGS, STRIKES, Fault, Kind, Miss, strike
from campaigns.live_run import Found, LiveRun

DEADLINE_S = 5.0
_MARGIN_S = 2.0
# After the deadline a record needs its judging and, after a fault of the server, the imports of the next one.
_RECORD_LIMIT_S = 60.0
_WORLDS = ("threads:2", "processes:2", "threads:3", "processes:3")
_ENGINES = ("torch.ddp", "reference")
_STRIKES_PER_RUN = 8
_DAMAGE_SHARE = 0.3
_DISK_SHARE = 0.03
_WORKERS_SHARE = 0.3
_POLL_S = 0.02
_FEWEST_LOOKS = 20


class Live:
    """One run, the faults done to it, and what was seen of it meanwhile."""

    def __init__(self, folder: Path, rng: random.Random, *, longest_file: int | None = None) -> None:
        self._rng = rng
        self.has_workers = longest_file is None and rng.random() < _WORKERS_SHARE
        self.run = LiveRun(folder, _arguments(self.has_workers), longest_file=longest_file)
        self.faults: list[Fault] = []
        self._seen: list[str] = []
        self._descriptors: list[int] = []

    def strike(self, num: int) -> None:
        """Inject ``num`` faults into the processes of the run, one after the other."""
        kinds = [k for k in STRIKES if self.has_workers or k.role != "worker"]
        for kind in self._rng.choices(kinds, [STRIKES[k] for k in kinds], k=num):
            if self.run.process.poll() is not None:
                return
            fault = strike(self.run, kind, self._rng, self._look)
            self.faults.append(fault)
            if fault.is_done:
                self._await_effect(fault, is_stop=kind.number.name == "SIGSTOP")

    def finish(self, ending: Kind | None) -> list[Fault]:
        """End the run by a fault of its own, or let it come to its end; returns all faults, checked."""
        if ending is not None:
            self._wait(self._rng.uniform(0.0, 2.0 if self.faults else 12.0))
            last = strike(self.run, ending, self._rng, self._look)
            self.faults.append(last)
            ending = ending if last.is_done else None
        self._look()
        if not self.faults:
            self.faults.append(Fault(kind="nothing", is_done=True))
        misses = check_end(self.run, self.faults, ending, self._seen)
        check_worlds(self.faults, self.run.records())
        if self.faults:
            self.faults[-1].misses += misses + self._leaked()
        self.run.end()
        return self.faults

    def _look(self) -> list[Found]:
        """List the processes; note the records on the disk, and the descriptors where no case runs."""
        self._seen = self.run.records()
        found = self.run.processes()
        if self._seen and not self.has_workers and not {"host", "question"} & {f.role for f in found}:
            # Each server holds one; a killed one comes back later.
            num_servers = sum(f.role == "reaper" for f in found)
            self._descriptors.append(self.run.num_descriptors() - num_servers)
        return found

    def _await_effect(self, fault: Fault, *, is_stop: bool) -> None:
        """Wait for the record of the case that was struck, or for any; a stop has its limit."""
        before = len(self.run.records())
        limit = time.monotonic() + _RECORD_LIMIT_S
        while (
            time.monotonic() < limit and self.run.process.poll() is None and not self._is_over(fault, before)
        ):
            self._look()
            time.sleep(_POLL_S)
        took_s = time.monotonic() - fault.at_s
        has_world = bool(fault.worlds) and self._is_over(fault, before)
        if took_s > DEADLINE_S + _MARGIN_S and (has_world or time.monotonic() > limit) and is_stop:
            fault.misses.append((Miss.LATE, f"explained after {took_s:.1f} s"))

    def _is_over(self, fault: Fault, before: int) -> bool:
        lines = self.run.records()
        if not fault.worlds:
            return len(lines) > before
        kept = [record["observation"] for record in records_of(lines)]
        return any(name and world.endswith(name) for name in kept for world in fault.worlds)

    def _wait(self, duration_s: float) -> None:
        limit = time.monotonic() + duration_s
        while time.monotonic() < limit and self.run.process.poll() is None:
            self._look()
            time.sleep(_POLL_S)

    def _leaked(self) -> list[tuple[Miss, str]]:
        """Compare the fewest descriptors of the first looks with those of the last.

        A world that begins has some before its process is seen, so a few looks prove nothing.
        """
        quiet = [count for count in self._descriptors if count]
        part = len(quiet) // 3
        if part < _FEWEST_LOOKS:
            return []
        first, last = min(quiet[:part]), min(quiet[-part:])
        return [(Miss.LITTER, f"descriptors: {first} at first, {last} at last")] if last > first + 2 else []


def campaign(num_faults: int, seed: int, folder: Path) -> list[Fault]:
    """Inject this number of faults; returns every fault tried, those whose target never came included."""
    rng = random.Random(seed)
    done: list[Fault] = []
    num_cut = int(num_faults * _DAMAGE_SHARE)
    num_full = int(num_faults * _DISK_SHARE)
    number = 0
    while (left := num_faults - num_cut - num_full - _num_done(done)) > 0:
        number += 1
        with tempfile.TemporaryDirectory(prefix="sp", dir=folder) as place:
            live = Live(Path(place), rng)
            live.strike(min(left - 1, rng.randint(0, _STRIKES_PER_RUN)))
            done += live.finish(rng.choice([*ENDINGS, None]) if left > len(live.faults) else None)
        _say(f"run {number}", done, num_faults)
    for _ in range(num_full):
        done.append(_fill_disk(rng, folder))
        _say("full disk", done, num_faults)
    done += _cut(rng, folder, num_cut)
    return done


def _num_done(faults: Sequence[Fault]) -> int:
    return sum(fault.is_done for fault in faults)


def _fill_disk(rng: random.Random, folder: Path) -> Fault:
    """Let no file of a run grow beyond some size, as a full disk does; each write past it fails."""
    with tempfile.TemporaryDirectory(prefix="sp", dir=folder) as place:
        live = Live(Path(place), rng, longest_file=rng.choice([0, 500, 2_000, 6_000, 20_000, 60_000]))
        (fault,) = live.finish(None)
        verdicts = Counter(record["verdict"] for record in records_of(live.run.records()))
    return Fault(kind="full disk", is_done=True, verdicts=tuple(verdicts.elements()), misses=fault.misses)


def _cut(rng: random.Random, folder: Path, num: int) -> list[Fault]:
    """Cut off files of a run that passed."""
    if not num:
        return []
    with tempfile.TemporaryDirectory(prefix="sp", dir=folder) as place:
        arguments = ["--engine", "torch.ddp", "--suite", "smoke", "-k", "trains"]
        whole = LiveRun(Path(place) / "whole", [*arguments, "--world", "threads:2", "--world", "processes:2"])
        assert whole.ended(120.0) == 0, whole.said()
        done: list[Fault] = []
        for _ in range(num):
            done.append(cut_one(whole.out, Path(place), rng))
            _say("half-written files", done, num)
        return done


def _arguments(has_workers: bool) -> list[str]:
    return [
        *(f"--engine={engine}" for engine in _ENGINES),
        *(f"--world={world}" for world in _WORLDS),
        *("--suite", "smoke", "--no-expectations", f"--deadline={DEADLINE_S:g}"),
        *(["-n2"] if has_workers else []),
    ]


def table(faults: Sequence[Fault]) -> str:
    """Return one line per kind of fault: how many were done, the verdicts of what they struck, and each miss."""
    rows = []
    for kind in sorted({fault.kind for fault in faults}):
        of_kind = [fault for fault in faults if fault.kind == kind]
        verdicts = Counter(verdict for fault in of_kind if fault.is_done for verdict in fault.verdicts)
        missed = Counter(miss for fault in of_kind for miss, _ in fault.misses)
        words = ", ".join(f"{n} {verdict}" for verdict, n in sorted(verdicts.items()))
        rows.append([kind, _num_done(of_kind), len(of_kind), words, *(missed[miss] for miss in Miss)])
    total = Counter(miss for fault in faults for miss, _ in fault.misses)
    rows.append(["all", _num_done(faults), len(faults), "", *(total[miss] for miss in Miss)])
    return tabulate(rows, headers=["fault", "done", "tried", "verdicts", *(miss.value for miss in Miss)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign and print its table; returns 1 if a target was missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=1000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument(
        "--headlines", action="store_true", help="print the headline of each case that was struck"
    )
    arguments = parser.parse_args(argv)
    begun = time.monotonic()
    # Not below a folder of the user's choice: sockets live there, and their paths are short.
    folder = Path(tempfile.mkdtemp(prefix="sp"))
    try:
        faults = campaign(arguments.faults, arguments.seed, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(faults))
    for fault in faults if arguments.headlines else ():
        for verdict, headline in zip(fault.verdicts, fault.headlines, strict=False):
            print(f"{fault.kind}: {verdict}: {headline}")
    missed = [(fault.kind, miss, text) for fault in faults for miss, text in fault.misses]
    for kind, miss, text in missed:
        print(f"{miss.value}: {kind}: {text}")
    took_s = time.monotonic() - begun
    print(
        f"{len(faults)} faults tried, {_num_done(faults)} done, {len(missed)} targets missed, {took_s:.0f} s"
    )
    return bool(missed)


def _say(what: str, done: Sequence[Fault], num: int) -> None:
    """Report progress and every miss so far: a campaign that is cut off has no table."""
    missed = [f"{miss.value}: {fault.kind}: {text}" for fault in done for miss, text in fault.misses]
    line = f"{what}: {_num_done(done)} of {num} faults, {len(missed)} targets missed"
    print("; ".join([line, *missed]), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
