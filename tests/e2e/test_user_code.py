"""The user's own rewards, loss and advantages, and the options that end a completion, through the whole program."""

import json
import math

import pytest
from launching import needs_cpu_engine, run, write_config

pytestmark = needs_cpu_engine
MAX_LENGTH = 5
EOS = 257
SEVEN = ord("7") - ord("!")  # byte-level alphabet: ids begin at "!"

MODULE = '''
import json

def record(name, **values):
    with open("calls.jsonl", "a") as file:
        file.write(json.dumps({"call": name, **values}) + "\\n")

def length_reward(prompts, completions, completion_ids, **columns):
    record("reward", prompts=prompts, completions=completions, completion_ids=completion_ids, columns=columns)
    return [float(len(ids)) for ids in completion_ids]

def constant_loss(inputs, config):
    record("loss", advantages=inputs.advantages_N.tolist(), lengths=inputs.lengths_N.tolist())
    return 3.0 - (inputs.logprobs_N - inputs.logprobs_N.detach()) * inputs.advantages_N

def ranks_of_rewards(rewards, groups):
    record("advantages", rewards=rewards, groups=groups)
    return [0.5 + group for group in groups]
'''
FILE = '''
async def first_is_even(prompts, completion_ids, answer, **columns):
    """Half a point for an even first id, not applicable for an answer of one digit."""
    return [None if len(a) == 1 else 0.5 * (ids[0] % 2 == 0) for ids, a in zip(completion_ids, answer)]
'''


@pytest.fixture(scope="module")
def finished(model, prompts, tmp_path_factory):
    """(folder, metrics of the steps, calls of the user's functions, output) of a run of one rank, 2 steps."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "mine.py").write_text(MODULE)
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "own_file.py").write_text(FILE)
    config = write_config(
        folder / "config.yaml", model, prompts / "train.jsonl", folder / "run",
        rewards={"functions": ["mine:length_reward", "elsewhere/own_file.py:first_is_even"], "weights": [1.0, 2.0],
                 "num_workers": 0},  # in the trainer, a call with all
        loss={"loss_type": "mine:constant_loss"}, advantages={"function": "mine:ranks_of_rewards"},
        rollout={"stop": ["1", "55"], "stop_token_ids": [SEVEN], "max_completion_length": MAX_LENGTH,
                 "num_generations": 16})
    output = run(["-m", "spmd_rl.train", "--config", str(config)], cwd=folder).succeeded().output
    calls = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return folder, lines, calls, output


def test_rewards_get_prompts_texts_ids_and_columns(finished, prompts):
    """Each completion comes with its own row's prompt and columns; prompts as the data has them."""
    _, _, calls, _ = finished
    rewards = [call for call in calls if call["call"] == "reward"]
    rows = {row["prompt"]: row for row in map(json.loads, (prompts / "train.jsonl").read_text().splitlines())}
    assert len(rewards) == 2
    for call in rewards:
        assert call["columns"].keys() == {"answer"}
        assert len(call["prompts"]) == len(call["completions"]) == len(call["completion_ids"]) == 4 * 16
        assert call["columns"]["answer"] == [rows[prompt]["answer"] for prompt in call["prompts"]]


def test_weighted_rewards_and_the_users_advantages(finished):
    """reward = 1 x length + 2 x (0.5 for an even first id), None counting nothing; the advantages function gets all of
    them with their groups, and what it returns is on each trained token."""
    _, lines, calls, _ = finished
    rewards = [call for call in calls if call["call"] == "reward"]
    advantages = [call for call in calls if call["call"] == "advantages"]
    losses = [call for call in calls if call["call"] == "loss"]
    for reward, advantage, line in zip(rewards, advantages, lines, strict=True):
        ids, answers = reward["completion_ids"], reward["columns"]["answer"]
        second = [None if len(a) == 1 else 0.5 * (i[0] % 2 == 0) for i, a in zip(ids, answers, strict=True)]
        assert advantage["rewards"] == [len(i) + 2 * (s or 0) for i, s in zip(ids, second, strict=True)]
        assert advantage["groups"] == [place // 16 for place in range(64)]
        scored = [s for s in second if s is not None]
        assert line["rewards/length_reward/mean"] == pytest.approx(sum(map(len, ids)) / 64)
        assert line["rewards/first_is_even/mean"] == pytest.approx(math.fsum(scored) / len(scored))
        assert line["rewards/first_is_even/unscored"] == 64 - len(scored)
        assert line["reward"] == pytest.approx(sum(advantage["rewards"]) / 64)
    trained = [advantage for call in losses for advantage in call["advantages"]]
    wanted = [0.5 + place // 16 for call in rewards for place, ids in enumerate(call["completion_ids"]) for _ in ids]
    assert sorted(trained) == sorted(wanted)


def test_users_loss_is_a_mean_over_the_steps_tokens(finished):
    """A token loss whose value is 3 everywhere gives the loss 3 over any number of rows, and its gradient acts."""
    _, lines, calls, _ = finished
    assert len([call for call in calls if call["call"] == "loss"]) > 2
    for line in lines:
        assert line["loss"] == pytest.approx(3.0, abs=1e-6)
        assert line["grad_norm"] > 0


def test_stop_strings_and_ids_end_a_completion(finished):
    """A completion ends at the first of: a token with the text "1", one that makes up "55", the id of "7", EOS, or the
    length limit; all of its ids are kept. Only the last kind counts as clipped."""
    _, lines, calls, _ = finished
    ends = {"text 1": 0, "text 55": 0, "id 7": 0, "end of sequence": 0, "length": 0}
    clipped = []
    for call in calls:
        if call["call"] != "reward":
            continue
        kinds = [how_it_ended(ids) for ids in call["completion_ids"]]
        assert None not in kinds, [ids for ids, kind in zip(call["completion_ids"], kinds) if kind is None]
        for kind in kinds:
            ends[kind] += 1
        clipped.append(kinds.count("length") / len(kinds))
    assert all(ends[kind] for kind in ("text 1", "id 7", "end of sequence", "length")), ends
    assert [line["completions/clipped_ratio"] for line in lines] == pytest.approx(clipped)


def test_rewards_get_the_text_up_to_the_stop(finished):
    """A completion's text is that of all its ids but EOS, as without stop strings, and ends before a stop string."""
    _, _, calls, _ = finished
    compared = 0
    for call in calls:
        for ids, text in zip(call.get("completion_ids", ()), call.get("completions", ()), strict=True):
            whole = text_of(ids)
            if whole.isascii():
                assert text == whole.split("1")[0].split("55")[0], (ids, how_it_ended(ids))
                compared += 1
    assert compared > 20


def text_of(ids):
    """Below 94 an id is the character 33 + id, from 258 on a filler word; other bytes are not compared."""
    return "".join(chr(33 + i) if i < 94 else f" w{i}" if i >= 258 else "" if i >= 256 else "\xff" for i in ids)


def how_it_ended(ids):
    """Which end the ids have, None where they go on past one."""
    before, text, last = text_of(ids[:-1]), text_of(ids), ids[-1]
    if "1" in before or "55" in before or SEVEN in ids[:-1] or EOS in ids[:-1]:
        return None
    for kind, holds in (("text 1", "1" in text), ("text 55", "55" in text), ("id 7", last == SEVEN),
                        ("end of sequence", last == EOS), ("length", len(ids) == MAX_LENGTH)):
        if holds:
            return kind
    return None
