"""Weights of shards on several hosts: each rank gets all of them, whoever is late."""

import json

import pytest
from launching import ROOT, torchrun

from spmd_rl.between_hosts import buckets, by_host
from spmd_rl.load_plan import Weight

WORKER = str(ROOT / "tests" / "dist" / "worker_between_hosts.py")


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize("hosts, bucket_bytes, dtype, number", [
    ([0, 1, 1, 0], 150, "float32", 5), long([0, 0, 1, 1], 150, "float32", 5),
    long([0, 1, 0, 1], 600, "bfloat16", 4),
    long([0, 0, 1, 1], 2**20, "bfloat16", 1), long([0, 0, 0, 1, 1, 1], 1, "float32", 6)])
def test_every_rank_gets_every_weight(tmp_path, hosts, bucket_bytes, dtype, number):
    """Hosts of neighbouring ranks or in any order, an odd or an even number of buckets, one in all; weights that some
    ranks hold nothing of; ranks that read late, also the last bucket before a pass begins anew; a sync given up."""
    job = dict(hosts=hosts, bucket_bytes=bucket_bytes, dtype=dtype, syncs=6, late=0.4)
    (tmp_path / "job.json").write_text(json.dumps(job))
    torchrun(len(hosts), [WORKER, str(tmp_path / "job.json")], env={"PYTHONPATH": str(ROOT)}, timeout_s=120).succeeded()
    ranks = json.loads((tmp_path / "results.json").read_text())
    assert len(ranks) == len(hosts) and not any(rank["wrong"] for rank in ranks), ranks
    assert {rank["buckets"] for rank in ranks} == {number}


def test_hosts_in_order_of_their_first_rank():
    assert by_host(["b", "a", "b", "a", "b"]) == [[0, 2, 4], [1, 3]]


def test_buckets_are_the_same_whatever_a_rank_holds():
    """By shapes alone; a shard begins at a multiple of 16 bytes; a weight above the limit is alone."""
    import torch

    weights = [Weight(name, shape, torch.bfloat16, []) for name, shape in
               [("a", (10, 10)), ("b", (3,)), ("c", (1000,)), ("d", (4,))]]
    found = buckets(weights, 4, 400)
    assert [[weight.name for weight in bucket.weights] for bucket in found] == [["a", "b"], ["c"], ["d"]]
    assert [bucket.offsets for bucket in found] == [(0, 64), (0,), (0,)]
    assert [bucket.num_bytes for bucket in found] == [80, 512, 16]
