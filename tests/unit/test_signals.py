"""Requests to stop: which signals, what a second one does, forked children, and the time limit."""

import os
import signal
import subprocess
import sys
import time

import pytest

from spmd_rl import signals
from spmd_rl.signals import SIGNALS, StopRequest, process_seconds


@pytest.fixture(autouse=True)
def handlers_back():
    """The tests' own handlers are there again afterwards."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_nothing_else(number, capfd):
    """The process goes on, knows the signal's name, and has said once what will happen."""
    stop = StopRequest(0)
    assert stop.reason() is None
    os.kill(os.getpid(), number)
    assert stop.reason() == number.name
    os.kill(os.getpid(), signal.SIGTERM)  # a second one, of whatever kind
    assert stop.reason() == number.name
    assert capfd.readouterr().err.count("the run ends after this step") == 1


def test_a_forked_child_ends_by_a_signal():
    """A child that inherited the handler has no steps to stop between: it ends as any process does."""
    StopRequest(0)
    runs, says = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(says, b"x")
        time.sleep(20)
        os._exit(0)
    os.read(runs, 1)  # a signal in the middle of the fork itself is dropped by Python
    os.kill(child, signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    os.close(runs)
    os.close(says)


def test_the_time_limit_counts_from_the_process_start(monkeypatch):
    """Minutes of the process, imports and all; 0 is no limit."""
    monkeypatch.setattr(signals, "process_seconds", lambda: 90.0)
    assert StopRequest(1.5).reason() == "run.max_train_minutes 1.5"
    assert StopRequest(1.51).reason() is None
    assert StopRequest(0).reason() is None


def test_process_seconds_are_those_of_the_process():
    """A fresh process has lived for about as long as its parent waited for it."""
    code = "import time; time.sleep(0.5); from spmd_rl.signals import process_seconds; print(process_seconds())"
    start = time.monotonic()
    found = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0.4 < found < time.monotonic() - start + 0.1
    assert process_seconds() > 0
