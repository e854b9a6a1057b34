"""One process of a world, from its start to its end: connects to the supervisor, hosts one rank or many threads."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import NoReturn

import torch
import torch.distributed as dist

from shardproof.harness.torch_compat.accelerators import (
    backends_for,
    device_of_rank,
    hide_accelerators,
    make_current,
    own_stream,
)
from shardproof.harness.torch_compat.process_groups import FileStore, HashStore, Store, TCPStore
from shardproof.harness.tracing.collectives.interception import Interceptor, standing_in_c10d
from shardproof.harness.tracing.current_rank import bind_rank, current_rank
from shardproof.harness.tracing.operators import current_witnesses
from shardproof.harness.tracing.recorder import Recorder
from shardproof.harness.worlds.exception_outcome import raised, text_of
from shardproof.harness.worlds.messages import Dying, Finished, HostSpec, Job, Ready, Started
from shardproof.harness.worlds.outcome import Raised, Returned
from shardproof.harness.worlds.output import redirect_output
from shardproof.harness.worlds.processes.leaving import await_threads, leave, start_afresh
from shardproof.harness.worlds.processes.lineage import adopt_orphans
from shardproof.harness.worlds.processes.supervisor_link import SupervisorLink
from shardproof.harness.worlds.rank import RankContext, journal_path, run_rank
from shardproof.harness.worlds.simulated import simulating
from shardproof.harness.worlds.spec import WorldKind, WorldSpec
from shardproof.harness.worlds.threads.isolation import isolate_threads
from shardproof.harness.worlds.threads.process_group import (
    MemoryStore,
    global_ranks,
    register_threads_backend,
)
from shardproof.harness.worlds.threads.scheduler import STALLED_AFTER_S, Scheduler
from shardproof.harness.worlds.threads.transport import InMemoryTransport

# This many of the longest turns fit before the deadline, so that the waits of ranks can still be reported.
_TURNS_TO_DEADLINE = 4
# The host sleeps while it waits for a device, and while a kernel is loaded for the first time.
_STALLED_ON_DEVICE_AFTER_S = 10.0
# A group's own timeout must not fire before the world's deadline, which reports more about the cause.
_BEYOND_DEADLINE_S = 60.0


def host_main(connection: Connection, spec: HostSpec) -> None:
    """Host the ranks of ``spec`` until the supervisor sends None, then leave; runs in a process of its own."""
    os.setsid()  # one process group per host, so that all processes that a rank starts can be ended with it
    adopt_orphans()  # a child that leaves the group, and whose parent has ended, stays below its host
    start_afresh()
    redirect_output(spec.output_file)
    if spec.world.device == "cpu":
        hide_accelerators()
    os.environ.update(spec.temporary)
    tempfile.tempdir = None  # the fork server's may have been used
    with spec.stack_file.open("w") as stacks:
        faulthandler.enable(stacks, all_threads=True)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        torch.set_num_threads(1)
        link = SupervisorLink(connection, spec.ranks)
        match spec.world.kind:
            case WorldKind.THREADS:
                _host_threads(link, spec)
            case WorldKind.SIMULATED:
                _host_simulated(link, spec)
            case WorldKind.PROCESSES | WorldKind.LAUNCHED:
                _host_process(link, spec)
        leave(link)


def _host_process(link: SupervisorLink, spec: HostSpec) -> None:
    world, (rank,) = spec.world, spec.ranks
    recorders: list[Recorder] = []
    os.environ.update(spec.environment)
    device = device_of_rank(world.device, int(spec.environment["LOCAL_RANK"]))

    def enter() -> None:
        if not dist.is_initialized():
            make_current(device)
            _join(world, backends_for(world.device), _store(spec), rank)

    interceptor = Interceptor(
        recorder=lambda: recorders[-1] if recorders else None,
        ranks_of=global_ranks,
        observer=current_witnesses,
    )
    with standing_in_c10d(interceptor):
        link.send(Ready())
        while (job := link.jobs.get()) is not None:
            link.send(Started(rank=rank, thread_ident=threading.get_ident()))
            context = _context(world, rank, device, job)
            recorders.append(context.recorder)
            _report(link, context, job, enter)
        if dist.is_initialized():
            _destroy_groups(link, rank)
        await_threads(link)


def _store(spec: HostSpec) -> Store:
    if spec.store is None:
        return FileStore(str(spec.folder / "store"), spec.world.size)
    return TCPStore(
        spec.environment["MASTER_ADDR"], spec.store, timeout=timedelta(seconds=spec.world.deadline_s)
    )


def _destroy_groups(link: SupervisorLink, rank: int) -> None:
    """Destroy the process groups as a script does; an error replaces the rank's result."""
    try:
        dist.destroy_process_group()
    except Exception as error:
        link.send(Finished(outcome=raised(rank, error)))


def _host_threads(link: SupervisorLink, spec: HostSpec) -> None:
    world = spec.world
    store = MemoryStore()
    recorders: dict[int, Recorder] = {}

    def recorder() -> Recorder | None:
        rank = current_rank()
        return None if rank is None else recorders.get(rank)

    register_threads_backend(world.device)
    device = device_of_rank(world.device, 0)  # the transport copies within one device
    # torch 2.15 records the calls of every group once per process, see pytorch#189363: ranks that are threads would
    # share one record.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    with isolate_threads(), _reporting_exit(link):
        link.send(Ready())
        while (job := link.jobs.get()) is not None:
            scheduler = store.scheduler = Scheduler(
                world.size,
                job.seed,
                longest_s=world.deadline_s / _TURNS_TO_DEADLINE,
                stalled_after_s=STALLED_AFTER_S if world.device == "cpu" else _STALLED_ON_DEVICE_AFTER_S,
            )
            transport = InMemoryTransport(world.size, scheduler)
            contexts = [_context(world, rank, device, job) for rank in range(world.size)]
            recorders.update({c.rank: c.recorder for c in contexts})
            interceptor = Interceptor(
                recorder=recorder, ranks_of=global_ranks, transport=transport, observer=current_witnesses
            )
            with standing_in_c10d(interceptor):
                _run_threads(
                    link,
                    job,
                    contexts,
                    scheduler,
                    transport,
                    lambda rank: _join(world, "threads", store, rank),
                )
        await_threads(link)


def _host_simulated(link: SupervisorLink, spec: HostSpec) -> None:
    """Run each rank of a sample by itself: it has all process groups of its rank, without peers."""
    world, recorders = spec.world, list[Recorder]()
    register_threads_backend()
    with standing_in_c10d(simulating(lambda: recorders[-1] if recorders else None)), _reporting_exit(link):
        link.send(Ready())
        while (job := link.jobs.get()) is not None:
            for rank in spec.ranks:
                link.send(Started(rank=rank, thread_ident=threading.get_ident()))
                context = _context(world, rank, torch.device("cpu"), job)
                recorders.append(context.recorder)
                _report(link, context, job, partial(_join, world, "threads", HashStore(), rank))
                if dist.is_initialized():
                    _destroy_groups(link, rank)
        await_threads(link)


def _run_threads(
    link: SupervisorLink,
    job: Job,
    contexts: list[RankContext],
    scheduler: Scheduler,
    transport: InMemoryTransport,
    join: Callable[[int], None],
) -> None:
    def live(context: RankContext) -> None:
        bind_rank(context.rank)
        torch.set_num_threads(1)  # per thread under OpenMP
        own_stream(context.device)
        link.send(Started(rank=context.rank, thread_ident=threading.get_ident()))
        scheduler.begin(context.rank)
        try:
            outcome = _report(
                link, context, job, lambda: None if dist.is_initialized() else join(context.rank)
            )
            match outcome:
                case Returned():
                    transport.leave(context.rank)
                case Raised(is_symptom=False):
                    transport.abort(f"rank {context.rank} raised {outcome.kind}: {outcome.message}")
        finally:
            scheduler.end(context.rank)

    threads = [threading.Thread(target=live, args=(c,), name=f"rank{c.rank}", daemon=True) for c in contexts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _report(
    link: SupervisorLink, context: RankContext, job: Job, enter: Callable[[], None]
) -> Returned | Raised | None:
    outcome = run_rank(context, job, enter)
    try:
        link.send(Finished(outcome=outcome))
    except Exception as error:  # a value may raise any error when it is read
        message = f"the rank's result cannot be sent: {text_of(error)}; return plain values"
        own = raised(context.rank, error, message)
        try:
            link.send(Finished(outcome=own))
        except BaseException:  # nothing can be sent: this thread's stack shows which rank it was
            lost = outcome if isinstance(outcome, Raised) else own
            os.write(2, lost.traceback.encode())
            os.abort()
        return own
    return outcome if isinstance(outcome, Returned | Raised) else None


def _context(world: WorldSpec, rank: int, device: torch.device, job: Job) -> RankContext:
    return RankContext(
        rank=rank,
        size=world.size,
        device=device,
        folder=job.folder,
        recorder=Recorder(journal_path(job.folder, rank)),
        shares_a_process=world.kind.shares_a_process,
        is_simulated=world.kind is WorldKind.SIMULATED,
    )


def _join(world: WorldSpec, backend: str, store: Store, rank: int) -> None:
    timeout_s = world.collective_timeout_s or world.deadline_s + _BEYOND_DEADLINE_S
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world.size, timeout=timedelta(seconds=timeout_s)
    )


@contextlib.contextmanager
def _reporting_exit(link: SupervisorLink) -> Iterator[None]:
    """Record which rank is about to end the process that all ranks share: the exit status cannot name it.

    It replaces an audit hook, which Python would call for every ``id()`` and every access to a frame's code.
    """
    silent_exit, kill, killpg = os._exit, os.kill, os.killpg

    def say(call: str) -> None:
        rank = current_rank()
        if rank is not None:
            link.send(Dying(rank=rank, call=call))

    def reporting_exit(status: int) -> NoReturn:
        say(f"os._exit({status})")
        silent_exit(status)

    def aloud(send_signal: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def signal_aloud(target: int, number: int, /) -> None:
            if target in {os.getpid(), os.getpgid(0), 0, -1}:
                say(f"os.{send_signal.__name__}({target}, {number!r})")
            send_signal(target, number)

        return signal_aloud

    os._exit, os.kill, os.killpg = reporting_exit, aloud(kill), aloud(killpg)
    try:
        yield
    finally:
        os._exit, os.kill, os.killpg = silent_exit, kill, killpg
