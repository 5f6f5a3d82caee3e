"""Reward functions: the built-in ones, how the user's own are found, and what they may return.

A reward is ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``, plain or async:
`prompts` as the data has them, `completions` as text, `columns` the data's other columns, one entry a
completion. None says that the function does not apply to that completion.
"""

import importlib
import inspect
import logging
import math
import re
import threading
from collections.abc import Callable
from typing import Any

from spmd_rl.config import ConfigError, RewardsConfig, load_function

RewardFunction = Callable[..., Any]


def check_result(name: str, result: Any, expected: int) -> list[float | None]:
    """The function's result (a reward's, or the user's advantages) as a list of `expected` floats or None.

    Raises ValueError for anything else: one value spread over all completions would be trained on silently.
    """
    checked = []
    for i, number in enumerate(numbers(name, result, expected)):
        if number is not None and not math.isfinite(number):
            raise ValueError(f"{name} returned {number} for completion {i}: return a finite float or None")
        checked.append(number)
    return checked


def numbers(name: str, result: Any, expected: int) -> list[float | None]:
    """The same with NaN and infinities let through."""
    if not isinstance(result, (list, tuple)) and hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        raise ValueError(f"{name} returned {type(result).__name__}: return a list of {expected} floats")
    if len(result) != expected:
        raise ValueError(f"{name} returned {len(result)} values for {expected} completions")
    found: list[float | None] = []
    for i, value in enumerate(result):
        try:
            found.append(None if value is None else float(value))
        except OverflowError:
            found.append(math.inf)  # a whole number beyond any float
        except (TypeError, ValueError):
            raise ValueError(f"{name} returned {value!r} for completion {i}: return a float or None") from None
    return found


def is_async(function: RewardFunction) -> bool:
    """Whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))


# Built-in functions. -------------------------------------------------------------------------------------------------
# `runs_in_trainer`: of bounded time and memory for any completion, so that it needs no process of its own.


class ExactMatch:
    """1 where the completion, less surrounding white space, is the answer; else 0."""

    runs_in_trainer = True

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


class ThinkFormat:
    """1 where the completion is <think>, a thought, </think> and an answer, each mark once and in order; else 0."""

    runs_in_trainer = True

    def __init__(self, config: RewardsConfig) -> None:
        """No option."""

    def __call__(self, completions: list[str], **columns: list) -> list[float]:
        """One float a completion."""
        return [float(self._holds(c.strip())) for c in completions]

    @staticmethod
    def _holds(text: str) -> bool:
        thought, end, answer = text.partition("</think>")
        return (text.startswith("<think>") and text.count("<think>") == 1 and bool(end) and "</think>" not in answer
                and bool(answer.strip()))


class MathVerify:
    """1 where math-verify finds the completion's answer equal to the gold one, else 0.

    A gold answer that cannot be parsed gives None: the row cannot be scored.
    """

    def __init__(self, config: RewardsConfig) -> None:
        self.columns = (config.answer_column,)
        self._math_verify = _import_extra("math_verify", "math", "rewards.functions math_verify")
        self._has_own_limit = config.num_workers == 0

    def __call__(self, completions: list[str], **columns: list) -> list[float | None]:
        """One float or None a completion."""
        scores: list[float | None] = []
        for completion, answer in zip(completions, columns[self.columns[0]], strict=True):
            gold = parse_gold(self._parse, str(answer))
            scores.append(float(self._verify(gold, self._parse(completion))) if gold else None)
        return scores

    def _seconds(self) -> int | None:
        # Its time-outs are alarm signals, which work in the main thread alone; a worker's limit is the pool's.
        return 5 if self._has_own_limit and threading.current_thread() is threading.main_thread() else None

    def _parse(self, text: str) -> list:
        return self._math_verify.parse(text, parsing_timeout=self._seconds())

    def _verify(self, gold: list, answer: list) -> bool:
        return self._math_verify.verify(gold, answer, timeout_seconds=self._seconds())


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

    runs_in_trainer = True

    def __init__(self, buffer: int, max_completion_length: int) -> None:
        self._buffer, self._free = buffer, max_completion_length - buffer

    def __call__(self, completion_ids: list[list[int]], **_: list) -> list[float]:
        """One float a completion."""
        return [min(0.0, (self._free - len(ids)) / self._buffer) for ids in completion_ids]


class LengthPenalty:
    """Minus the completion's tokens over the most it may have: 0 to -1, to be weighed small."""

    runs_in_trainer = True

    def __init__(self, max_completion_length: int) -> None:
        self._longest = max_completion_length

    def __call__(self, completion_ids: list[list[int]], **_: list) -> list[float]:
        """One float a completion."""
        return [-len(ids) / self._longest for ids in completion_ids]


BUILT_IN: dict[str, Callable[[RewardsConfig], RewardFunction]] = {
    "exact_match": ExactMatch, "regex": Regex, "think_format": ThinkFormat, "math_verify": MathVerify,
    "reasoning_gym": ReasoningGym,
}
OF_LENGTH: dict[str, Callable[[RewardsConfig, int], RewardFunction]] = {
    "soft_overlong": lambda config, longest: SoftOverlong(config.overlong_buffer, longest),
    "length_penalty": lambda config, longest: LengthPenalty(longest),
}


def find(name: str, config: RewardsConfig, max_completion_length: int) -> RewardFunction:
    """A built-in function, or the user's own; verl's ``compute_score`` is taken as it is. Raises ConfigError."""
    if ":" in name:
        function = load_function(name, "rewards.functions")
        return of_compute_score(function) if _is_compute_score(function) else function
    if name in OF_LENGTH:
        return OF_LENGTH[name](config, max_completion_length)
    if name not in BUILT_IN:
        known = ", ".join([*BUILT_IN, *OF_LENGTH])
        raise ConfigError(f"rewards.functions has {name!r}: set one of {known}, or module:function")
    return BUILT_IN[name](config)


def _is_compute_score(function: RewardFunction) -> bool:
    try:
        return {"solution_str", "ground_truth"} <= inspect.signature(function).parameters.keys()
    except (TypeError, ValueError):
        return False  # a callable without a signature


def of_compute_score(function: Callable[..., Any]) -> RewardFunction:
    """A reward from verl's ``compute_score(data_source, solution_str, ground_truth, extra_info)``, plain or async.

    It returns a number, or a dictionary with `score`. Columns that a row lacks are None.
    """
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters}

    def calls(completions: list[str], columns: dict[str, list]) -> list[dict[str, Any]]:
        given = []
        for i, text in enumerate(completions):
            row = {name: columns[name][i] if name in columns else None
                   for name in ("data_source", "ground_truth", "extra_info")}
            row |= {name: values[i] for name, values in columns.items() if takes_all or name in names}
            row["solution_str"] = text
            given.append({name: value for name, value in row.items() if takes_all or name in names})
        return given

    def plain(completions: list[str], prompts: Any, completion_ids: Any, **columns: Any) -> list[Any]:
        return [_score_of(function(**arguments)) for arguments in calls(completions, columns)]

    async def awaited(completions: list[str], prompts: Any, completion_ids: Any, **columns: Any) -> list[Any]:
        return [_score_of(await function(**arguments)) for arguments in calls(completions, columns)]

    adapted = awaited if is_async(function) else plain
    setattr(adapted, "columns", ("ground_truth",))
    return adapted


def _score_of(result: Any) -> Any:
    return result["score"] if isinstance(result, dict) else result


def _import_extra(module: str, extra: str, field: str) -> Any:
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{field} needs the extra {extra!r}: pip install 'spmd-rl[{extra}]' ({error})") from None
    logging.getLogger(module).setLevel(logging.ERROR)  # math-verify warns at each call without its own time-out
    return found
