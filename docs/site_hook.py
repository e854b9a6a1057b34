"""The hook of mkdocs.yml: linked files of the repository become part of the site, and the API lists public names."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s:]+)\)")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links that lead out of ``docs/``: a folder's by its text."""

    def on_site(match: re.Match[str]) -> str:
        path = (Path(str(page.file.abs_src_path)).parent / match[2]).resolve()
        if path.is_dir():
            return match[1]
        if path.is_relative_to(_ROOT / "docs"):
            return match[0]
        copy = f"source/{path.relative_to(_ROOT)}.txt"
        if copy not in files.src_uris:
            files.append(File.generated(config, copy, abs_src_path=str(path)))
        return f"[{match[1]}]({'../' * page.file.src_uri.count('/')}{copy})"

    return _LINK.sub(on_site, markdown).replace("<!-- names -->", "\n".join(_names()))


def _names() -> list[str]:
    exports = re.findall(
        r"^from (\S+) import (\w+) as", (_ROOT / "shardproof/__init__.pyi").read_text(), re.M
    )
    shown = []
    for module, names in groupby(exports, key=lambda export: export[0]):
        described, constants = [], []
        for _, name in names:
            (constants if name.isupper() else described).append(name)
        shown += [f"\n## {module}\n", *(f"\n::: {module}.{name}\n" for name in described)]
        shown += [f"\nConstants: {', '.join(f'`{name}`' for name in constants)}\n"] if constants else []
    return shown
