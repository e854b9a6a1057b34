"""The bundled engines on one machine with an accelerator, in stages, most telling first; writes ``docs/gpu.md``.

    python -m campaigns.gpu --budget 500

Each stage has a limit of its own, and what fails stops no other stage. ``--together`` runs several at a time, but for
those that measure. A stage that has run is not run again: delete its folder below ``conformance/gpu/`` to have it run
anew. The exit code is 1 if a stage is red or was not reached.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from shutil import which

import torch
from tabulate import tabulate

from shardproof.harness.errors import ShardproofError
from shardproof.harness.records.record import Verdict
from shardproof.harness.records.run import read_run
from shardproof.harness.torch_compat.accelerators import accelerator

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "conformance" / "gpu"
PAGE = ROOT / "docs" / "gpu.md"
_ENGINES = ("torch.ddp", "torch.fsdp1", "torch.fsdp2", "torch.replicate", "reference", "reference.zero2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One command, without Python; ``shows`` is what only an accelerator can show.

    ``is_alone`` says that it measures, so that nothing else may run.
    """

    name: str
    shows: str
    command: tuple[str, ...]
    limit_s: float = 150.0
    is_alone: bool = False

    @property
    def judges(self) -> bool:
        """Whether it judges cases."""
        return self.command[1:2] in {("run",), ("mutants",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a stage ended: its exit code, None at its limit, its seconds, its result, and the table that it printed."""

    name: str
    code: int | None
    seconds: float
    result: str
    table: str = ""


def stages(device: str) -> Iterator[Stage]:
    """Yield the stages on a device: several ranks are threads, because a machine may have one device."""
    one, two, four = f"processes:1:{device}", f"threads:2:{device}", f"threads:4:{device}"
    numbers = ("smoke", "parity", "clipping", "precision", "state", "communication")
    yield Stage(name="doctor", shows="which worlds start", command=("shardproof", "doctor"), limit_s=90)
    yield _judged("races", "waits between streams, as torch reports them", two, "races", "prefetch")
    yield _judged("kernels", "layers and repeatability", two, "building_blocks", "determinism")
    yield _judged("one rank", "the device's own backend", one, "smoke", "parity", "gpu")
    yield _mutants("mutants of races", two, "races", "prefetch")
    yield _mutants("mutants of the device", one, "gpu")
    yield _mutants("mutants of memory", two, "smoke", "offload", "lifetimes", "zero")
    yield _judged("numbers", "sharding, on streams of each rank's own", two, *numbers, limit_s=360)
    yield _judged("memory", "shares, offload and lifetimes", two, "offload", "lifetimes", "zero", "gpu")
    yield _judged(
        "four ranks", "replicas of shards", four, "smoke", "parity", "communication", "races", limit_s=300
    )
    yield _judged("on the CPU", "worlds on the CPU beside an accelerator", "threads:2", "smoke", "races")
    yield _judged("catalogue", "an eighth of all cases", two, options=("--shard", "1/8"), limit_s=300)
    for world in (one, two, four):
        yield Stage(
            name=f"step, {world}",
            shows="time, peak and overlap beside torch's engines",
            command=("campaigns.gpu_step", f"--world={world}"),
            is_alone=True,
        )


def _judged(
    name: str, shows: str, world: str, *suites: str, options: Sequence[str] = (), limit_s: float = 150.0
) -> Stage:
    chosen = [*(f"--engine={engine}" for engine in _ENGINES), *(f"--suite={suite}" for suite in suites)]
    command = ("shardproof", "run", *chosen, f"--world={world}", "--quiet", *options)
    return Stage(name=f"{name}, {world}", shows=shows, command=command, limit_s=limit_s)


def _mutants(name: str, world: str, *suites: str) -> Stage:
    command = (
        "shardproof",
        "mutants",
        "--quick",
        *(f"--suite={suite}" for suite in suites),
        f"--world={world}",
    )
    return Stage(name=f"{name}, {world}", shows="wrong engines die on the device", command=command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages that have not run, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", help="default: the accelerator that torch finds")
    parser.add_argument("--budget", type=float, default=500.0, metavar="SECONDS", help="default: %(default)g")
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="default: %(default)d")
    parser.add_argument(
        "--together", type=int, default=1, metavar="N", help="stages at a time; default: %(default)d"
    )
    parser.add_argument(
        "--only", action="append", help="stages whose name begins with this; several may be given"
    )
    parser.add_argument("--keyword", metavar="WORDS", help="cases that pytest's -k selects")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=RUNS, help="default: %(default)s")
    asked = parser.parse_args(argv)
    found = asked.device or accelerator()
    if found is None:
        parser.error(
            "expected an accelerator that torch finds, got none; try `shardproof doctor`, or --device"
        )
    device = str(found)
    asked.out.mkdir(parents=True, exist_ok=True)
    stop_at = time.monotonic() + asked.budget
    chosen = [stage for stage in stages(device) if stage.name.startswith(tuple(asked.only or [""]))]

    def ran(stage: Stage) -> Done:
        folder = asked.out / stage.name.replace(", ", "-").replace(":", "-").replace(" ", "-")
        one = _once(stage, folder, stop_at, _options(stage, asked))
        print(f"{one.name}: {one.result}, {one.seconds:.0f} s", flush=True)
        return one

    with ThreadPoolExecutor(asked.together) as pool:
        done = list(pool.map(ran, [stage for stage in chosen if not stage.is_alone]))
    done += [ran(stage) for stage in chosen if stage.is_alone]
    shown = {stage.name: stage.shows for stage in stages(device)}
    asked.page.write_text(page(done, shown, _machine(device)), encoding="utf-8")
    return int(any(one.code != 0 for one in done))


def _options(stage: Stage, asked: argparse.Namespace) -> list[str]:
    if not stage.judges:
        return []
    return ["-n", str(asked.workers), *(["-k", asked.keyword] if asked.keyword else [])]


def _once(stage: Stage, folder: Path, stop_at: float, options: Sequence[str]) -> Done:
    """Run a stage unless it has ended before, within its limit and the rest of the budget."""
    kept = folder / "done.json"
    if kept.exists():
        return Done(**json.loads(kept.read_text(encoding="utf-8")))
    limit_s = min(stage.limit_s, stop_at - time.monotonic())
    if limit_s < 1:
        return Done(name=stage.name, code=None, seconds=0.0, result="not reached: the budget is spent")
    folder.mkdir(parents=True, exist_ok=True)
    began, code = time.monotonic(), None
    run = folder / f"run{len(list(folder.glob('run*')))}"  # one that was cut off is kept beside its successor
    out = ["--out", str(run)] if stage.judges else []
    command = [sys.executable, "-m", *stage.command, *options, *out]
    with (folder / "log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
    seconds = time.monotonic() - began
    # The records of mutants are red where all is well.
    told = (_judged_cases(run) if stage.command[1] == "run" else "") or _last_line(folder / "log")
    cut = "cut off at its limit; " if code is None else ""
    table = _table(folder / "log") if stage.is_alone else ""
    done = Done(
        name=stage.name, code=code, seconds=seconds, result=cut + ("below" if table else told), table=table
    )
    if code is not None:
        kept.write_text(json.dumps(asdict(done)), encoding="utf-8")
    return done


def _judged_cases(run: Path) -> str:
    """Count the records of a run, and name its first red one; empty if there is no run."""
    try:
        records = read_run(run).records
    except ShardproofError:
        return ""
    passed = [record for record in records if record.verdict is Verdict.PASSED]
    red = [record for record in records if not record.verdict.is_conforming]
    errors = [record.worst.ratio for record in passed if record.worst and record.worst.ratio is not None]
    parts = [f"{len(passed)} of {len(records)} passed, {len(red)} not conforming"]
    parts += [f"largest error {max(errors):.2g} of the allowed one"] if errors else []
    parts += [f"first: {red[0].engine} {red[0].case}: {red[0].headline[:200]}"] if red else []
    return "; ".join(parts)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "nothing printed")[:160]


def _table(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return "\n".join(line for line in lines if line.startswith("|"))


def _machine(device: str) -> Mapping[str, str]:
    module = torch.get_device_module(device)
    name = module.get_device_name() if hasattr(module, "get_device_name") else device
    asked = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    driver = subprocess.run(asked, capture_output=True, text=True).stdout if which(asked[0]) else "none named"
    return {
        "device": f"{module.device_count()} of {name}",
        "driver": driver.split("\n")[0],
        "CUDA": str(torch.version.cuda),
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }


def page(done: Sequence[Done], shown: Mapping[str, str], machine: Mapping[str, str]) -> str:
    """Return the page of a campaign in Markdown."""
    rows = [
        [one.name, shown[one.name], "limit" if one.code is None else one.code, round(one.seconds), one.result]
        for one in done
    ]
    table = tabulate(rows, headers=["stage and world", "shows", "exit", "s", "result"], tablefmt="github")
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    measured = "".join(f"\n{one.table}\n" for one in done if one.table)
    return f"# On a GPU\n\n<!-- Written by `python -m campaigns.gpu`. -->\n\n{facts}.\n\n{table}\n{measured}"


if __name__ == "__main__":
    sys.exit(main())
