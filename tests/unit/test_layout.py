"""Layouts."""

import pytest

from kdist import Layout


def test_parse_inverts_str():
    layout = Layout.parse("data=2, pipeline=2,micro_batches=4,schedule=gpipe")
    assert layout == Layout(data=2, pipeline=2, micro_batches=4, schedule="gpipe")
    assert Layout.parse(str(layout)) == layout
    assert Layout.parse("") == Layout() == Layout.parse(str(Layout()))


def test_shard():
    layout = Layout(data=4, shard="optimizer", min_shard_bytes=1024)
    assert Layout.parse("data=4,shard=optimizer,min_shard_bytes=1024") == layout
    assert Layout.parse(str(layout)) == layout
    assert layout.strategy == "mirrored"
    with pytest.raises(ValueError, match="shard=optimizer: on a JAX mesh"):
        layout.check_mesh()


def test_recompute():
    layout = Layout(pipeline=2, micro_batches=2, recompute=True)
    assert str(layout) == "pipeline=2,micro_batches=2,recompute=true"
    for text in (str(layout), "pipeline=2,recompute,micro_batches=2"):
        assert Layout.parse(text) == layout
    assert not Layout.parse("pipeline=2,recompute=false").recompute


@pytest.mark.parametrize(
    ("layout", "group_size"),
    [
        (Layout(data=4), 1),
        (Layout(data=2, pipeline=3), 3),
        (Layout(data=2, pipeline=2, tensor=4), 8),
        (Layout(branch=3), 3),
    ],
)
def test_devices(layout, group_size):
    assert layout.group_size == group_size
    assert layout.devices == group_size * layout.data


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=0", "whole number"),
        ("data=two", "data='two'"),
        ("data", "write it as data=2,pipeline=2"),
        ("pipelines=2", r"did you mean pipeline\?"),
        ("data=2,data=4", "sets data twice"),
        ("pipeline=2,schedule=fifo", "use 1f1b or gpipe"),
        ("data=2,micro_batches=4", "--accumulate=4"),
        ("data=2,recompute", "--accumulate=2"),
        ("pipeline=2,recompute=true", "set micro_batches=2 or more"),
        ("pipeline=2,micro_batches=2,recompute=yes", "recompute='yes'"),
        ("branch=2,tensor=2", "leave branch out"),
        ("branch=2,pipeline=2", "leave branch out"),
        ("pipeline=2,between=hosts", "use data or model"),
        ("data=2,between=model", "needs a split model"),
        ("data=3,machines=2", "cannot be divided"),
        ("pipeline=2,asynchronous", "asynchronous"),
        ("data=2,local_steps=0", "local_steps=0"),
        ("data=2,shard=weight", "use optimizer"),
        ("data=2,tensor=2,shard=optimizer", "leave tensor"),
        ("data=2,local_steps=2,shard=weights", "leave local_steps out"),
        ("data=2,min_shard_bytes=1", "without shard"),
        ("data=2,shard=optimizer,min_shard_bytes=0", "min_shard_bytes=0"),
    ],
)
def test_parse_rejects(text, message):
    with pytest.raises(ValueError, match=message):
        Layout.parse(text)


def test_a_degree_is_a_number():
    with pytest.raises(ValueError, match="data=True"):
        Layout(data=True)


@pytest.mark.parametrize(
    ("layout", "strategy", "devices_per_machine"),
    [
        (Layout(), "one_device", 1),
        (Layout(data=4), "mirrored", 4),
        (Layout(data=4, machines=2), "multi_worker", 2),
        (Layout(data=4, machines=2, asynchronous=True), "parameter_server", 2),
        (Layout(data=2, pipeline=2), "split", 4),
    ],
)
def test_strategy_and_machines(layout, strategy, devices_per_machine):
    assert layout.strategy == strategy
    assert layout.devices_per_machine == devices_per_machine
    assert Layout.parse(str(layout)) == layout


def test_fields_of_plans_are_not_for_create_strategy():
    layout = Layout(data=2, accumulate=4, local_steps=8)
    layout.degrees.check_only_degrees()
    with pytest.raises(ValueError, match=r"compile\(\)"):
        layout.check_only_degrees()


HOSTS = [["a0", "a1"], ["b0", "b1"]]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("data=2,pipeline=2", [["a0", "a1"], ["b0", "b1"]]),
        ("data=2,pipeline=2,between=model", [["a0", "b0"], ["a1", "b1"]]),
        ("pipeline=4", [["a0", "a1", "b0", "b1"]]),
        ("pipeline=4,between=model", [["a0", "a1", "b0", "b1"]]),
        ("data=4", [["a0"], ["a1"], ["b0"], ["b1"]]),
    ],
)
def test_groups_of_devices(text, groups):
    assert Layout.parse(text).groups(HOSTS) == groups
    assert Layout.parse(str(Layout.parse(text))).groups(HOSTS) == groups


@pytest.mark.parametrize(
    ("text", "hosts", "message"),
    [
        ("pipeline=2", HOSTS, r"for 2 devices and there are 4 \(a0, a1, b0, b1\)"),
        ("pipeline=3,between=model", [["a"], ["b"]], "for 3 devices and there are 2"),
        (
            "data=2,pipeline=3,between=model",
            [["a", "b", "c"]] * 2,
            "cannot be divided over 2 hosts",
        ),
    ],
)
def test_devices_that_do_not_suit(text, hosts, message):
    with pytest.raises(ValueError, match=message):
        Layout.parse(text).groups(hosts)
