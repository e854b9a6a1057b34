"""Every engine that has an adapter here, judged by the whole catalogue: `make engines`, of one `ENGINES=fairscale`.

``python -m campaigns.engines`` makes an environment for each family below ``.venvs/engines/``, runs the catalogue in
it, and writes ``docs/engines.md`` and ``docs/engines/`` from the records. What has been run already is not run again;
delete its folder below ``conformance/engines/`` to have it run anew. All take some three hours on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from campaigns.engine_pages import Judged, columns, columns_of, page, summary
from campaigns.environments import ENVIRONMENTS, ROOT, environment
from shardproof.engine.registry import BUILT_IN, THIRD_PARTY
from shardproof.harness.records.record import Expectations
from shardproof.harness.records.run import read_run
from shardproof.harness.verdicts.known_failures import expected
from shardproof.harness.verdicts.known_failures_file import read
from shardproof.reports.summary import tally

RUNS = ROOT / "conformance" / "engines"
DOCS = ROOT / "docs"
_LIMIT_S = 3600
_THREADS, _PROCESSES = "threads:2", "processes:2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Engines of one package: the packages to install, one pip call each, and the world in which they are judged."""

    packages: tuple[str, ...] = ()
    world: str = _THREADS


_COLOSSALAI = (
    # It pins torch below 2.6, and its imports must be as old.
    "--no-deps colossalai==0.5.0 peft==0.13.2 transformers==4.51.3 huggingface_hub==0.30.2 tokenizers==0.21.1 "
    "accelerate==1.6.0 galore-torch bitsandbytes ray",
    "einops psutil safetensors contexttimer rich click tqdm pydantic pyyaml protobuf regex requests packaging",
)
# SimpleFSDP needs little of what torchtitan installs for training.
_TORCHTITAN = ("--no-deps torchtitan==0.3.0 tyro spmd_types", "docstring_parser typeguard")
FAMILIES: Mapping[str, Family] = {
    "torch": Family(),
    "reference": Family(),
    "accelerate": Family(packages=("accelerate==1.15.0",), world=_PROCESSES),
    "colossalai": Family(packages=_COLOSSALAI),
    "deepspeed": Family(packages=("deepspeed==0.19.8",), world=_PROCESSES),
    "fairscale": Family(packages=("--no-deps fairscale==0.4.13",)),
    "ignite": Family(packages=("--no-deps pytorch-ignite==0.5.5", "packaging"), world=_PROCESSES),
    "lightning": Family(packages=("lightning-fabric==2.6.6",), world=_PROCESSES),
    "mcore": Family(packages=("megatron-core==0.16.1",)),
    "megatron": Family(packages=("--no-deps megatron-fsdp==0.6.1 einops",)),
    "olmo": Family(packages=("ai2-olmo-core==3.0.0",)),
    "pipegoose": Family(packages=("--no-deps pipegoose==0.2.0 torchtyping typeguard==2.13.3", "einops")),
    "torchft": Family(packages=("torchft==0.2.0",), world=_PROCESSES),
    "torchtitan": Family(packages=_TORCHTITAN),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the requested engines and write the pages of all that have run; 1 if one of these does not conform."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="*", help="names of engines, or of families; default: all")
    parser.add_argument(
        "--environments", type=Path, default=ENVIRONMENTS / "engines", help="default: %(default)s"
    )
    parser.add_argument("--suite", action="append", help="default: the whole catalogue")
    parser.add_argument("--pages-only", action="store_true", help="run nothing")
    asked = parser.parse_args(argv)
    for engine in () if asked.pages_only else sorted({*BUILT_IN, *THIRD_PARTY}):
        family = engine.partition(".")[0]
        if not asked.engines or {engine, family} & set(asked.engines):
            python = environment(asked.environments / family, *FAMILIES[family].packages)
            _run(engine, python, asked.suite or [])
    folders = [done.parent for done in sorted(RUNS.glob("*/capabilities.json"))]
    if not folders:
        parser.error(
            f"expected runs below {RUNS}, found none; try the name of an engine without --pages-only"
        )
    known = read(ROOT / "suites" / "known_failures.toml", today=datetime.now(UTC).date())
    judged = [_read(folder, known) for folder in folders]
    (DOCS / "engines").mkdir(exist_ok=True)
    for one in judged:
        (DOCS / "engines" / f"{one.engine}.md").write_text(page(one, ROOT), encoding="utf-8")
    _compare(judged, DOCS / "engines.md")
    return 1 if any(tally(one.records).num_not_conforming for one in judged) else 0


def _compare(judged: Sequence[Judged], path: Path) -> None:
    """Write the page of all engines; rows of engines that have not run here are kept."""
    kept = columns_of(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = kept | columns(judged)
    missing = sorted({*BUILT_IN, *THIRD_PARTY} - found.keys())
    if missing:
        print(f"{path} lacks engines that have not run: {', '.join(missing)}")
    if kept or not missing:
        path.write_text(summary(found), encoding="utf-8")


_DECLARED = """
import json, sys
from shardproof.engine.registry import resolve
print(json.dumps(sorted(capability.name for capability in resolve(sys.argv[1]).capabilities)))
"""


def _run(engine: str, python: Path, suites: Sequence[str]) -> None:
    folder = RUNS / engine
    if (folder / "run").exists() and not read_run(folder / "run").is_interrupted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(engine, flush=True)
    options = ["--engine", engine, "--world", FAMILIES[engine.partition(".")[0]].world]
    options += [word for suite in suites for word in ("--suite", suite)]
    command = [str(python), "-m", "shardproof", "run", *options, "-n", "1", "--out", str(folder / "run")]
    quiet = {**os.environ, "RUST_LOG": "error"}  # torchft's servers report every request
    with (folder / "log").open("w", encoding="utf-8") as log:
        subprocess.run(command, cwd=ROOT, env=quiet, stdout=log, stderr=log, timeout=_LIMIT_S, check=False)
    asked = subprocess.run(
        [str(python), "-c", _DECLARED, engine], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (folder / "capabilities.json").write_text(asked.stdout.splitlines()[-1], encoding="utf-8")


def _read(folder: Path, known: Expectations) -> Judged:
    """Read a run, with today's known failures."""
    run = read_run(folder / "run")
    packages = FAMILIES[folder.name.partition(".")[0]].packages
    return Judged(
        engine=folder.name,
        run=replace(run, records=tuple(expected(record, known) for record in run.records)),
        capabilities=tuple(json.loads((folder / "capabilities.json").read_text(encoding="utf-8"))),
        install="\n".join(f"pip install {arguments}" for arguments in ("shardproof", *packages)),
    )


if __name__ == "__main__":
    sys.exit(main())
