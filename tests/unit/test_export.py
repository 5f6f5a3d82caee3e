"""Export: what is written is what was there, and a folder with the final name is whole."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from spmd_rl import run_folder, shards
from spmd_rl.config import Config, ModelConfig, as_dict
from spmd_rl.export import ShardWriter, export, export_checkpoint, main
from spmd_rl.files import REPLACED, WRITING, replace_folder
from spmd_rl.model import build, load_hf_config, read_weights, weight_files
from spmd_rl.prompts import load_tokenizer
from spmd_rl.shards import cut

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),  # 24 bytes
    "b": torch.arange(8, dtype=torch.bfloat16),  # 16
    "c": torch.full((3,), -0.5),  # 12
    "d": torch.tensor(7.0),  # 4, without axes
}
# Largest file -> names in each: 24 + 16 = 40 fits 40 and not 39; a tensor above the limit has a file of its own.
SHARDS = {1000: [["a", "b", "c", "d"]], 56: [["a", "b", "c", "d"]], 40: [["a", "b"], ["c", "d"]],
          39: [["a"], ["b", "c", "d"]], 16: [["a"], ["b"], ["c", "d"]], 1: [["a"], ["b"], ["c"], ["d"]]}


@pytest.mark.parametrize("max_bytes", SHARDS)
def test_files_hold_every_tensor_once_within_their_size(tmp_path, max_bytes):
    """Names, values and types come back through the index; files are filled in order to the limit."""
    folder = str(tmp_path / "out")
    writer = ShardWriter(folder, max_bytes)
    for name, tensor in TENSORS.items():
        writer.add(name, tensor)
    writer.finish()
    files = weight_files(folder)
    shards = SHARDS[max_bytes]
    assert [sorted(n for n in files if files[n] == path) for path in sorted(set(files.values()))] == shards
    count = len(shards)
    names = {"model.safetensors"} if count == 1 else {f"model-{i + 1:05d}-of-{count:05d}.safetensors"
                                                      for i in range(count)} | {"model.safetensors.index.json"}
    assert set(os.listdir(folder)) == names
    for name, tensor in read_weights(files, list(TENSORS)):
        assert tensor.dtype == TENSORS[name].dtype and torch.equal(tensor, TENSORS[name])
    if count > 1:
        with open(os.path.join(folder, "model.safetensors.index.json")) as file:
            assert json.load(file)["metadata"]["total_size"] == 56
    with safe_open(next(iter(files.values())), "pt") as opened:
        assert opened.metadata() == {"format": "pt"}  # Transformers refuses a file that does not say


def test_a_tensor_is_copied_when_it_is_added(tmp_path):
    """The bucket that it came from is used again: what was added is what is written. Views are written whole."""
    writer = ShardWriter(str(tmp_path / "out"), 1000)
    base = torch.arange(12.0)
    writer.add("x", base)
    writer.add("y", base[2:4])  # shares storage with x, which safetensors refuses
    writer.add("z", base.reshape(3, 4).T)
    base.zero_()
    writer.finish()
    found = dict(read_weights(weight_files(str(tmp_path / "out")), ["x", "y", "z"]))
    assert found["x"].tolist() == list(range(12))
    assert found["y"].tolist() == [2, 3]
    assert torch.equal(found["z"], torch.arange(12.0).reshape(3, 4).T)


def test_what_an_export_that_was_cut_off_left_is_not_mixed_in(tmp_path):
    """Older part files under the writing name are gone before the first new one."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "part-7").write_text("old")
    writer = ShardWriter(str(folder), 1000)
    writer.add("x", torch.ones(1))
    writer.finish()
    assert os.listdir(folder) == ["model.safetensors"]


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("leftover", [False, True])
def test_the_new_folder_takes_the_place_of_the_old_one(tmp_path, older, leftover):
    """After it there is the new folder alone, whether or not there was one, or the rest of a cut-off exchange."""
    folder = str(tmp_path / "export")
    for name, made in ((folder, older), (folder + REPLACED, leftover), (folder + WRITING, True)):
        if made:
            os.makedirs(name)
            with open(os.path.join(name, "file"), "w") as file:
                file.write(name)
    replace_folder(folder)
    assert os.listdir(tmp_path) == ["export"]
    with open(os.path.join(folder, "file")) as file:
        assert file.read() == folder + WRITING


def test_the_old_folder_stays_until_the_new_one_is_there(tmp_path, monkeypatch):
    """An error at the last rename leaves the older folder's files, under one of the two names."""
    folder = str(tmp_path / "export")
    for name in (folder, folder + WRITING):
        os.makedirs(name)
        with open(os.path.join(name, "file"), "w") as file:
            file.write(name)
    rename = os.rename

    def fails(source, target):
        if source == folder + WRITING:
            raise OSError("disk")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(OSError, match="disk"):
        replace_folder(folder)
    kept = [name for name in (folder, folder + REPLACED) if os.path.exists(os.path.join(name, "file"))]
    assert kept, "neither the old nor the new folder is left"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_an_export_loads_with_plain_transformers(model_folder, mesh, tmp_path, family, dtype, tied):
    """The same keys, shapes and values as the model that was trained, in its type; tied weights once; with config,
    tokenizer, template and generation config.
    """
    source = model_folder(family, tied=tied, dtype=getattr(torch, dtype))
    config = Config(model=ModelConfig(path=source, dtype=dtype))
    config.checkpoint.max_shard_gib = 20_000 / 2**30  # several files
    hf_config = load_hf_config(config.model)
    model = build(config.model, hf_config, 1.0)
    policy = SimpleNamespace(hf_config=model.lm.config, full_weights=lambda size: (
        (name, p.detach()) for name, p in model.lm.named_parameters()))
    tokenizer = load_tokenizer(config.model)
    folder = str(tmp_path / "export")
    for _ in range(2):  # the second takes the place of the first
        export(folder, policy, tokenizer, config, mesh)
    assert os.listdir(tmp_path) == ["export"]
    assert set(weight_files(folder)) == set(weight_files(source))
    assert tied == ("lm_head.weight" not in weight_files(folder))
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    original = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    assert loaded.dtype == original.dtype == getattr(torch, dtype)
    ids = torch.arange(20)[None]
    assert torch.equal(loaded(ids).logits, original(ids).logits)
    again = AutoTokenizer.from_pretrained(folder)
    assert again.chat_template == tokenizer.chat_template and len(again) == len(tokenizer)
    for name in ("eos_token_id", "pad_token_id", "temperature"):
        assert getattr(GenerationConfig.from_pretrained(folder), name) == getattr(
            GenerationConfig.from_pretrained(source), name)


def write_checkpoint(folder, source, dtype, masters):
    """A checkpoint of two ranks' shards, as a run at `source` would have left it."""
    path = folder / "checkpoints" / "step-7"
    (path / "policy").mkdir(parents=True)
    shapes = {name: tuple(master.shape) for name, master in masters.items()}
    for rank in range(2):
        pieces = []
        for name, master in masters.items():
            size = -(-master.numel() // 2)
            part = master.reshape(-1)[rank * size:(rank + 1) * size]
            pieces += [*cut("master", name, rank * size, part), *cut("exp_avg", name, rank * size, part * 0)]
        shards.write(str(path / "policy"), f"rank-{rank}", pieces, shapes)
    config = Config(model=ModelConfig(path=str(source), dtype=dtype))
    config.checkpoint.max_shard_gib = 20_000 / 2**30
    (path / "state.json").write_text(json.dumps({"step": 7, "config": as_dict(config)}))
    names = run_folder.files_below(str(path))
    run_folder.write_manifest(str(path), run_folder.manifest_entries(str(path), names))
    return path


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_case_61_a_checkpoint_exports_its_masters_in_the_runs_type(model_folder, tmp_path, dtype, tied):
    """Keys, shapes and type are the source's, fp32 masters rounded to it; logits are those of the model in memory with
    the same weights. The run's folder serves as well as the checkpoint's, and gets export-N."""
    source = model_folder("qwen3", tied=tied, dtype=getattr(torch, dtype))
    original = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    masters = {name: p.detach().float() * 1.001 + 1e-4 for name, p in original.named_parameters()}
    path = write_checkpoint(tmp_path, source, dtype, masters)
    for given, wanted in ((path, tmp_path / "export-7"), (tmp_path, tmp_path / "mine")):
        folder = export_checkpoint(str(given), None if given == path else str(wanted))
        assert folder == str(wanted)
    with torch.no_grad():
        for name, p in original.named_parameters():
            p.copy_(masters[name])
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and loaded.dtype == getattr(torch, dtype)
    files = weight_files(folder)
    assert set(files) == set(weight_files(source)) and len(set(files.values())) > 1
    ids = torch.arange(20)[None]
    assert torch.equal(loaded(ids).logits, original(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(source).chat_template
    eos_token_id = GenerationConfig.from_pretrained(source).eos_token_id
    assert GenerationConfig.from_pretrained(folder).eos_token_id == eos_token_id


def test_an_export_that_cannot_be_is_refused(model_folder, tmp_path, capsys):
    """A folder that is there, a checkpoint that is not whole, a model that has moved (and --model, which finds it):
    one line and exit code 2, nothing written."""
    source = tmp_path / "source"
    shutil.copytree(model_folder("qwen3"), source)
    masters = {name: p.detach() for name, p in AutoModelForCausalLM.from_pretrained(source).named_parameters()}
    path = write_checkpoint(tmp_path / "run", source, "float32", masters)
    (tmp_path / "there").mkdir()
    source.rename(tmp_path / "elsewhere")

    def refused(*args):
        with pytest.raises(SystemExit) as exit_:
            main([*args])
        assert exit_.value.code == 2
        return capsys.readouterr().err

    assert "there is there already" in refused(str(path), "--output", str(tmp_path / "there"))
    assert "source" in refused(str(path), "--output", str(tmp_path / "out"))
    main([str(path), "--output", str(tmp_path / "out"), "--model", str(tmp_path / "elsewhere")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    os.truncate(path / "policy" / "rank-1-0.safetensors", 100)
    assert "policy/rank-1-0.safetensors has 100 bytes" in refused(str(tmp_path / "run"), "--output", "x")
    assert "no whole checkpoint: give the folder of a run" in refused(str(tmp_path), "--output", "x")
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "out", "run", "there"] and not os.path.exists("x")


def test_the_commands_of_the_page_on_checkpoints_work(model_folder, tmp_path):
    """Those of "By hand", as they are written: whether one is whole, another name to keep it, and a tensor of one."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md").read_text()
    commands = page.split("## By hand")[1].split("```bash\n")[1].split("```")[0]
    source = model_folder("qwen3")
    masters = {name: p.detach() for name, p in AutoModelForCausalLM.from_pretrained(source).named_parameters()}
    path = write_checkpoint(tmp_path / "runs" / "mine", source, "float32", masters)
    for number in (40, 50):
        shutil.copytree(path, path.with_name(f"step-{number}"))
    (path.with_name("step-50") / "policy" / "rank-0-0.safetensors").unlink()
    root = str(Path(__file__).resolve().parents[2])
    env = os.environ | {"PYTHONPATH": root, "PATH": os.pathsep.join([str(Path(sys.executable).parent),
                                                                    os.environ["PATH"]])}
    done = subprocess.run(["bash", "-euc", commands], cwd=tmp_path, env=env, capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, name, *values = done.stdout.split(maxsplit=2)
    assert (first, name) == ("policy/rank-0-0.safetensors", "missing") and "tensor([" in values[0]
    assert sorted(os.listdir(path.parent)) == ["step-40", "step-50.mine", "step-7"]
