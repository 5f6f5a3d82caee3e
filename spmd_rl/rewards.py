"""The rewards of a run: functions with weights, called on completions as they finish, and what a failure gives.

Functions run in `reward_pool`'s processes, a completion a call; built-in ones of bounded time in the trainer. With
rewards.num_workers 0 all run in the trainer, each called once with all of the rank's completions, without any limit.
"""

import asyncio
import inspect
import sys
from collections.abc import Sequence
from typing import Any

from spmd_rl.batch import Completion, Prompt
from spmd_rl.config import ConfigError, RewardsConfig
from spmd_rl.reward_functions import check_result, find, is_async
from spmd_rl.reward_pool import Outcome, RewardPool

FAILURES_SHOWN = 5  # of a rank in a run; all are counted
MISTAKES = ("error", "wrong_result")  # of the function, whatever the completion


class RewardError(RuntimeError):
    """A reward function has failed in a way that rewards.on_error does not let pass."""


class Rewards:
    """The functions of a run, with their weights."""

    def __init__(self, config: RewardsConfig, max_completion_length: int = 0) -> None:
        """max_completion_length: for the rewards of length alone.

        Raises ConfigError for a function that cannot be found or is named twice, or whose extra is not installed.
        """
        if len(set(config.functions)) < len(config.functions):
            raise ConfigError(f"rewards.functions is {config.functions}: name each once; weigh it by rewards.weights")
        self._config, self._longest = config, max_completion_length
        self._functions = [find(name, config, max_completion_length) for name in config.functions]
        short = [name.rsplit(":", 1)[-1] for name in config.functions]
        self.names = short if len(set(short)) == len(short) else list(config.functions)
        self.weights = config.weights or [1.0] * len(self.names)
        self._in_pool = [i for i, function in enumerate(self._functions)
                         if config.num_workers and not getattr(function, "runs_in_trainer", False)]
        self._pool: RewardPool | None = None
        self._waiting: list[tuple[Prompt, Completion]] = []
        self._columns: set[str] = set()
        self._failures_shown = 0

    def start(self) -> None:
        """Start the pool's server where a function needs it, before this process uses a GPU."""
        if self._in_pool and self._pool is None:
            async_functions = {i for i in self._in_pool if is_async(self._functions[i])}
            self._pool = RewardPool(self._config, self._longest, async_functions)

    def close(self) -> None:
        """End the pool."""
        if self._pool:
            self._pool.close()
            self._pool = None

    def check_row(self, columns: dict[str, Any], where: str) -> None:
        """Raises ConfigError, before anything is loaded, where a function's column is not in the row."""
        for taken in ("prompts", "completions", "completion_ids"):
            if taken in columns:
                raise ConfigError(f"{where}: a column {taken!r}, which is an argument of every reward; rename it")
        for function in self._functions:
            for column in getattr(function, "columns", ()):
                if columns.get(column) is None:
                    raise ConfigError(f"{where}: no column {column!r}, or null, which a reward needs; "
                                      "data.columns can name another")
        self._columns |= columns.keys()

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> None:
        """Fill `rewards` and `reward` of each completion; prompts[i] is that of completions[i]."""
        for prompt in prompts:
            self._columns |= prompt.columns.keys()
        for prompt, completion in zip(prompts, completions, strict=True):
            self.submit(prompt, completion)
        self.collect()

    def submit(self, prompt: Prompt, completion: Completion) -> None:
        """Begin to score a completion; `collect` fills it. A column that only other rows have is None."""
        key = len(self._waiting)
        self._waiting.append((prompt, completion))
        if self._in_pool:
            self.start()
            assert self._pool
            self._pool.submit(key, self._arguments([(prompt, completion)]), self._in_pool)

    def collect(self) -> None:
        """Fill `rewards`, `reward` and `failures` of all that was submitted, and wait for the last of it.

        Raises RewardError for a function's exception or a result of wrong length or type, unless rewards.on_error is
        skip.
        """
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        outcomes = self._pool.collect() if self._pool else {}
        # They were submitted as they ended: a function that compares wants a prompt's together.
        keys = sorted(range(len(waiting)), key=lambda key: (waiting[key][1].group, waiting[key][1].sample))
        for number in range(len(self._functions)):
            if number not in self._in_pool:
                values = self._in_trainer(number, [waiting[key] for key in keys])
                outcomes |= {(key, number): Outcome(value) for key, value in zip(keys, values, strict=True)}
        for key in keys:
            self._fill(*waiting[key], [outcomes[key, number] for number in range(len(self._functions))])

    def _arguments(self, scored: Sequence[tuple[Prompt, Completion]]) -> dict[str, list]:
        columns = {name: [prompt.columns.get(name) for prompt, _ in scored] for name in sorted(self._columns)}
        return dict(prompts=[prompt.content for prompt, _ in scored], completions=[c.text for _, c in scored],
                    completion_ids=[c.token_ids for _, c in scored], **columns)

    def _in_trainer(self, number: int, scored: Sequence[tuple[Prompt, Completion]]) -> list[float | None]:
        result = self._functions[number](**self._arguments(scored))
        if inspect.isawaitable(result):
            result = asyncio.run(_wait(result))
        return check_result(f"reward {self._config.functions[number]}", result, len(scored))

    def _fill(self, prompt: Prompt, completion: Completion, outcomes: Sequence[Outcome]) -> None:
        completion.rewards, completion.failures = [], {}
        for name, outcome in zip(self.names, outcomes, strict=True):
            value = outcome.value
            if outcome.failure:
                self._report(name, prompt, completion, outcome)
                completion.failures[name] = outcome.failure
                value = self._config.failed_reward
            completion.rewards.append(value)
        scored = [w * r for w, r in zip(self.weights, completion.rewards, strict=True) if r is not None]
        completion.reward = sum(scored) if scored else None

    def _report(self, name: str, prompt: Prompt, completion: Completion, outcome: Outcome) -> None:
        text = (f"reward {name}, row {prompt.row}: {outcome.failure}: {outcome.detail.strip()}\n"
                f"  the completion: {completion.text!r:.300}")
        if outcome.failure in MISTAKES and self._config.on_error == "raise":
            raise RewardError(text)
        if self._failures_shown < FAILURES_SHOWN:
            self._failures_shown += 1
            print(text, file=sys.stderr, flush=True)


async def _wait(result: Any) -> Any:
    return await result
