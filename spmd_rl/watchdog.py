"""How a failure on one rank ends all: it writes an abort key into the rendezvous store, and every rank has a thread
that looks at it; so do ranks that find another one vanished or late.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

ABORT_KEY = "spmd_rl/abort"
ABORT_POLL_S = 0.5
BEAT_S = 2.0
VANISHED_S = 45.0  # longer than any call that keeps Python's lock; a killed rank should end all within a minute
LATE_SHARE = 0.9  # of mesh.timeout_s: before the process group's own time-out, which names nobody


@dataclass(frozen=True)
class Place:
    """How far a rank has come: ranks pass the same phases and collectives in the same order."""

    count: int
    """Phases and collectives entered so far."""
    phase: str
    since: float
    """time.monotonic() of the last of them."""

    def report(self) -> str:
        """`count seconds phase`, for other hosts, whose clocks differ."""
        return f"{self.count} {time.monotonic() - self.since:.0f} {self.phase}"


class AbortWatcher:
    """A thread that ends this process once any rank has set the abort key, and sets it itself for ranks that vanished
    or that keep the others waiting for almost mesh.timeout_s.

    It has a connection to the store of its own: the process group's client is locked while it waits. Each rank tells
    the store where it is, and looks whether the next rank still does: one read a rank and beat.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float, place: Callable[[], Place]) -> None:
        self._own, self._world_size, self._timeout_s, self._place = rank, world_size, timeout_s, place
        self._stop = threading.Event()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._key = f"{ABORT_KEY}/{attempt}"
        self._store = self._connect()
        self._abort_store = self._connect()
        self._next_beat, self._beats = 0.0, 0
        self._seen, self._seen_at = b"", time.monotonic()
        self._looks = 0
        self._thread = threading.Thread(target=self._watch, name="abort-watcher", daemon=True)
        self._thread.start()
        threading.Thread(target=self._guard, name="store-guard", daemon=True).start()

    @staticmethod
    def _connect() -> dist.TCPStore:
        return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False,
                             timeout=timedelta(seconds=60))

    def _watch(self) -> None:
        while not self._stop.wait(ABORT_POLL_S):
            try:
                reason = self._look()
            except dist.DistError as error:
                reason = f"the rendezvous store is gone, so the process that held it is: {error}"
            self._looks += 1
            if reason and not self._stop.is_set():
                self._leave(reason)

    def _guard(self) -> None:
        """Leave where the store no longer answers: a read from a host that is gone waits for ever."""
        looks, silent_s = -1, 0.0
        while not self._stop.wait(BEAT_S):
            # In turns of its own, not by the clock: a call that keeps Python's lock stops both threads.
            silent_s = silent_s + BEAT_S if looks == self._looks else 0.0
            looks = self._looks
            if silent_s >= VANISHED_S:
                self._leave(f"no answer for {silent_s:.0f} s from {os.environ['MASTER_ADDR']}, where the ranks meet: "
                            "that host is gone, or cannot be reached")

    def _leave(self, reason: str) -> NoReturn:
        print(f"[rank {self._own}] leaves: {reason}", file=sys.stderr, flush=True)
        leave(1)

    def _look(self) -> str | None:
        """Why to leave, or None."""
        if self._store.check([self._key]):
            return self._store.get(self._key).decode()
        if time.monotonic() >= self._next_beat:
            self._next_beat, self._beats = time.monotonic() + BEAT_S, self._beats + 1
            self._store.set(self._beat_key(self._own), f"{self._beats} {self._place().report()}")
            vanished = self._vanished((self._own + 1) % self._world_size)
            if vanished:
                return self._tell(vanished)
        place = self._place()
        waited_s = time.monotonic() - place.since
        if waited_s >= LATE_SHARE * self._timeout_s:
            late = [f"rank {rank} (in phase {phase} for {seconds} s)"
                    for rank, count, seconds, phase in self._others(self._store) if count < place.count]
            if late:
                return self._tell(f"rank {self._own} has waited {waited_s:.0f} s in phase {place.phase} for "
                                  f"{', '.join(late)}; mesh.timeout_s is {self._timeout_s:g}")
        return None

    def _beat_key(self, rank: int) -> str:
        return f"{self._key}/beat/{rank}"

    def _vanished(self, rank: int) -> str | None:
        """A message once the rank has told the store nothing new for VANISHED_S: killed, or on a host that is gone."""
        key = self._beat_key(rank)
        seen = self._store.get(key) if self._store.check([key]) else b""
        if seen != self._seen:
            self._seen, self._seen_at = seen, time.monotonic()
        silent_s = time.monotonic() - self._seen_at
        if silent_s < VANISHED_S:
            return None
        phase = seen.decode().split(" ", 3)[3] if seen else "start-up"
        return f"rank {rank} has vanished: no sign of life for {silent_s:.0f} s, last seen in phase {phase}"

    def _others(self, store: dist.TCPStore) -> list[tuple[int, int, int, str]]:
        """(rank, count, seconds, phase) of the other ranks that have said so."""
        found = []
        for rank in range(self._world_size):
            if rank != self._own and store.check([self._beat_key(rank)]):
                _, count, seconds, phase = store.get(self._beat_key(rank)).decode().split(" ", 3)
                found.append((rank, int(count), int(seconds), phase))
        return found

    def describe_others(self) -> str:
        """Where the other ranks are, a line each; for an error that came from waiting for them."""
        try:
            return "\n".join(f"rank {rank} is in phase {phase} for {seconds} s"
                             for rank, _, seconds, phase in self._others(self._abort_store))
        except dist.DistError as error:
            return f"the rendezvous store is gone: {error}"

    def _tell(self, reason: str) -> str:
        self._store.set(self._key, reason)
        return reason

    def abort(self, reason: str) -> None:
        """Tell every rank to leave."""
        self._stop.set()
        try:
            self._abort_store.compare_set(self._key, "", reason)  # the first failure is the cause of later ones
        except dist.DistError as error:
            print(f"[rank {self._own}] could not tell the others: {error}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join()


def leave(code: int) -> NoReturn:
    """Exit without Python's tear-down, which would wait for other threads and groups."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
