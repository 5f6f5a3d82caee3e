"""Being asked to stop: signals from a user or a scheduler, and the run's own time limit.

A request is only noted; the run looks at it between two steps, where all ranks agree. The end of a run after a
peer's failure looks the same to a handler (the launcher sends SIGTERM): it is told apart by the abort key, which the
failing rank sets first and `watchdog.AbortWatcher` acts on, whatever was noted here.
"""

import os
import signal
import time
from types import FrameType

EXIT_STOPPED = 75
"""Ended early on request, with a checkpoint: start again to go on (EX_TEMPFAIL of sysexits.h)."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class StopRequest:
    """Notes the first request to stop."""

    def __init__(self, max_minutes: float) -> None:
        """Take over the signals; SIGQUIT and SIGKILL still end the process at once.

        max_minutes: from the process's start, 0 for no limit.
        """
        self._signal: str | None = None
        self._pid = os.getpid()
        self._max_minutes = max_minutes
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child has inherited the handler, not the steps to stop between
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self._signal is None:  # a second one, in the middle of the save, changes nothing
            self._signal = signal.Signals(number).name
            # Not print: the signal may have come in the middle of one.
            os.write(2, f"{self._signal}: the run ends after this step, with a checkpoint (SIGQUIT ends it now)\n"
                     .encode())

    def reason(self) -> str | None:
        """Why to stop now, or None."""
        if self._signal:
            return self._signal
        if self._max_minutes and process_seconds() >= 60 * self._max_minutes:
            return f"run.max_train_minutes {self._max_minutes:g}"
        return None


def process_seconds() -> float:
    """Seconds since this process was started, imports and all."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])  # field 22, since the machine's boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
