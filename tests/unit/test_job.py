"""What is checked before any engine starts."""

import json

import pytest

from spmd_rl.config import Config, ConfigError
from spmd_rl.job import arithmetic, load_inputs


@pytest.fixture
def config(tmp_path, model_folder):
    """A config of a tiny model that takes 64 tokens; a test then spoils one thing."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    config = Config()
    config.model.path = model_folder("qwen3", max_position_embeddings=64)
    config.data.train = str(tmp_path / "train.jsonl")
    config.run.output_dir = str(tmp_path / "run")
    config.data.max_prompt_length, config.rollout.max_completion_length = 32, 32
    config.batch.prompts_per_step = 4
    return config


def test_inputs_are_loaded_and_checked(config):
    """Model config, tokenizer, prompts and rewards, without weights."""
    inputs = load_inputs(config, 2)
    assert [p.content for p in inputs.train_prompts] == ["a"] and inputs.eval_prompts == {}
    assert inputs.rewards.names == ["exact_match"] and inputs.train_prompts.too_long == {}
    assert inputs.user_loss is None and inputs.user_advantages is None


@pytest.mark.parametrize("top_k", [0, 20])
def test_the_arithmetic_names_what_makes_the_sampler_another_distribution(config, top_k):
    """Before anything starts, and only where there is such an option."""
    config.rollout.top_k = top_k
    text = arithmetic(config, load_inputs(config, 1), 1)
    assert ("the sampler is not the policy with rollout.top_k 20" in text) == (top_k > 0)


def test_case_16_sequences_longer_than_the_model_are_refused(config):
    """32 + 33 tokens for a model of 64: found at the start, with both fields and the model's number."""
    config.rollout.max_completion_length = 33
    with pytest.raises(ConfigError, match="data.max_prompt_length.*rollout.max_completion_length is 65.*64"):
        load_inputs(config, 1)


def test_a_held_out_row_without_its_column_is_refused(config, tmp_path):
    """The held-out file is checked like the other one, before training and not after it."""
    path = tmp_path / "eval.jsonl"
    path.write_text(json.dumps({"prompt": "a", "answer": "1"}) + "\n" + json.dumps({"prompt": "b"}) + "\n")
    config.data.eval = str(path)
    with pytest.raises(ConfigError, match="eval.jsonl, line 2: no column 'answer'"):
        load_inputs(config, 1)


@pytest.mark.parametrize("section, field", [("loss", "loss_type"), ("advantages", "function")])
def test_the_users_functions_are_found_or_refused(config, tmp_path, section, field):
    """A loss or advantage of the user's own is loaded at the start; one that is not there is refused by field."""
    (tmp_path / "own_of_a_test.py").write_text("def mine(*args):\n    return 1\n")
    setattr(getattr(config, section), field, f"{tmp_path}/own_of_a_test.py:mine")
    inputs = load_inputs(config, 1)
    assert (inputs.user_loss or inputs.user_advantages)() == 1
    setattr(getattr(config, section), field, f"{tmp_path}/own_of_a_test.py:yours")
    with pytest.raises(ConfigError, match=f"{section}.{field}.*yours"):
        load_inputs(config, 1)
