"""One host process on another machine, or beside another launched process, as its supervisor sees it."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from shardproof.harness.errors import HarnessBug
from shardproof.harness.worlds.launched.agent_link import AgentLink
from shardproof.harness.worlds.messages import HostSpec, Job
from shardproof.harness.worlds.outcome import Died, Outcome, Raised, Returned
from shardproof.harness.worlds.processes.host_handle import pickled

# The network latency that is added to a limit that the agent keeps.
_WAY_S = 1.0


class RemoteHost:
    """The part of a `HostHandle` that a world uses, through an agent that has the handle."""

    def __init__(self, spec: HostSpec, agent: AgentLink) -> None:
        (self.rank,) = spec.ranks
        self.spec = spec
        self._agent = agent
        self._folder = Path(agent.hello.folder) / spec.folder.name
        self._num_jobs = 0
        self._begun = agent.send("start", replace(spec, folder=self._folder), tuple(sys.path))

    @property
    def is_ready(self) -> bool:
        """Return whether it can take a job."""
        return self._has_answered and self._agent.state.is_ready

    @property
    def has_left(self) -> bool:
        """Return whether all its work is done and it waits for its dismissal."""
        return self._has_answered and self._agent.state.has_left

    @property
    def is_over(self) -> bool:
        """Return whether it has ended, or cannot be reached any more."""
        return bool(self._agent.why_lost) or (self._has_answered and self._agent.state.is_over)

    @property
    def outcomes(self) -> dict[int, Outcome]:
        """The outcome of the rank, with the name of its machine, in the time of the supervisor's clock."""
        outcome = self._agent.state.outcome if self._has_answered else None
        if self._agent.why_lost and (outcome is None or isinstance(outcome, Returned)):
            outcome = Died(
                rank=self.rank,
                exit_code=None,
                is_attributed=True,
                text=self._agent.why_lost,
                is_after_result=outcome is not None,
            )
        if isinstance(outcome, Raised):
            outcome = replace(outcome, at_s=outcome.at_s + self._agent.behind_s)
        return {} if outcome is None else {self.rank: outcome}

    @property
    def pending(self) -> list[int]:
        """The rank, unless it has ended."""
        return [] if self.outcomes else [self.rank]

    @property
    def awaited(self) -> list[Connection | int]:
        """File objects that are readable as soon as the agent sends a message."""
        return [] if self.is_over else [self._agent.connection]

    def check_start(self) -> None:
        """Raise HarnessBug unless the process can take a job."""
        if not self.is_ready:
            self._refuse("its host to start")

    def check_server(self) -> None:
        """Raise HarnessBug if the process has ended and the fork server there does not report it."""
        self._agent.ask("check_server")
        if self._agent.state.error:
            self._refuse("the end of its host to be reported")

    def begin(self, job: Job) -> None:
        """Send the next job; its files go to a folder of the agent's."""
        self._num_jobs += 1
        folder = self._folder / f"job{self._num_jobs}"
        self._begun = self._agent.send("begin", pickled(replace(job, folder=folder)), folder)

    def dismiss(self) -> None:
        """Ask the process to leave, and once it has left, let it end."""
        self._agent.send("dismiss")

    def listen(self) -> None:
        """Receive all messages of the agent."""
        self._agent.listen()

    def ask_for_stacks(self) -> None:
        """Make the process write the stacks of all its threads."""
        self._agent.send("ask_for_stacks")

    def await_stacks(self, limit: float) -> None:
        """Wait for the stacks, at the latest until ``limit`` (time.monotonic); an agent may have none to send."""
        left_s = max(0.0, limit - time.monotonic())
        self._agent.await_answer(self._agent.send("await_stacks", left_s), left_s + _WAY_S)

    def stack(self, rank: int) -> str:
        """Return the stack of the rank, innermost frame first; empty if it did not arrive."""
        return self._agent.state.stack

    def miss_the_end(self, limit: float) -> None:
        """Record why the process does not end after its results."""
        self._agent.ask("miss_the_end", max(0.0, limit - time.monotonic()))

    def gather(self, folder: Path) -> None:
        """Fetch the rank's files of its last job."""
        self._gather("send_files", folder)
        if self._agent.state.error:
            self._refuse("the files of its rank")

    def look(self) -> None:
        """Ask the agent to record the processes below the host."""
        self._agent.send("look")

    def kill(self) -> None:
        """End the process itself."""
        self._agent.send("kill")

    def end_leaked(self) -> tuple[str, ...]:
        """End the processes that the rank left behind; returns their texts as a local world does."""
        self._agent.ask("end_leaked")
        return self._agent.state.leaks

    def release(self) -> None:
        """Fetch the output of the process, and have the agent drop the host."""
        self._gather("release", self.spec.folder)

    @property
    def _has_answered(self) -> bool:
        return self._agent.state.answered >= self._begun

    def _gather(self, method: str, folder: Path) -> None:
        self._agent.gathers_to = folder
        self._agent.ask(method)
        self._agent.gathers_to = None

    def _refuse(self, expected: str) -> None:
        raise HarnessBug(
            f"rank {self.rank} of world {self.spec.world} on {self._agent.hello.host}",
            expected=expected,
            got=self._agent.why_lost or self._agent.state.error or "nothing within the deadline",
            hint="`shardproof doctor` on that machine",
        )
