"""Rank bodies that return and then end badly, or well. Run inside worlds by test_world_ends.py."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist

from shardproof.harness.tracing.events import EventKind
from shardproof.harness.worlds.rank import RankContext

CULPRIT = 1
# Keeps leftovers of a rank from being collected with its body: executors, processes.
_kept: list[object] = []


def _is_culprit(context: RankContext) -> bool:
    return context.rank == CULPRIT


def _note(context: RankContext, pid: int) -> None:
    (context.folder / "child").write_text(str(pid))


def forked(*, sessions: int) -> int:
    """Fork a process that never ends, below a chain of processes that made a session and ended; return its pid."""
    reads, writes = os.pipe()
    if os.fork() == 0:
        for _ in range(sessions):
            os.setsid()
            if sessions > 1 and os.fork():
                os._exit(0)
        os.write(writes, str(os.getpid()).encode())
        while True:
            signal.pause()
    pid = int(os.read(reads, 20))
    os.close(reads)
    os.close(writes)
    return pid


def _fill_disk(context: RankContext) -> None:
    """Let the journals of this process grow by fewer bytes than one write has."""
    size = max(path.stat().st_size for path in context.folder.glob("*.ledger.jsonl"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))


def fills_the_disk_with_calls(context: RankContext) -> None:
    """Call until the ledger cannot be written."""
    dist.all_reduce(torch.ones(4))
    if _is_culprit(context):
        _fill_disk(context)
    for _ in range(3):
        dist.all_reduce(torch.ones(4))


def fills_the_disk_with_its_last_marks(context: RankContext) -> None:
    """Return, with more marks than the disk has room for."""
    if _is_culprit(context):
        context.recorder.mark(EventKind.BEGAN)
        _fill_disk(context)


def aborts_when_groups_are_destroyed(context: RankContext) -> None:
    """Replace the function that destroys process groups."""
    if _is_culprit(context):
        dist.destroy_process_group = lambda *_: os.abort()


def hangs_when_groups_are_destroyed(context: RankContext) -> None:
    """Replace the function that destroys process groups."""
    if _is_culprit(context):
        dist.destroy_process_group = lambda *_: threading.Event().wait()


def raises_when_groups_are_destroyed(context: RankContext) -> None:
    """Replace the function that destroys process groups."""

    def destroy(*_: object) -> NoReturn:
        raise RuntimeError("a group is still in use")

    if _is_culprit(context):
        dist.destroy_process_group = destroy  # type: ignore[assignment]  # it destroys nothing


def leaves_a_thread(context: RankContext) -> None:
    """Start a thread that keeps every script alive."""
    if _is_culprit(context):
        threading.Thread(target=threading.Event().wait, name="uploader", daemon=False).start()


def hangs_at_exit(context: RankContext) -> None:
    """Register a hook that waits for ever."""
    if _is_culprit(context):
        atexit.register(threading.Event().wait)


def aborts_at_exit(context: RankContext) -> None:
    if _is_culprit(context):
        atexit.register(os.abort)


def is_killed_at_exit(context: RankContext) -> None:
    """Be killed, as by the kernel when memory runs out."""
    if _is_culprit(context):
        atexit.register(os.kill, os.getpid(), signal.SIGKILL)


def is_terminated_at_exit(context: RankContext) -> None:
    if _is_culprit(context):
        atexit.register(os.kill, os.getpid(), signal.SIGTERM)


def segfaults_at_exit(context: RankContext) -> None:
    """Read address zero in a hook."""
    if _is_culprit(context):
        atexit.register(ctypes.string_at, 0)


def exits_with_a_status(context: RankContext) -> None:
    """End the process in a hook, with a status that is not zero."""
    if _is_culprit(context):
        atexit.register(os._exit, 3)


def exits_too_early(context: RankContext) -> None:
    """End the process in a hook with status zero, before the other hooks."""
    if _is_culprit(context):
        atexit.register(os._exit, 0)


def leaves_a_child(context: RankContext) -> None:
    """Leave a fork in the rank's own session."""
    if _is_culprit(context):
        _note(context, forked(sessions=0))


def leaves_a_detached_child(context: RankContext) -> None:
    """Leave a program in a session of its own."""
    if _is_culprit(context):
        sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
        _kept.append(sleeper)
        _note(context, sleeper.pid)


def forks_a_daemon(context: RankContext) -> None:
    """Leave a fork in a session of its own, which holds every pipe of the rank."""
    if _is_culprit(context):
        _note(context, forked(sessions=1))


def forks_twice(context: RankContext) -> None:
    """Leave a fork whose parents have ended, in a session of its own."""
    if _is_culprit(context):
        _note(context, forked(sessions=2))


def dies_beside_a_daemon(context: RankContext) -> None:
    """Be killed while a fork holds every pipe of the rank."""
    if _is_culprit(context):
        _note(context, forked(sessions=1))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def dies_beside_an_orphaned_daemon(context: RankContext) -> None:
    """Be killed after a fork whose parents have ended."""
    if _is_culprit(context):
        _note(context, forked(sessions=2))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def waits_beside_a_daemon(context: RankContext) -> None:
    if _is_culprit(context):
        _note(context, forked(sessions=2))
    _wait_for_ever()


def kills_the_fork_server(context: RankContext) -> None:
    if _is_culprit(context):
        os.kill(os.getppid(), signal.SIGKILL)
    _wait_for_ever()


def dies_after_its_result(context: RankContext) -> None:
    """Kill the process when the result is on its way, while the other ranks still wait for this one."""
    if _is_culprit(context):
        threading.Thread(
            target=_kill_once_returned, args=(threading.main_thread().ident,), daemon=True
        ).start()
    else:
        dist.all_reduce(torch.ones(1))


def _kill_once_returned(rank: int) -> None:
    """Kill the process once the thread of the rank waits for another job."""
    while not _is_idle(rank):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def _is_idle(thread: int) -> bool:
    return not any(frame.f_code.co_name == "_report" for frame in _frames(thread))


def closes_its_connections(context: RankContext) -> None:
    """Shut every local connection, the one to the supervisor among them, and stay alive."""
    if _is_culprit(context):
        for number in sockets():
            with socket.socket(fileno=os.dup(number)) as connection:
                if connection.family is socket.AF_UNIX:
                    connection.shutdown(socket.SHUT_RDWR)
    _wait_for_ever()


def sockets() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found.append(int(name))
    return found


def sends_half_a_message(context: RankContext) -> None:
    """Announce a message on every connection that the rank has, and never send it."""
    for number in sockets():
        with contextlib.suppress(OSError):
            os.write(number, struct.pack("!i", 100) + b"half")
    _wait_for_ever()


def returns_a_megabyte(context: RankContext) -> list[str]:
    """Return more bytes than a pipe holds."""
    return [str(context.rank) * 2**10] * 2**10


def leaves_an_idle_executor(context: RankContext) -> None:
    """Leave threads that end when the interpreter asks them to."""
    executor = ThreadPoolExecutor(1)
    executor.submit(int).result()
    _kept.append(executor)


def leaves_a_thread_that_ends(context: RankContext) -> None:
    rank = threading.current_thread()
    threading.Thread(target=_outlast, args=(rank.ident,), daemon=False).start()


def _outlast(rank: int) -> None:
    """Run until the rank's thread has left the rank's body."""
    while any(frame.f_code.co_name == "run_rank" for frame in _frames(rank)):
        pass


def _frames(thread: int) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def leaves_a_daemon_thread(context: RankContext) -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def _wait_for_ever() -> None:
    while True:
        signal.pause()


def leaves_a_daemonic_worker(context: RankContext) -> None:
    """Leave a worker that multiprocessing ends at exit, as those of a data loader."""
    worker = multiprocessing.get_context("fork").Process(target=_wait_for_ever, daemon=True)
    worker.start()
    _kept.append(worker)


def waits_for_its_children(context: RankContext) -> None:
    subprocess.run(["true"], check=True, start_new_session=True)
    subprocess.run(["true"], check=True)


def leaves_a_child_that_follows(context: RankContext) -> None:
    """Leave a program that ends when the rank does: its input is a pipe that the rank holds."""
    _kept.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))


Body = Callable[[RankContext], object]
