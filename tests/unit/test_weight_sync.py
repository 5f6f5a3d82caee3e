"""The manifest: equal for equal tensors alone, and a rank that differs is named."""

import itertools

import pytest

from spmd_rl.weight_sync import Manifest, check_manifests, check_names

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
