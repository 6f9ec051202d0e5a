"""Assertions that everything that belongs to a split model's layers is on the specified devices.

    with operations_that_run() as operations:
        model.fit(x, y)                  # its first steps
    assert_in_place(model, operations)

A misplaced layer trains to the same weights, so that comparing weights is not enough.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable, Iterator

import keras

from kdist.parallel.inspect.operation_devices import RanOperation, devices_of, groups_of
from kdist.parallel.placement import operations_by_name
from kdist.parallel.tensor.shards import ShardedLayer, own_variables, owners_of
from kdist.training.optimizers import inner_optimizers
from kdist.training.replica.accumulation import optimizers_of

# ResourceScatter applies sparse gradients, such as those of embeddings.
_WRITES = ("Assign", "ResourceScatter")


@dataclasses.dataclass(frozen=True)
class PlacedPart:
    """A layer that has weights, or a device's part of one whose weights are divided.

    Attributes:
        name: name of the layer; parts end in `/shard_0` and so on.
        place: number of its device within a replica's group.
        variables: variables on that device.
    """

    name: str
    place: int
    variables: tuple[keras.Variable, ...]

    @property
    def is_trained(self) -> bool:
        """True if gradients are computed for it."""
        return any(variable.trainable for variable in self.variables)


def parts_of(model) -> Iterator[PlacedPart]:
    """Yields the parts of a split model that have weights.

    The whole variables of a divided layer (the bias of a row division) are on the first of its
    devices, under the name of the layer.

    Args:
        model: model that `kdist.parallel.split` returned.
    """
    for name, layer in operations_by_name(model).items():
        if not isinstance(layer, keras.layers.Layer) or isinstance(layer, keras.Model):
            continue
        place, divided = model.places[name], []
        if isinstance(layer, ShardedLayer):
            for number, part in enumerate(layer.shards.parts):
                divided += part.variables
                shard = f"{name}/shard_{number}"
                yield PlacedPart(shard, place + number, _with_values(part.variables))
        inside = {id(variable) for variable in divided}
        whole = _with_values(v for v in layer.variables if id(v) not in inside)
        if whole:
            yield PlacedPart(name, place, whole)


def assert_in_place(model, operations: Collection[RanOperation]):
    """Fails unless everything that belongs to layers with weights is on their devices.

    Checks, in each replica: variables, slots, forward operations, backward operations of trained
    layers, in each micro-batch, and the operations that compute and write updates.

    Args:
        model: compiled model that `kdist.parallel.split` returned. No name may be another name with
            a number, such as `dense` and `dense_1`, since Keras numbers calls in this way.
        operations: operations of the first training steps; see `operations_that_run`.
    """
    parts = list(parts_of(model))
    assert_variables_in_place(model, parts)
    for replica, group in enumerate(groups_of(model.distribute_strategy)):
        mine = [o for o in operations if replica_of(o) == replica and o.computes]
        _assert_computed_in_place(model, parts, mine, group)
    assert_updates_in_place(model, operations)


def assert_variables_in_place(model, parts: Iterable[PlacedPart]):
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
    """Fails unless each device updates its own trained variables and slots.

    Each device writes as many variables as it holds. Of the values that the optimizer computes,
    only scalars come from other devices: the learning rate, and norms for clipping.
    """
    names = "|".join(re.escape(each.name) for each in optimizers_of(model))
    scope = re.compile(rf"(^|/)({names})(_\d+)?/")
    at = {(o.function, o.device, o.name): o for o in operations}
    mine = {o for o in operations if scope.search(o.name)}
    written: dict[int, set] = collections.defaultdict(
        set
    )  # per function, as a partial batch has its own
    for operation in mine:
        if operation.type.startswith(_WRITES):
            written[operation.function].add((operation.device, operation.inputs[0]))
            assert _origin(operation.inputs[-1], operation, at).type != "_Recv", operation
    assert written
    for variables in written.values():
        assert collections.Counter(device for device, _ in variables) == _trained_on(model)
    if not any(each.clipnorm or each.global_clipnorm for each in optimizers_of(model)):
        _assert_numbers_alone_travel(mine, written, at)


def _assert_numbers_alone_travel(mine, written, at):
    """Fails if the optimizer sends something computed from gradients, variables or slots.

    Args:
        mine: operations of the optimizer.
        written: function -> {(device, name of a variable there)}.
        at: (function, device, name) -> operation.
    """
    sent = {(o.function, o.name.rpartition("/_")[0]) for o in mine if o.type == "_Recv"}
    for operation in mine:
        if (operation.function, operation.name) in sent:
            for source in _sources(operation, at):
                assert source in mine or not source.computes, (operation, source)
                reads = (source.device, *source.inputs[:1])
                assert reads not in written[source.function], (operation, source)


def _origin(name, operation, at):
    """Returns the operation that computes the input `name`, behind copies and casts."""
    source = _source(name, operation, at)
    while source.type in ("Identity", "Cast", "Reshape"):
        source = _source(source.inputs[0], source, at)
    return source


def _source(name, operation, at):
    found = at.get((operation.function, operation.device, name))
    assert found is not None, f"{name} is not on the device of {operation}"
    return found


def _sources(operation, at):
    """Returns an operation and all operations on its device that it depends on."""
    found, left = {}, [operation]
    while left:
        each = left.pop()
        if each.name not in found:
            found[each.name] = each
            left += [_source(name, each, at) for name in each.inputs]
    return found.values()


def _trained_on(model):
    """Returns {device: number of trained variables and slots on it}."""
    strategy, slots, lie_there = model.distribute_strategy, slots_of(model), collections.Counter()
    for variable in model.trainable_variables:
        for each in (variable, *slots.get(id(variable), ())):
            lie_there.update(devices_of(strategy, each))
    return lie_there


def slots_of(model) -> dict[int, list[keras.Variable]]:
    """Returns {id of a trained variable: its slots}."""
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
    """Returns the number of an operation's replica."""
    found = re.search(r"(^|/)replica_(\d+)/", operation.name)
    return int(found[2]) if found else 0


def _assert_computed_in_place(model, parts, operations, group):
    """Fails unless each part has operations, all on one device of the replica."""
    layout = model.distribute_strategy.layout
    micro_batches = set(range(layout.micro_batches)) if layout.micro_batches > 1 else {None}
    by_scope = _by_scope(operations, {part.name for part in parts})
    for part in parts:
        mine, here = by_scope[part.name], group[part.place]
        if (
            part.name in model.divisions
        ):  # it prepares the inputs of its parts on each of their devices
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
    """Returns {name: operations in its scope}: the outermost scope, with the longest name."""
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
    """Returns the number of an operation's micro-batch; None without a pipeline."""
    found = re.match(r"(?:replica_\d+/)?(?:forward|backward)_(\d+)_on_stage", operation.name)
    return int(found[1]) if found else None


def _with_values(variables):
    """Returns variables without states of seed generators, which may be on any device."""
    return tuple(v for v in variables if "seed" not in v.path.rpartition("/")[2])
