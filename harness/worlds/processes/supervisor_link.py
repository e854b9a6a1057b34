"""The pipe between a host and its supervisor, as the host sees it."""

from __future__ import annotations

import os
import queue
import threading
from multiprocessing.connection import Connection

from shardproof.harness.worlds.exception_outcome import raised, text_of
from shardproof.harness.worlds.messages import Finished, Job, Message, send


class SupervisorLink:
    """The pipe to the supervisor: any thread may send; jobs arrive through a queue."""

    def __init__(self, connection: Connection, ranks: tuple[int, ...]) -> None:
        self._connection = connection
        self._ranks = ranks
        self._lock = threading.Lock()
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="link", daemon=True).start()

    def _say_unloadable(self, error: Exception) -> None:
        text = text_of(error)
        message = f"the job cannot be loaded on the rank: {text}; send what importable modules define"
        for rank in self._ranks:
            self.send(Finished(outcome=raised(rank, error, message)))

    def send(self, message: Message) -> None:
        """Send one message; a value that is not plain is the sender's error."""
        with self._lock:
            send(self._connection, message)

    def _receive(self) -> None:
        while True:
            try:
                self.jobs.put(self._connection.recv())
            except (EOFError, OSError):
                os._exit(1)  # the supervisor is gone: leave no orphan
            except Exception as error:  # unpickling imports modules, which may raise anything
                self._say_unloadable(error)
