"""Predictions of published rates are as near as they were, and tables are read or refused."""

import csv
import dataclasses
import hashlib
import math
from importlib import resources

import pytest

from benchmarks.planner_validation import TABLES, compute_fitting, fitting
from benchmarks.planner_validation.fitting import fit_constants, known_cases, predicted_rates
from benchmarks.planner_validation.published import (
    PublishedRate,
    gradients_of,
    input_of,
    known_rates,
    pairs,
    precision_name,
    read_rates,
    setup_of,
)
from benchmarks.planner_validation.published_models import array_shape, find_model, workload_name
from benchmarks.planner_validation.summary import given_look_ups, look_ups, share_right
from benchmarks.planner_validation.validate import (
    MANY_NODES,
    NO_PEER_TO_PEER,
    WITHIN_NODE,
    Prediction,
    Validation,
    mean_error,
    validate,
)
from kdist.planner.cost.constants import known_constants
from kdist.planner.tables.machines import known_machines

HEAD = "machine,model,framework,gpu,n_gpus,per_gpu_batch,examples_per_s,precision,data,note\n"
ROWS = (
    "new,ResNet50,PyTorch DDP,T4,1,64,150,fp32,synthetic,\n"
    "new,ResNet50,PyTorch DDP,T4,4,64,560,fp32,synthetic,\n"
)
MACHINES = (
    "machine,gpu,gpus_per_node,link,peer_to_peer,node_gbit_s,cpu_cores,note\n"
    "new,T4,4,pcie3,yes,25,48,\n"
)

# Mean absolute errors as of today, rounded up to 0.2 points.
LEFT_OUT_BOUNDS = {WITHIN_NODE: 0.040, NO_PEER_TO_PEER: 0.030, MANY_NODES: 0.082}
MODEL_LEFT_OUT_BOUNDS = {WITHIN_NODE: 0.042, NO_PEER_TO_PEER: 0.030, MANY_NODES: 0.086}
FITTED_BOUNDS = {WITHIN_NODE: 0.030, NO_PEER_TO_PEER: 0.024, MANY_NODES: 0.068}
# From the specification alone, with constants of computation that are fitted elsewhere.
SPECIFICATION_BOUND, SPECIFICATION_WITHOUT_MODEL_BOUND = 0.150, 0.170


@pytest.fixture
def table(tmp_path):
    def write(rows, head=HEAD):
        path = tmp_path / "rates.csv"
        path.write_text(head + rows)
        return path

    return write


@pytest.fixture
def machines(tmp_path):
    path = tmp_path / "machines.csv"
    path.write_text(MACHINES)
    return path


@pytest.fixture(scope="module")
def own() -> Validation:
    return validate(
        TABLES / "scaling.csv", resources.files("kdist.planner.tables") / "machines.csv"
    )


@pytest.fixture(scope="module")
def fitted() -> Validation:
    return validate(TABLES / "scaling.csv", constants=known_constants())


def errors(rows):
    return {
        kind: mean_error([row for row in rows if row.kind == kind])
        for kind in (WITHIN_NODE, NO_PEER_TO_PEER, MANY_NODES)
    }


def exceeded(rows, bounds):
    return [kind for kind, error in errors(rows).items() if not error <= bounds[kind]]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_error_has_grown(own):
    assert len(own.without_machine) == 230
    assert exceeded(own.without_machine, LEFT_OUT_BOUNDS) == []
    assert exceeded(own.without_model, MODEL_LEFT_OUT_BOUNDS) == []
    assert mean_error(own.specification) <= SPECIFICATION_BOUND
    assert mean_error(own.specification_without_model) <= SPECIFICATION_WITHOUT_MODEL_BOUND
    assert all(row.predicted for row in own.specification)
    assert own.unknown_models == ()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_choices_are_among_the_best(own):
    found = given_look_ups(own)
    assert len(found) > 200
    assert share_right(found) >= 0.998
    assert share_right(look_ups(own.specification)) >= 0.998


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_text_ends_with_the_overall_error(own):
    lines = str(own).splitlines()
    whole = f"whole: {100 * mean_error(own.without_machine):.1f} % given a rate"
    assert lines[-1].startswith(whole)
    assert "from the specification alone (341 of 341 rows, without its machine" in lines[-1]
    assert lines[-2].startswith("with the priors instead of fitted constants: ")
    assert any(line.startswith("21 rows have no batch") for line in lines)
    assert any("dgx2h-cluster" in line for line in lines)
    assert any("EfficientNetV2-S" in line for line in lines)


def test_the_constants_that_come_with_kdist_fit(fitted):
    assert exceeded(fitted.without_machine, FITTED_BOUNDS) == []


@pytest.mark.parametrize(
    ("constant", "kind"),
    [
        ("host_server_share", WITHIN_NODE),
        ("policy_core_ms_per_megapixel", WITHIN_NODE),
        ("staged_device_share", NO_PEER_TO_PEER),
        ("node_spread", MANY_NODES),
    ],
)
def test_one_wrong_constant_exceeds_a_bound(constant, kind):
    right = known_constants()
    wrong = dataclasses.replace(right, **{constant: 2 * getattr(right, constant)})
    rows = validate(TABLES / "scaling.csv", constants=wrong).without_machine
    assert kind in exceeded(rows, FITTED_BOUNDS)


@pytest.mark.timeout(120)
def test_the_table_of_constants_is_what_a_fit_finds():
    cases = known_cases()
    again, stored = (
        abs(predicted_rates(cases, constants) / cases.wanted_rate - 1).mean()
        for constants in (fit_constants(cases), known_constants())
    )
    assert stored == pytest.approx(again, abs=2e-4)


def test_linear_scaling_is_far_worse(fitted):
    base = {pair[1]: pair[0] for pair in pairs(known_rates())}
    linear = [
        dataclasses.replace(
            row, predicted=base[row.rate].rate * row.rate.devices / base[row.rate].devices
        )
        for row in fitted.without_machine
    ]
    for kind, error in errors(linear).items():
        assert error > 3 * errors(fitted.without_machine)[kind]


def test_vgg16_gets_slower_without_peer_to_peer_as_it_did(fitted):
    rows = {
        row.rate.devices: row
        for row in fitted.without_machine
        if row.rate.machine == "epyc-8xrtx3090"
        and row.rate.model == "VGG16"
        and row.rate.local_batch == 64
    }
    assert rows[8].rate.rate < rows[4].rate.rate
    assert rows[8].predicted < rows[4].predicted


def test_an_unknown_machine(table, machines):
    found = validate(table(ROWS), machines)
    (row,) = found.without_machine
    assert 450 < row.predicted < 600
    assert len(found.specification) == 2
    assert "new" in str(found)


def test_unknown_models_are_predicted_and_listed(table, machines):
    found = validate(table(ROWS.replace("ResNet50", "MyNet")), machines)
    assert found.unknown_models == ("MyNet",)
    assert 300 < found.without_machine[0].predicted < 600
    text = str(found)
    assert "unknown models, assumed to have 25 million parameters" in text
    assert "MyNet" in text
    assert math.isnan(mean_error(found.specification))
    assert dict(found.reasons) == {"the time of MyNet on T4 in fp32 is not known": 2}
    assert ", - from the specification alone (0 of 2 rows, " in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (ROWS.replace("560", "nan"), "line 3: examples_per_s is nan, but must be a number above 0"),
        (ROWS.replace("560", "0"), "line 3: examples_per_s is 0"),
        (ROWS.replace("T4,4,", "T4,0,"), "line 3: n_gpus is 0"),
        (ROWS.replace("fp32", "int8", 1), "line 2: precision is 'int8', but must be one of fp32"),
        (ROWS.replace("560", ""), "line 3: examples_per_s is empty"),
        (ROWS.splitlines(keepends=True)[0], "no training on several numbers of devices"),
        (ROWS.replace("new,", "old,"), "names machines that are not known: old; add them"),
    ],
)
def test_a_wrong_table_is_refused(table, machines, rows, says):
    with pytest.raises(ValueError, match="rates.csv") as raised:
        validate(table(rows), machines)
    assert says in str(raised.value)


def test_a_table_without_a_column_is_refused(table):
    lacking = "framework, gpu, n_gpus, per_gpu_batch, examples_per_s, precision, data, note"
    with pytest.raises(ValueError, match=f"lacks the columns {lacking}; it has machine, model"):
        validate(table("x,ResNet50\n", "machine,model\n"))


RATE = PublishedRate("m", "ResNet-50", "TF2", "T4", 1, 64.0, 100.0, "fp32", "real", "")


def checked(devices, published, predicted, batch=64.0):
    rate = dataclasses.replace(RATE, devices=devices, rate=published, local_batch=batch)
    return Prediction(rate, predicted, WITHIN_NODE)


def test_a_look_up_is_right_within_five_percent_of_the_best():
    near = [checked(1, 100.0, 100.0), checked(4, 300.0, 350.0), checked(8, 314.0, 340.0)]
    (found,) = look_ups(near)
    assert (found.free, found.chosen, found.best, found.right) == ("devices", 300.0, 314.0, True)
    (far,) = look_ups([*near[:2], checked(8, 330.0, 340.0)])
    assert not far.right
    assert share_right([found, far]) == 0.5


def test_look_ups_need_a_predicted_row():
    given = [checked(1, 100.0, None).rate, checked(1, 120.0, None, batch=128.0).rate]
    assert look_ups([], given) == []
    (found,) = look_ups([checked(2, 240.0, 230.0, batch=128.0)], given)
    assert (found.free, found.right) == ("devices", True)


def published(**changed):
    return dataclasses.replace(RATE, **changed)


@pytest.mark.parametrize(
    ("changed", "update"),
    [
        ({}, "all_reduce"),
        ({"note": "parameter_server on cpu"}, "server_on_host"),
        ({"note": "PS-on-CPU update; VGG16 replicated+NCCL"}, "server_on_host"),
        ({"note": "PS-on-CPU update; VGG16 replicated", "model": "VGG16"}, "all_reduce"),
        ({"framework": "TF1 tf_cnn_benchmarks"}, "server_on_devices"),
        ({"framework": "TF1 tf_cnn_benchmarks", "note": "replicated, NCCL"}, "all_reduce"),
    ],
)
def test_the_update_follows_from_the_description(changed, update):
    rate = published(machine="pcie-8xp100", **changed)
    assert setup_of(rate, known_machines()).update == update


def test_the_input_work_follows_from_the_description():
    assert input_of(published()).decoder == "tf.data"
    assert input_of(published(framework="MXNet DALI")).decoder == "dali"
    assert input_of(published(data="synthetic")).decoder == "none"
    assert input_of(published(data="fake array on CPU")).host_bytes == pytest.approx(
        602e3, rel=0.01
    )
    assert input_of(published(framework="Keras, numpy input")).decoder == "numpy"
    assert input_of(published(model="BERT-large")).decoder == "none"
    assert input_of(published(model="Mask R-CNN R50")).masks


def test_the_setup_follows_from_the_description():
    assert published(note="x; gradient accumulation 64").accumulate == 64
    assert published().accumulate == 1
    assert gradients_of(published(precision="fp16")).bytes == pytest.approx(51.2e6)
    assert gradients_of(published(precision="amp")).bytes == pytest.approx(102.4e6)
    machines = known_machines()
    horovod = setup_of(published(machine="4xv100", framework="TF2 Horovod"), machines)
    assert (horovod.library, horovod.in_graph) == ("horovod", False)
    old = published(machine="4xv100", framework="TF1.3 tf_cnn_benchmarks replicated")
    assert setup_of(old, machines).nccl1
    new = published(machine="4xv100", framework="TF1.12 tf_cnn_benchmarks replicated")
    assert not setup_of(new, machines).nccl1


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("ResNet50", "ResNet-50"),
        ("resnet-50 v2", "ResNet-50"),
        ("ResNeXt-101 32x4d", "ResNeXt-101"),
        ("EfficientDet-D0 512px", "EfficientDet-D0"),
        ("VGG-16", "VGG16"),
        ("BERT large pretrain seq128", "BERT-large"),
        ("mobilenet_v2 fine-tune", "MobileNetV2"),
    ],
)
def test_models_are_found_by_the_names_that_tables_use(name, found):
    assert find_model(name).name == found


def test_a_number_ends_where_a_name_ends():
    assert find_model("ResNet-500") is None


def corrupted(tmp_path, machine):
    """kdist's own table with three times the rates of a machine."""
    with open(TABLES / "scaling.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    path = tmp_path / "corrupted.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        for row in rows:
            times = 3 if row["machine"] == machine else 1
            writer.writerow({**row, "examples_per_s": times * float(row["examples_per_s"])})
    return path


@pytest.mark.timeout(120)
def test_constants_do_not_depend_on_the_machine_left_out(tmp_path, monkeypatch):
    machine = "ec2-p3.16xlarge"
    wrong = read_rates(corrupted(tmp_path, machine))
    fit_without = fitting.constants_without.__wrapped__
    right, of_others = fit_without("machine", machine), fit_without("machine", "pcie-8xp100")
    monkeypatch.setattr(fitting, "known_rates", lambda: wrong)
    assert fit_without("machine", "pcie-8xp100") != of_others
    assert fit_without("machine", machine) == right
    assert right != known_constants()


@pytest.mark.timeout(120)
def test_constants_of_computation_do_not_depend_on_the_machine_left_out(tmp_path, monkeypatch):
    machine = "dgx2h-cluster"
    wrong = read_rates(corrupted(tmp_path, machine))
    fit_without = compute_fitting.compute_constants_without.__wrapped__
    right = fit_without("machine", machine)
    monkeypatch.setattr(compute_fitting, "known_rates", lambda: wrong)
    assert fit_without("machine", machine) == right
    assert fit_without("machine", "4xv100") != right


def test_own_table_is_the_one_published():
    """Results on `scaling.csv` can be compared only while nobody edits it."""
    digest = hashlib.sha256((TABLES / "scaling.csv").read_bytes()).hexdigest()
    assert digest == "91e88c7cce878cf98ca25db922fe94c5bd6dabb83c8a7c6d967c920a666a32ba"


def test_one_thread_prepares_images_for_some_sources():
    threads = {input_of(rate).threads for rate in known_rates() if "sayakpaul" in rate.source}
    assert threads == {1}
    assert input_of(published()).threads is None


def test_a_source_is_read_where_there_is_one(table):
    rows = ROWS.replace(",\n", ",,me\n")
    assert read_rates(table(rows, HEAD.replace("note", "note,source")))[0].source == "me"
    assert read_rates(table(ROWS))[0].source == ""


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("FP32", "fp32"),
        ("float32", "fp32"),
        ("mixed_float16", "amp"),
        ("Mixed", "amp"),
        ("half", "fp16"),
        ("float16", "fp16"),
        ("TF32", "tf32"),
        ("mixed_bfloat16", "bf16"),
    ],
)
def test_a_precision_has_many_names(table, said, name):
    assert precision_name(said) == name
    rate, _ = read_rates(table(ROWS.replace("fp32", said)))
    size = 2 if name == "fp16" else 4
    assert (rate.precision, gradients_of(rate).bytes) == (name, 25.6e6 * size)


@pytest.mark.parametrize(("framework", "batch"), [("PyTorch DDP", 256), ("TF2", 64)])
def test_the_default_batch_is_the_same_everywhere(tmp_path, table, framework, batch):
    rows = ROWS.replace("PyTorch DDP", framework).replace(",64,", ",,")
    path = table(rows.replace("synthetic,\n", "synthetic,x\n"))
    assert {(rate.local_batch, rate.batch_assumed) for rate in read_rates(path)} == {(batch, True)}
    rates = compute_fitting.compute_rates(read_rates(path))
    assert [rate.local_batch for rate in rates] == [batch]


@pytest.mark.parametrize(
    ("model", "data", "numbers"),
    [
        ("ResNet-18 Fashion-MNIST", "real", 28 * 28),
        ("ResNet-18", "MNIST", 28 * 28),
        ("ResNet-18 CIFAR-10", "real", 32 * 32 * 3),
        ("ResNet-50", "cifar100", 32 * 32 * 3),
    ],
)
def test_small_images_are_arrays_in_memory(model, data, numbers):
    work = input_of(published(model=model, data=data))
    assert (work.host_bytes, work.source_megapixels, work.decoder) == (4 * numbers, 0, "none")


def test_small_images_are_known_by_their_names():
    assert array_shape("ResNet-50 real") is None
    assert workload_name("ResNet-18 Fashion-MNIST") == "ResNet-18 28px"
    assert workload_name("ResNet-18 CIFAR-10") == "resnet18_cifar10"
    assert workload_name("ResNet-50", "CIFAR-10") == "ResNet-50 32px"
    assert find_model("ResNet-18 CIFAR-10").name == "ResNet-18"


def test_pixels_in_a_name_are_resized_to():
    assert input_of(published(model="ResNet-50 512px")).model_megapixels == 512**2 / 1e6
    assert input_of(published(model="ResNet-50")).model_megapixels == 224**2 / 1e6


FASHION = (
    "gce-n1-standard-4-4xk80,{model},TF2,K80 (one die),1,64,4918,fp32,real,\n"
    "gce-n1-standard-4-4xk80,{model},TF2,K80 (one die),2,64,8108,fp32,real,\n"
)


def test_two_devices_are_faster_on_small_images(table):
    path = table(FASHION.format(model="ResNet-18 Fashion-MNIST"))
    checked_two = validate(path, constants=known_constants())
    assert checked_two.without_machine[0].predicted > 4918
    assert checked_two.too_fast == ()


def test_a_rate_above_the_input_limit_is_noted(table):
    path = table(FASHION.format(model="ResNet-18"))
    text = str(validate(path, constants=known_constants()))
    assert "4,918 examples/s is more than the model of exchange and input allows" in text
