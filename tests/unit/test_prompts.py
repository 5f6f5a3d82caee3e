"""Prompts: files of every oddity, tokenizers of every kind, and an order that depends on seed and step alone."""

import copy
import json
import random

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoTokenizer

from spmd_rl.batch import Prompt
from spmd_rl.config import ConfigError, DataConfig, ModelConfig
from spmd_rl.prompts import PromptSampler, encode_prompt, load_prompts, load_tokenizer

BOS = "<|bos|>"
PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
MESSAGES = [{"role": "user", "content": "hi"}]
BOS_ID = 258  # after 256 bytes, pad and EOS

# Kind -> (has a BOS, the tokenizer adds it by itself, the template writes it, leading BOS ids that are right).
KINDS = {
    "template and tokenizer": (True, True, True, 1),
    "tokenizer only": (True, True, False, 1),
    "no bos": (False, False, False, 0),
    "template only": (True, False, True, 1),
    "bos that nobody writes": (True, False, False, 0),
}


@pytest.fixture(scope="module")
def tokenizer_of(make_model, tmp_path_factory):
    """A function from a kind to its tokenizer, saved and loaded again as a run loads it."""
    made = {}

    def tokenizer(kind):
        if kind not in made:
            has_bos, adds, writes, _ = KINDS[kind]
            folder = str(tmp_path_factory.mktemp("tokenizer"))
            new = make_model.make_tokenizer(320, [BOS] if has_bos else [])
            new.chat_template = BOS * writes + PLAIN
            if has_bos:
                new.bos_token = BOS
            if adds:
                new._tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
            new.save_pretrained(folder)
            AutoConfig.for_model("qwen3").save_pretrained(folder)
            made[kind] = load_tokenizer(ModelConfig(path=folder))
        return made[kind]

    return tokenizer


def leading(ids, wanted):
    """How many times `wanted` stands at the beginning."""
    return next((i for i, value in enumerate(ids) if value != wanted), len(ids))


@pytest.mark.parametrize("kind", KINDS)
def test_case_10_the_kinds_of_tokenizer_are_what_they_say(tokenizer_of, kind):
    """The tokenizers of these tests really add the BOS, or do not: a test on the wrong kind would show nothing."""
    has_bos, adds, writes, _ = KINDS[kind]
    tokenizer = tokenizer_of(kind)
    assert (tokenizer.bos_token_id is not None) == has_bos
    assert leading(tokenizer("hi")["input_ids"], BOS_ID) == adds
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text.startswith(BOS) == writes


@pytest.mark.parametrize("kind", KINDS)
def test_case_10_messages_have_the_bos_once_or_not_at_all(tokenizer_of, kind):
    """Leading BOS ids are 1, 1, 0 (and 1, 0): never two, never none where one is usual.

    Encoding the templated text with special tokens gives 2 for the first; always without them 0 for the second.
    """
    tokenizer = tokenizer_of(kind)
    ids = encode_prompt(tokenizer, MESSAGES, None, "here")
    right = KINDS[kind][3]
    assert leading(ids, BOS_ID) == right and ids.count(BOS_ID) == right
    assert ids[right:] == list(b"user: hi\nassistant: ") or tokenizer.decode(ids[right:]) == "user: hi\nassistant: "


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["hi", BOS + "hi", "h", " "])
def test_case_10_text_has_the_bos_once_or_not_at_all(tokenizer_of, kind, text):
    """Text gets the BOS that the tokenizer adds by itself, once, also where the text already begins with it."""
    has_bos, adds, _, _ = KINDS[kind]
    ids = encode_prompt(tokenizer_of(kind), text, None, "here")
    assert leading(ids, BOS_ID) == (1 if adds or (has_bos and text.startswith(BOS)) else 0)


def test_case_10_no_other_special_token_is_added(tokenizer_of):
    """A tokenizer that also ends every text with EOS: a prompt does not end with it, or the model would be done."""
    tokenizer = copy.deepcopy(tokenizer_of("tokenizer only"))
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A {tokenizer.eos_token}",
        special_tokens=[(BOS, BOS_ID), (tokenizer.eos_token, tokenizer.eos_token_id)])
    assert tokenizer("hi")["input_ids"][-1] == tokenizer.eos_token_id
    ids = encode_prompt(tokenizer, "hi", None, "here")
    assert (leading(ids, BOS_ID), ids.count(tokenizer.eos_token_id), len(ids)) == (1, 0, 3)


def test_case_12_a_tokenizer_without_pad_is_taken_as_it_is(make_model, model_folder, tmp_path):
    """No pad token: prompts encode, nothing is added to the vocabulary, and the saved tokenizer still loads."""
    folder = model_folder("qwen3")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(folder)
    config.save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert loaded.pad_token is None
    assert len(encode_prompt(loaded, "hi", None, "here")) == 2
    assert loaded.pad_token is None and len(loaded) == config.vocab_size == 320
    loaded.save_pretrained(tmp_path / "again")
    config.save_pretrained(tmp_path / "again")
    assert len(load_tokenizer(ModelConfig(path=str(tmp_path / "again")))) == 320


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    """ConfigError with the field: the folder may hold anything else."""
    AutoConfig.for_model("qwen3").save_pretrained(tmp_path)
    for path in (str(tmp_path), str(tmp_path / "no-such-folder")):
        with pytest.raises(ConfigError, match="model.path"):
            load_tokenizer(ModelConfig(path=path))


# Contents of a prompt. ------------------------------------------------------------------------------------------------


def test_messages_pass_through_the_template_up_to_the_assistant(tokenizer):
    """Roles and contents as the template lays them, ending where the assistant begins."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"}]
    ids = encode_prompt(tokenizer, messages, None, "here")
    assert tokenizer.decode(ids) == "user: a\nassistant: b\nuser: c\nassistant: "


@pytest.mark.parametrize("content, expected", [
    (MESSAGES, "system: S\nuser: hi\nassistant: "),
    ([{"role": "system", "content": "own"}, *MESSAGES], "system: own\nuser: hi\nassistant: "),
    ("hi", "hi")])
def test_the_system_prompt_goes_before_messages_without_one(tokenizer, content, expected):
    """A row's own system message stays, text stays as it is, and the row itself is not changed."""
    before = copy.deepcopy(content)
    assert tokenizer.decode(encode_prompt(tokenizer, content, "S", "here")) == expected
    assert content == before


@pytest.mark.parametrize("content", ["", None, 7, [], {}, ["hi"], [{"role": "user"}], [{"content": "x"}],
                                     [{"role": "user", "content": None}], [{"role": 1, "content": "x"}],
                                     [{"role": "user", "content": [{"type": "text", "text": "x"}]}]])
def test_a_prompt_that_is_neither_text_nor_messages_is_refused(tokenizer, content):
    """ConfigError that says where; an empty text has no state to predict the first token from."""
    with pytest.raises(ConfigError, match="train.jsonl, line 3"):
        encode_prompt(tokenizer, content, None, "train.jsonl, line 3")


def test_messages_need_a_template(tokenizer):
    """A tokenizer without template cannot lay out messages; text still passes."""
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(ConfigError, match="line 3.*no chat template"):
        encode_prompt(bare, MESSAGES, None, "line 3")
    assert len(encode_prompt(bare, "hi", None, "line 3")) == 2


def test_messages_that_the_template_refuses_are_reported_with_their_line(tokenizer):
    """Templates raise for roles they do not know (a system message, two users in a row): that is the row's error."""
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    with pytest.raises(ConfigError, match="line 3.*no system"):
        encode_prompt(strict, [{"role": "system", "content": "s"}, *MESSAGES], None, "line 3")


@pytest.mark.parametrize("text", ["\U0001f600 é", "a\x00b", "\u202eabc", "\u2028x\u2029", "\r\n\t", "<|pad|>x", "\x85"])
def test_odd_text_encodes(tokenizer, text):
    """Emoji, NUL, right-to-left marks and line separators are text like any other; bytes are kept."""
    assert tokenizer.decode(encode_prompt(tokenizer, text, None, "here")) == text


# Files. ---------------------------------------------------------------------------------------------------------------

ROW1, ROW2 = b'{"prompt": "one", "answer": "1"}', b'{"prompt": "two", "answer": "2"}'
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
FILES = {
    "plain": ROW1 + b"\n" + ROW2 + b"\n",
    "all at once": BYTE_ORDER_MARK + ROW1 + b"\r\n" + b"\n" + b"   \n" + ROW2,
    "byte-order mark": BYTE_ORDER_MARK + ROW1 + b"\n" + ROW2 + b"\n",
    "windows line ends": ROW1 + b"\r\n" + ROW2 + b"\r\n",
    "no final newline": ROW1 + b"\n" + ROW2,
    "blank lines first and last": b"\n\r\n \t\n" + ROW1 + b"\n\n" + ROW2 + b"\n\n  ",
    "spaces around": b"  " + ROW1 + b"  \n\t" + ROW2 + b"\t\n",
    "keys in another order": b'{"answer": "1", "prompt": "one"}\n{"answer": "2", "prompt": "two"}\n',
}


def load(tmp_path, data, tokenizer, **fields):
    path = tmp_path / "train.jsonl"
    path.write_bytes(data)
    return load_prompts(str(path), tokenizer, DataConfig(**fields))


@pytest.mark.parametrize("kind", FILES)
def test_case_19_every_row_is_read(tmp_path, tokenizer, kind):
    """2 rows with their columns, whatever marks, line ends and blank lines are around them.

    Plain utf-8 reading fails on a byte-order mark, or calls the first key '\\ufeffprompt'.
    """
    prompts, dropped = load(tmp_path, FILES[kind], tokenizer)
    assert [(p.row, p.content, p.columns) for p in prompts] == [(0, "one", {"answer": "1"}),
                                                                (1, "two", {"answer": "2"})]
    assert [tokenizer.decode(p.token_ids) for p in prompts] == ["one", "two"]
    assert dropped == []


@pytest.mark.parametrize("data", [b"", b"\n", BYTE_ORDER_MARK, b" \r\n\t\n"])
def test_case_19_a_file_without_rows_is_refused(tmp_path, tokenizer, data):
    """Nothing to train on is an error at the start, with the file's name."""
    with pytest.raises(ConfigError, match="train.jsonl: no rows"):
        load(tmp_path, data, tokenizer)


@pytest.mark.parametrize("bad, reason", [
    (b"{", "JSON"), (b"prompt", "JSON"), (b'{"prompt": "x"} {"prompt": "y"}', "JSON"), (b"[]", "list"), (b"7", "int"),
    (b"null", "None"), (b'"text"', "str"), (b'{"question": "x"}', "question"), (b"{}", "prompt"),
    (b'{"prompt": ""}', "empty"), (b'{"prompt": 7}', "7"), (b'{"prompt": null}', "None"),
    (b'{"prompt": []}', "messages"),
    (b'{"prompt": "caf\xe9"}', "UTF-8"), (b"\xff\xfe{", "UTF-8"), (b'{"prompt": "\\ud800"}', "")])
def test_case_19_a_bad_row_is_reported_with_file_line_and_reason(tmp_path, tokenizer, bad, reason):
    """The line number is that of an editor: blank lines count. A bad row is never skipped in silence."""
    with pytest.raises(ConfigError) as error:
        load(tmp_path, ROW1 + b"\r\n\n" + bad + b"\n" + ROW2, tokenizer)
    assert "train.jsonl, line 3" in str(error.value) and reason in str(error.value)


def test_case_19_a_file_in_another_encoding_is_refused(tmp_path, tokenizer):
    """UTF-16, as some editors save by default: an error that names the file and the encoding, not the schema."""
    with pytest.raises(ConfigError, match="train.jsonl.*UTF-8"):
        load(tmp_path, (ROW1 + b"\n" + ROW2).decode().encode("utf-16"), tokenizer)


@pytest.mark.parametrize("kind", ["folder", "absent"])
def test_case_19_a_path_that_is_no_file_is_refused(tmp_path, tokenizer, kind):
    """A folder in place of a file, or nothing: the error names the path."""
    path = tmp_path / "train.jsonl"
    if kind == "folder":
        path.mkdir()
    with pytest.raises((ConfigError, OSError), match="train.jsonl"):
        load_prompts(str(path), tokenizer, DataConfig())


def test_case_19_line_separators_inside_a_text_do_not_split_a_row(tmp_path, tokenizer):
    """U+2028, U+0085, form feed and an escaped newline are characters of a text, not ends of lines."""
    text = "a\u2028b\u0085c\x0cd\n\re\x1c"
    data = json.dumps({"prompt": text}, ensure_ascii=False).encode() + b"\n" + ROW2
    assert [p.content for p in load(tmp_path, data, tokenizer)[0]] == [text, "two"]


def test_case_16_long_rows_are_dropped_by_tokens_and_counted(tmp_path, tokenizer):
    """Limit 32 after the template: 31 and 32 tokens stay, 33 and 500 go, and their rows are told; row numbers stay."""
    data = b"\n".join(json.dumps({"prompt": "x" * n}).encode() for n in (33, 31, 32, 500, 1))
    prompts, dropped = load(tmp_path, data, tokenizer, max_prompt_length=32)
    assert [(p.row, len(p.token_ids)) for p in prompts] == [(1, 31), (2, 32), (4, 1)]
    assert dropped == [0, 3]
    # "user: " + 6 + "\n" + "assistant: ": 6 + 6 + 1 + 11 = 24.
    data = json.dumps({"prompt": [{"role": "user", "content": "x" * 6}]}).encode()
    assert load(tmp_path, data, tokenizer, max_prompt_length=24)[1] == []
    with pytest.raises(ConfigError, match="all 1 rows are longer than data.max_prompt_length, 23"):
        load(tmp_path, data, tokenizer, max_prompt_length=23)


# The order. -----------------------------------------------------------------------------------------------------------


def rows(count):
    return [Prompt(row, f"{row}", [1], {}) for row in range(count)]


def drawn(sampler, steps):
    return [[p.row for p in sampler.draw(step)] for step in steps]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("count, per_step", [(7, 3), (8, 4), (5, 5), (3, 8), (1, 2)])
def test_every_epoch_holds_every_row_once(count, per_step, shuffle):
    """Epochs laid end to end: no row is left out at the end of one, and none comes twice in it."""
    steps = 3 * count  # whole epochs: 3 * count steps are 3 * per_step epochs
    flat = [row for step in drawn(PromptSampler(rows(count), per_step, 1, shuffle), range(steps)) for row in step]
    assert len(flat) == steps * per_step
    for start in range(0, len(flat), count):
        epoch = flat[start:start + count]
        assert sorted(epoch) == list(range(count))
        assert shuffle or epoch == list(range(count))


@pytest.mark.parametrize("engine_seeds", [False, True])
def test_case_23_the_order_depends_on_seed_and_step_alone(engine_seeds):
    """Any order of asking, another sampler, seeded global generators: step n draws the same rows."""
    straight = drawn(PromptSampler(rows(10), 4, 1, True), range(12))
    sampler = PromptSampler(rows(10), 4, 1, True)
    for step in (11, 0, 5, 5, 2, 7, 1, 11):
        if engine_seeds:
            random.seed(0)
        assert drawn(sampler, [step]) == [straight[step]]
    assert drawn(PromptSampler(rows(10), 4, 2, True), range(12)) != straight
    state = random.getstate()
    drawn(PromptSampler(rows(10), 4, 1, True), range(12))
    assert random.getstate() == state


def test_epochs_differ_and_count_up():
    """Another order each epoch; after step 4 of 4 prompts a step, 20 of 10 rows: 2 epochs."""
    sampler = PromptSampler(rows(10), 10, 0, True)
    assert drawn(sampler, [0]) != drawn(sampler, [1])
    assert PromptSampler(rows(10), 4, 0, True).epoch(4) == 2.0
