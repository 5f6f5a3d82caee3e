"""The model and the prompts of the whole-program tests, made once a session."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import launching  # noqa: E402


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Folder of a tied tiny model."""
    return launching.make_model(tmp_path_factory.mktemp("model") / "tiny", tied=True)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory):
    """Folder with train.jsonl, 64 rows, and heldout.jsonl, 10 rows."""
    folder = tmp_path_factory.mktemp("prompts")
    rows = launching.make_rows(74, seed=1)
    launching.write_jsonl(folder / "train.jsonl", rows[:64])
    launching.write_jsonl(folder / "heldout.jsonl", rows[64:])
    return folder
