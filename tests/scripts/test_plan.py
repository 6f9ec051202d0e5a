"""Runs of `kdist plan`: valid and invalid flags, missing files."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest

from benchmarks.planner_validation import TABLES
from kdist import planner
from kdist.planner.measurements import Calibration, work_terms
from kdist.tuning import Tuned
from tests.scripts.test_train import SCRIPTS, program, train

RESNET = ("--model=resnet50", "--examples=1281167", "--epochs=90", "--measurements=")


def planned(*flags):
    process = program("plan", *flags)
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


def refused(*flags):
    process = program("plan", *flags)
    assert process.returncode == 1
    assert "Traceback" not in process.stderr
    return process.stderr


def test_a_ranked_table_a_plan_and_a_page(tmp_path):
    page, output = tmp_path / "page.html", tmp_path / "plan.json"
    printed = planned(*RESNET, "--max_usd=500", f"--page={page}", f"--output={output}", "--explain")
    assert any("examples/s" in line for line in printed.splitlines())
    assert "Recommended: " in printed
    assert "the fastest on one machine" in printed
    assert "= 1,281,167 examples × 90 epochs" in printed
    assert json.loads(output.read_text())["model"] == "resnet50"
    assert "Efficiency against devices" in page.read_text()


@pytest.mark.slow
def test_plan_is_trained_and_its_rate_learned(tmp_path):
    plan, rows = tmp_path / "plan.json", tmp_path / "rows.csv"
    flags = ("--model=lenet", "--examples=256", "--optimizer=sgd", f"--measurements={rows}")
    planned(
        *flags,
        "--local_batch_sizes=16",
        "--accumulate=2",
        "--machine=n1-standard-4 + 1 x T4",
        "--max_machines=1",
        f"--output={plan}",
        "--page=",
    )
    fields = json.loads(plan.read_text())
    fields["layout"] |= {"data": 2, "shard": "optimizer"}  # two devices that divide state
    plan.write_text(json.dumps(fields))
    summary, printed = train(tmp_path / "run", f"--plan={plan}", "--examples=256")
    assert (summary["model"], summary["local_batch_size"], summary["accumulate"]) == (
        "lenet",
        16,
        2,
    )
    assert summary["plan"]["layout"]["strategy"] == "mirrored"
    assert json.loads((tmp_path / "run" / "config.json").read_text())["shard"] == "optimizer"
    assert "planned: " in printed
    assert "; measured: " in printed
    # A run on a CPU does not measure a T4.
    assert "ran on CPU:0" in refused(f"--learn={tmp_path / 'run'}", f"--measurements={rows}")
    summary["devices"] = ["GPU:0"]
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    assert "lenet on T4" in planned(f"--learn={tmp_path / 'run'}", f"--measurements={rows}")
    assert len(rows.read_text().splitlines()) == 2


def test_flag_that_contradicts_the_plan_is_an_error(tmp_path):
    plan = tmp_path / "plan.json"
    planned("--model=lenet", "--examples=256", "--gpu=T4", f"--output={plan}", "--page=")
    process = program("train", f"--plan={plan}", "--local_batch_size=7", "--dataset=digits")
    assert process.returncode == 1
    assert "--local_batch_size=7 contradicts" in process.stderr
    assert "leave the flag out" in process.stderr
    own = ("train", f"--plan={plan}", "--model=no_file.py:build", "--dataset=digits")
    assert "--model=no_file.py:build contradicts" in program(*own).stderr
    # A plan of a model that kdist does not build is trained with the user's function.
    plan.write_text(plan.read_text().replace('"lenet"', '"my_network"'))
    assert "no file no_file.py" in program(*own).stderr


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), "pass a model: --model=resnet50"),
        (("--model=lenet",), "--examples=60000"),
        ((*RESNET, "--examples=0"), "examples has to be above 0, not 0"),
        ((*RESNET, "--max_usd=0"), "max_usd has to be above 0, not 0.0"),
        ((*RESNET, "--max_usd=3"), "--max_usd="),
        ((*RESNET, "--gpu=Voodoo"), "there is no GPU like 'Voodoo'"),
        ((*RESNET, "--cloud=mine"), "there is no cloud like 'mine'; there are aws, azure, gcp"),
        ((*RESNET, "--link=telepathy"), "telepathy"),
        ((*RESNET, "--source_image=big"), "--source_image=big is neither"),
        ((*RESNET, "--learn=nowhere"), "nowhere holds no finished planned run"),
        (
            ("--model=bert_large_seq128", "--examples=9", "--source_image=500x375"),
            "no image input",
        ),
        ((*RESNET, "--source_image=-5x5"), "--source_image=-5x5 is neither"),
        ((*RESNET, "--strategies=parameter_server", "--max_machines=1"), "(--max_machines)"),
    ],
)
def test_errors_are_one_line_with_a_remedy(flags, expected):
    assert expected in refused(*flags)


def test_all_known_models_are_listed():
    assert {"resnet50", "vgg16", "lenet", "bert_large_seq128"} <= set(
        planned("--model=list").split()
    )


def test_published_rates_and_trainings_are_compared_in_a_clone(tmp_path):
    table = TABLES / "time_to_accuracy.csv"
    assert planned(f"--trainings={table}").splitlines()[-1].startswith("dollars: ")
    rates = tmp_path / "rates.csv"
    rates.write_text(
        "machine,model,framework,gpu,n_gpus,per_gpu_batch,examples_per_s,precision,data,note\n"
        "new,ResNet50,PyTorch DDP,T4,1,64,150,fp32,synthetic,\n"
        "new,ResNet50,PyTorch DDP,T4,4,64,560,fp32,synthetic,\n"
    )
    machines = tmp_path / "machines.csv"
    machines.write_text(
        "machine,gpu,gpus_per_node,link,peer_to_peer,node_gbit_s,cpu_cores,note\n"
        "new,T4,4,pcie3,yes,25,48,\n"
    )
    validated = planned(f"--validate={rates}", f"--machines={machines}")
    assert validated.splitlines()[-1].startswith("whole: ")
    # The script alone, where the repository is not on the path.
    script = tmp_path / "scripts" / "plan.py"
    script.parent.mkdir()
    script.write_text((SCRIPTS / "plan.py").read_text())
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "kdist").symlink_to(SCRIPTS.parent / "kdist")
    process = subprocess.run(
        [sys.executable, script, f"--validate={rates}"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert process.returncode == 1
    assert "clone" in process.stderr
    assert "Traceback" not in process.stderr


TUNED = Tuned(
    *({"local_batch_size": 32, "jit_compile": True}, 1.5, (1.4, 1.6)),
    *("lenet", "2 cores, 0 GPUs", 2, 16_000.0),
)
LENET = ("--model=lenet", "--examples=57600", "--epochs=10")


def rows_of(printed):
    """Returns {local batch: (milliseconds of a step, examples per second, hours)} of a table."""
    rows = re.findall(r"^ +(\d+) +([\d.]+) ms +([\d,.]+) +([\d.]+)  ", printed, re.MULTILINE)
    return {int(b): (float(ms), float(rate.replace(",", "")), float(h)) for b, ms, rate, h in rows}


def test_the_measured_step_of_tuned_settings_replaces_the_estimate(tmp_path):
    tuned, here = tmp_path / "tuned.json", tmp_path / "here.json"
    TUNED.save(tuned)
    printed = planned(*LENET, f"--tuned={tuned}")
    assert "lenet on 2 cores, 0 GPUs, 2 devices" in printed
    assert "measured by kdist tune" in printed
    assert rows_of(printed) == {32: (4.0, 16_000.0, 0.01)}
    costs = dict.fromkeys(work_terms(planner.resolve_workload("lenet"), 32), 1e-9) | {"step": 2e-3}
    here.write_text(Calibration("a CPU", 2, "float32", costs, 0.1, 0.2).to_json())
    flags = (*LENET, f"--calibration={here}", "--local_batch_sizes=32,64")
    estimated = rows_of(planned(*flags))
    corrected = rows_of(planned(*flags, f"--tuned={tuned}"))
    assert corrected[32][0] == 4.0 != estimated[32][0]
    factor = corrected[32][0] / estimated[32][0]
    assert corrected[64][0] == pytest.approx(factor * estimated[64][0], abs=0.1 * factor + 0.05)


@pytest.mark.parametrize(
    ("changes", "flags", "expected"),
    [
        ({"examples_per_second": None}, (), "no measured rate"),
        ({"model": "mlp"}, (), "pass --model=mlp"),
        ({}, ("--precision=mixed_bfloat16",), "is of float32"),
    ],
)
def test_tuned_settings_that_measure_something_else_are_rejected(
    changes, flags, expected, tmp_path
):
    tuned = tmp_path / "tuned.json"
    settings = {**TUNED.settings, "precision": "float32"}
    dataclasses.replace(TUNED, settings=settings, **changes).save(tuned)
    assert expected in refused(*LENET, f"--tuned={tuned}", *flags)


def test_tuned_settings_of_another_number_of_replicas_are_rejected(tmp_path):
    tuned, here = tmp_path / "tuned.json", tmp_path / "here.json"
    dataclasses.replace(TUNED, replicas=4).save(tuned)
    costs = dict.fromkeys(work_terms(planner.resolve_workload("lenet"), 32), 1e-9)
    here.write_text(Calibration("a CPU", 2, "float32", costs, 0.1, 0.2).to_json())
    message = refused(*LENET, f"--tuned={tuned}", f"--calibration={here}")
    assert "has 4 replicas" in message
    assert "with --num_devices" in message
