"""A pytest plugin for mutation testing: each case runs on the mutants that it must kill, instead of on every engine.

[Note: the placeholder] The marks of a case are complete only on the collected item, when all its parameters are
known; but the mutants are parameters themselves. So every case is collected with each mutant that one of its marks may
name, and once with a placeholder. The placeholder's item has the marks of the case, shows whether -k selects it, and
never runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from shardproof.harness.audit.marks import (
    Breadth,
    Idle,
    MarkedCase,
    MustKill,
    Pair,
    PytestMark,
    Selection,
    check_names,
    deadline_of,
    kills_of,
    mutant_name,
    pairs,
    write_selection,
)
from shardproof.harness.cases.case_id import Node
from shardproof.harness.errors import UsageError
from shardproof.harness.records.record import RecordKey
from shardproof.harness.runner.cell import PLACEHOLDER, Cell
from shardproof.harness.runner.plugin import CELLS, CELLS_ARE_CHOSEN
from shardproof.harness.runner.session_end import refuse
from shardproof.harness.worlds.spec import Sizes, WorldSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MutationRun:
    """The options of a run: engines by the names of their mutants, worlds in the order of preference."""

    engines: dict[str, str]
    worlds: tuple[str, ...]
    breadth: Breadth
    deadline_s: float
    out: Path | None = None

    @classmethod
    def of(cls, cells: Sequence[Cell], config: pytest.Config) -> MutationRun:
        """Read the cells and options of a session."""
        out = config.getoption("shardproof_out")
        return cls(
            engines={mutant_name(cell.engine): cell.engine for cell in cells},
            worlds=tuple(dict.fromkeys(str(cell.world) for cell in cells)),
            breadth=Breadth(config.getoption("--mutants")),
            deadline_s=cells[0].world.deadline_s,
            out=Path(out) if out else None,
        )

    def cell(self, mutant: str, world: str, kills: Iterable[MustKill] = ()) -> Cell:
        """Return the engine of one mutant in one world, with the deadline that the marks ask for."""
        deadline_s = deadline_of(mutant, kills, self.deadline_s)
        engine = self.engines.get(mutant, PLACEHOLDER)
        return Cell(engine=engine, world=WorldSpec.parse(world, deadline_s=deadline_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class _CasePairs:
    """The pairs of one case: those to run here, those whose device this machine lacks, or why there are none."""

    case: str
    pairs: tuple[Pair, ...] = ()
    elsewhere: tuple[Pair, ...] = ()
    why: str = ""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that chooses pairs."""
    parser.getgroup("shardproof").addoption(
        "--mutants",
        choices=[str(breadth.value) for breadth in Breadth],
        help="run mutants: each case with those in its `kills` marks, each mutant with one such case, or all pairs",
    )


@pytest.hookimpl(trylast=True)  # after the plugin that reads engines and worlds
def pytest_configure(config: pytest.Config) -> None:
    """Choose the engine and the world of each case instead of the plugin that runs it."""
    if config.getoption("--mutants"):
        config.stash[CELLS_ARE_CHOSEN] = True
        run = MutationRun.of(config.stash[CELLS], config)
        config.pluginmanager.register(MutationPlugin(run), "shardproof-mutants")


class MutationPlugin:
    """Selects and records pairs of mutant and case, and reports a kill as caught instead of failed."""

    def __init__(self, run: MutationRun) -> None:
        self._run = run

    @pytest.hookimpl(tryfirst=True)  # so that the cell comes first in ids, where Node finds it
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize every test with a trial by the placeholder and each mutant that a mark of it may name."""
        if "trial" not in metafunc.fixturenames:
            return
        cells = [
            self._run.cell(PLACEHOLDER, self._run.worlds[0]),
            *self._candidates(metafunc.definition),
        ]
        metafunc.parametrize("cell", cells, ids=[str(cell) for cell in cells], scope="session")

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # around -k and all others that leave items out
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Iterator[None]:
        """Keep the pairs; remove placeholders after other plugins have selected among the cases."""
        try:
            cases = [_marked(item) for item in items if _is_placeholder(item)]
            check_names(cases, self._run.engines)
            by_case = [self._pairs_of(case) for case in cases]
            if self._run.breadth is Breadth.ONCE:
                by_case = [*_cheapest_cases(by_case, self._run.worlds)]
            wanted = self._wanted(by_case, items)
        except UsageError as error:
            refuse(config, items, error)
            yield
            return
        items[:] = [item for item in items if _is_placeholder(item) or _key(item) in wanted]
        yield
        left = {_case(item) for item in items if _is_placeholder(item)}
        items[:] = [item for item in items if not _is_placeholder(item)]
        if self._run.out is not None:
            chosen = tuple(wanted[key] for item in items if (key := _key(item)) in wanted)
            by_case = [of_case for of_case in by_case if of_case.case in left]
            selection = Selection(
                pairs=chosen,
                elsewhere=tuple(pair for of_case in by_case for pair in of_case.elsewhere),
                idle=tuple(Idle(case=of_case.case, why=of_case.why) for of_case in by_case if of_case.why),
            )
            write_selection(self._run.out, selection)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Report a mutant that fails as caught, which is expected here."""
        if report.when != "call":
            return None
        return ("caught", "x", "CAUGHT") if report.failed else ("escaped", ".", "ESCAPED")

    def _candidates(self, definition: pytest.Item) -> list[Cell]:
        inner = _marks_of_parameters(definition)
        sizes = tuple(mark.args[0] for mark in definition.iter_markers("worlds"))
        outer = MarkedCase(id=definition.nodeid, sizes=sizes)
        worlds = [world for world in self._run.worlds if outer.suits(world)]
        if not any(mark.name == "worlds" for mark in inner):
            worlds = worlds[:1]  # each of its cases runs in the first
        marks = [*definition.iter_markers("kills"), *(mark for mark in inner if mark.name == "kills")]
        try:
            kills = kills_of(marks, where=definition.nodeid)
        except UsageError:
            # Reported later from the items, where it ends the session and not this file alone.
            kills = frozenset()
        names = {p.mutant for p in kills} if self._run.breadth is not Breadth.ALL else set(self._run.engines)
        wanted = {(name, world) for name in names for world in worlds}
        wanted |= {(p.mutant, p.world) for p in kills if p.world}
        known = self._run.engines
        return [self._run.cell(name, world, kills) for name, world in sorted(wanted) if name in known]

    def _pairs_of(self, case: MarkedCase) -> _CasePairs:
        """Pair one case."""
        found = pairs(case, list(self._run.engines), self._run.worlds, self._run.breadth)
        if found:
            here = tuple(pair for pair in found if _is_here(pair.world))
            return _CasePairs(case=case.id, pairs=here, elsewhere=tuple(p for p in found if p not in here))
        is_suited = any(case.suits(world) for world in self._run.worlds)
        why = "no kills mark" if is_suited else f"makes no sense in {', '.join(self._run.worlds)}"
        return _CasePairs(case=case.id, why=why)

    def _wanted(self, by_case: Sequence[_CasePairs], items: Sequence[pytest.Item]) -> dict[RecordKey, Pair]:
        """Find the item of every pair; raises UsageError where a mark came from where no candidate was seen."""
        engines = self._run.engines
        found = {(engines[p.mutant], p.case, p.world): p for of_case in by_case for p in of_case.pairs}
        for key in sorted(found.keys() - set(map(_key, items))):
            raise UsageError(
                f"the kills mark of {found[key].case}",
                expected="a mark on the module, the test, or a value in a list given to parametrize",
                got=f"{found[key].mutant} from elsewhere",
                hint="moving the mark",
            )
        return found


def _cheapest_cases(by_case: Sequence[_CasePairs], worlds: Sequence[str]) -> Iterator[_CasePairs]:
    """Keep one pair of each mutant, and only cases with a pair.

    The first worlds are the cheapest; of their cases the one that names most mutants, which then share its oracle.
    """

    def cost(of_case: _CasePairs, pair: Pair) -> tuple[int, int]:
        place = worlds.index(pair.world) if pair.world in worlds else len(worlds)
        return place, -len(of_case.pairs)

    ordered = sorted(
        ((cost(of_case, pair), pair) for of_case in by_case for pair in of_case.pairs),
        key=lambda found: found[0],
    )
    chosen = {pair.mutant: pair for _, pair in reversed(ordered)}
    for of_case in by_case:
        kept = tuple(pair for pair in of_case.pairs if chosen[pair.mutant] is pair)
        if kept or of_case.elsewhere:
            yield replace(of_case, pairs=kept)


def _marks_of_parameters(definition: pytest.Item) -> list[PytestMark]:
    """Return the marks of all values of the test's own parameters."""
    lists = [[*mark.args, *mark.kwargs.values()] for mark in definition.iter_markers("parametrize")]
    # A generator can be read once, and not by us: _wanted refuses what is missed here.
    values = [v for given in lists for values in given if isinstance(values, list | tuple) for v in values]
    return [mark for value in values for mark in getattr(value, "marks", ())]


def _is_here(world: str) -> bool:
    device = WorldSpec.parse(world).device
    if device == "cpu":
        return True
    # Imported here because it imports torch, which only processes that collect cases need.
    from shardproof.harness.torch_compat.accelerators import is_here

    return is_here(device)


def _is_placeholder(item: pytest.Item) -> bool:
    cell = _cell(item)
    return cell is not None and cell.is_placeholder


def _cell(item: pytest.Item) -> Cell | None:
    callspec = getattr(item, "callspec", None)
    cell = callspec.params.get("cell") if callspec is not None else None
    return cell if isinstance(cell, Cell) else None


def _key(item: pytest.Item) -> RecordKey | None:
    node = Node.parse(item.nodeid)
    return node.key if node is not None else None


def _case(item: pytest.Item) -> str:
    node = Node.parse(item.nodeid)
    return node.case if node is not None else item.nodeid


def _marked(item: pytest.Item) -> MarkedCase:
    case = _case(item)
    sizes: tuple[Sizes, ...] = tuple(mark.args[0] for mark in item.iter_markers("worlds"))
    return MarkedCase(id=case, kills=kills_of(item.iter_markers("kills"), where=case), sizes=sizes)
