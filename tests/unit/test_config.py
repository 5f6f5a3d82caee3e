"""Options: what is given is used, and what cannot be read is refused with field, value and fix."""

import dataclasses
import sys

import pytest
import yaml

from spmd_rl.config import Config, ConfigError, as_dict, load_function, parse

SECTIONS = [f.name for f in dataclasses.fields(Config)]


def write(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return str(path)


def test_short_options_of_recording_and_replay(tmp_path):
    """--record_rollouts and --replay DIR are their fields of the run section, over a file's."""
    path = write(tmp_path, "run: {record_rollouts: false, replay: there, max_steps: 3}\n")
    assert parse(["--config", path])[0].run.replay == "there"
    config, _ = parse(["--config", path, "--replay", "here", "--record_rollouts"])
    assert (config.run.replay, config.run.record_rollouts, config.run.max_steps) == ("here", True, 3)
    assert parse(["--run.replay", "x"])[0].run.replay == "x" and parse([])[0].run.replay is None


@pytest.mark.parametrize("text, value", [("auto", "auto"), ("on", True), ("off", False), ("true", True), ("false", 0)])
def test_shared_prompt_is_auto_on_or_off(tmp_path, text, value):
    """On the command line and in YAML, where on and off are booleans."""
    assert parse(["--batch.shared_prompt", text])[0].batch.shared_prompt == value
    assert parse(["--config", write(tmp_path, f"batch: {{shared_prompt: {text}}}")])[0].batch.shared_prompt == value


@pytest.mark.parametrize("text", ["sometimes", "2", "null", "[]"])
def test_shared_prompt_of_another_value_is_refused(text):
    with pytest.raises(ConfigError, match="shared_prompt"):
        parse(["--batch.shared_prompt", text])


# Reading. -------------------------------------------------------------------------------------------------------------


def test_no_option_gives_the_defaults():
    """Nothing said is the dataclasses' defaults, and no dry run."""
    assert parse([]) == (Config(), False)


def test_two_parses_share_nothing():
    """Lists and raw options of one config are not another's: a default made once would be."""
    first, second = parse([])[0], parse([])[0]
    first.rewards.functions.append("x")
    first.rollout.stop.append("x")
    first.vllm["x"] = 1
    assert second == Config() == parse([])[0]


@pytest.mark.parametrize("text, number", [("1e-4", 1e-4), ("1.0e-04", 1e-4), ("0.0001", 1e-4), ("1E-4", 1e-4),
                                          ("1", 1.0)])
def test_a_float_in_yaml_is_a_number_however_it_is_written(tmp_path, text, number):
    """1e-4 is a float in a file and on the command line: YAML 1.1 reads it as text."""
    path = write(tmp_path, f"policy:\n  learning_rate: {text}\n")
    for args in (["--config", path], ["--policy.learning_rate", text]):
        rate = parse(args)[0].policy.learning_rate
        assert rate == number and isinstance(rate, float)


def test_later_options_win(tmp_path):
    """Defaults, then the file, then what follows it on the command line; other fields of a section stay."""
    path = write(tmp_path, "rollout:\n  temperature: 0.7\n  top_k: 5\n")
    config, _ = parse(["--config", path, "--rollout.temperature", "0.8", "--dry_run"])
    assert (config.rollout.temperature, config.rollout.top_k, config.rollout.top_p) == (0.8, 5, 1.0)
    assert parse(["--config", path, "--dry_run"])[1] is True


@pytest.mark.parametrize("section", ["deepspeed", "vllm"])
@pytest.mark.parametrize("text, value", [("7", 7), ("0.5", 0.5), ("1e-4", 1e-4), ("true", True), ("null", None),
                                         ("fp8", "fp8"), ("[1, 2]", [1, 2]), ("{a: 1}", {"a": 1})])
def test_raw_options_of_the_command_line_are_typed(section, text, value):
    """--vllm.KEY VALUE has the type that the value has in a YAML file of this program."""
    found = getattr(parse([f"--{section}.some_key", text])[0], section)
    assert found == {"some_key": value}
    assert type(found["some_key"]) is type(value)


@pytest.mark.parametrize("value", [7, 0.5, 1e-4, True, None, "fp8", [1, "2"], {"a": {"b": "x"}}])
@pytest.mark.parametrize("section", ["deepspeed", "vllm"])
def test_raw_options_of_a_file_are_taken_as_they_are(tmp_path, section, value):
    """A raw section arrives as the file has it, nested ones too."""
    path = write(tmp_path, yaml.safe_dump({section: {"some_key": value}}))
    assert getattr(parse(["--config", path])[0], section) == {"some_key": value}


@pytest.mark.parametrize("value", ["7", "true", "null", "a: b", "{{ x }}", "{% if a %}b{% endif %}", "- x", "[", "no"])
def test_a_quoted_text_in_a_raw_section_stays_text(tmp_path, value):
    """What a file quotes is text: a revision "7" is no number, and a chat template no YAML to be read again."""
    path = write(tmp_path, yaml.safe_dump({"vllm": {"chat_template": value}}))
    assert parse(["--config", path])[0].vllm == {"chat_template": value}


def test_dotted_raw_options_go_into_the_files_sections(tmp_path):
    """A dotted option over a file changes that key; its neighbours in the file stay."""
    path = write(tmp_path, yaml.safe_dump({"deepspeed": {"zero_optimization": {"overlap_comm": False},
                                                         "wall_clock_breakdown": True}}))
    found = parse(["--config", path, "--deepspeed.zero_optimization.reduce_bucket_size", "500"])[0].deepspeed
    assert found == {"zero_optimization": {"overlap_comm": False, "reduce_bucket_size": 500},
                     "wall_clock_breakdown": True}


def test_dotted_raw_options_nest_and_add_up():
    """--deepspeed.a.b 1 --deepspeed.a.c 2 is one nested section: the second does not drop the first."""
    args = ["--deepspeed.zero_optimization.reduce_bucket_size", "500", "--deepspeed.zero_optimization.overlap_comm",
            "false", "--deepspeed.wall_clock_breakdown", "true"]
    assert parse(args)[0].deepspeed == {
        "zero_optimization": {"reduce_bucket_size": 500, "overlap_comm": False}, "wall_clock_breakdown": True}


def test_as_dict_goes_through_yaml_and_back(tmp_path):
    """The config.yaml that a run writes is that run's config: no field is lost, none changes its type."""
    args = ["--policy.learning_rate", "1e-7", "--loss.epsilon_high", "0.28", "--rollout.stop", '["a: b", "7"]',
            "--rewards.weights", "[0.5]", "--data.eval", "x.jsonl", "--vllm.max_num_seqs", "64",
            "--deepspeed.zero_optimization.overlap_comm", "false", "--policy.zero_stage", "3"]
    config, _ = parse(args)
    path = write(tmp_path, yaml.safe_dump(as_dict(config), sort_keys=False))
    assert parse(["--config", path])[0] == config
    assert list(as_dict(config)) == SECTIONS


def test_print_config_prints_what_a_file_may_hold(capsys, tmp_path):
    """--print_config prints the resolved config as YAML that reads back to it, and exits with 0."""
    with pytest.raises(SystemExit) as exit_:
        parse(["--policy.learning_rate", "1e-7", "--run.seed", "3", "--vllm.max_num_seqs", "64", "--print_config"])
    assert exit_.value.code in (0, None)
    config, _ = parse(["--config", write(tmp_path, capsys.readouterr().out)])
    assert (config.policy.learning_rate, config.run.seed, config.vllm) == (1e-7, 3, {"max_num_seqs": 64})


def test_help_has_a_line_for_every_field(capsys):
    """Every option is in --help with its meaning."""
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = capsys.readouterr().out
    for section in dataclasses.fields(Config):
        if dataclasses.is_dataclass(section.default_factory):
            for field in dataclasses.fields(section.default_factory):
                assert f"--{section.name}.{field.name}" in text
    assert "Sampling temperature" in text


# Refusals of the reader. ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, named", [
    ("rolout:\n  temperature: 1.0\n", "rolout"), ("rollout:\n  temprature: 1.0\n", "temprature"),
    ("temperature: 1.0\n", "temperature"), ("rollout:\n  temperature:\n    x: 1\n", "temperature"),
    ("rollout:\n  num_generations: many\n", "num_generations"), ("rollout:\n  num_generations: 2.5\n",
                                                                 "num_generations"),
    ("rollout:\n  temperature: hot\n", "temperature"), ("rollout:\n  stop: a\n", "stop"),
    ("policy:\n  zero_stage: 4\n", "zero_stage"), ("model:\n  dtype: float16\n", "dtype"),
    ("data:\n  shuffle: 7\n", "shuffle"), ("rollout: 7\n", "rollout"), ("vllm: 7\n", "vllm"),
    ("run:\n  seed: null\n", "seed"), ("memory:\n  swap: [engine]\n", "swap"), ("rollout: null\n", "rollout"),
    ("vllm: null\n", "vllm"), ("deepspeed: null\n", "deepspeed"),
    ("- a\n- b\n", "config"), ("rollout: {temperature: 1.0\n", "config"), ("just words\n", "config")])
def test_a_file_that_does_not_fit_is_refused(tmp_path, text, named):
    """Unknown key, wrong type, or no YAML mapping at all: ConfigError with the field, never a traceback.

    An empty section (its fields commented out) is null in YAML; reading it as the defaults would be right too.
    """
    try:
        config, _ = parse(["--config", write(tmp_path, text)])
    except ConfigError as error:
        assert named in str(error)
    else:
        assert text.endswith("null\n") and config == Config(), f"{text!r} was read as {config}"


@pytest.mark.parametrize("args, named", [
    (["--rollout.temprature", "1"], "temprature"), (["--rolout.temperature", "1"], "rolout"),
    (["--rollout.num_generations", "2.5"], "num_generations"), (["--rollout.temperature", "hot"], "temperature"),
    (["--policy.zero_stage", "5"], "zero_stage"), (["--dry_run", "maybe"], "dry_run"), (["stray"], "stray"),
    (["--run.seed"], "seed")])
def test_an_option_that_does_not_fit_is_refused(args, named):
    """The same on the command line."""
    with pytest.raises(ConfigError, match=named):
        parse(args)


@pytest.mark.parametrize("args", [["--rollout.temp", "0.5"], ["--run.max_step", "3"], ["--dry"], ["--conf", "x.yaml"],
                                  ["--roll.temperature", "0.5"]])
def test_abbreviations_are_refused(args):
    """An abbreviation would change its meaning with the next option that begins like it."""
    with pytest.raises(ConfigError):
        parse(args)


@pytest.mark.parametrize("kind", ["absent", "folder", "binary"])
def test_a_config_file_that_cannot_be_read_is_refused(tmp_path, kind):
    """No file, a folder, or bytes that are no text: ConfigError."""
    path = tmp_path / "config.yaml"
    if kind == "folder":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError):
        parse(["--config", str(path)])


# The user's own functions. --------------------------------------------------------------------------------------------


def test_a_function_is_found_by_module_and_by_file(tmp_path, monkeypatch):
    """module:function is looked for on the path and in the working directory, file.py:function where it says."""
    (tmp_path / "my_own_reward.py").write_text("def score(x):\n    return x + 1\n")
    assert load_function("os.path:basename", "f")("a/b") == "b"
    assert load_function(f"{tmp_path}/my_own_reward.py:score", "f")(1) == 2
    sys.modules.pop("my_own_reward", None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_function("my_own_reward:score", "f")(1) == 2
    sys.modules.pop("my_own_reward", None)


@pytest.mark.parametrize("name", ["no_such_module_x:f", "no_such_module_x.y:f", "os.no_such_module:f", "os:no_such",
                                  "os:sep", "no/such/file.py:f", "os:", ":f", ":"])
def test_a_function_that_is_not_there_is_refused(name):
    """ConfigError with the field and the name, for each part that can be wrong."""
    with pytest.raises(ConfigError, match="rewards.functions") as error:
        load_function(name, "rewards.functions")
    assert repr(name) in str(error.value)


def test_an_error_inside_the_users_module_is_shown_as_it_is(tmp_path):
    """A mistake in the user's file is the user's to see: not "no such module"."""
    (tmp_path / "broken_reward.py").write_text("import no_such_thing_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_thing_at_all"):
        load_function(f"{tmp_path}/broken_reward.py:f", "f")


def test_a_file_named_like_a_library_replaces_nothing(tmp_path):
    """A user's colorsys.py is loaded as such, and `import colorsys` means what it meant."""
    import colorsys

    (tmp_path / "colorsys.py").write_text("def score(x):\n    return 'mine'\n")
    try:
        assert load_function(f"{tmp_path}/colorsys.py:score", "f")(1) == "mine"
        assert sys.modules["colorsys"] is colorsys
    finally:
        sys.modules["colorsys"] = colorsys
