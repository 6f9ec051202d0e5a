import json

import pytest

from kdist.training.groups.loop import CallbackList, LazyLogs


class Reader:
    def __init__(self):
        self.times = 0

    def __call__(self):
        self.times += 1
        return {"loss": 0.5, "accuracy": 1}


@pytest.mark.parametrize(
    "read",
    [
        lambda logs: logs["loss"],
        lambda logs: logs.get("loss"),
        lambda logs: "loss" in logs,
        len,
        list,
        dict,
        repr,
        lambda logs: {**logs},
        lambda logs: list(logs.items()),
        lambda logs: logs.copy(),
        lambda logs: logs == {},
        lambda logs: logs | {},
        lambda logs: logs.update(x=1),
        json.dumps,
    ],
)
def test_any_access_reads_once(read):
    reader = Reader()
    logs = LazyLogs(reader)
    read(logs)
    assert reader.times == 1
    assert logs["loss"] == 0.5
    assert logs["accuracy"] == 1.0
    assert reader.times == 1


def test_is_a_dict_with_all_values():
    logs = LazyLogs(Reader())
    assert isinstance(logs, dict)
    assert dict(logs) == {**logs} == logs.copy() == {"loss": 0.5, "accuracy": 1.0}
    assert json.loads(json.dumps(logs)) == {"loss": 0.5, "accuracy": 1.0}
    logs["lr"] = 1
    assert list(logs) == ["accuracy", "loss", "lr"]


def test_an_epoch_has_no_logs_that_a_callback_added_to_a_step():
    logs = LazyLogs(lambda: {"loss": 2.0}, lambda: {"loss": 3.0})
    logs["mine"] = 1.0
    assert logs.of_epoch() == {"loss": 3.0}


def test_truth_value_does_not_read():
    reader = Reader()
    logs = LazyLogs(reader)
    logs = logs or {}
    CallbackList([]).on_train_batch_end(0, logs)
    assert reader.times == 0
