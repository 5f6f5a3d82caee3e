"""Prompts: the data set, the chat template, and the order in which steps draw them."""

import bisect
import functools
import itertools
import random
import re
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from spmd_rl.batch import Prompt
from spmd_rl.config import ConfigError, DataConfig, ModelConfig
from spmd_rl.mesh import say_once
from spmd_rl.rows import Source, open_source, prompt_and_columns

ENCODED_AT_ONCE = 512  # rows: the tokenizer shares them out over its threads
CACHED_PROMPTS = 4096
PROGRESS_S = 10.0
REASONS_KEPT = 5
# A turn of the assistant that is not the last: after the last some templates write an empty thought.
TURNS = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
WORDS = re.compile(r"[\w\s]*")  # added tokens such as line ends and names of roles are ordinary text


def load_tokenizer(config: ModelConfig) -> Any:
    """The model folder's tokenizer. Raises ConfigError where there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path is {config.path!r}: no tokenizer can be loaded from it ({error})") from None
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:  # Transformers makes an empty one where files lack
        raise ConfigError(f"model.path is {config.path!r}: its tokenizer knows no text; are its files there?")
    return tokenizer


class Lazy(Sequence[Prompt]):
    """Some of the prompts, each read when it is asked for: a rank encodes those that it samples from."""

    def __init__(self, prompts: Sequence[Prompt], places: Sequence[int]) -> None:
        self._prompts, self._places = prompts, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Lazy(self._prompts, self._places[index])
        return self._prompts[self._places[index]]


class PromptSampler:
    """Which prompts a step draws: a function of (seed, step) alone, the same on every rank and after a resume."""

    def __init__(self, prompts: Sequence[Prompt], prompts_per_step: int, seed: int, shuffle: bool,
                 sizes: Sequence[int] = (), weights: Sequence[float] | None = None) -> None:
        """sizes, weights: of the data sets that lie one after the other in `prompts`, where they are mixed by weight;
        each then has epochs of its own."""
        self._prompts, self._prompts_per_step, self._seed, self._shuffle = prompts, prompts_per_step, seed, shuffle
        self._sizes = list(sizes) if weights else [len(prompts)]
        self._firsts = [0, *itertools.accumulate(self._sizes)]
        self._weights = [w / sum(weights) for w in weights] if weights else [1.0]
        self._orders: dict[int, tuple[int, Sequence[int]]] = {}
        self._turns, self._nth = array("i"), array("q")  # by place: whose turn it is, and for the how manieth time
        self._counts = [0] * len(self._sizes)

    def draw(self, step: int) -> Sequence[Prompt]:
        """The prompts of a step (from 0): the next ones of the epochs laid end to end, no row left out."""
        first = step * self._prompts_per_step
        return Lazy(self._prompts, [self._at(place) for place in range(first, first + self._prompts_per_step)])

    def draw_again(self, step: int, round_: int, count: int) -> Sequence[Prompt]:
        """Prompts for groups of the step that taught nothing: a function of (seed, step, round) too, out of turn."""
        draw = random.Random(f"{self._seed}/{step}/{round_}")
        if len(self._sizes) == 1:
            return Lazy(self._prompts, draw.choices(range(len(self._prompts)), k=count))
        parts = draw.choices(range(len(self._sizes)), self._weights, k=count)
        return Lazy(self._prompts, [self._firsts[part] + draw.randrange(self._sizes[part]) for part in parts])

    def epoch(self, step: int) -> float:
        """Epochs done after this step; of all rows together where they are mixed by weight."""
        return (step + 1) * self._prompts_per_step / len(self._prompts)

    def _at(self, place: int) -> int:
        part, nth = (0, place) if len(self._sizes) == 1 else self._turn(place)
        epoch, index = divmod(nth, self._sizes[part])
        if not self._shuffle:
            return self._firsts[part] + index
        if self._orders.get(part, (-1,))[0] != epoch:
            order = array("q", range(self._sizes[part]))
            # A generator of its own: the global ones are at the mercy of every library in the process.
            name = f"{self._seed}/{epoch}" if len(self._sizes) == 1 else f"{self._seed}/{epoch}/{part}"
            random.Random(name).shuffle(order)  # type: ignore[arg-type]
            self._orders[part] = (epoch, order)
        return self._firsts[part] + self._orders[part][1][index]

    def _turn(self, place: int) -> tuple[int, int]:
        """(data set, how many of it came before) at a place: always the one that is furthest behind its share, so that
        any number of places has each set's share to within one."""
        while len(self._turns) <= place:
            behind = [w * (len(self._turns) + 1) - n for w, n in zip(self._weights, self._counts, strict=True)]
            part = behind.index(max(behind))
            self._turns.append(part)
            self._nth.append(self._counts[part])
            self._counts[part] += 1
        return self._turns[place], self._nth[place]


class PromptSet(Sequence[Prompt]):
    """The rows of one or several data sets that are short enough, encoded when they are asked for."""

    def __init__(self, sources: Sequence[Source], tokenizer: Any, config: DataConfig,
                 check_row: Callable[[dict[str, Any], str], None] = lambda columns, where: None) -> None:
        """Reads all rows once. Raises ConfigError with file, line and reason for a bad row (unless
        data.skip_bad_rows), an empty set, or one where no row is short enough."""
        self._sources, self._tokenizer, self._config = sources, tokenizer, config
        self._places: list[array] = []
        self._rows: list[array] = []
        self.too_long: dict[str, array] = {}
        """Source -> rows left out for their length."""
        self.bad: dict[str, int] = {}
        """Source -> number of bad rows left out."""
        self.reasons: list[str] = []
        """Of the first bad ones."""
        for source in sources:
            self._scan(source, check_row)
        self.sizes = [len(rows) for rows in self._rows]
        self._firsts = [0, *itertools.accumulate(self.sizes)]
        self._cached = functools.lru_cache(CACHED_PROMPTS)(self._read)

    def __len__(self) -> int:
        return self._firsts[-1]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Lazy(self, range(len(self))[index])
        return self._cached(range(len(self))[index])

    def _read(self, index: int) -> Prompt:
        part = bisect.bisect_right(self._firsts, index) - 1
        source, nth = self._sources[part], index - self._firsts[part]
        row = self._rows[part][nth]
        where = f"{source.name}, row {row}"
        content, columns = prompt_and_columns(source.read(self._places[part][nth]), self._config, where)
        text = prompt_text(self._tokenizer, content, self._config.system_prompt, where,
                           self._config.chat_template_kwargs)
        return Prompt(row, content, encode_texts(self._tokenizer, [text])[0], columns, source.name)

    def _scan(self, source: Source, check_row: Callable[[dict[str, Any], str], None]) -> None:
        places, rows, too_long, num_bad = array("q"), array("q"), array("q"), 0
        waiting: list[tuple[int, int, str]] = []  # row, place, text

        def skip(error: ConfigError) -> None:
            nonlocal num_bad
            if not self._config.skip_bad_rows:
                raise error
            num_bad += 1
            self.reasons += [str(error)] if len(self.reasons) < REASONS_KEPT else []

        def encode() -> None:
            encoded = encode_texts(self._tokenizer, [text for *_, text in waiting])
            for (row, place, _), ids in zip(waiting, encoded, strict=True):
                if not ids:
                    skip(ConfigError(f"{source.name}, row {row}: the prompt is empty"))
                elif len(ids) > self._config.max_prompt_length:
                    too_long.append(row)
                else:
                    places.append(place)
                    rows.append(row)
            waiting.clear()

        shown = time.monotonic()
        row = -1
        for row, (place, where, raw, share) in enumerate(source.scan()):
            try:
                content, columns = prompt_and_columns(source.parse(raw, where), self._config, where)
                text = prompt_text(self._tokenizer, content, self._config.system_prompt, where,
                                   self._config.chat_template_kwargs)
                check_row(columns, where)
            except ConfigError as error:
                skip(error)
                continue
            waiting.append((row, place, text))
            if len(waiting) == ENCODED_AT_ONCE:
                encode()
            if time.monotonic() - shown > PROGRESS_S:
                shown = time.monotonic()
                say_once(f"reading {source.name}: {share:.0%}, {row + 1:,} rows")
        encode()
        if not rows:
            raise ConfigError(f"{source.name}: {self._why_none(row + 1, len(too_long), num_bad)}")
        self._places.append(places)
        self._rows.append(rows)
        self.too_long |= {source.name: too_long} if too_long else {}
        self.bad |= {source.name: num_bad} if num_bad else {}

    def _why_none(self, num_rows: int, num_too_long: int, num_bad: int) -> str:
        if not num_rows:
            return "no rows"
        if num_bad:
            return f"no row is left of {num_rows}: {num_bad} are bad ({self.reasons[0]}), {num_too_long} too long"
        return f"all {num_rows} rows are longer than data.max_prompt_length, {self._config.max_prompt_length} tokens"


def load_prompts(paths: Sequence[str], tokenizer: Any, config: DataConfig, split: str = "train",
                 check_row: Callable[[dict[str, Any], str], None] = lambda columns, where: None,
                 field: str = "data.train") -> PromptSet:
    """The prompts of these files or data sets. Raises ConfigError, see PromptSet and rows.open_source.

    check_row: gets the columns and place of each row, and raises ConfigError for one that it cannot use.
    """
    return PromptSet([open_source(path, split, config.subset, field) for path in paths], tokenizer, config, check_row)


def encode_prompt(tokenizer: Any, content: Any, system_prompt: str | None, where: str,
                  template_kwargs: dict[str, Any] | None = None) -> list[int]:
    """Token ids of a prompt, with the special tokens that the model expects, once. Raises ConfigError."""
    return encode_texts(tokenizer, [prompt_text(tokenizer, content, system_prompt, where, template_kwargs)])[0]


def prompt_text(tokenizer: Any, content: Any, system_prompt: str | None, where: str,
                template_kwargs: dict[str, Any] | None = None) -> str:
    """A prompt as text: text as it is, messages through the chat template, which ends where the assistant begins.

    Raises ConfigError for what is neither, and for messages that hold a control token's text: it would be read as one,
    and could end a turn and forge another.
    """
    if isinstance(content, str):
        text = content
    elif _is_messages(content):
        if tokenizer.chat_template is None:
            raise ConfigError(f"{where}: the prompt is messages, but the tokenizer has no chat template; "
                              "give text, or a model folder with a template")
        control = _control_token(tokenizer, content)
        if control:
            raise ConfigError(f"{where}: a message holds {control!r}, which the tokenizer reads as a control token; "
                              "remove it, or give the whole prompt as text")
        if system_prompt and content[0]["role"] != "system":
            content = [{"role": "system", "content": system_prompt}, *content]
        try:
            text = tokenizer.apply_chat_template(content, tokenize=False, add_generation_prompt=True,
                                                 **(template_kwargs or {}))
        except TemplateError as error:
            raise ConfigError(f"{where}: the chat template refuses these messages: {error}") from None
    else:
        raise ConfigError(f"{where}: `prompt` is {content!r:.80}: give text, or a list of messages with "
                          "`role` and `content`")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: the prompt is no valid Unicode: {error}") from None
    if not text and _usual_bos(tokenizer) is None:
        raise ConfigError(f"{where}: the prompt is empty")
    return text


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts, with the BOS that the model expects, once."""
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    # A template may write the BOS itself or leave it to the tokenizer: never two, never none where one is usual.
    bos = _usual_bos(tokenizer)
    return [[bos, *ids] if bos is not None and ids[:1] != [bos] else ids for ids in encoded]


def _control_token(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> str | None:
    """The first control token whose text is in a message, or None."""
    return next((token for text in _texts(messages) for token in _control_tokens(tokenizer) if token in text), None)


def _texts(value: Any) -> Iterator[str]:
    """All texts in it: a template may write any key of a message, a name, a thought or a tool's arguments."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)


@functools.lru_cache(4)
def _control_tokens(tokenizer: Any) -> list[str]:
    """Texts of the special tokens, and of those with which the template marks turns: some models' are not special."""
    try:
        turns = tokenizer.apply_chat_template(TURNS, tokenize=False)
    except TemplateError:
        turns = ""
    return [token.content for token in tokenizer.added_tokens_decoder.values()
            if token.special or (token.content in turns and not WORDS.fullmatch(token.content))]


def _usual_bos(tokenizer: Any) -> int | None:
    """The BOS id that the tokenizer puts in front of any text by itself, or None."""
    ids = tokenizer("a")["input_ids"]
    return ids[0] if ids and tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id else None


def _is_messages(content: Any) -> bool:
    return isinstance(content, list) and bool(content) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in content)
