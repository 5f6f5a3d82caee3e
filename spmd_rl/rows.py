"""Rows of a data set, read in order once and then by their place: JSONL, parquet, Hugging Face data sets.

Rows stay on disk (a JSONL file as it is, the others as memory-mapped Arrow tables): a large file takes
a few bytes a row. Every form of prompt that people write becomes a `prompt` and columns here.
"""

import codecs
import glob
import json
import os
import re
from collections.abc import Iterator
from typing import Any, Protocol

from spmd_rl.config import ConfigError, DataConfig

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


class Source(Protocol):
    """Rows in order, and by place."""

    name: str

    def scan(self) -> Iterator[tuple[int, str, Any, float]]:
        """(place, where it is for a reader, what `parse` takes, share of the whole that is read) of each row."""

    def parse(self, raw: Any, where: str) -> dict[str, Any]:
        """The row. Raises ConfigError with where and reason."""

    def read(self, place: int) -> dict[str, Any]:
        """The row at a place that `scan` gave."""


def open_source(path: str, split: str, subset: str | None, field: str) -> Source:
    """A JSONL or parquet file, a folder, or a Hugging Face name; ``path@split`` names another split than `split`.

    Raises ConfigError that names `field`.
    """
    if not os.path.exists(path) and "@" in path:
        path, _, split = path.rpartition("@")
    if os.path.isfile(path) and not path.endswith(".parquet"):
        return JsonLines(path)
    if not os.path.exists(path) and not is_hub_name(path):
        raise ConfigError(f"{field} is {path!r}: no such file; set it to a JSONL or parquet file, a folder, or a "
                          "Hugging Face data set's name")
    if os.path.isdir(path) and not any(glob.iglob(os.path.join(glob.escape(path), "**", ending), recursive=True)
                                       for ending in ("*.parquet", "*.arrow", "README.md")):
        raise ConfigError(f"{field} is {path!r}: a folder without parquet or Arrow files; give the JSONL file itself")
    return Table(path, split, subset, field)


def is_hub_name(path: str) -> bool:
    """Whether it may name a data set of the Hugging Face hub: owner/name, and no file's ending."""
    path = path.partition("@")[0]
    return bool(HUB_NAME.fullmatch(path)) and not path.endswith((".jsonl", ".json", ".parquet"))


class JsonLines:
    """A JSONL file; a byte-order mark, Windows line ends and blank lines are read past. A place is a byte offset."""

    def __init__(self, path: str) -> None:
        self.name = path

    def scan(self) -> Iterator[tuple[int, str, Any, float]]:
        size, place = max(1, os.path.getsize(self.name)), 0
        with open(self.name, "rb") as file:  # bytes: a line that is not UTF-8 is named by its number
            for number, line in enumerate(file, 1):
                if line.strip() and not (place == 0 and not line.removeprefix(codecs.BOM_UTF8).strip()):
                    yield place, f"{self.name}, line {number}", line, (place + len(line)) / size
                place += len(line)

    def parse(self, raw: bytes, where: str) -> dict[str, Any]:
        try:
            record = json.loads(raw.removeprefix(codecs.BOM_UTF8).decode())
        except UnicodeDecodeError as error:
            raise ConfigError(f"{where}: not UTF-8 text: {error}") from None
        except (json.JSONDecodeError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ConfigError(f"{where}: a {type(record).__name__}, not an object with a `prompt`")
        return record

    def read(self, place: int) -> dict[str, Any]:
        with open(self.name, "rb") as file:
            file.seek(place)
            return self.parse(file.readline(), f"{self.name}, byte {place}: was it changed since the start?")


class Table:
    """A parquet file, a folder (of `save_to_disk`, or of data files) or a data set of the hub, by `datasets`."""

    def __init__(self, path: str, split: str, subset: str | None, field: str) -> None:
        try:
            import datasets
        except ImportError as error:
            raise ConfigError(f"{field} is {path!r}: other forms than JSONL need the extra 'data': "
                              f"pip install 'spmd-rl[data]' ({error})") from None
        self.name = path
        datasets.disable_progress_bars()
        try:
            if path.endswith(".parquet"):
                table = datasets.load_dataset("parquet", data_files=path, split="train")
            elif any(os.path.exists(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json")):
                table = datasets.load_from_disk(path)
                table = table[split] if isinstance(table, dict) else table
            else:
                table = datasets.load_dataset(path, subset, split=split)
        except KeyError:
            raise ConfigError(f"{field} is {path!r}: it has no split {split!r} but {', '.join(table)}; "
                              f"write {path}@SPLIT") from None
        except IndexError:  # what the library makes of a saved table without rows
            raise ConfigError(f"{path}: no rows") from None
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            if "corresponds to no data" in str(error):
                raise ConfigError(f"{path}: no rows in split {split!r}") from None
            raise ConfigError(f"{field} is {path!r}, split {split!r}: {error}") from None
        self._table = table

    def scan(self) -> Iterator[tuple[int, str, Any, float]]:
        for place, record in enumerate(self._table):
            yield place, f"{self.name}, row {place}", record, (place + 1) / len(self._table)

    def parse(self, raw: dict[str, Any], where: str) -> dict[str, Any]:
        return dict(raw)

    def read(self, place: int) -> dict[str, Any]:
        return dict(self._table[place])


def prompt_and_columns(record: dict[str, Any], config: DataConfig, where: str) -> tuple[Any, dict[str, Any]]:
    """(`prompt` as text or plain messages, the other columns) of a row.

    data.columns renames first. `messages` serves where there is no `prompt`: a last turn of the assistant becomes the
    column `answer`. verl's `reward_model` gives `ground_truth` and `answer`. Raises ConfigError.
    """
    columns = dict(record)
    for ours, theirs in config.columns.items():
        columns[ours] = _at(record, theirs, where)
        if theirs != ours and theirs not in config.columns:
            columns.pop(theirs, None)
    given: dict[str, Any] = {}
    if columns.get("prompt") is None and columns.get("messages") is not None:  # a table fills up with null
        messages = _plain_messages(columns.pop("messages"))
        if isinstance(messages, list) and messages and messages[-1].get("role") == "assistant":
            given["answer"] = messages.pop().get("content")
        columns["prompt"] = messages
    if isinstance(verl := columns.get("reward_model"), dict) and "ground_truth" in verl:
        given = {"ground_truth": verl["ground_truth"], "answer": verl["ground_truth"]} | given
    if "prompt" not in columns:
        raise ConfigError(f"{where}: no `prompt`; the keys are {', '.join(map(repr, record))}")
    content = _plain_messages(columns.pop("prompt"))
    return content, given | columns


def _at(record: dict[str, Any], path: str, where: str) -> Any:
    """A column, or with dots what lies inside of one."""
    if path in record:
        return record[path]
    value: Any = record
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            raise ConfigError(f"{where}: no {path!r}, which data.columns names; the keys are "
                              f"{', '.join(map(repr, record))}")
        value = value[key]
    return value


def _plain_messages(content: Any) -> Any:
    """Messages whose text is in parts as one text each, without the keys that a table fills up with null."""
    if not isinstance(content, list) or not all(isinstance(message, dict) for message in content):
        return content
    return [{key: _text_of(value) if key == "content" else value
             for key, value in message.items() if value is not None} for message in content]


def _text_of(content: Any) -> Any:
    if isinstance(content, list) and content and all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    return content
