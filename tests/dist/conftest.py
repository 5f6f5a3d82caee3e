"""Models and prompts of the multi-process tests, made once a session."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import launching  # noqa: E402


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """{"tied": folder, "untied": folder}."""
    folder = tmp_path_factory.mktemp("models")
    return {name: launching.make_model(folder / name, tied=name == "tied") for name in ("tied", "untied")}


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory):
    """64 rows with `prompt` and `answer`."""
    return launching.write_jsonl(tmp_path_factory.mktemp("prompts") / "train.jsonl", launching.make_rows(64, seed=1))
