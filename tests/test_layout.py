import pytest

from kdist import Layout


def test_it_is_read_as_it_is_written():
    layout = Layout.parse("data=2, pipeline=2,micro_batches=4,schedule=gpipe")
    assert layout == Layout(data=2, pipeline=2, micro_batches=4, schedule="gpipe")
    assert Layout.parse(str(layout)) == layout
    assert Layout.parse("") == Layout() == Layout.parse(str(Layout()))


def test_recompute():
    layout = Layout(pipeline=2, micro_batches=2, recompute=True)
    assert str(layout) == "pipeline=2,micro_batches=2,recompute=true"
    for text in (str(layout), "pipeline=2,recompute,micro_batches=2"):
        assert Layout.parse(text) == layout
    assert not Layout.parse("pipeline=2,recompute=false").recompute


@pytest.mark.parametrize(
    ("layout", "in_a_group"),
    [
        (Layout(data=4), 1),
        (Layout(data=2, pipeline=3), 3),
        (Layout(data=2, pipeline=2, tensor=4), 8),
        (Layout(branch=3), 3),
    ],
)
def test_devices(layout, in_a_group):
    assert layout.group_size == in_a_group
    assert layout.devices == in_a_group * layout.data


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=0", "whole number from 1 on"),
        ("data=two", "data='two'"),
        ("data", "write it as data=2,pipeline=2"),
        ("pipelines=2", r"did you mean pipeline\?"),
        ("data=2,data=4", "says data twice"),
        ("pipeline=2,schedule=fifo", "there are 1f1b and gpipe"),
        ("data=2,micro_batches=4", "--accumulate=4"),
        ("data=2,recompute", "--accumulate=2"),
        ("pipeline=2,recompute=true", "give micro_batches=2 or more"),
        ("pipeline=2,micro_batches=2,recompute=yes", "recompute='yes': it is true or false"),
        ("branch=2,tensor=2", "leave branch out"),
        ("branch=2,pipeline=2", "leave branch out"),
        ("pipeline=2,between=hosts", "there are data and model"),
        ("data=2,between=model", "without a model that is split"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Layout.parse(text)


def test_a_degree_is_a_number():
    with pytest.raises(ValueError, match="data=True"):
        Layout(data=True)


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
