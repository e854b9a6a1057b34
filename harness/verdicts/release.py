"""An engine's release, such as ``torch 2.13.0+cpu``, and conditions on it, such as ``torch >=2.11,<2.15``."""

from __future__ import annotations

from enum import Enum

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from harness.errors import UsageError

__all__ = ["Fit", "check_condition", "fit"]


class Fit(Enum):
    """How a condition and a release go together."""

    MEETS = "meets"  # the release meets the condition, or there is none
    MISSES = "misses"  # another release of the same engine would meet it
    NEVER = "never"  # no release could: another name, or no version that can be read


def check_condition(condition: str, what: str) -> None:
    """Raise a UsageError about ``what`` unless ``condition`` is a name with bounds on its version."""
    try:
        found = Requirement(condition)
    except InvalidRequirement as error:
        problem = str(error).splitlines()[0]
        raise _refusal(what, f"{condition!r} ({problem})") from error
    if not found.specifier or found.extras or found.marker or found.url:
        raise _refusal(what, repr(condition))


def fit(condition: str, release: str) -> Fit:
    """Say how a checked condition and an engine's own account of its release go together."""
    if not condition:
        return Fit.MEETS
    wanted = Requirement(condition)
    name, _, version = release.rpartition(" ")
    try:
        found = Version(version)
    except InvalidVersion:
        return Fit.NEVER
    if canonicalize_name(name) != canonicalize_name(wanted.name):
        return Fit.NEVER
    # Nightlies are releases too: without this, no bound would ever hold of one.
    return Fit.MEETS if wanted.specifier.contains(found, prereleases=True) else Fit.MISSES


def _refusal(what: str, got: str) -> UsageError:
    return UsageError(
        what,
        expected="a name with bounds on its version",
        got=got,
        hint='"torch >=2.11,<2.15", or no `version` at all if every release fails',
    )
