"""The manifest of a folder: the SHA-256 of each file, by which a reader detects every changed byte. No torch here.

Its format is that of sha256sum, so ``sha256sum -c SHA256SUMS`` checks it too. It guards against damage, not against an
author: a program that rewrites the files can rewrite the manifest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from shardproof.harness.regular_file import open_regular, read_regular, replace_regular

MANIFEST = "SHA256SUMS"

_LINE = re.compile(r"([0-9a-f]{64})  ([\w.-]+)")
_MISSING, _CHANGED = "missing", "changed since it was written"


def write_manifest(folder: Path, digests: Mapping[str, str]) -> None:
    """Write the hashes of the folder's files, by name."""
    replace_regular(folder / MANIFEST, _text_of(digests).encode())


def _text_of(digests: Mapping[str, str]) -> str:
    return "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))


def digest_of(file: Path) -> str:
    """Return the hash of a file's current bytes."""
    with open_regular(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def changes(folder: Path, is_asked: Callable[[str], bool] = lambda _: True) -> Mapping[str, str]:
    """Compare files with the manifest; returns a message for each that has changed.

    ``is_asked`` chooses files by name; the manifest itself is always read.
    """
    try:
        text = _text(folder)
    except FileNotFoundError:
        return {MANIFEST: _MISSING}
    except OSError as error:
        return {MANIFEST: f"unreadable ({error.strerror})"}
    known = _digests(text)
    found = {name: _change(folder / name, digest) for name, digest in known.items() if is_asked(name)}
    # The text has one form, so no byte of it can change unnoticed.
    if text != _text_of(known) or not known:
        found[MANIFEST] = _CHANGED
    return {name: why for name, why in found.items() if why}


def kept_digests(folder: Path) -> Mapping[str, str]:
    """Read the manifest's hash of each file; raises OSError if there is no manifest."""
    return _digests(_text(folder))


def _text(folder: Path) -> str:
    return read_regular(folder / MANIFEST).decode("ascii", "backslashreplace")


def _digests(text: str) -> dict[str, str]:
    lines = [_LINE.fullmatch(line) for line in text.split("\n")[:-1]]
    return {match[2]: match[1] for match in lines if match}


def _change(file: Path, digest: str) -> str:
    try:
        return "" if digest_of(file) == digest else _CHANGED
    except FileNotFoundError:
        return _MISSING
    except OSError as error:
        return f"unreadable ({error.strerror})"
