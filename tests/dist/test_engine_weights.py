"""After a sync the engine has the policy's weights, bit for bit, by each transport at each ZeRO stage.

tools/check_weight_sync.py with the real engine and policy on CPU ranks: it fills the engine with noise, syncs, and
compares. One launch a model and tensor_parallel_size; vLLM's repacking is off but where that is the point, so that
its parameters can be compared.
"""

import json

import pytest
from launching import ROOT, Once, load_tool, needs_cpu_engine, torchrun

pytestmark = needs_cpu_engine
TOOL = str(ROOT / "tools" / "check_weight_sync.py")
VOCABULARY = 4224  # an embedding of more than the smallest bucket, 1 MiB, in bf16
STAGES = [0, 1, 2, 3]


class Launches:
    """The tool's cells of one launch, made when first asked for."""

    def __init__(self, folder):
        self._folder = folder
        self.results = Once(self._launch)
        self.model = Once(self._make_model)

    def _make_model(self, family, tied):
        tool = load_tool("make_model")
        sizes = tool.TINY | dict(tied=tied, vocab_size=VOCABULARY)
        path = self._folder / f"{family}-{tied}"
        tool.save(path, tool.build_model(family, **sizes), tool.make_tokenizer(VOCABULARY))
        return path

    def _launch(self, family, tied, tensor_parallel_size, ranks, *options):
        out = self._folder / f"{family}-{tied}-{tensor_parallel_size}-{ranks}-{len(list(self._folder.iterdir()))}.json"
        torchrun(ranks, [TOOL, "--model", str(self.model(family, tied)), "--device", "cpu", "--out", str(out),
                         "--tensor_parallel_size", str(tensor_parallel_size), *options],
                 env={"PYTHONPATH": str(ROOT)}, timeout_s=550).succeeded()
        return json.loads(out.read_text())


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    return Launches(tmp_path_factory.mktemp("weight_sync"))


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


WHOLE_TABLE = ("--stages", "0,1,2,3", "--bucket_mib", "512,1", "--plain", "--transports")
# (family, tied, tensor_parallel_size, ranks)
TABLE = [("qwen3", True, 1, 2), ("llama", False, 2, 2),
         *(long(family, tied, tp, 2) for family in ("qwen3", "qwen2", "llama", "gemma3") for tied in (True, False)
           for tp in (1, 2) if (family, tied, tp) not in {("qwen3", True, 1), ("llama", False, 2)}),
         long("qwen2", True, 2, 4), long("qwen3", False, 1, 4), long("qwen3", True, 1, 1),
         long("qwen2", False, 4, 4)]  # with more ranks than key heads


@pytest.mark.parametrize("family, tied, tensor_parallel_size, ranks", TABLE)
def test_every_tensor_has_the_policys_bits(launches, family, tied, tensor_parallel_size, ranks):
    """bf16, after the first sync (vLLM's own loading) and after syncs that follow optimizer steps (the noted copies):
    all engine parameters over noise, at each stage, by each transport, with a bucket smaller than the embedding. Where
    the engine shares the policy's memory, each of its parameters lies in that."""
    shares = tensor_parallel_size == 1 and ranks <= 2  # an engine more a stage and rank, each with a cache of its own
    cells = launches.results(family, tied, tensor_parallel_size, ranks, *WHOLE_TABLE,
                             "shared,ipc,gather" if shares else "ipc,gather")
    assert [(c["stage"], c["transport"], c["bucket_mib"]) for c in cells] == [
        (stage, *rest) for stage in STAGES for rest in (("shared", 512), ("ipc", 512), ("gather", 512), ("gather", 1))
        if rest[0] != "shared" or shares and stage < 3]
    for cell in cells:
        assert cell["right"] and not cell["wrong_names"], cell
        assert cell["compared"] > 200_000, cell
        assert cell["how"] == "nothing to copy" if cell["transport"] == "shared" else cell["how"].endswith(" copies")
        assert cell["version"] == 2
        for rank in cell["resources"]:
            assert rank[-1]["files"] <= rank[-2]["files"], rank


@pytest.mark.long
@pytest.mark.parametrize("family, tied, tensor_parallel_size", [("qwen3", True, 1), ("llama", False, 2)])
def test_ranks_of_two_hosts_give_every_tensor_its_bits(launches, family, tied, tensor_parallel_size):
    """Handles within each pair of ranks, gathers between the pairs, in one bucket and in several."""
    cells = launches.results(family, tied, tensor_parallel_size, 4, "--stages", "3", "--bucket_mib", "512,1", "--plain",
                             "--hosts", "2", "--transports", "ipc")
    assert [(cell["transport"], cell["bucket_mib"]) for cell in cells] == [("ipc", 512), ("ipc", 1)]
    for cell in cells:
        assert cell["right"] and cell["how"].endswith(" copies") and cell["compared"] > 200_000, cell
        for rank in cell["resources"]:
            assert rank[-1]["files"] <= rank[-2]["files"] and rank[-1]["maps"] <= rank[-2]["maps"] + 2, rank


@pytest.mark.parametrize("family, tied, tensor_parallel_size, ranks", [
    long("qwen2", True, 1, 2), long("gemma3", True, 2, 2), long("qwen3", False, 1, 2), long("llama", True, 2, 2)])
def test_a_repacked_engine_gives_the_policys_logprobs(launches, family, tied, tensor_parallel_size, ranks):
    """fp32, where vLLM keeps copies of its own: there is no plan, all goes layer by layer, and log-probs agree to 1e-5
    after each sync, those of a tied head too."""
    cells = launches.results(family, tied, tensor_parallel_size, ranks, "--stages", "2,3", "--transports", "ipc,gather",
                             "--dtype", "float32")
    assert len(cells) == 4
    for cell in cells:
        assert cell["right"] and cell["gap"] <= 1e-5, cell
        assert cell["how"] == "layer by layer (vLLM has repacked its weights)"


@pytest.mark.long
@pytest.mark.parametrize("options", ["--stages 3 --steps 200 --moving", "--stages 2,3 --steps 200"])
def test_nothing_grows_from_sync_to_sync(launches, options):
    """Case 38: after the third of 201 syncs host memory stays within 1 %, open files and mappings to 2."""
    for cell in launches.results("qwen3", True, 1, 2, *options.split(), "--transports", "ipc", "--plain"):
        assert cell["right"], cell
        for rank in cell["resources"]:
            settled, last = rank[3], rank[-1]
            assert last["rss_mib"] <= 1.01 * settled["rss_mib"] + 1, (settled, last)
            assert last["files"] <= settled["files"] + 2 and last["maps"] <= settled["maps"] + 2, (settled, last)
