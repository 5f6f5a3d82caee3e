"""A load plan is what a model's own loading does: the same bits in the same places, from weights in parts or whole."""

import itertools
import math

import pytest
import torch

from spmd_rl.load_plan import FINGERPRINT_ELEMENTS, Span, Unplannable, Weight, record

ROWS, COLUMNS = 6, 4


class Engine:
    """Parameters as vLLM fuses and pads them, for rank `part` of `parts` tensor-parallel ones: a vocabulary padded by
    two rows, queries, keys and values in one, gate and up in one, columns of a row-parallel layer."""

    def __init__(self, part=0, parts=1, dtype=torch.bfloat16):
        self.part, self.parts = part, parts
        made = {"embed": (ROWS + 2, COLUMNS), "qkv": (12 // parts, COLUMNS), "gate_up": (16 // parts, COLUMNS),
                "down": (COLUMNS, 8 // parts), "norm": (COLUMNS,)}
        self.parameters = {name: torch.full(shape, 9, dtype=dtype) for name, shape in made.items()}

    def load(self, weights):
        """As vLLM's loaders do it: narrow the weight, narrow the parameter, copy."""
        for name, weight in weights:
            if name == "embed":
                self.parameters["embed"][:ROWS].data.copy_(weight)
                self.parameters["embed"][ROWS:].data.fill_(0)
            elif name in ("q", "k", "v"):
                self.fill("qkv", weight, {"q": 0, "k": 6 // self.parts, "v": 9 // self.parts}[name])
            elif name in ("gate", "up"):
                self.fill("gate_up", weight, {"gate": 0, "up": 8 // self.parts}[name])
            elif name == "down":
                size = 8 // self.parts
                self.parameters["down"].data.copy_(weight.narrow(1, self.part * size, size))
            else:
                self.parameters["norm"].data.copy_(weight)

    def fill(self, name, weight, start):
        size = weight.shape[0] // self.parts
        self.parameters[name].data.narrow(0, start, size).copy_(weight.narrow(0, self.part * size, size))


SHAPES = {"embed": (ROWS, COLUMNS), "q": (6, COLUMNS), "k": (3, COLUMNS), "v": (3, COLUMNS), "gate": (8, COLUMNS),
          "up": (8, COLUMNS), "down": (COLUMNS, 8), "norm": (COLUMNS,)}


def weights_of(seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    made["norm"][0], made["norm"][1] = math.nan, -0.0
    return made


def plan_of(engine, dtype=torch.bfloat16):
    return record(engine.parameters, {name: (shape, dtype) for name, shape in SHAPES.items()}, engine.load)


def in_parts(weight, num_parts):
    """As ZeRO-3 cuts it: equal parts, the last one shorter, those of a small weight empty."""
    flat = weight.reshape(-1)
    size = -(-flat.numel() // num_parts)
    starts = range(0, flat.numel(), size)
    return [Span(start, flat[start:start + size].clone()) for start in starts]


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


@pytest.mark.parametrize("parts, part", [(1, 0), (3, 0), (3, 2)])
@pytest.mark.parametrize("num_spans", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_planned_load_is_the_models_own(parts, part, num_spans, dtype):
    """Every parameter has the bits that `load` gives it, NaN and -0 too, for whole weights and for shards of any size,
    for each tensor-parallel rank; recording itself writes nothing."""
    if 8 % parts:
        parts, part = 1, 0
    engine, truth = Engine(part, parts, dtype), Engine(part, parts, dtype)
    plan = plan_of(engine, dtype)
    assert all(bool((p == 9).all()) for p in engine.parameters.values())
    made = weights_of(dtype=dtype)
    truth.load(made.items())
    plan.load(Weight(name, SHAPES[name], dtype, in_parts(w, num_spans)) for name, w in made.items())
    for name, parameter in truth.parameters.items():
        assert torch.equal(bits(parameter), bits(engine.parameters[name])), name
    assert plan.num_copies == len(SHAPES)


@pytest.mark.parametrize("num_spans", [1, 2, 3])
@pytest.mark.parametrize("parts, part", [(1, 0), (2, 1)])
def test_row_parallel_columns_of_a_weight_in_parts(num_spans, parts, part):
    """Columns of a weight that lies in shards are put together first; only those of the rank are taken."""
    engine, truth = Engine(), Engine()
    for each in (engine, truth):
        each.part, each.parts = part, parts
        each.parameters = {"down": torch.full((COLUMNS, 8 // parts), 9.0)}
    plan = record(engine.parameters, {"down": ((COLUMNS, 8), torch.float32)}, engine.load)
    weight = torch.arange(32.0).view(COLUMNS, 8)
    plan.load([Weight("down", (COLUMNS, 8), torch.float32, in_parts(weight, num_spans))])
    assert torch.equal(engine.parameters["down"], weight[:, part * 8 // parts:(part + 1) * 8 // parts])


def test_differences_are_found_to_the_bit():
    """None after a load; -0 for 0 is one, and so is a single changed element of a slice."""
    engine = Engine()
    plan, made = plan_of(engine), weights_of()
    plan.load(Weight.of(name, w) for name, w in made.items())
    assert plan.differences(Weight.of(name, w) for name, w in made.items()) == []
    engine.parameters["norm"][1] = 0.0
    engine.parameters["qkv"][8, 3] += 1
    assert plan.differences(Weight.of(name, w) for name, w in made.items()) == ["k", "norm"]


def test_a_load_without_all_weights_is_refused():
    """The slices that nobody filled would be of older weights."""
    engine, made = Engine(), weights_of()
    plan = plan_of(engine)
    with pytest.raises(RuntimeError, match=r"without 2 of 8 weights: \['k', 'norm'\]"):
        plan.load(Weight.of(name, w) for name, w in made.items() if name not in ("k", "norm"))


def test_a_parameter_that_moved_is_named():
    """After it got other memory the old plan would write to memory of something else."""
    engine = Engine()
    plan = plan_of(engine)
    assert plan.moved == []
    engine.parameters["down"].data = engine.parameters["down"].clone()
    assert plan.moved == ["down"]


class Faulty(Engine):
    """Loaders that do something else."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def load(self, weights):
        for name, weight in weights:
            if name == self.fault[1]:
                getattr(self, self.fault[0])(name, weight)
            else:
                super().load([(name, weight)])

    def scales(self, name, weight):
        super().load([(name, weight * 2)])

    def transposes(self, name, weight):
        self.parameters[name].data.copy_(weight.t().contiguous().t())

    def leaves_out(self, name, weight):
        pass

    def fills_half(self, name, weight):
        self.parameters[name][:2].data.copy_(weight[:2])

    def fills_twice(self, name, weight):
        super().load([(name, weight), (name, weight)])

    def fills_with_gaps(self, name, weight):
        self.parameters[name].data[:, :2].copy_(weight[:, :2])
        self.parameters[name].data[:, 2:].copy_(weight[:, 2:])

    def adds(self, name, weight):
        self.parameters[name].data.add_(weight)

    def fills_with_one(self, name, weight):
        self.parameters[name].data.fill_(1)

    def looks_at_the_data(self, name, weight):
        self.parameters[name].data.fill_(weight.sum().item())

    def expects_another_shape(self, name, weight):
        assert weight.shape == (1,), "another shape"

    def negates_lazily(self, name, weight):
        self.parameters[name].data.copy_(torch._neg_view(weight))

    def reads_as_another_dtype(self, name, weight):
        self.parameters[name].data.view(torch.int16).copy_(weight.view(torch.int16))

    def broadcasts(self, name, weight):
        self.parameters[name].data.copy_(weight[:1])


FAULTS = {"scales": ["q", "norm", "down"], "transposes": ["down"], "leaves_out": ["embed", "q", "up", "norm"],
          "fills_half": ["norm"], "fills_twice": ["norm", "gate"], "fills_with_gaps": ["down"],
          "adds": ["norm", "down"], "fills_with_one": ["norm"], "looks_at_the_data": ["norm"],
          "expects_another_shape": ["k"], "negates_lazily": ["norm"], "reads_as_another_dtype": ["norm"],
          "broadcasts": ["down"]}


@pytest.mark.parametrize("fault, name", [(fault, name) for fault, names in FAULTS.items() for name in names])
def test_loading_that_is_more_than_copies_has_no_plan(fault, name):
    """What computes, looks at values, leaves an element out or writes one twice is refused: a plan of it would load
    something else, silently."""
    engine = Faulty((fault, name))
    with pytest.raises(Unplannable):
        plan_of(engine)
    assert all(bool((p == 9).all()) for p in engine.parameters.values()), "recording wrote something"


def test_another_dtype_has_no_plan():
    """A copy that rounds is not the policy's value."""
    with pytest.raises(Unplannable, match="not a copy"):
        plan_of(Engine(dtype=torch.bfloat16), torch.float32)


# Views. -------------------------------------------------------------------------------------------------------------


def in_one_storage(order, gap=0, lead=0):
    """Weights one after another in one flat buffer, `gap` elements between them, `lead` before the first."""
    made = weights_of()
    flat = torch.zeros(lead + sum(math.prod(SHAPES[name]) + gap for name in order), dtype=torch.bfloat16)
    place, weights = lead, {}
    for name in order:
        count = math.prod(SHAPES[name])
        flat[place:place + count] = made[name].reshape(-1)
        weights[name] = flat[place:place + count].view(SHAPES[name])
        place += count + gap
    return flat, [Weight.of(name, weights[name]) for name in SHAPES]


class Unpadded(Engine):
    """Its vocabulary has no padding."""

    def __init__(self):
        super().__init__()
        self.parameters["embed"] = torch.full((ROWS, COLUMNS), 9, dtype=torch.bfloat16)


IN_ORDER = ["embed", "q", "k", "v", "gate", "up", "down", "norm"]
MIXED = ["norm", "gate", "up", "down", "q", "k", "v", "embed"]


@pytest.mark.parametrize("order", [IN_ORDER, IN_ORDER[4:7] + IN_ORDER[:4] + ["norm"]], ids=["in order", "other order"])
def test_parameters_become_views_of_neighbours(order):
    """No byte is copied: each view has the model's own bits, and follows a change of the policy's storage."""
    flat, weights = in_one_storage(order)
    engine, truth = Unpadded(), Unpadded()
    truth.load((w.name, w.whole(torch.device("cpu"))) for w in weights)
    views = plan_of(engine).shared_views(weights)
    assert views.keys() == truth.parameters.keys()
    for name, view in views.items():
        assert torch.equal(bits(view), bits(truth.parameters[name])), name
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert view.shape == engine.parameters[name].shape and view.is_contiguous()
    flat.fill_(3)
    assert all(bool((view == 3).all()) for view in views.values())


def cases():
    """(why, weights, engine) that have no views."""
    yield "no neighbours", in_one_storage(["embed", "q", "norm", "k", "v", "gate", "up", "down"])[1], Unpadded()
    yield "no neighbours", in_one_storage(["k", "q", "v", "embed", "gate", "up", "down", "norm"])[1], Unpadded()
    yield "no neighbours", in_one_storage(IN_ORDER, gap=8)[1], Unpadded()
    yield "no neighbours", [Weight.of(w.name, w.whole(torch.device("cpu")).clone()) for w in
                            in_one_storage(IN_ORDER)[1]], Unpadded()
    yield "multiple of 16", in_one_storage(MIXED, lead=1)[1], Unpadded()
    yield "pads the vocabulary by 8", in_one_storage(IN_ORDER)[1], Engine()
    whole = in_one_storage(IN_ORDER)[1]
    cut = [Weight(w.name, w.shape, w.dtype, in_parts(w.whole(torch.device("cpu")), 2)) for w in whole]
    yield "not lie in one piece", cut, Unpadded()


@pytest.mark.parametrize("why, weights, engine", list(cases()))
def test_what_has_no_view_is_refused_with_the_reason(why, weights, engine):
    """Fused parts that are not neighbours or in another order, gaps, padding, shards, addresses off a 16-byte grid."""
    with pytest.raises(Unplannable, match=why):
        plan_of(engine).shared_views(weights)


def test_whole_weights_in_one_part_are_not_copied():
    """Of one span the tensor itself, of several a new one."""
    tensor = torch.arange(6.0).view(2, 3)
    assert Weight.of("a", tensor).whole(torch.device("cpu")).data_ptr() == tensor.data_ptr()
    for num_parts in (2, 3, 6):
        put_together = Weight("a", (2, 3), torch.float32, in_parts(tensor, num_parts)).whole(torch.device("cpu"))
        assert torch.equal(put_together, tensor) and put_together.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("shape", [(), (1,), (1, 5), (5, 1)])
def test_small_shapes(shape):
    """Scalars and rows of one."""
    target = torch.full(shape, 9.0)
    plan = record({"a": target}, {"w": (shape, torch.float32)},
                  lambda weights: [target.data.copy_(w) for _, w in weights])
    value = torch.randn(shape)
    for spans in ([Span(0, value.reshape(-1))], in_parts(value, 2)):
        target.fill_(9.0)
        plan.load([Weight("w", shape, torch.float32, spans)])
        assert torch.equal(target, value)
    assert list(itertools.chain(plan.differences([Weight.of("w", value)]))) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("place", [0, FINGERPRINT_ELEMENTS, FINGERPRINT_ELEMENTS + 4])
def test_a_fingerprint_sees_one_bit(dtype, place):
    """Of any element, also the sign of a zero."""
    weight = Weight.of("a", torch.zeros(FINGERPRINT_ELEMENTS + 5, dtype=dtype))
    before = weight.fingerprint(torch.device("cpu"))
    weight.spans[0].flat[place] = -0.0
    assert weight.fingerprint(torch.device("cpu")) != before


def test_a_fingerprint_is_of_every_elements_place():
    """Values that any linear weighting of places takes for one another, also with a period."""
    cpu = torch.device("cpu")

    def of(*values):
        return Weight.of("a", torch.tensor(values, dtype=torch.int16).view(torch.bfloat16)).fingerprint(cpu)

    assert of(2, 0) != of(0, 1) and of(5, 7, 7, 5) != of(7, 5, 5, 7) and of(0, 0, 1) != of(0, 1, 0)
    rows = torch.randn(8191 * 4, 3).bfloat16()
    shards = rows.chunk(4)
    assert (Weight.of("a", torch.cat([shards[k] for k in (1, 0, 2, 3)])).fingerprint(cpu)
            != Weight.of("a", rows).fingerprint(cpu))


def test_a_fingerprint_is_that_of_the_whole_weight():
    """In one piece or in several, and not that of the same rows in another order or at another place."""
    cpu, flat = torch.device("cpu"), torch.randn(24, 10, generator=torch.Generator().manual_seed(3)).bfloat16()
    right = Weight.of("a", flat).fingerprint(cpu)
    cuts = [0, 7, 100, 240]
    pieces = [Span(low, flat.view(-1)[low:high].clone()) for low, high in zip(cuts, cuts[1:])]
    assert Weight("a", (24, 10), torch.bfloat16, pieces).fingerprint(cpu) == right
    assert Weight.of("a", flat.roll(1, 0)).fingerprint(cpu) != right
    assert Weight("a", (24, 10), torch.bfloat16, pieces[:2]).fingerprint(cpu) != right
