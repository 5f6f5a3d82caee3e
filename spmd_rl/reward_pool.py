"""Processes that run reward functions, so that no completion can stall or end the trainer.

A rank starts one server, a fresh interpreter without torch, before its GPU is in use. The server forks
workers, hands each one completion at a time and puts an end to what outlives its limit; the trainer
only writes calls and, once its engine is done, reads outcomes. The kernel tells the server of the trainer's end,
however that comes, and ends workers with the server.
"""

import asyncio
import contextlib
import ctypes
import glob
import inspect
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from spmd_rl.config import RewardsConfig
from spmd_rl.reward_functions import RewardFunction, find, numbers

ASYNC_CALLS = 64  # of async functions, at once in their one worker
START_S = 300.0  # for a worker to import the user's file
LATE_S = 2.0  # after which an event loop that keeps no time-out is taken for blocked
PR_SET_PDEATHSIG = 1
TRAINER_ENDED = signal.SIGHUP  # to the server, from the kernel; its terminal is none
SIGNALS_TO_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # which decides what to do


@dataclass(frozen=True)
class Outcome:
    """What one function said of one completion."""

    value: float | None
    failure: str | None = None
    """timeout, crash (the process ended), memory, not_finite; error (an exception), wrong_result (length or type)."""
    detail: str = ""


@dataclass(eq=False)
class Call:
    """One completion, for one or several functions."""

    key: int
    arguments: dict[str, list]
    functions: deque[int]
    """Those without an outcome yet, in order."""
    started: float = 0.0


# The trainer's end. --------------------------------------------------------------------------------------------------


class RewardPool:
    """The trainer's connection to its server."""

    def __init__(self, config: RewardsConfig, max_completion_length: int, async_functions: set[int]) -> None:
        """Start the server; its workers are forked when there is something to do.

        async_functions: places in rewards.functions of those that give a coroutine.
        """
        ours, theirs = socket.socketpair()
        code = f"from spmd_rl.reward_pool import serve; serve({theirs.fileno()})"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        # A session of its own: Ctrl-C in a terminal is the trainer's.
        self._process = subprocess.Popen([sys.executable, "-P", "-c", code], pass_fds=[theirs.fileno()],
                                         env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()
        self._connection = Connection(ours.detach())
        self._send((os.getpid(), config, max_completion_length, async_functions))

    def submit(self, key: int, arguments: dict[str, list], functions: Sequence[int]) -> None:
        """Score one completion by the functions of these places; returns at once. `key` names it in the outcomes."""
        self._send(Call(key, arguments, deque(functions)))

    def collect(self) -> dict[tuple[int, int], Outcome]:
        """(key, function) -> outcome of all that was submitted since the last time; waits for the last of them.

        Raises RuntimeError where the functions cannot be loaded in a worker, or the server is gone.
        """
        self._send(None)
        try:
            found = self._connection.recv()
        except (EOFError, ConnectionError):
            self._gone()
        if isinstance(found, str):
            raise RuntimeError(f"the reward functions cannot be loaded in a process of their own:\n{found}")
        return found

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except ConnectionError:
            self._gone()

    def _gone(self) -> NoReturn:
        raise RuntimeError(f"the server of the reward processes has ended with {self._process.wait()}: "
                           "killed, or out of memory?") from None

    def close(self) -> None:
        """End the server and its workers."""
        self._connection.close()
        self._process.wait()


# The server. ---------------------------------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """The server's main: until the trainer's end of the socket is closed."""
    trainer = Connection(descriptor)
    pid, *arguments = trainer.recv()
    for number in SIGNALS_TO_THE_TRAINER:
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs that a reward starts would inherit
    signal.signal(TRAINER_ENDED, lambda *_: sys.exit(1))
    _end_with(pid, TRAINER_ENDED)  # its closed socket says so too, unless another process holds a copy of it
    server = Server(trainer, *arguments)
    try:
        server.run()
    finally:
        signal.signal(TRAINER_ENDED, signal.SIG_IGN)  # it follows on the closed socket
        server.close()


@dataclass(eq=False)
class Worker:
    """A forked process, as the server sees it."""

    pid: int
    connection: Connection
    capacity: int
    calls: list[Call] = field(default_factory=list)
    is_ready: bool = False
    born: float = field(default_factory=time.monotonic)


class Server:
    """Hands calls to workers, keeps their outcomes until they are asked for, and replaces workers that end."""

    def __init__(self, trainer: Connection, config: RewardsConfig, max_completion_length: int,
                 async_functions: set[int]) -> None:
        self._trainer, self._config, self._longest = trainer, config, max_completion_length
        self._async_functions = async_functions
        for name in config.functions:
            if ":" not in name:
                find(name, config, max_completion_length)  # its library is imported once, and shared by the workers
        self._queues: dict[bool, deque[Call]] = {False: deque(), True: deque()}  # of plain and of async functions
        self._workers: dict[bool, list[Worker]] = {False: [], True: []}
        self._outcomes: dict[tuple[int, int], Outcome] = {}
        self._is_asked = False
        self._fault: str | None = None

    def run(self) -> None:
        """Serve until the trainer is gone."""
        while True:
            workers = [w for pool in self._workers.values() for w in pool]
            by_connection = {w.connection: w for w in workers}
            for ready in wait([self._trainer, *by_connection], self._next_deadline(workers)):
                if ready is not self._trainer:
                    self._hear(by_connection[ready])  # type: ignore[index]
                    continue
                try:
                    self._take(self._trainer.recv())
                except (EOFError, ConnectionError):
                    return
            self._end_late()
            self._hand_out()
            self._answer()

    def close(self) -> None:
        """End all workers, and what they started."""
        for worker in [w for pool in self._workers.values() for w in pool]:
            self._end(worker)

    def _take(self, message: Call | None) -> None:
        if message is None:
            self._is_asked = True
            return
        plain = deque(f for f in message.functions if f not in self._async_functions)
        if plain:
            self._queues[False].append(Call(message.key, message.arguments, plain))
        for function in message.functions:
            if function in self._async_functions:
                self._queues[True].append(Call(message.key, message.arguments, deque([function])))

    def _answer(self) -> None:
        """What was asked for, once all of it is known: the trainer reads only then."""
        busy = any(self._queues.values()) or any(w.calls for pool in self._workers.values() for w in pool)
        if self._is_asked and (self._fault or not busy):
            self._trainer.send(self._fault or self._outcomes)
            self._outcomes, self._is_asked = {}, False

    def _hand_out(self) -> None:
        for kind, queue in self._queues.items():
            most = 1 if kind else self._config.num_workers
            while queue and not self._fault:
                pool = self._workers[kind]
                free = next((w for w in pool if w.is_ready and len(w.calls) < w.capacity), None)
                if free is None:
                    starting = sum(not w.is_ready for w in pool)
                    if len(pool) < most and starting < len(queue):
                        pool.append(self._fork(kind))
                        continue
                    break
                call = queue.popleft()
                call.started = time.monotonic()
                free.calls.append(call)
                with contextlib.suppress(ConnectionError):  # ended meanwhile: heard of when it is listened to
                    free.connection.send(call)

    def _fork(self, is_async_kind: bool) -> Worker:
        ours, theirs = socket.socketpair()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._trainer.close()
            for pool in self._workers.values():
                for other in pool:
                    other.connection.close()
            work(server, Connection(theirs.detach()), self._config, self._longest, is_async_kind)
        theirs.close()
        return Worker(pid, Connection(ours.detach()), ASYNC_CALLS if is_async_kind else 1)

    def _hear(self, worker: Worker) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, ConnectionError):
            self._replace(worker, "crash", "the process ended")
            return
        if message is None:
            worker.is_ready = True
        elif isinstance(message, str):
            self._fault = message
        else:
            key, function, outcome = message
            call = next(c for c in worker.calls if c.key == key and function in c.functions)
            self._settle(call, function, outcome)
            call.started = time.monotonic()
            if not call.functions:
                worker.calls.remove(call)
            if outcome.failure == "memory":
                self._replace(worker, "memory", "")  # what it still holds is unknown

    def _settle(self, call: Call, function: int, outcome: Outcome) -> None:
        call.functions.remove(function)
        self._outcomes[call.key, function] = outcome

    def _limit_s(self, worker: Worker) -> float:
        return self._config.timeout_s + (LATE_S if worker.capacity > 1 else 0)

    def _next_deadline(self, workers: Sequence[Worker]) -> float | None:
        """Seconds until the first limit is reached."""
        ends = [call.started + self._limit_s(w) for w in workers for call in w.calls]
        ends += [w.born + START_S for w in workers if not w.is_ready]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _end_late(self) -> None:
        now = time.monotonic()
        for worker in [w for pool in self._workers.values() for w in pool]:
            if any(now - call.started >= self._limit_s(worker) for call in worker.calls):
                self._replace(worker, "timeout", f"longer than rewards.timeout_s, {self._config.timeout_s:g}")
            elif not worker.is_ready and now - worker.born >= START_S:
                self._end(worker)
                self._fault = f"importing them took longer than {START_S:g} s"

    def _replace(self, worker: Worker, failure: str, detail: str) -> None:
        """End a worker. The function that it was at has failed; what it had not come to is done by another."""
        status = self._end(worker)
        if failure == "crash":
            detail = f"exit code {status}" if status >= 0 else f"signal {-status}, {signal.strsignal(-status)}"
            if not worker.is_ready:
                self._fault = self._fault or f"the process ended while it loaded them: {detail}"
        for call in worker.calls:
            # Of async calls many are begun, and who is to blame is not known: each again, in a plain worker.
            if worker.capacity == 1 and failure != "memory":
                self._settle(call, call.functions[0], Outcome(None, failure, detail))
            if call.functions:
                self._queues[False].appendleft(call)
        worker.calls = []

    def _end(self, worker: Worker) -> int:
        """Kill the worker and what it started; its exit code, or minus its signal."""
        for pool in self._workers.values():
            if worker in pool:
                pool.remove(worker)
        below = _descendants(worker.pid)  # some may be in a session of their own; once it is dead they are not below it
        for kill, pid in ((os.killpg, worker.pid), *((os.kill, pid) for pid in (worker.pid, *below))):
            with contextlib.suppress(ProcessLookupError):  # it may not have made its group yet
                kill(pid, signal.SIGKILL)
        worker.connection.close()
        return os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])


# A worker. -----------------------------------------------------------------------------------------------------------


def work(server: int, connection: Connection, config: RewardsConfig, max_completion_length: int,
         is_async_kind: bool) -> NoReturn:
    """A worker's whole life: load the functions, say so, score."""
    try:
        signal.signal(TRAINER_ENDED, signal.SIG_DFL)
        _end_with(server, signal.SIGKILL)
        os.setsid()  # the server ends the group: what a reward has started goes with it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it is killed, never flushed
        try:
            functions = [find(name, config, max_completion_length) for name in config.functions]
        except BaseException:
            connection.send(traceback.format_exc())
            raise
        # Of its own writable memory: address space that a library only reserves does not count.
        limit = _data_bytes() + int(config.memory_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        connection.send(None)
        if is_async_kind:
            asyncio.run(_work_async(connection, functions, config))
        while True:
            call = connection.recv()
            for number in call.functions:
                outcome = score(config.functions[number], functions[number], call.arguments)
                connection.send((call.key, number, outcome))
    finally:
        os._exit(1)  # the server's clean-up is not ours


async def _work_async(connection: Connection, functions: Sequence[RewardFunction], config: RewardsConfig) -> None:
    tasks: set[asyncio.Task] = set()

    async def run(call: Call, number: int) -> None:
        name = config.functions[number]

        async def result() -> Any:
            return await functions[number](**call.arguments)

        try:
            outcome = _judge(name, await asyncio.wait_for(result(), config.timeout_s))
        except TimeoutError:
            outcome = Outcome(None, "timeout", f"longer than rewards.timeout_s, {config.timeout_s:g}")
        except BaseException as error:
            outcome = _failure(error)
        connection.send((call.key, number, outcome))

    def take() -> None:
        call = connection.recv()
        for number in call.functions:
            task = asyncio.ensure_future(run(call, number))
            tasks.add(task)  # the loop itself keeps no hold of it
            task.add_done_callback(tasks.discard)

    asyncio.get_running_loop().add_reader(connection.fileno(), take)
    await asyncio.Event().wait()


def score(name: str, function: RewardFunction, arguments: dict[str, list]) -> Outcome:
    """Call a function on one completion; whatever it does but ending the process is an outcome."""
    try:
        result = function(**arguments)
        if inspect.isawaitable(result):
            result = asyncio.run(_wait(result))
        return _judge(name, result)
    except BaseException as error:
        return _failure(error)


async def _wait(result: Any) -> Any:
    return await result


def _judge(name: str, result: Any) -> Outcome:
    try:
        value, = numbers(f"reward {name}", result, 1)
    except ValueError as error:
        return Outcome(None, "wrong_result", str(error))
    if value is not None and not math.isfinite(value):
        return Outcome(None, "not_finite", str(value))
    return Outcome(value)


def _failure(error: BaseException) -> Outcome:
    if isinstance(error, MemoryError):
        return Outcome(None, "memory", "more than rewards.memory_gib")
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return Outcome(None, "crash", repr(error))
    return Outcome(None, "error", "".join(traceback.format_exception(error)))


def _end_with(parent: int, number: int) -> None:
    """Let the kernel send this process a signal when its parent ends, whatever it is doing then."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)  # it ended before that


def _descendants(pid: int) -> list[int]:
    """The processes that it started, and those that these did."""
    children: dict[int, list[int]] = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError), open(path, "rb") as file:  # one that has ended meanwhile
            parent = int(file.read().rpartition(b")")[2].split()[1])  # before that is its name, of any characters
            children.setdefault(parent, []).append(int(path.split("/")[2]))
    found = [pid]
    for process in found:
        found += children.get(process, [])
    return found[1:]


def _data_bytes() -> int:
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[5]) * resource.getpagesize()
