"""Weight sync with CUDA handles and vLLM on a GPU: bits, nothing that grows. Several NCCL ranks are on the one device
where there are too few.

tools/check_weight_sync.py fills the engine with noise, syncs, and compares.
"""

import json
import os

import launching
import pytest
import torch

pytestmark = pytest.mark.gpu
TOOL = str(launching.ROOT / "tools" / "check_weight_sync.py")
VOCABULARY = 4224  # an embedding of more than the smallest bucket, 1 MiB


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """The tool's cells: (family, tied, ranks, options) -> list."""
    folder = tmp_path_factory.mktemp("weight_sync")

    def launch(family, tied, ranks, options):
        tool = launching.load_tool("make_model")
        path = folder / f"{family}-{tied}"
        if not path.exists():
            sizes = tool.TINY | dict(tied=tied, vocab_size=VOCABULARY)
            tool.save(path, tool.build_model(family, **sizes), tool.make_tokenizer(VOCABULARY))
        out = folder / f"{len(list(folder.iterdir()))}.json"
        shared_gpu = ["--one_gpu"] if ranks > torch.cuda.device_count() else []
        launching.torchrun(ranks, [TOOL, "--model", str(path), "--device", "cuda", "--out", str(out), *options.split(),
                                   *shared_gpu], env={"PYTHONPATH": path_with_root()}).succeeded()
        return json.loads(out.read_text())

    return launching.Once(launch)


def path_with_root():
    return os.pathsep.join(filter(None, [str(launching.ROOT), os.environ.get("PYTHONPATH")]))


@pytest.mark.parametrize("family, tied, ranks, options", [
    ("qwen3", True, 1, "--stages 0,1,2,3 --transports shared,ipc,gather --bucket_mib 512,1"),
    ("gemma3", True, 1, "--stages 2 --transports shared,ipc"),
    ("qwen2", False, 1, "--stages 2 --transports shared,ipc"),
    ("llama", False, 2, "--stages 2,3 --transports ipc,gather --bucket_mib 512,1"),
    ("qwen3", True, 2, "--stages 3 --transports ipc,gather --moving"),
    ("qwen2", True, 2, "--stages 3 --transports ipc --tensor_parallel_size 2"),
    ("qwen3", False, 4, "--stages 3 --transports ipc --tensor_parallel_size 2"),
    ("gemma3", True, 4, "--stages 3 --transports ipc"),
    ("qwen2", False, 4, "--stages 1,3 --transports ipc,gather --tensor_parallel_size 4"),  # more ranks than key heads
    ("qwen3", False, 4, "--stages 3 --transports ipc --hosts 2 --bucket_mib 512,1"),
    ("qwen3", True, 4, "--stages 3 --transports ipc --hosts 2 --moving --tensor_parallel_size 2"),
])
def test_every_tensor_has_the_policys_bits(check, family, tied, ranks, options):
    """Over noise, after vLLM's own loading and after the noted copies that follow optimizer steps; a shared engine's
    parameters lie in the policy's memory."""
    cells = check(family, tied, ranks, options)
    assert cells
    for cell in cells:
        assert cell["right"] and not cell["wrong_names"], cell
        assert cell["how"] == "nothing to copy" if cell["transport"] == "shared" else cell["how"].endswith(" copies")


@pytest.mark.parametrize("ranks, options", [(1, "--stages 2 --transports shared"), (1, "--stages 2 --transports ipc"),
                                            (2, "--stages 3 --transports ipc"),
                                            (2, "--stages 3 --transports ipc --moving")])
def test_nothing_grows_from_sync_to_sync(check, ranks, options):
    """Case 38: over 200 syncs the driver's view of the device, host memory and open files stay as after the third."""
    for cell in check("qwen3", True, ranks, options + " --steps 200"):
        assert cell["right"], cell
        for rank in cell["resources"]:
            settled, last = rank[3], rank[-1]
            assert last["device_mib"] <= 1.01 * settled["device_mib"], (settled, last)
            assert last["rss_mib"] <= 1.01 * settled["rss_mib"], (settled, last)
            assert last["files"] <= settled["files"] + 2, (settled, last)
