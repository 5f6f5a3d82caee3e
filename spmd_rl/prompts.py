"""Prompts: the data set, the chat template, and the order in which steps draw them."""

import codecs
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from spmd_rl.batch import Prompt
from spmd_rl.config import ConfigError, DataConfig, ModelConfig


def load_tokenizer(config: ModelConfig) -> Any:
    """The model folder's tokenizer. Raises ConfigError where there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path is {config.path!r}: no tokenizer can be loaded from it ({error})") from None
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:  # Transformers makes an empty one where files lack
        raise ConfigError(f"model.path is {config.path!r}: its tokenizer knows no text; are its files there?")
    return tokenizer


class PromptSampler:
    """Which prompts a step draws: a function of (seed, step) alone, the same on every rank and after a resume."""

    def __init__(self, prompts: Sequence[Prompt], prompts_per_step: int, seed: int, shuffle: bool) -> None:
        self._prompts = prompts
        self._prompts_per_step = prompts_per_step
        self._seed, self._shuffle = seed, shuffle
        self._epoch, self._order = -1, list(range(len(prompts)))

    def draw(self, step: int) -> list[Prompt]:
        """The prompts of a step (from 0): the next ones of the epochs laid end to end, no row left out."""
        first = step * self._prompts_per_step
        return [self._at(place) for place in range(first, first + self._prompts_per_step)]

    def draw_again(self, step: int, round_: int, count: int) -> list[Prompt]:
        """Prompts for groups of the step that taught nothing: a function of (seed, step, round) too, out of turn."""
        return random.Random(f"{self._seed}/{step}/{round_}").choices(self._prompts, k=count)

    def epoch(self, step: int) -> float:
        """Epochs done after this step."""
        return (step + 1) * self._prompts_per_step / len(self._prompts)

    def _at(self, place: int) -> Prompt:
        epoch, index = divmod(place, len(self._prompts))
        if self._shuffle and epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._prompts)))
            # A generator of its own: the global ones are at the mercy of every library in the process.
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        return self._prompts[self._order[index]]


def load_prompts(path: str, tokenizer: Any, config: DataConfig) -> tuple[list[Prompt], list[int]]:
    """(prompts, rows that were dropped for their length) of a JSONL file.

    Raises ConfigError with file, line and reason for a bad row, an empty file, or one where no row is short enough.
    """
    prompts, too_long = [], []
    for row, (line, record) in enumerate(_read_jsonl(path)):
        where = f"{path}, line {line}"
        if "prompt" not in record:
            raise ConfigError(f"{where}: no `prompt`; the keys are {', '.join(map(repr, record))}")
        content = record.pop("prompt")
        ids = encode_prompt(tokenizer, content, config.system_prompt, where)
        if len(ids) > config.max_prompt_length:
            too_long.append(row)
        else:
            prompts.append(Prompt(row, content, ids, record))
    if not prompts:
        reason = f"all {len(too_long)} rows are longer than data.max_prompt_length, {config.max_prompt_length} tokens"
        raise ConfigError(f"{path}: {reason if too_long else 'no rows'}")
    return prompts, too_long


def encode_prompt(tokenizer: Any, content: Any, system_prompt: str | None, where: str) -> list[int]:
    """Token ids of a prompt, with the special tokens that the model expects, once.

    Text is encoded as it is; messages pass through the chat template, which ends where the assistant begins.
    """
    if isinstance(content, str):
        text = content
    elif _is_messages(content):
        if tokenizer.chat_template is None:
            raise ConfigError(f"{where}: the prompt is messages, but the tokenizer has no chat template; "
                              "give text, or a model folder with a template")
        if system_prompt and content[0]["role"] != "system":
            content = [{"role": "system", "content": system_prompt}, *content]
        try:
            text = tokenizer.apply_chat_template(content, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ConfigError(f"{where}: the chat template refuses these messages: {error}") from None
    else:
        raise ConfigError(f"{where}: `prompt` is {content!r:.80}: give text, or a list of messages with "
                          "`role` and `content`")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: the prompt is no valid Unicode: {error}") from None
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    # A template may write the BOS itself or leave it to the tokenizer: never two, never none where one is usual.
    bos = _usual_bos(tokenizer)
    ids = [bos, *ids] if bos is not None and ids[:1] != [bos] else ids
    if not ids:
        raise ConfigError(f"{where}: the prompt is empty")
    return ids


def _usual_bos(tokenizer: Any) -> int | None:
    """The BOS id that the tokenizer puts in front of any text by itself, or None."""
    ids = tokenizer("a")["input_ids"]
    return ids[0] if ids and tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id else None


def _is_messages(content: Any) -> bool:
    return isinstance(content, list) and bool(content) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in content)


def _read_jsonl(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, record); a byte-order mark, Windows line ends and blank lines are read past."""
    with open(path, "rb") as file:  # bytes: a line that is not UTF-8 is named by its number
        for number, line in enumerate(file, 1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip():
                yield number, _record(path, number, line)


def _record(path: str, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}, line {number}: not UTF-8 text: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {number}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{path}, line {number}: a {type(record).__name__}, not an object with a `prompt`")
    return record
