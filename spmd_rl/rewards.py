"""Reward functions: the built-in ones, the user's own, and how their results are checked.

A reward is ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``, plain or async:
`prompts` as the data has them, `completions` as text, `columns` the data's other columns, one entry a
completion. None says that the function does not apply to that completion. A function that raises ends
the run: an error in a verifier is not a wrong answer.
"""

import asyncio
import importlib
import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from spmd_rl.batch import Completion, Prompt
from spmd_rl.config import ConfigError, RewardsConfig, load_function

RewardFunction = Callable[..., Any]


class Rewards:
    """The functions of a run, with their weights."""

    def __init__(self, config: RewardsConfig, max_completion_length: int = 0) -> None:
        """max_completion_length: for soft_overlong alone.

        Raises ConfigError for a function that cannot be found or is named twice, or whose extra is not installed.
        """
        if len(set(config.functions)) < len(config.functions):
            raise ConfigError(f"rewards.functions is {config.functions}: name each once; weigh it by rewards.weights")
        self._functions = {name: _find(name, config, max_completion_length) for name in config.functions}
        short = [name.rsplit(":", 1)[-1] for name in self._functions]
        self.names = short if len(set(short)) == len(short) else list(self._functions)
        self.weights = config.weights or [1.0] * len(self.names)

    def check_columns(self, prompts: Sequence[Prompt], source: str) -> None:
        """Raises ConfigError, before anything is loaded, where a built-in's column is not in the data."""
        for taken in ("prompts", "completions", "completion_ids"):
            bad = next((p.row for p in prompts if taken in p.columns), None)
            if bad is not None:
                raise ConfigError(f"{source}, row {bad}: a column {taken!r}, which is an argument of every reward; "
                                  "rename it")
        for function in self._functions.values():
            for column in getattr(function, "columns", ()):
                bad = next((p.row for p in prompts if p.columns.get(column) is None), None)
                if bad is not None:
                    raise ConfigError(f"{source}, row {bad}: no column {column!r}, or null, which a reward needs")

    def score(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> None:
        """Fill `rewards` and `reward` of each completion; prompts[i] is that of completions[i]."""
        if not completions:
            return
        names = {name for prompt in prompts for name in prompt.columns}
        columns = {name: [p.columns.get(name) for p in prompts] for name in sorted(names)}
        scores = []
        for name, function in self._functions.items():
            result = function(prompts=[p.content for p in prompts], completions=[c.text for c in completions],
                              completion_ids=[c.token_ids for c in completions], **columns)
            if inspect.isawaitable(result):
                result = asyncio.run(_wait(result))
            scores.append(check_result(f"reward {name}", result, len(completions)))
        for i, completion in enumerate(completions):
            completion.rewards = [values[i] for values in scores]
            scored = [w * r for w, r in zip(self.weights, completion.rewards, strict=True) if r is not None]
            completion.reward = sum(scored) if scored else None


async def _wait(result: Any) -> Any:
    return await result


def check_result(name: str, result: Any, expected: int) -> list[float | None]:
    """The function's result (a reward's, or the user's advantages) as a list of `expected` floats or None.

    Raises ValueError for anything else: one value spread over all completions would be trained on silently.
    """
    if not isinstance(result, (list, tuple)) and hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        raise ValueError(f"{name} returned {type(result).__name__}: return a list of {expected} floats")
    if len(result) != expected:
        raise ValueError(f"{name} returned {len(result)} values for {expected} completions")
    checked: list[float | None] = []
    for i, value in enumerate(result):
        try:
            number = None if value is None else float(value)
        except (TypeError, ValueError):
            raise ValueError(f"{name} returned {value!r} for completion {i}: return a float or None") from None
        if number is not None and not math.isfinite(number):
            raise ValueError(f"{name} returned {number} for completion {i}: return a finite float or None")
        checked.append(number)
    return checked


# Built-in functions. -------------------------------------------------------------------------------------------------


class ExactMatch:
    """1 where the completion, less surrounding white space, is the answer; else 0."""

    def __init__(self, config: RewardsConfig) -> None:
        self.columns = (config.answer_column,)

    def __call__(self, completions: list[str], **columns: list) -> list[float]:
        """One float a completion."""
        answers = columns[self.columns[0]]
        return [float(c.strip() == str(a).strip()) for c, a in zip(completions, answers, strict=True)]


class Regex:
    """1 where the pattern is found in the completion, else 0."""

    def __init__(self, config: RewardsConfig) -> None:
        try:
            self._pattern = re.compile(config.regex_pattern or "", re.DOTALL)
        except re.error as error:
            raise ConfigError(f"rewards.regex_pattern is {config.regex_pattern!r}: {error}") from None

    def __call__(self, completions: list[str], **columns: list) -> list[float]:
        """One float a completion."""
        return [float(self._pattern.search(c) is not None) for c in completions]


class MathVerify:
    """1 where math-verify finds the completion's answer equal to the gold one, else 0.

    A gold answer that cannot be parsed gives None: the row cannot be scored.
    """

    def __init__(self, config: RewardsConfig) -> None:
        self.columns = (config.answer_column,)
        self._math_verify = _import_extra("math_verify", "math", "rewards.functions math_verify")

    def __call__(self, completions: list[str], **columns: list) -> list[float | None]:
        """One float or None a completion."""
        parse, verify = self._math_verify.parse, self._math_verify.verify
        scores: list[float | None] = []
        for completion, answer in zip(completions, columns[self.columns[0]], strict=True):
            gold = parse_gold(parse, str(answer))
            scores.append(float(verify(gold, parse(completion))) if gold else None)
        return scores


def parse_gold(parse: Callable, answer: str) -> list:
    """Parse a gold answer as it stands, else as LaTeX; empty where it is neither."""
    return parse(answer) or parse(f"${answer}$") if answer.strip() and re.search(r"\d|\\|\$", answer) else []


class ReasoningGym:
    """reasoning-gym's own scorer of the row's task, between 0 and 1."""

    columns = ("task", "answer", "metadata")

    def __init__(self, config: RewardsConfig) -> None:
        self._gym = _import_extra("reasoning_gym", "gym", "rewards.functions reasoning_gym")

    def __call__(self, completions: list[str], task: list, answer: list, metadata: list, **_: list) -> list[float]:
        """One float a completion."""
        rows = zip(completions, task, answer, metadata, strict=True)
        return [self._gym.get_score_answer_fn(t)(c.strip(), {"answer": a, "metadata": m}) for c, t, a, m in rows]


class SoftOverlong:
    """0 up to `buffer` tokens below the limit, then linearly down to -1 at it (soft overlong punishment, DAPO 2025)."""

    def __init__(self, buffer: int, max_completion_length: int) -> None:
        self._buffer, self._free = buffer, max_completion_length - buffer

    def __call__(self, completion_ids: list[list[int]], **_: list) -> list[float]:
        """One float a completion."""
        return [min(0.0, (self._free - len(ids)) / self._buffer) for ids in completion_ids]


BUILT_IN: dict[str, Callable[[RewardsConfig], RewardFunction]] = {
    "exact_match": ExactMatch, "regex": Regex, "math_verify": MathVerify, "reasoning_gym": ReasoningGym,
}


def _find(name: str, config: RewardsConfig, max_completion_length: int) -> RewardFunction:
    if ":" in name:
        return load_function(name, "rewards.functions")
    if name == "soft_overlong":
        return SoftOverlong(config.overlong_buffer, max_completion_length)
    if name not in BUILT_IN:
        known = ", ".join([*BUILT_IN, "soft_overlong"])
        raise ConfigError(f"rewards.functions has {name!r}: set one of {known}, or module:function")
    return BUILT_IN[name](config)


def _import_extra(module: str, extra: str, field: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{field} needs the extra {extra!r}: pip install 'spmd-rl[{extra}]' ({error})") from None
