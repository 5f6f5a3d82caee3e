"""An engine's parameters as views of other memory: made without their own, taken or given it back, and looked after."""

import math

import pytest
import torch

from spmd_rl.adoption import Adoption
from spmd_rl.load_plan import Weight


class Layers(torch.nn.Module):
    """Two layers and a scale, as vLLM's models load them."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.zeros(8))
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8, bias=False) for _ in range(2)])

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            parameters[name].data.copy_(weight)


def replaced_layer(model):
    model.layers[1] = torch.nn.Linear(8, 8, bias=False)


def replaced_parameter(model):
    model.scale = torch.nn.Parameter(torch.zeros(8))


def moved(model):
    model.layers[0].weight.data = model.layers[0].weight.data.clone()


def dropped(model):
    model.layers[0].weight = None


def added(model):
    model.layers[0].bias = torch.nn.Parameter(torch.zeros(8))


@pytest.mark.parametrize("change, name", [
    (replaced_layer, "layers.1.weight"), (replaced_parameter, "scale"), (moved, "layers.0.weight"),
    (dropped, "layers.0.weight"), (added, "layers.0.bias")])
@pytest.mark.parametrize("looks", [0, 3])
def test_a_parameter_that_is_no_longer_the_policys_memory_is_seen(change, name, looks):
    """Whatever became of it, also where all were right at earlier looks."""
    model, adoption = Layers(), Adoption()
    flat = torch.randn(8 + 2 * 64)
    places = {"layers.0.weight": (0, (8, 8)), "layers.1.weight": (64, (8, 8)), "scale": (128, (8,))}
    adoption.take(model, [Weight.of(key, flat[start:start + math.prod(shape)].view(shape))
                          for key, (start, shape) in places.items()])
    assert torch.equal(model.layers[1].weight, flat[64:128].view(8, 8))
    for _ in range(looks):
        assert adoption.lost(model) == []
    change(model)
    for _ in range(2):
        assert adoption.lost(model) == [name]


SIZES = {"first": (512, 600), "large": (1024, 512), "later": (700, 512), "scale": (8,)}


class Made(torch.nn.Module):
    """A model as a loader makes it: matrices, one of them tied, and a small vector that its module writes to."""

    def __init__(self):
        super().__init__()
        for name, shape in SIZES.items():
            setattr(self, name, torch.nn.Parameter(torch.full(shape, 9.0)))
        self.scale.data.fill_(3)
        self.head = self.large

    def load_weights(self, weights):
        for name, weight in weights:
            getattr(self, name)[:len(weight)].data.copy_(weight)  # as a vocabulary that may be padded


def in_scratch(adoption):
    with adoption.in_scratch():
        return Made()


def policys_weights(start):
    """Those of such a model in one buffer, from its element `start` on."""
    flat = torch.randn(start + sum(map(math.prod, SIZES.values())))
    found, place = {}, start
    for name, shape in SIZES.items():
        found[name] = flat[place:place + math.prod(shape)].view(shape)
        place += math.prod(shape)
    return found


def test_a_model_that_is_to_be_views_has_no_memory_of_its_own():
    """Its large parameters lie one over the other until they are views, but for one that is larger than those before;
    small ones, and those made after, do not."""
    adoption = Adoption()
    model = in_scratch(adoption)
    assert model.later.data_ptr() == model.large.data_ptr() != model.first.data_ptr()
    storages = [getattr(model, name).untyped_storage() for name in SIZES]
    assert len({storage._cdata for storage in storages}) == len(SIZES)
    assert [storage.nbytes() for storage in storages] == [4 * math.prod(shape) for shape in SIZES.values()]
    assert model.scale.tolist() == [3] * 8
    model.later.data.fill_(1)  # harmless, as in memory of its own
    other = torch.nn.Linear(1024, 512).weight
    assert other.data_ptr() not in {storage.data_ptr() for storage in storages}
    weights = policys_weights(0)
    assert adoption.take(model, [Weight.of(name, weight) for name, weight in weights.items()])
    assert adoption.why_not is None and adoption.lost(model) == []
    assert model.head.data_ptr() == weights["large"].data_ptr()
    for name, weight in weights.items():
        assert torch.equal(getattr(model, name), weight) and getattr(model, name).data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("start, known, why_not", [
    (1, None, "no multiple of 16"),  # the weights do not begin at an aligned address
    (0, "known before", "known before")])
def test_a_model_that_cannot_be_views_has_memory_of_its_own_again(monkeypatch, start, known, why_not):
    """Loading of its own follows: into all of it, each parameter apart. Only what is still there gets any."""
    adoption = Adoption()
    model = in_scratch(adoption)
    with adoption.in_scratch():
        for _ in range(3):
            model.first = torch.nn.Parameter(torch.full(SIZES["first"], 9.0))
    made, empty_like = [], torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda tensor: made.append(tensor.shape) or empty_like(tensor))
    weights = policys_weights(start)
    assert not adoption.take(model, [Weight.of(name, weight) for name, weight in weights.items()], known)
    assert why_not in adoption.why_not and sorted(map(tuple, made)) == sorted(SIZES[n] for n in SIZES if n != "scale")
    model.load_weights(weights.items())
    assert all(torch.equal(getattr(model, name), weight) for name, weight in weights.items())
    assert model.head is model.large


def test_memory_that_runs_out_there_is_explained(monkeypatch):
    """Why a second model was needed is known before it is made."""
    adoption = Adoption()
    model = in_scratch(adoption)

    def full(tensor):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "empty_like", full)
    with pytest.raises(torch.OutOfMemoryError):
        adoption.take(model, [], "repacked")
    assert adoption.why_not == "repacked"


@pytest.mark.parametrize("start", [0, 1])
def test_what_is_registered_after_loading_keeps_its_memory(start):
    """vLLM's processing after loading may make parameters, of new data or of views of old."""
    adoption = Adoption()
    with adoption.in_scratch():
        model = Made()
        weights = policys_weights(start)
        taken = adoption.take(model, [Weight.of(name, weight) for name, weight in weights.items()])
        before = {name: weight.clone() for name, weight in weights.items()}
        for number, name in enumerate(("first", "later")):
            setattr(model, name, torch.nn.Parameter(torch.full(SIZES[name], float(number))))
        model.large = torch.nn.Parameter(model.large.data)
    assert taken == (start == 0)
    assert bool((model.first == 0).all()) and bool((model.later == 1).all())
    assert all(torch.equal(weights[name], before[name]) for name in SIZES)


@pytest.mark.parametrize("made", [
    lambda: torch.nn.Parameter(torch.empty(1024, 512, device="meta")), torch.nn.UninitializedParameter,
    lambda: torch.nn.Parameter(torch.empty(2**20 + 1, dtype=torch.uint8)[:2**20].view(torch.float32))])
def test_a_parameter_that_cannot_lie_there_is_left_alone(made):
    """On meta, as vLLM's Transformers backend makes a model; not yet of a size; over a storage of an odd one."""
    adoption, module = Adoption(), torch.nn.Module()
    with adoption.in_scratch():
        module.first = torch.nn.Parameter(torch.ones(1024, 1024))
        parameter = made()
        before = type(parameter), parameter.device, parameter.dtype
        module.second = parameter
    assert module.second is parameter
    assert (type(parameter), parameter.device, parameter.dtype) == before
    assert bool((module.first == 1).all())
