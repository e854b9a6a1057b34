"""The page of benchmarks has the printed tables, and bars as long as their figures."""

from __future__ import annotations

import re

import pytest

from benchmarks.page import Plot, filled, picture, read_table

_PRINTED = """a warning that a benchmark prints first
what        number    ms each
----------  --------  ---------------
read, all   1,000     0.50
diff        20        1.00 [0.9, 1.1]
"""


def test_a_table_is_read_by_its_line_of_dashes() -> None:
    table = read_table(_PRINTED)
    assert table.heads == ("what", "number", "ms each")
    assert table.column("what") == ["read, all", "diff"]
    assert table.column("ms each") == ["0.50", "1.00 [0.9, 1.1]"]


def test_a_bar_is_as_long_as_its_figure_and_an_aim_is_marked() -> None:
    drawn = picture(
        read_table(_PRINTED), Plot(columns=("ms each",), labels=("what", "number"), unit=" ms", aim=0.5)
    )
    assert re.findall(r'<rect .*? width="([\d.]+)"', drawn) == ["150.0", "300.0"]
    assert "read, all: 1,000" in drawn
    assert 'd="M480.0' in drawn


def test_a_page_keeps_its_text_and_must_have_the_marks() -> None:
    page = "before\n<!-- a -->\nold\n<!-- end of a -->\nafter\n"
    written = filled(page, "a", read_table(_PRINTED))
    assert written.startswith("before\n<!-- a -->\n| what")
    assert written.endswith("![a](benchmark-a.svg)\n<!-- end of a -->\nafter\n")
    assert "old" not in written
    with pytest.raises(ValueError, match="end of b"):
        filled(page, "b", read_table(_PRINTED))
