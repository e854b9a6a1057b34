"""A comparison of two runs as text for a terminal, and as Markdown short enough for a comment on a pull request.

[Note: what a diff leaves out first] Both list groups of changes, the most urgent first, with a limited number of cases
each. The Markdown leaves out groups that do not fit. Everything left out is counted. The JSON of ``reports.diff_json``
is complete.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from shardproof.harness.records.diff.comparability import ComparedRun
from shardproof.harness.records.diff.comparison import Comparison, News
from shardproof.reports.change_groups import TITLES, ChangeGroup, Line, case_lines, groups, shared_world
from shardproof.reports.markup import Budget, code, escape, table
from shardproof.reports.summary import conclude, tally
from shardproof.reports.text import one_line

WIDTH = 100
LIMIT_BYTES = 60_000  # GitHub accepts 65,536 characters in a comment
_RESERVE_BYTES = 2_000  # for the sentences that count what was left out
_HEAD_BYTES = LIMIT_BYTES // 4  # so that long warnings leave room for changes
_NUM_CASES = 5  # in a terminal
_NUM_CASES_MARKDOWN = 20
_NUM_GROUPS = 30  # of one kind of news, in a terminal
_TEXT_LIMIT = 400  # characters of one headline


def render(comparison: Comparison, *, width: int = WIDTH) -> str:
    """Render for a terminal; no line is longer than ``width``."""
    parts = [
        "\n".join(_wrapped(text, width) for text in _sides(comparison)),
        "\n".join(_wrapped(text, width, indent=2) for text in _settings(comparison)),
        "\n".join(_wrapped(f"WARNING: {text}", width, indent=2) for text in comparison.warnings),
        *_sections(groups(comparison), width),
        _wrapped(_unmeasured(comparison), width),
        _wrapped(summary(comparison), width),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def render_markdown(comparison: Comparison) -> str:
    """Render in at most LIMIT_BYTES; see [Note: what a diff leaves out first]."""
    head = "\n\n".join(part for part in _head(comparison) if part)
    budget = Budget(LIMIT_BYTES - _RESERVE_BYTES)
    budget.takes(head)
    parts, left_out = [head], dict.fromkeys(News, 0)
    title = ""
    for group in groups(comparison):
        heading = f"## {TITLES[group.news]}"
        body = _markdown_group(group)
        text = body if heading == title else f"{heading}\n\n{body}"
        if budget.takes(text):
            parts.append(text)
            title = heading
        else:
            left_out[group.news] += 1
    parts.append(_left_out(left_out))
    return "\n\n".join(part for part in parts if part) + "\n"


def summary(comparison: Comparison) -> str:
    """Count changes in one line."""
    counts = ", ".join(f"{count} {_WORDS[news]}" for news, count in comparison.counts.items() if count)
    num_changed = len(comparison.changes)
    if not num_changed:
        return f"Nothing changed: {_records(comparison.num_unchanged)} alike"
    return f"{_records(num_changed)} changed ({counts}), {comparison.num_unchanged} alike"


_WORDS = {
    News.WORSE: "worse",
    News.BETTER: "better",
    News.OTHER_VERDICT: "with another verdict or expectation",
    News.EXPLANATION: "with another headline",
    News.COMMUNICATION: "with other communication",
    News.NEW: "new",
    News.GONE: "gone",
}


def _records(count: int) -> str:
    return f"{count} record{'s' * (count != 1)}"


def _sides(comparison: Comparison) -> list[str]:
    return [_side("A", comparison.before), _side("B", comparison.after)]


def _side(name: str, compared: ComparedRun) -> str:
    header = compared.run.header
    conclusion = f"{conclude(compared.run).value.lower()}, {tally(compared.run.records).score}"
    torch = header.versions.get("torch", "unknown")
    return f"{name}: {compared.folder}: {conclusion}; torch {torch}; {header.started_at}"


def _settings(comparison: Comparison) -> list[str]:
    return [f"{found.name}: {found.before} -> {found.after}" for found in comparison.settings]


def _unmeasured(comparison: Comparison) -> str:
    count = comparison.num_unmeasured
    return f"Communication of {_records(count)} not compared: a rank did not run to its end" if count else ""


# The terminal


def _sections(found: Sequence[ChangeGroup], width: int) -> Iterable[str]:
    for news in News:
        of_news = [group for group in found if group.news is news]
        if of_news:
            yield TITLES[news].upper()
            yield from (_terminal_group(group, width) for group in of_news[:_NUM_GROUPS])
        if len(of_news) > _NUM_GROUPS:
            more = f"... and {len(of_news) - _NUM_GROUPS} more groups; --format json has them"
            yield _wrapped(more, width, indent=2)


def _terminal_group(group: ChangeGroup, width: int) -> str:
    cases = case_lines(group)
    lines = [_wrapped(f"{group.engine}: {_group_title(group)}", width, indent=2)]
    lines += [_wrapped(_labelled(line), width, indent=6) for line in group.lines]
    lines += [_wrapped(case, width, indent=4) for case in cases[:_NUM_CASES]]
    if len(cases) > _NUM_CASES:
        lines.append(f"    ... and {len(cases) - _NUM_CASES} more cases")
    return "\n".join(lines)


def _group_title(group: ChangeGroup) -> str:
    world = f" in {shared_world(group)}" if shared_world(group) else ""
    example = "; the headline is the first one's" if group.is_example else ""
    return f"{group.title}, {_records(len(group.changes))}{world}{example}"


def _labelled(line: Line) -> str:
    return f"{line.side}: {line.text}" if line.side else line.text


def _wrapped(text: str, width: int, *, indent: int = 0) -> str:
    return textwrap.fill(
        one_line(text, limit=_TEXT_LIMIT),
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
    )


# Markdown


def _head(comparison: Comparison) -> Iterable[str]:
    budget = Budget(_HEAD_BYTES)
    yield "# Shardproof: two runs compared"
    yield f"**{summary(comparison)}.**"
    yield "\n".join(f"- {code(text, limit=_TEXT_LIMIT)}" for text in _sides(comparison))
    yield _fitting(
        [f"> - {escape(text, limit=_TEXT_LIMIT)}" for text in comparison.warnings],
        budget,
        title="> **These runs are not comparable in every respect.**\n>",
        more="> - and {} more warnings",
    )
    rows = [(found.name, found.before, found.after) for found in comparison.settings]
    yield _fitting(
        [f"| {' | '.join(map(_cell, row))} |" for row in rows],
        budget,
        title=table(["made with", "A", "B"], ()),
        more="| and {} more | | |",
    )
    yield escape(_unmeasured(comparison))


def _cell(text: str) -> str:
    return escape(text, limit=_TEXT_LIMIT) or " "


def _fitting(lines: Sequence[str], budget: Budget, *, title: str, more: str) -> str:
    kept = [line for line in lines if budget.takes(line)]
    dropped = [more.format(len(lines) - len(kept))] if len(kept) < len(lines) else []
    return "\n".join([title, *kept, *dropped]) if lines else ""


def _markdown_group(group: ChangeGroup) -> str:
    cases = case_lines(group)
    # As code: an engine's text must neither become markup nor mention a user of the forge.
    lines = [
        f"- {f'{line.side}: ' if line.side else ''}{code(line.text, _TEXT_LIMIT)}" for line in group.lines
    ]
    listed = [f"- {code(case)}" for case in cases[:_NUM_CASES_MARKDOWN]]
    if len(cases) > _NUM_CASES_MARKDOWN:
        listed.append(f"- and {len(cases) - _NUM_CASES_MARKDOWN} more cases")
    parts = [
        f"### {code(group.engine)}: {escape(_group_title(group))}",
        "\n".join(lines),
        "Cases:",
        "\n".join(listed),
    ]
    return "\n\n".join(part for part in parts if part)


def _left_out(counts: dict[News, int]) -> str:
    words = ", ".join(f"{count} under *{TITLES[news]}*" for news, count in counts.items() if count)
    return f"---\n\nGroups left out for length: {words}. `--format json` has them all." if words else ""
