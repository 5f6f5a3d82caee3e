"""A reward that interrupts the run from inside a step (rewards.num_workers 0), for runs that have to go on afterwards.

The environment's INTERRUPT is CALL:RANK:SIGNAL[:WHOM]; in this process's CALL-th call on RANK the signal goes to this
process, or to its parent (the launcher) where WHOM is `parent`. Evaluations are calls too. AGAIN names a signal that
this process and its parent get once more, in the middle of the save that follows. Each call takes REWARD_SECONDS, for
runs that are interrupted from outside.
"""

import os
import signal
import time

from spmd_rl import shards

calls = []
write = shards.write


def write_and_signal(*arguments):
    """A rank's files of a checkpoint, with a signal before them and one after."""
    last = len(calls) == int(os.environ["INTERRUPT"].split(":")[0])
    for process in (os.getpid(), os.getppid()) if last else ():
        print(f"{os.environ['AGAIN']} to {process} in the save", flush=True)
        os.kill(process, signal.Signals[f"SIG{os.environ['AGAIN']}"])
    names = write(*arguments)
    if last:
        os.kill(os.getpid(), signal.SIGUSR2)
    return names


if "AGAIN" in os.environ:
    shards.write = write_and_signal


def reward(completions, answer, **columns):
    """The share of the answer's digits that are at their places."""
    calls.append(1)
    time.sleep(float(os.environ.get("REWARD_SECONDS", "0")))
    call, rank, name, whom = (os.environ.get("INTERRUPT", "0:0:TERM") + ":self").split(":")[:4]
    if len(calls) == int(call) and os.environ["RANK"] == rank:
        os.kill(os.getppid() if whom == "parent" else os.getpid(), signal.Signals[f"SIG{name}"])
    return [sum(a == b for a, b in zip(text, right)) / len(right)
            for text, right in zip(completions, answer, strict=True)]
