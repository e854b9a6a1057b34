"""The catalogue on each release of torch that is supported: one environment a release, one table in the docs.

``python -m campaigns.torch_versions`` makes the environments below ``.venvs/``, runs the catalogue in them, and writes
``docs/torch-versions.md`` and the line below each heading of ``docs/what-it-found.md``. What a release has run
already is not run again; delete its folder below ``conformance/versions/`` to have it run anew. An environment takes
up to 6 GB of disk, a release about twenty minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from shardproof.engine.registry import BUILT_IN
from shardproof.harness.records.record import Verdict
from shardproof.harness.records.run import Run, read_run
from shardproof.harness.torch_compat.releases import TESTED
from shardproof.harness.verdicts.known_failures import expected
from shardproof.harness.verdicts.known_failures_file import read
from shardproof.reports.summary import tally

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".venvs"
RUNS = ROOT / "conformance" / "versions"
PAGE = ROOT / "docs" / "torch-versions.md"
FOUND = ROOT / "docs" / "what-it-found.md"

_CATALOGUE = ("--world", "threads:2")
_PROCESSES = ("--world", "processes:2", "--suite", "smoke", "--suite", "parity")
_RUN_LIMIT_S, _COMMAND_LIMIT_S = 3600, 300
_SIGNATURES = "tests/reference/test_signatures.py"  # of the reference engine, beside those of the release
_AT_A_TIME = 2

_PROBE = """
import json
from shardproof.harness.torch_compat.private_names import NAMES, optional
print(json.dumps({name.path: optional(name.path) is not None for name in NAMES}))
"""
_PAGE = """# Releases of torch

<!-- Written by `make versions`. -->

Shardproof supports torch 2.11 and newer. The tables below come from runs of the built-in engines on the CPU, in one
environment per release. `make versions` writes them again: it downloads several gigabytes and takes about an hour and a
half. A release newer than the last one here runs too, with a line that it is untested.

Each cell of the first two tables has four counts: passed, known failures, unsupported, not conforming. A difference
between releases is an entry of [the known failures](known-failures.md) with its releases, or a capability that an
adapter derives from the release. [diff](read-a-report.md#compare-two-runs) compares the runs of two releases.

## The whole catalogue in threads:2

{catalogue}

## Smoke and parity in processes:2

{processes}

## Divergences by release

From the commands of [what it found](what-it-found.md).

{divergences}

## Private names of torch

Names are looked up when they are used. In a release without one of them, the features that need it
are refused by name, and all others run.

{private_names}
"""
_SECTION = re.compile(
    r"^## (?P<number>\d+)\. (?P<title>.+?)\n(?P<body>.*?)```sh\n(?P<command>.*?)\n```", re.M | re.S
)
_SEEN = re.compile(r"^Seen in torch .*\n\n|^Not seen in .*\n\n", re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """One section of the page on what was found: its number, title, and the command that shows it."""

    number: int
    title: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The results of one release of torch."""

    version: str
    catalogue: Run
    processes: Run
    private_names: Mapping[str, bool]
    divergences: Mapping[int, str]  # by number: seen, not seen, or not supported


def main(argv: Sequence[str] | None = None) -> int:
    """Run the requested releases and write the page from all that have run; 1 if one of these does not conform."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("releases", nargs="*", default=TESTED, help=f"default: {' '.join(TESTED)}")
    for version in parser.parse_args(argv).releases:
        python = _environment(version)
        _run(version, python)
    releases = [_read(version) for version in TESTED if (RUNS / version / "divergences.json").exists()]
    PAGE.write_text(_page(releases), encoding="utf-8")
    FOUND.write_text(_with_releases(FOUND.read_text(encoding="utf-8"), releases), encoding="utf-8")
    runs = [run for release in releases for run in (release.catalogue, release.processes)]
    return 1 if any(tally(run.records).num_not_conforming for run in runs) else 0


def _environment(version: str) -> Path:
    """Return the Python of a release's environment, created if missing: a CPU build if the index has one."""
    folder = ENVIRONMENTS / f"torch-{version}"
    python = folder / "bin" / "python"
    if (folder / ".made").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    print(f"torch {version}: making {folder.relative_to(ROOT)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    constraints = folder / "constraints.txt"
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints.write_text(
        "\n".join(line for line in pinned if not line.startswith("torch==")), encoding="utf-8"
    )
    install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
    if subprocess.run([*install, f"torch=={version}+cpu"], check=False, capture_output=True).returncode:
        subprocess.run([*install, f"torch=={version}"], check=True)
    subprocess.run([*install, f"torch=={version}", "--editable", f"{ROOT}[dev]"], check=True)
    (folder / ".made").touch()
    return python


def _run(version: str, python: Path) -> None:
    folder = RUNS / version
    for name, options in (("catalogue", _CATALOGUE), ("processes", _PROCESSES)):
        out = folder / name
        if out.exists() and not read_run(out).is_interrupted:
            continue
        shutil.rmtree(out, ignore_errors=True)
        print(f"torch {version}: {name}", flush=True)
        command = [
            str(python),
            "-m",
            "shardproof.harness.cli.main",
            "run",
            *options,
            "-n",
            str(_AT_A_TIME),
            "--out",
            str(out),
        ]
        with _log(folder / f"{name}.log") as log:
            subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=_RUN_LIMIT_S, check=False)
    if not (folder / "divergences.json").exists():
        print(f"torch {version}: divergences", flush=True)
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            shown = pool.map(lambda divergence: _shown(divergence, python, folder), _divergences())
            found = {d.number: verdict for d, verdict in zip(_divergences(), shown, strict=True)}
        (folder / "divergences.json").write_text(json.dumps(found), encoding="utf-8")
    probed = subprocess.run([str(python), "-c", _PROBE], cwd=ROOT, capture_output=True, text=True, check=True)
    (folder / "private_names.json").write_text(probed.stdout, encoding="utf-8")
    subprocess.run([str(python), "-m", "pytest", "-n0", "-q", _SIGNATURES], cwd=ROOT, check=True)


def _log(path: Path) -> IO[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w", encoding="utf-8")


def _divergences() -> list[Divergence]:
    text = FOUND.read_text(encoding="utf-8")
    return [
        Divergence(number=int(m["number"]), title=m["title"], command=m["command"])
        for m in _SECTION.finditer(text)
    ]


def _shown(divergence: Divergence, python: Path, folder: Path) -> str:
    """Run the command of a divergence and return the result of its verdicts."""
    out = folder / "divergences" / str(divergence.number)
    shutil.rmtree(out, ignore_errors=True)
    module, *arguments = shlex.split(divergence.command)
    command = [str(python), "-m", module, *arguments, "--out", str(out)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    with _log(folder / "divergences" / f"{divergence.number}.log") as log:
        subprocess.run(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=_COMMAND_LIMIT_S, check=False
        )
    verdicts = {record.verdict for record in read_run(out).records}
    if verdicts & {Verdict.FAILED, Verdict.CRASHED, Verdict.HUNG, Verdict.UNSUPPORTED_SILENT}:
        return "seen"
    if verdicts <= {Verdict.PASSED, Verdict.UNSUPPORTED}:
        return "not seen" if Verdict.PASSED in verdicts else "not supported"
    return "unclear"


def _read(version: str) -> Release:
    folder = RUNS / version
    found = json.loads((folder / "divergences.json").read_text(encoding="utf-8"))
    return Release(
        version=version,
        catalogue=_by_known_failures_of_today(folder / "catalogue"),
        processes=_by_known_failures_of_today(folder / "processes"),
        private_names=json.loads((folder / "private_names.json").read_text(encoding="utf-8")),
        divergences={int(number): verdict for number, verdict in found.items()},
    )


def _by_known_failures_of_today(folder: Path) -> Run:
    """Read a run with today's known failures: an entry may be widened after a release has run."""
    known = read(ROOT / "suites" / "known_failures.toml", today=datetime.now(UTC).date())
    run = read_run(folder)
    return replace(run, records=tuple(expected(record, known) for record in run.records))


def _page(releases: Sequence[Release]) -> str:
    versions = [release.version for release in releases]
    divergences = (
        [f"{d.number}. {d.title}", *(r.divergences.get(d.number, "not run") for r in releases)]
        for d in _divergences()
    )
    return _PAGE.format(
        catalogue="\n".join(_verdicts(releases, "catalogue")),
        processes="\n".join(_verdicts(releases, "processes")),
        divergences="\n".join(_table(["divergence", *versions], divergences)),
        private_names="\n".join(_private_names(releases)),
    )


def _verdicts(releases: Sequence[Release], kind: str) -> Iterator[str]:
    def cell(release: Release, engine: str) -> str:
        run: Run = getattr(release, kind)
        counted = tally(r for r in run.records if r.engine == engine)
        known, refused = (counted.counts.get(v, 0) for v in (Verdict.KNOWN_FAILURE, Verdict.UNSUPPORTED))
        return f"{counted.passed}, {known}, {refused}, {counted.num_not_conforming}"

    rows = ([engine, *(cell(release, engine) for release in releases)] for engine in sorted(BUILT_IN))
    yield from _table(["engine", *(release.version for release in releases)], rows)


def _private_names(releases: Sequence[Release]) -> Iterator[str]:
    from shardproof.harness.torch_compat.private_names import NAMES, Feature  # here, because it imports torch

    def row(path: str, use: str, without: Feature | str) -> list[str]:
        missing = [r.version for r in releases if not r.private_names[path]]
        lost = without.value if isinstance(without, Feature) else without
        return [f"`{path.replace(':', '.')}`", use, lost, ", ".join(missing) or "none"]

    header = ["name", "use", "lost without it", "releases without it"]
    yield from _table(header, (row(name.path, name.use, name.without) for name in NAMES))


def _table(header: Sequence[str], rows: Iterator[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _with_releases(text: str, releases: Sequence[Release]) -> str:
    """Put a line with the releases before the command of each divergence, in place of an older one."""

    def section(match: re.Match[str]) -> str:
        line = _seen_in(int(match["number"]), releases)
        body = _SEEN.sub("", match["body"])
        return f"## {match['number']}. {match['title']}\n{body}{line}\n\n```sh\n{match['command']}\n```"

    return _SECTION.sub(section, text)


def _seen_in(number: int, releases: Sequence[Release]) -> str:
    by_verdict = {
        verdict: [r.version for r in releases if r.divergences.get(number) == verdict]
        for verdict in ("seen", "not seen", "not supported")
    }
    seen = ", ".join(by_verdict["seen"])
    others = [
        f"{word} in {', '.join(by_verdict[verdict])}"
        for verdict, word in (("not seen", "not seen"), ("not supported", "not supported"))
        if by_verdict[verdict]
    ]
    if not seen:
        return f"Not seen in any release that was run: {'; '.join(others)}."
    return "; ".join([f"Seen in torch {seen}", *others]) + "."


if __name__ == "__main__":
    sys.exit(main())
