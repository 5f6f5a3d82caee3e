"""The manifest: equal for equal tensors alone, and a rank that differs is named."""

import itertools

import pytest

from spmd_rl.weight_sync import Manifest, check_manifests, check_names

TENSORS = (("a", (2, 3), "torch.bfloat16"), ("b", (5,), "torch.float32"), ("c", (), "torch.float32"))
BASE = Manifest(3, TENSORS)
OTHERS = {
    "version": Manifest(4, TENSORS),
    "order": Manifest(3, (TENSORS[1], TENSORS[0], TENSORS[2])),
    "missing": Manifest(3, TENSORS[:2]),
    "doubled": Manifest(3, (*TENSORS, TENSORS[2])),
    "name": Manifest(3, (("x", (2, 3), "torch.bfloat16"), *TENSORS[1:])),
    "shape": Manifest(3, (("a", (3, 2), "torch.bfloat16"), *TENSORS[1:])),
    "axes": Manifest(3, (("a", (6,), "torch.bfloat16"), *TENSORS[1:])),
    "dtype": Manifest(3, (("a", (2, 3), "torch.float32"), *TENSORS[1:])),
    "empty": Manifest(3, ()),
}


def entry(manifest):
    """What a rank gives to the others."""
    return manifest.version, manifest.digest(), manifest.tensors[:1]


def test_bytes_are_counted_once_a_tensor():
    """6 bf16 elements, 5 fp32 and a scalar: 12 + 20 + 4."""
    assert BASE.num_bytes == 36
    assert Manifest(0, ()).num_bytes == 0


def test_equal_manifests_have_equal_digests():
    """Made anew, on another rank: the same digest; any two that differ have two."""
    assert Manifest(3, tuple(tuple(t) for t in TENSORS)).digest() == BASE.digest()
    for one, other in itertools.combinations([BASE, *OTHERS.values()], 2):
        assert one.digest() != other.digest()


def test_ranks_that_agree_pass():
    """One rank, or several alike."""
    for world_size in (1, 4):
        check_manifests([entry(BASE)] * world_size, BASE)


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("ranks", [[1], [0, 3], [1, 2, 3]])
def test_ranks_that_differ_are_refused_and_named(kind, ranks):
    """Before any tensor moves: a rank with another name, order, shape, type, count or version would load wrongly."""
    seen = [entry(OTHERS[kind] if rank in ranks else BASE) for rank in range(4)]
    with pytest.raises(RuntimeError) as error:
        check_manifests(seen, BASE)
    assert f"ranks {ranks}" in str(error.value)


@pytest.mark.parametrize("given, named", [({"a", "b", "c"}, "'c'"), ({"a"}, "'b'"), ({"a", "x"}, "'b'.*'x'")])
def test_names_that_the_engine_does_not_have_or_misses_are_refused(given, named):
    """A tensor that never comes leaves noise in the engine; one too many is a model of another kind."""
    with pytest.raises(RuntimeError, match=named):
        check_names({"a", "b"}, given)
    check_names({"a", "b"}, {"a", "b"})
