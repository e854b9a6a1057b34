"""Engines that train as they should, and damage files or messages of their world. Named in test_crashes.py."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from shardproof.harness.worlds.messages import Done, Finished, Leaving, Message, encode
from shardproof.harness.worlds.outcome import Raised, Returned
from shardproof.harness.worlds.output import LEFT_FILES
from tests.verdicts.adversaries import Averages
from tests.worlds.ends import CULPRIT, sockets

JOURNAL = f"rank{CULPRIT}.ledger.jsonl"
Damage = Callable[[Path], object]


class Damages(Averages):
    """Averages gradients, and damages files after the last step."""

    def __init__(self, do: Damage) -> None:
        super().__init__(at_last=lambda: do(_folder()))


def _folder() -> Path:
    """Find the folder of the world by the journal that this rank writes."""
    opened = (Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    targets = [Path(os.readlink(link)) for link in opened if link.is_symlink()]
    return next(target for target in targets if target.name == JOURNAL).parent


def at_exit(do: Damage) -> Damages:
    """Damage files when every rank has returned, and its files are written."""
    return Damages(lambda folder: atexit.register(do, folder))


def _append(folder: Path, text: str) -> None:
    with (folder / JOURNAL).open("a") as journal:
        journal.write(text)


def _drop_the_first_half(folder: Path) -> None:
    lines = (folder / JOURNAL).read_bytes().splitlines(keepends=True)
    (folder / JOURNAL).write_bytes(b"".join(lines[len(lines) // 2 :]))


def _remove_and_leave_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    tempfile.mkstemp()


def _leave_a_file_behind_pipes(folder: Path) -> None:
    _replace_by_pipes(folder, "outcomes.json", "SHA256SUMS", "schedule", "rank1.observation", LEFT_FILES)
    tempfile.mkstemp()


def _replace_by_pipes(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)


def _die_behind_pipes(folder: Path) -> None:
    _replace_by_pipes(folder, "host0.stacks", "host1.stacks", "host1.output", "x.output")
    os.kill(os.getpid(), signal.SIGKILL)


def _send(*messages: Message) -> None:
    """Send messages on every local connection that the process has, the one to its supervisor among them."""
    for number in sockets():
        with socket.socket(fileno=os.dup(number)) as connection, contextlib.suppress(OSError):
            if connection.family is socket.AF_UNIX:
                connection.sendall(b"".join(encode(message) for message in messages))


def _send_and_exit(folder: Path) -> None:
    """Send the message of a rank that trained to its end, and end before the training is recorded."""
    results = (Finished(outcome=Returned(rank=rank, value=None)) for rank in (0, CULPRIT))
    _send(*results, Leaving(ident=0, threads=()), Done())
    os._exit(0)


def _blame_another(folder: Path) -> None:
    innocent = Raised(rank=0, kind="E", message="mine", traceback="", is_symptom=False, at_s=0.0)
    _send(Finished(outcome=innocent))


appends_half_a_line = Damages(lambda folder: _append(folder, '{"entry":{"se'))
appends_a_mark = Damages(lambda folder: _append(folder, '{"over":0}\n'))
drops_lines = Damages(_drop_the_first_half)
removes_its_journal = Damages(lambda folder: (folder / JOURNAL).unlink())
makes_its_journal_huge = Damages(lambda folder: os.truncate(folder / JOURNAL, 2**40))
removes_its_observation = at_exit(lambda folder: (folder / "rank1.observation").unlink())
forges_an_observation = at_exit(
    lambda folder: shutil.copy(folder / "rank0.observation", folder / "rank1.observation")
)
removes_the_folder = at_exit(_remove_and_leave_a_file)
forges_its_result = Damages(_send_and_exit)
blames_another = Damages(_blame_another)
makes_pipes = at_exit(_leave_a_file_behind_pipes)
dies_behind_pipes = Damages(_die_behind_pipes)
