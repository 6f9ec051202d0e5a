"""Files of tuned settings, and the strategies that follow from them."""

import pytest

from kdist.layout import Layout
from kdist.strategy_spec import resolve
from kdist.tuning import Tuned

SETTINGS = {
    "num_devices": 2,
    "reduction": "hierarchical_copy",
    "num_packs": 0,
    "accumulate": 2,
    "jit_compile": True,
    "steps_per_execution": "32",
    "intra_op_threads": 3,
    "parallel_calls": 4,
}


def test_a_file_holds_the_settings(tmp_path):
    tuned = Tuned(SETTINGS, 1.5, (1.4, 1.6), "lenet", "2 cores")
    tuned.save(tmp_path / "tuned.json")
    assert Tuned.load(tmp_path / "tuned.json") == tuned
    options = {"accumulate": 2, "jit_compile": True, "steps_per_execution": 32}
    assert tuned.compile_options == options
    assert tuned.data_options == {"parallel_calls": 4}
    assert Tuned({"steps_per_execution": "auto"}).compile_options["steps_per_execution"] == "auto"


@pytest.mark.parametrize(
    "text",
    [
        *('{"settings": {"epochs": 3}}', '{"settings": {"num_devices": "2"}}', "[]", "{}", "no"),
        *('{"settings": {"jit_compile": 1}}', '{"settings": {}, "more": 1}', '{"settings": []}'),
    ],
)
def test_other_files_are_rejected(text, tmp_path):
    (tmp_path / "tuned.json").write_text(text)
    with pytest.raises(ValueError, match=r"tuned\.json.*kdist tune"):
        Tuned.load(tmp_path / "tuned.json")


def test_the_strategy_is_that_of_the_settings():
    spec = resolve(Tuned(SETTINGS))
    options = {"reduction": "hierarchical_copy", "num_packs": 0, "intra_op_threads": 3}
    assert spec == resolve("auto", 2, **options)
    assert resolve(Tuned({})) == resolve("auto")
    assert resolve(Tuned({}), shard="optimizer") == resolve("auto", shard="optimizer")
    split = Tuned({"layout": "data=2,pipeline=2"})
    assert resolve(split) == resolve(Layout(data=2, pipeline=2))


@pytest.mark.parametrize(
    "options",
    [
        *({"devices": 4}, {"reduction": "nccl"}, {"num_packs": 1}, {"shard": "weights"}),
        {"intra_op_threads": 2},
    ],
    ids=lambda each: next(iter(each)),
)
def test_an_argument_that_contradicts_the_settings_is_an_error(options):
    settings = {**SETTINGS, "shard": "optimizer"}
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.*the tuned settings have"):
        resolve(Tuned(settings), **options)


def test_arguments_complete_the_settings():
    tuned = Tuned({"jit_compile": True, "reduction": "hierarchical_copy"})
    assert resolve(tuned, 2, num_packs=1) == resolve(
        "auto", 2, reduction="hierarchical_copy", num_packs=1
    )
    assert resolve(Tuned(SETTINGS), 2) == resolve(Tuned(SETTINGS))


def test_a_difference_of_model_or_machine_is_named():
    tuned = Tuned({}, model="lenet", machine="2 cores, 0 GPUs")
    assert tuned.differences("lenet", "2 cores, 0 GPUs") == []
    assert tuned.differences("mlp", "8 cores, 0 GPUs") == [
        "the model lenet, not mlp",
        "a machine with 2 cores, 0 GPUs, not 8 cores, 0 GPUs",
    ]
    assert Tuned({}).differences("mlp", "8 cores, 0 GPUs") == []  # written by hand
