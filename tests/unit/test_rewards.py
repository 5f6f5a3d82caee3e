"""Rewards: what a function may return, what the built-in ones give, and how they are summed."""

import math

import numpy as np
import pytest
import torch

from spmd_rl.batch import Prompt
from spmd_rl.config import ConfigError, RewardsConfig
from spmd_rl.reward_functions import BUILT_IN, check_result, parse_gold
from spmd_rl.rewards import RewardError, Rewards

N = 8
NAN = float("nan")


def score(function, texts, config=None, **columns):
    """A built-in's result on texts, columns repeated for each where they are no list."""
    config = config or RewardsConfig()
    columns = {k: v if isinstance(v, list) else [v] * len(texts) for k, v in columns.items()}
    return BUILT_IN[function](config)(prompts=[""] * len(texts), completions=texts,
                                      completion_ids=[[1]] * len(texts), **columns)


@pytest.fixture
def user_rewards(tmp_path):
    """A function from Python source to Rewards of the functions it names, closed after the test."""
    made = []

    def make(source, *names, **fields):
        path = tmp_path / "reward_of_a_test.py"
        path.write_text(source)
        made.append(Rewards(RewardsConfig(functions=[f"{path}:{name}" for name in names], **fields), 8))
        return made[-1]

    yield make
    for rewards in made:
        rewards.close()


# Wrong results: one value, one too few or many, no list at all, and lists of what is no number.
WRONG = {
    "1 of 8": [1.0], "7 of 8": [1.0] * 7, "9 of 8": [1.0] * 9, "0 of 8": [], "one in a tensor": torch.ones(1),
    "column": torch.ones(N, 1), "square": np.ones((N, N)), "scalar": 1.0, "int": 1, "0-d tensor": torch.tensor(1.0),
    "numpy scalar": np.float32(1), "generator": (1.0 for _ in range(N)), "dict": {i: 1.0 for i in range(N)},
    "set": set(range(N)), "text": "11111111", "nothing": None, "map": map(float, range(N)),
    "words": ["good"] * N, "nested": [[1.0]] * N, "complex": [1j] * N,
    "nan": [1.0] * 7 + [NAN], "inf": [float("inf")] + [1.0] * 7, "-inf": torch.full((N,), -math.inf),
}


@pytest.mark.parametrize("kind", WRONG)
def test_case_28_a_result_that_is_no_list_of_n_floats_is_refused(kind):
    """The error names the function; a wrong length also what was expected and what came.

    A result of one element, made into a tensor, would be spread over all completions.
    """
    with pytest.raises(ValueError, match="my_reward") as error:
        check_result("my_reward", WRONG[kind], N)
    if "of 8" in kind:
        assert f"{kind[0]} values for {N} completions" in str(error.value)


@pytest.mark.parametrize("result", [
    [1.0, 0.0, 0.5], (1.0, 0.0, 0.5), [1, 0, 0.5], [True, False, 0.5], np.array([1, 0, 0.5]),
    torch.tensor([1.0, 0.0, 0.5]), torch.tensor([1.0, 0.0, 0.5], dtype=torch.bfloat16),
    [np.float32(1), torch.tensor(0.0), 0.5]], ids=lambda r: type(r).__name__)
def test_case_28_any_sequence_of_n_numbers_is_taken(result):
    """Lists, tuples, arrays and tensors of one number a completion become floats."""
    found = check_result("r", result, 3)
    assert found == [1.0, 0.0, 0.5] and all(type(value) is float for value in found)


def test_none_says_that_a_function_does_not_apply():
    """None stays None: it is not 0."""
    assert check_result("r", [None, 0.0, None], 3) == [None, 0.0, None]


# Gold answer, completion, right score: None where the gold one cannot be parsed.
MATH = [
    ("1/3", r"\boxed{1/3}", 1.0), (r"\frac{1}{3}", r"so \boxed{\frac{1}{3}}", 1.0), (r"$\frac{1}{3}$", r"$1/3$", 1.0),
    ("63/400", r"\boxed{64/400}", 0.0), ("$63/400$", r"\boxed{64/400}", 0.0), ("63/400", r"\boxed{63/400}", 1.0),
    ("$63/400$", r"$\boxed{63/400}$", 1.0), ("63/400", r"\boxed{0.1575}", 1.0), ("63/400", "$64/400$", 0.0),
    ("7", "the answer is 7", 1.0), ("7", r"\boxed{8}", 0.0), (7, r"\boxed{7}", 1.0), ("0.5", r"\boxed{\frac12}", 1.0),
    ("-3", r"\boxed{3}", 0.0), ("7", "", 0.0), ("7", "no number", 0.0), ("7", r"\boxed{}", 0.0),
    ("banana", r"\boxed{1}", None), ("", r"\boxed{1}", None), ("   ", r"\boxed{1}", None),
    ("banana", r"\boxed{banana}", None), (None, r"\boxed{1}", None),
]


@pytest.mark.parametrize("gold, completion, expected", MATH)
def test_case_28_math_verify(gold, completion, expected):
    """1 for an equal answer, 0 for another or none, None (excluded) where the gold answer is unreadable, never 1."""
    pytest.importorskip("math_verify")
    assert score("math_verify", [completion], answer=[gold]) == [expected]


@pytest.mark.parametrize("gold", ["banana", "", "  ", "\n"])
def test_case_28_an_unreadable_gold_answer_parses_to_nothing(gold):
    """Words and empty texts are no mathematics."""
    math_verify = pytest.importorskip("math_verify")
    assert parse_gold(math_verify.parse, gold) == []


def test_exact_match_ignores_white_space_around():
    """Equal characters but for white space at the ends; a number in the data is its text."""
    assert score("exact_match", ["4", " 4\n", "4.", "", "44"], answer=4) == [1, 1, 0, 0, 0]
    config = RewardsConfig(answer_column="gold")
    assert score("exact_match", ["a", "b"], config, gold=["a", "a"], answer="b") == [1, 0]


def test_regex_searches_over_lines():
    """Found anywhere, a dot matching a line's end too."""
    config = RewardsConfig(regex_pattern=r"<a>.*</a>")
    assert score("regex", ["x<a>1\n2</a>", "<a>", "</a><a>"], config, answer="") == [1, 0, 0]


def test_a_broken_pattern_is_refused():
    """Found when the run starts, with the field's name."""
    with pytest.raises(ConfigError, match="rewards.regex_pattern"):
        Rewards(RewardsConfig(functions=["regex"], regex_pattern="("))


def test_reasoning_gym_scores_with_the_rows_own_task():
    """The task's own scorer sees the row's answer and metadata: a chain sum's right answer is 1, another is not."""
    gym = pytest.importorskip("reasoning_gym")
    item = gym.create_dataset("chain_sum", size=1, seed=3)[0]
    columns = dict(task=["chain_sum"] * 2, answer=[item["answer"]] * 2, metadata=[item["metadata"]] * 2)
    right, wrong = score("reasoning_gym", [item["answer"], "x"], **columns)
    assert right == 1.0 and wrong < 0.5


def test_an_unknown_name_is_refused():
    """The error lists what there is."""
    with pytest.raises(ConfigError, match="exact_mach.*exact_match, regex, think_format, math_verify"):
        Rewards(RewardsConfig(functions=["exact_mach"]))


def test_a_function_whose_extra_is_missing_says_what_to_install(monkeypatch):
    """ConfigError with the pip command, before anything is loaded."""
    import sys

    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"pip install 'spmd-rl\[math\]'"):
        Rewards(RewardsConfig(functions=["math_verify"]))


SOURCE = """
def length(completions, **columns):
    return [float(len(c)) for c in completions]

async def column(prompts, completions, completion_ids, gold, note, **columns):
    assert len(prompts) == len(completions) == len(completion_ids) == len(gold) == len(note)
    return [None if n is None else float(g) for g, n in zip(gold, note)]

def ids(completion_ids, **columns):
    return [float(sum(i)) for i in completion_ids]

def one(completions, **columns):
    return [1.0]

def two(completions, **columns):
    return [1.0, 1.0]

def raises(completions, **columns):
    raise KeyError("verifier is broken")
"""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_reward_is_the_weighted_sum_of_what_applies(user_rewards, completion, num_workers):
    """0.5 * length + 2 * column; None adds nothing; a column that a row lacks is None. Plain and async functions.

    Row 0: 0.5 * 3 + 2 * 4 = 9.5; row 1 has no note, so column does not apply: 0.5 * 1 = 0.5.
    """
    rewards = user_rewards(SOURCE, "length", "column", weights=[0.5, 2.0], num_workers=num_workers)
    prompts = [Prompt(0, "p", [1], {"gold": 4, "note": "n"}), Prompt(1, "p", [1], {"gold": 5})]
    completions = [completion([1, 2], text="abc"), completion([3], text="z")]
    rewards.score(prompts, completions)
    assert rewards.names == ["length", "column"]
    assert [c.rewards for c in completions] == [[3.0, 4.0], [1.0, None]]
    assert [c.reward for c in completions] == [9.5, 0.5]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_completions_that_end_in_any_order_are_scored_in_theirs(user_rewards, completion, num_workers):
    """In the trainer a function sees a prompt's completions together, in order; each gets its own reward."""
    rewards = user_rewards("def place(completions, **columns):\n    return [100.0 * i + float(text) for i, text in "
                           "enumerate(completions)]\n", "place", num_workers=num_workers)
    made = [completion([1], text=str(10 * g + s), group=g, sample=s) for g in range(2) for s in range(3)]
    for i in (4, 0, 5, 2, 3, 1):
        rewards.submit(Prompt(0, "p", [1], {}), made[i])
    rewards.collect()
    places = range(6) if num_workers == 0 else [0] * 6
    assert [c.reward for c in made] == [100.0 * i + float(c.text) for i, c in zip(places, made, strict=True)]


def test_weights_are_one_if_absent(user_rewards, completion):
    """length + ids: 2 + (1 + 5) = 8."""
    rewards = user_rewards(SOURCE, "length", "ids")
    scored = completion([1, 5], text="ab")
    rewards.score([Prompt(0, "p", [1], {})], [scored])
    assert scored.reward == 8.0


def test_case_28_a_users_function_of_the_wrong_length_ends_the_run(user_rewards, completion):
    """One value for two completions is an error that names the function, in the whole path too; in processes, where a
    call has one completion, it is two values for one."""
    prompts = [Prompt(0, "p", [1], {})] * 2
    with pytest.raises(ValueError, match="one returned 1 values for 2 completions"):
        user_rewards(SOURCE, "one", num_workers=0).score(prompts, [completion([1]), completion([2])])
    with pytest.raises(RewardError, match="reward two, row 0: wrong_result: .*two returned 2 values for 1 completions"):
        user_rewards(SOURCE, "two").score(prompts, [completion([1]), completion([2])])


def test_an_error_in_a_verifier_is_not_a_wrong_answer(user_rewards, completion):
    """It ends the run with its own traceback."""
    with pytest.raises(KeyError, match="verifier is broken"):
        user_rewards(SOURCE, "raises", num_workers=0).score([Prompt(0, "p", [1], {})], [completion([1])])
    with pytest.raises(RewardError, match="(?s)reward raises, row 4: error: Traceback.*verifier is broken.*'the text'"):
        user_rewards(SOURCE, "raises").score([Prompt(4, "p", [1], {})], [completion([1], text="the text")])


def test_nothing_to_score_calls_nothing(user_rewards):
    """A rank without completions does not run the functions."""
    user_rewards(SOURCE, "raises").score([], [])


@pytest.mark.parametrize("functions, weights", [(["regex", "regex", "exact_match"], [1.0, 2.0, 4.0]),
                                                (["exact_match", "exact_match"], None)])
def test_a_function_named_twice_is_refused_or_counts_twice(completion, functions, weights):
    """Weights stand beside their functions: dropping a double shifts all that follow it.

    The completion matches exactly and not the pattern: 4 for the first list, 2 for the second.
    """
    try:
        rewards = Rewards(RewardsConfig(functions=functions, weights=weights, regex_pattern="zzz"))
    except ConfigError:
        return
    scored = completion([1], text="4")
    rewards.score([Prompt(0, "p", [1], {"answer": "4"})], [scored])
    assert scored.reward == (4.0 if weights else 2.0)


def test_names_of_metrics_are_never_shared(tmp_path):
    """Two files' functions of one name are two metrics, or refused: under one name the second would hide the first."""
    for name in ("a", "b"):
        (tmp_path / f"{name}_reward.py").write_text("def score(completions, **columns):\n    return [1.0]\n")
    try:
        rewards = Rewards(RewardsConfig(functions=[f"{tmp_path}/{name}_reward.py:score" for name in ("a", "b")]))
    except ConfigError:
        return
    assert len(set(rewards.names)) == 2


@pytest.mark.parametrize("functions, column", [(["exact_match"], "answer"), (["regex", "exact_match"], "answer")])
def test_a_missing_column_is_found_before_anything_is_loaded(functions, column):
    """The error names file, row and column."""
    rewards = Rewards(RewardsConfig(functions=functions, regex_pattern="x"))
    rewards.check_row({"answer": "4"}, "train.jsonl, line 1")
    for columns in ({}, {"answer": None}):
        with pytest.raises(ConfigError, match=f"train.jsonl, line 3: no column '{column}'"):
            rewards.check_row(columns, "train.jsonl, line 3")
    with pytest.raises(ConfigError, match="line 4: a column 'completions'"):
        rewards.check_row({"answer": "4", "completions": 1}, "train.jsonl, line 4")


@pytest.mark.parametrize("text, expected", [
    ("<think>a</think>b", 1), (" <think>a\nb</think>\n\nc ", 1), ("<think>a</think>", 0), ("<think>a</think> \n", 0),
    ("a", 0), ("</think>b<think>", 0), ("x<think>a</think>b", 0), ("<think>a</think>b</think>", 0),
    ("<think><think>a</think>b", 0), ("<think>a</think><think>b", 0), ("", 0)])
def test_think_format(text, expected):
    """A thought in marks, then an answer; each mark once."""
    assert score("think_format", [text]) == [expected]


def test_rewards_of_length(completion):
    """Limit 8, buffer 4: 4, 6 and 8 tokens are 0, -1/2, -1 overlong, and -1/2, -3/4, -1 of the length."""
    rewards = Rewards(RewardsConfig(functions=["soft_overlong", "length_penalty"], overlong_buffer=4), 8)
    completions = [completion([1] * n) for n in (4, 6, 8)]
    rewards.score([Prompt(0, "p", [1], {})] * 3, completions)
    assert [c.rewards for c in completions] == [[0.0, -0.5], [-0.5, -0.75], [-1.0, -1.0]]


VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "gsm8k" and extra_info == {"index": 3}
    return {"score": float(solution_str == ground_truth), "acc": 1}

async def judge(solution_str, ground_truth, **kwargs):
    assert kwargs == {"data_source": "gsm8k", "extra_info": {"index": 3}, "level": 5}, kwargs
    return 2.0 * (solution_str == ground_truth)
"""


@pytest.mark.parametrize("num_workers", [0, 1])
def test_verls_compute_score_is_taken_as_it_is(user_rewards, completion, num_workers):
    """Known by its arguments, plain or async; a number or a dictionary with `score`."""
    rewards = user_rewards(VERL, "compute_score", "judge", num_workers=num_workers)
    columns = {"data_source": "gsm8k", "ground_truth": "72", "extra_info": {"index": 3}, "level": 5}
    completions = [completion([1], text="72"), completion([1], text="7")]
    rewards.score([Prompt(0, "p", [1], columns)] * 2, completions)
    assert [c.rewards for c in completions] == [[1.0, 2.0], [0.0, 0.0]]
    with pytest.raises(ConfigError, match="no column 'ground_truth'"):
        rewards.check_row({"data_source": "gsm8k"}, "here")


@pytest.mark.parametrize("length, expected", [(0, 0.0), (5, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (9, -0.75),
                                              (10, -1.0)])
def test_soft_overlong_falls_over_the_buffer(completion, length, expected):
    """Limit 10, buffer 4: 0 up to 6 tokens, then a quarter less for each, -1 at the limit; added to the others."""
    rewards = Rewards(RewardsConfig(functions=["exact_match", "soft_overlong"], overlong_buffer=4, weights=[1.0, 2.0]),
                      max_completion_length=10)
    scored = [completion([1] * length, text="7")]
    rewards.score([Prompt(0, "", [1], {"answer": "7"})], scored)
    assert scored[0].rewards == [1.0, expected] and scored[0].reward == 1.0 + 2 * expected
