"""Facts about an engine that judging needs, read in a process of its own, where its code can do no harm.

The answer comes back as JSON: engine code never runs in the process that judges. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from shardproof.engine.capability import Capability
from shardproof.engine.registry import EngineNotFoundError, resolve
from shardproof.harness.errors import UnreadableError
from shardproof.harness.tracing.codec import UNREADABLE, decode, encode
from shardproof.harness.worlds.processes.fresh_process import NoAnswerError, ask
from shardproof.harness.worlds.spec import DEVICES_OF_CUDA, WorldSpec

# Importing a large library from a cold disk takes tens of seconds; an answer that takes longer never comes.
_DEADLINE_S = 60.0
# A label of the build in a version, as torch's "+cpu" is one.
_STAND_IN = "cuda.stand.in"
_LONGEST_ANSWER = 1_000_000  # bytes
_FILE = "engine.json"  # beside the observations


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """An engine's promises and its release, and those of the known engine that it is derived from."""

    capabilities: frozenset[Capability]
    version: str
    insists_on_cuda: bool = False
    needs_processes: bool = False
    preload: tuple[str, ...] = ()
    known_as: str = ""
    known_version: str = ""

    def lacks_in(self, world: WorldSpec) -> str:
        """Return what a world lacks for this engine, and what to try; empty where it lacks nothing."""
        if self.needs_processes and world.kind.shares_a_process:
            return "a process for each rank (try --world processes:N)"
        if self.insists_on_cuda and world.device not in DEVICES_OF_CUDA:
            return "CUDA, or a CPU with a stand-in for it (try --world processes:N)"
        return ""

    def version_on(self, device: str) -> str:
        """Name the release as a record shows it, with a stand-in for torch.cuda where there was one."""
        if not self.insists_on_cuda or device == "cuda":
            return self.version
        return f"{self.version}{'.' if '+' in self.version else '+'}{_STAND_IN}"


def unavailable(names: Iterable[str], *, limit_s: float = _DEADLINE_S) -> dict[str, str]:
    """Return why engines cannot be judged, of those that do not answer within ``limit_s`` each; raises for none."""
    problems: dict[str, str] = {}
    for name in names:
        try:
            describe(name, limit_s=limit_s)
        except EngineNotFoundError as error:
            problems[name] = error.problem
    return problems


def describe(engine: str, *, limit_s: float = _DEADLINE_S) -> EngineDescription:
    """Ask for an engine's capabilities and release, once per process.

    Raises EngineNotFoundError, with the cause, for an engine that does not resolve, does not answer within ``limit_s``,
    ends the process that it is asked in, or answers with an invalid version.
    """
    found = _known.get(engine)
    if found is None:
        found = _known[engine] = _found(engine, limit_s)
    if isinstance(found, EngineNotFoundError):
        raise found
    return found


def keep_description(description: EngineDescription, folder: Path) -> None:
    """Write an engine's declarations beside its observations, so that judging again need not ask the engine."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _FILE).write_text(json.dumps(encode(description)))


def load_description(folder: Path) -> EngineDescription:
    """Read what `keep_description` wrote; raises UnreadableError where it is missing or damaged."""
    try:
        return decode(EngineDescription, json.loads((folder / _FILE).read_bytes()))
    except (OSError, *UNREADABLE) as error:
        raise UnreadableError(
            f"{folder.name}/{_FILE}",
            expected="the version and the capabilities of the engine",
            got="missing" if isinstance(error, FileNotFoundError) else "damaged",
            hint="running the case again",
        ) from error


# The plugin, the session and every case ask, and each answer costs a process.
_known: dict[str, EngineDescription | EngineNotFoundError] = {}


def _found(engine: str, limit_s: float) -> EngineDescription | EngineNotFoundError:
    try:
        return _read(_ask(engine, limit_s), engine)
    except EngineNotFoundError as error:
        return error.with_traceback(None)


def _ask(engine: str, limit_s: float) -> bytes:
    try:
        return ask(limit_s, _LONGEST_ANSWER, _answer, engine)
    except NoAnswerError as error:
        raise EngineNotFoundError(
            engine, f"the process that was asked for its version and capabilities {error}"
        ) from None


def _read(answer: bytes, engine: str) -> EngineDescription:
    try:
        plain = json.loads(answer)
        if "problem" in plain:
            raise EngineNotFoundError(engine, str(plain["problem"]))
        return decode(EngineDescription, plain)
    except UNREADABLE as error:
        raise EngineNotFoundError(engine, f"its answer cannot be read: {error!r}") from error


def _answer(engine: str) -> bytes:
    try:
        plain = encode(_facts(engine))
    except EngineNotFoundError as error:
        plain = {"problem": error.problem}
    return json.dumps(plain).encode()


def _facts(engine: str) -> EngineDescription:
    adapter = resolve(engine)
    try:
        version = adapter.version()
        capabilities = frozenset(map(Capability, adapter.capabilities))
        for module in adapter.preload:
            import_module(module)  # a server leaves out what is missing, and ends with what raises
    except (Exception, SystemExit) as error:
        raise EngineNotFoundError(
            engine, f"asking for its version, capabilities and preload raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(version, str) or not version.strip():
        raise EngineNotFoundError(
            engine, f"version(): expected a text such as 'torch 2.13.0', got {version!r}"
        )
    return EngineDescription(
        capabilities=capabilities,
        version=version,
        insists_on_cuda=bool(adapter.insists_on_cuda),
        needs_processes=bool(adapter.needs_processes),
        preload=tuple(map(str, adapter.preload)),
        known_as=str(adapter.known_as),
        known_version=resolve(adapter.known_as).version() if adapter.known_as else "",
    )
