"""The manifest: equal for equal tensors alone, and a rank that differs is named."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from spmd_rl.load_plan import Weight
from spmd_rl.weight_sync import Manifest, WeightSync, check_bits, check_manifests, check_names

TENSORS = (("a", (2, 3), "torch.bfloat16"), ("b", (5,), "torch.float32"), ("c", (), "torch.float32"))
BASE = Manifest(TENSORS)
OTHERS = {
    "order": Manifest((TENSORS[1], TENSORS[0], TENSORS[2])),
    "missing": Manifest(TENSORS[:2]),
    "doubled": Manifest((*TENSORS, TENSORS[2])),
    "name": Manifest((("x", (2, 3), "torch.bfloat16"), *TENSORS[1:])),
    "shape": Manifest((("a", (3, 2), "torch.bfloat16"), *TENSORS[1:])),
    "axes": Manifest((("a", (6,), "torch.bfloat16"), *TENSORS[1:])),
    "dtype": Manifest((("a", (2, 3), "torch.float32"), *TENSORS[1:])),
    "empty": Manifest(()),
}


def entry(manifest, version=3):
    """What a rank gives to the others."""
    return version, manifest.digest(), manifest.tensors[:1]


OWN = (3, BASE.digest())


def test_bytes_are_counted_once_a_tensor():
    """6 bf16 elements, 5 fp32 and a scalar: 12 + 20 + 4."""
    assert BASE.num_bytes == 36
    assert Manifest(()).num_bytes == 0


def test_equal_manifests_have_equal_digests():
    """Made anew, on another rank: the same digest; any two that differ have two."""
    assert Manifest(tuple(tuple(t) for t in TENSORS)).digest() == BASE.digest()
    for one, other in itertools.combinations([BASE, *OTHERS.values()], 2):
        assert one.digest() != other.digest()


def test_ranks_that_agree_pass():
    """One rank, or several alike."""
    for world_size in (1, 4):
        check_manifests([entry(BASE)] * world_size, OWN, BASE)


@pytest.mark.parametrize("kind", [*OTHERS, "version"])
@pytest.mark.parametrize("ranks", [[1], [0, 3], [1, 2, 3]])
def test_ranks_that_differ_are_refused_and_named(kind, ranks):
    """Before any tensor moves: a rank with another name, order, shape, type, count or version would load wrongly."""
    other = entry(BASE, 4) if kind == "version" else entry(OTHERS[kind])
    seen = [other if rank in ranks else entry(BASE) for rank in range(4)]
    with pytest.raises(RuntimeError) as error:
        check_manifests(seen, OWN, BASE)
    assert f"ranks {ranks}" in str(error.value)


@pytest.mark.parametrize("given, named", [({"a", "b", "c"}, "'c'"), ({"a"}, "'b'"), ({"a", "x"}, "'b'.*'x'")])
def test_names_that_the_engine_does_not_have_or_misses_are_refused(given, named):
    """A tensor that never comes leaves noise in the engine; one too many is a model of another kind."""
    with pytest.raises(RuntimeError, match=named):
        check_names({"a", "b"}, given)
    check_names({"a", "b"}, {"a", "b"})


def weights_of(**changed):
    made = {name: torch.arange(6.0) + place for place, name in enumerate("abc")} | changed
    return [Weight.of(name, tensor) for name, tensor in made.items()]


@pytest.mark.parametrize("came, named", [
    (weights_of(b=torch.arange(6.0)), "'b'"), (weights_of(b=torch.arange(6.0).flip(0) + 1), "'b'"),
    (weights_of()[:2], "'c'"), (weights_of(d=torch.ones(2)), "'d'"),
    (weights_of(b=(torch.arange(6.0) + 1).view(2, 3)), "'b'"),
    (weights_of()[::-1], "their order"), ([*weights_of(), weights_of()[0]], "their order")])
def test_handles_that_give_other_bits_than_gathers_are_refused(mesh, came, named):
    """An older weight, its parts in another order, one that does not come, one too many, another shape, another order
    of weights, one that comes twice."""
    check_bits(mesh, weights_of(), weights_of())
    with pytest.raises(RuntimeError, match=f"other bits.*{named}.*transport gather"):
        check_bits(mesh, came, weights_of())


def test_a_difference_on_another_rank_is_refused_on_this_one():
    """All ranks end together, and say whose weight it is."""
    peers = SimpleNamespace(device=torch.device("cpu"), all_gather=lambda mine: [mine, [], ["b"]])
    with pytest.raises(RuntimeError, match=r"\(2, \['b'\]\)"):
        check_bits(peers, weights_of(), weights_of())


@pytest.mark.parametrize("came, is_loaded", [(weights_of(), True), (weights_of(b=torch.arange(6.0)), False)])
def test_the_first_sync_compares_before_it_loads(mesh, came, is_loaded):
    """Shards by handles with DeepSpeed's gathers, once: the engine gets nothing of a difference."""
    def transport(weights):
        return SimpleNamespace(name="ipc", offer=lambda: None, weights=lambda offers: iter(weights),
                               release=lambda: None)

    loaded, sync = [], WeightSync.__new__(WeightSync)
    tensors = tuple((w.name, w.shape, str(w.dtype)) for w in weights_of())
    sync._mesh, sync._manifest, sync._digest = mesh, Manifest(tensors), Manifest(tensors).digest()
    sync._transport, sync._gather, sync._is_sharded = transport(came), transport(weights_of()), True
    sync.version, sync._is_first, sync._reason = -1, True, ""
    sync._policy = SimpleNamespace(tied_head_name=None, num_updates=0)
    sync._rollout = SimpleNamespace(
        expected_weights=lambda: set("abc"), load_weights=lambda weights, version, head: loaded.extend(weights),
        plan_load=lambda shapes: SimpleNamespace(num_copies=3, differences=lambda weights: []),
        use_plan=lambda plan: None)
    if is_loaded:
        sync.sync()
        sync._gather = transport(weights_of(c=torch.zeros(6)))  # not looked at again
        sync.sync()
    else:
        with pytest.raises(RuntimeError, match="other bits.*'b'"):
            sync.sync()
    assert [w.name for w in loaded] == ["a", "b", "c"] * (2 * is_loaded)
