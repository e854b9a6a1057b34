"""Unpacks report.html as a browser does."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from typing import Any


def index_of(page: str) -> dict[str, Any]:
    (found,) = _packed(page, 'id="index"')
    return dict(found)


def pieces_of(page: str) -> list[list[str]]:
    """Return the evidence of the records as markup, piece by piece."""
    return _packed(page, 'class="piece"')


def unpacked(page: str) -> str:
    """Append to a page its unpacked contents: the evidence as markup, the index as escaped text."""
    evidence = [one for piece in pieces_of(page) for one in piece]
    return "\n".join([page, *evidence, html.escape(json.dumps(index_of(page), ensure_ascii=False))])


def _packed(page: str, kind: str) -> list[Any]:
    found = re.findall(rf'<script type="text/plain" {kind}>([^<]*)</script>', page)
    return [json.loads(gzip.decompress(base64.b64decode(piece))) for piece in found]
