"""For tests: whether all that belongs to a split model's layers is where `split` was told.

    with operations_that_run() as operations:
        model.fit(x, y)                  # its first steps
    assert_in_place(model, operations)

A layer in another place trains as well, and gives the same weights: comparing these is not enough.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable, Iterator

import keras

from kdist.parallel.placement import RanOperation, devices_of, groups_of
from kdist.parallel.split_plan import operations_by_name
from kdist.parallel.tensor import ShardedLayer
from kdist.parallel.tensor.optimizers import inner_optimizers
from kdist.parallel.tensor.slots import own_variables, owners_of
from kdist.training.accumulation import optimizers_of

# The second is what tokens' gradients are applied with.
_WRITES = ("Assign", "ResourceScatter")


@dataclasses.dataclass(frozen=True)
class Part:
    """A layer that has weights, or a device's part of one whose weights are divided.

    Attributes:
        name: of the layer; of a part, with `/shard_0` and so on.
        place: the number of its device within a replica's group.
        variables: what lies there.
    """

    name: str
    place: int
    variables: tuple[keras.Variable, ...]

    @property
    def is_trained(self) -> bool:
        """Whether gradients are computed for it."""
        return any(variable.trainable for variable in self.variables)


def parts_of(model) -> Iterator[Part]:
    """The parts of a split model that have weights, each on its device.

    Of a divided layer, what is whole (the bias of one that is divided by row) is on the first of
    its devices, under the name of the layer.

    Args:
        model: made by `kdist.parallel.split`.
    """
    for name, layer in operations_by_name(model).items():
        if not isinstance(layer, keras.layers.Layer) or isinstance(layer, keras.Model):
            continue
        place, divided = model.places[name], []
        if isinstance(layer, ShardedLayer):
            for number, part in enumerate(layer.shards.parts):
                divided += part.variables
                shard = f"{name}/shard_{number}"
                yield Part(shard, place + number, _with_values(part.variables))
        inside = {id(variable) for variable in divided}
        whole = _with_values(v for v in layer.variables if id(v) not in inside)
        if whole:
            yield Part(name, place, whole)


def assert_in_place(model, operations: Collection[RanOperation]):
    """Fails unless all that belongs to layers with weights is on their devices, in each replica.

    That is: their variables; the optimizer's slots; what they compute forward and, if they are
    trained, backward, in each micro-batch; and what computes and writes their updates.

    Args:
        model: made by `kdist.parallel.split`, compiled, with names of which none is another one's
            with a number, `dense` and `dense_1`: Keras numbers calls likewise.
        operations: that ran in its first steps of training; see `operations_that_run`.
    """
    parts = list(parts_of(model))
    assert_variables_in_place(model, parts)
    for replica, group in enumerate(groups_of(model.distribute_strategy)):
        mine = [o for o in operations if replica_of(o) == replica and o.computes]
        _assert_computed_in_place(model, parts, mine, group)
    assert_updates_in_place(model, operations)


def assert_variables_in_place(model, parts: Iterable[Part]):
    """Fails unless variables and slots are on the devices of their parts, in each replica."""
    strategy = model.distribute_strategy
    groups, slots = groups_of(strategy), slots_of(model)
    for part in parts:
        expected = [group[part.place] for group in groups]
        for variable in part.variables:
            assert devices_of(strategy, variable) == expected, variable.path
            for slot in slots.get(id(variable), ()):
                assert devices_of(strategy, slot) == expected, slot.path


def assert_updates_in_place(model, operations: Collection[RanOperation]):
    """Fails unless each device updates the trained variables and slots that are on it, by itself.

    As many are written there as lie there. The new value comes from no other device, nor does
    anything that the optimizer has computed for it, but single numbers: what becomes of the
    learning rate, and norms to clip gradients by.
    """
    names = "|".join(re.escape(each.name) for each in optimizers_of(model))
    scope = re.compile(rf"(^|/)({names})(_\d+)?/")
    at = {(o.function, o.device, o.name): o for o in operations}
    mine = {o for o in operations if scope.search(o.name)}
    written: dict[int, set] = collections.defaultdict(set)  # by function: a last batch has another
    for operation in mine:
        if operation.type.startswith(_WRITES):
            written[operation.function].add((operation.device, operation.inputs[0]))
            assert _handed_on(operation.inputs[-1], operation, at).type != "_Recv", operation
    assert written
    for variables in written.values():
        assert collections.Counter(device for device, _ in variables) == _trained_on(model)
    if not any(each.clipnorm or each.global_clipnorm for each in optimizers_of(model)):
        _assert_numbers_alone_travel(mine, written, at)


def _assert_numbers_alone_travel(mine, written, at):
    """That nothing is sent that the optimizer has computed of gradients, variables or slots.

    Args:
        mine: its operations.
        written: function -> (device, name of a variable there).
        at: (function, device, name) -> operation.
    """
    sent = {(o.function, o.name.rpartition("/_")[0]) for o in mine if o.type == "_Recv"}
    for operation in mine:
        if (operation.function, operation.name) in sent:
            for source in _sources(operation, at):
                assert source in mine or not source.computes, (operation, source)
                reads = (source.device, *source.inputs[:1])
                assert reads not in written[source.function], (operation, source)


def _handed_on(name, operation, at):
    """The operation whose output, a copy of which `operation` takes under that name."""
    source = _source(name, operation, at)
    while source.type in ("Identity", "Cast", "Reshape"):
        source = _source(source.inputs[0], source, at)
    return source


def _source(name, operation, at):
    found = at.get((operation.function, operation.device, name))
    assert found is not None, f"{name} is not on the device of {operation}"
    return found


def _sources(operation, at):
    """It, and all that it takes something from on its device."""
    found, left = {}, [operation]
    while left:
        each = left.pop()
        if each.name not in found:
            found[each.name] = each
            left += [_source(name, each, at) for name in each.inputs]
    return found.values()


def _trained_on(model):
    """{device: how many trained variables and slots lie there}."""
    strategy, slots, lie_there = model.distribute_strategy, slots_of(model), collections.Counter()
    for variable in model.trainable_variables:
        for each in (variable, *slots.get(id(variable), ())):
            lie_there.update(devices_of(strategy, each))
    return lie_there


def slots_of(model) -> dict[int, list[keras.Variable]]:
    """The optimizer's variables for each trained one, by its id."""
    slots = collections.defaultdict(list)
    optimizers = optimizers_of(model)
    for optimizer in optimizers:
        optimizers += inner_optimizers(optimizer)
        own = own_variables(optimizer)
        for slot, (owner, _) in zip(own, owners_of(optimizer, own), strict=True):
            if owner is not None:
                slots[owner].append(slot)
    return slots


def replica_of(operation: RanOperation) -> int:
    """The number of the replica whose operation it is."""
    found = re.search(r"(^|/)replica_(\d+)/", operation.name)
    return int(found[2]) if found else 0


def _assert_computed_in_place(model, parts, operations, group):
    """That each part's operations, of one replica, are on one device, and there are some."""
    layout = model.distribute_strategy.layout
    micro_batches = set(range(layout.micro_batches)) if layout.micro_batches > 1 else {None}
    by_scope = _by_scope(operations, {part.name for part in parts})
    for part in parts:
        mine, here = by_scope[part.name], group[part.place]
        if part.name in model.divisions:  # around its parts it computes on the device of each
            first = model.places[part.name]
            allowed = set(group[first : first + layout.tensor])
        else:
            allowed = {here}
        elsewhere = [o for o in mine if o.device not in allowed]
        assert not elsewhere, (part.name, here, elsewhere[:3])
        seen = {(o.is_backward, _micro_batch(o)) for o in mine if o.device == here}
        ways = (False, True) if part.is_trained else (False,)
        expected = {(way, number) for way in ways for number in micro_batches}
        assert expected <= seen, (part.name, here, expected - seen)


def _by_scope(operations, names):
    """{name: the operations in its scope}; each is in one, the outermost, and the longest there."""
    keys = {tuple(name.split("/")) for name in names}
    longest = max(len(key) for key in keys)
    inside = collections.defaultdict(list)
    for operation in operations:
        scopes = operation.name.split("/")
        forms = [(scope, re.sub(r"_\d+$", "", scope)) for scope in scopes]  # calls are numbered
        for first, length in itertools.product(range(len(forms)), range(longest, 0, -1)):
            found = keys.intersection(itertools.product(*forms[first : first + length]))
            if found:
                inside["/".join(max(found))].append(operation)
                break
    return inside


def _micro_batch(operation):
    """The number of the micro-batch that it computes for; None without any."""
    found = re.match(r"(?:replica_\d+/)?(?:forward|backward)_(\d+)_on_stage", operation.name)
    return int(found[1]) if found else None


def _with_values(variables):
    """Without the states of random generators, which no device need have."""
    return tuple(v for v in variables if "seed" not in v.path.rpartition("/")[2])
