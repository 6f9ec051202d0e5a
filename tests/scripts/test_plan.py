"""scripts/plan.py as a user runs it: right and wrong flags, files that are not there."""

import json

import pytest

from tests.scripts.test_train import program, train

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
    said = planned(*RESNET, "--max_usd=500", f"--page={page}", f"--output={output}", "--explain")
    assert "examples/s" in said.splitlines()[0]
    assert "First is " in said
    assert "it is the fastest that keeps to the limits" in said
    assert "= 1,281,167 examples × 90 epochs" in said
    assert json.loads(output.read_text())["model"] == "resnet50"
    assert "Efficiency against devices" in page.read_text()


def test_what_was_planned_is_what_runs_and_sharpens_the_next_plan(tmp_path):
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
    summary, printed = train(tmp_path / "run", f"--plan={plan}", "--examples=256")
    assert (summary["model"], summary["local_batch_size"], summary["accumulate"]) == (
        "lenet",
        16,
        2,
    )
    assert summary["plan"]["layout"]["strategy"] == "one_device"
    assert "planned: " in printed
    assert "; measured: " in printed
    # Here it ran on a CPU, which says nothing of a T4.
    assert "ran on CPU:0" in refused(f"--learn={tmp_path / 'run'}", f"--measurements={rows}")
    summary["devices"] = ["GPU:0"]
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    assert "lenet on T4" in planned(f"--learn={tmp_path / 'run'}", f"--measurements={rows}")
    assert len(rows.read_text().splitlines()) == 2


def test_a_flag_that_says_otherwise_than_the_plan_is_an_error(tmp_path):
    plan = tmp_path / "plan.json"
    planned("--model=lenet", "--examples=256", "--gpu=T4", f"--output={plan}", "--page=")
    process = program("train", f"--plan={plan}", "--local_batch_size=7", "--dataset=digits")
    assert process.returncode == 1
    assert "--local_batch_size=7, and" in process.stderr
    assert "leave the flag out" in process.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "say what to train: --model=resnet50"),
        (("--model=resnet5O", "--examples=9"), "did you mean resnet50"),
        (("--model=resnet50", "--examples=-3"), "examples has to be above 0, not -3"),
        ((*RESNET, "--max_usd=-3"), "max_usd has to be above 0, not -3.0"),
        ((*RESNET, "--max_usd=3"), "--max_usd="),
        ((*RESNET, "--gpu=Voodoo"), "there is no GPU like 'Voodoo'"),
        ((*RESNET, "--cloud=mine"), "there is no cloud like 'mine'; there are aws, azure, gcp"),
        ((*RESNET, "--input_shape=224,x,3"), "--input_shape is whole numbers with commas"),
        ((*RESNET, "--machines=nowhere.csv"), "nowhere.csv"),
        ((*RESNET, "--link=telepathy"), "telepathy"),
        ((*RESNET, "--source_image=big"), "--source_image is WIDTHxHEIGHT or none, not big"),
        ((*RESNET, "--page=nowhere/plan.html"), "cannot write the page"),
        ((*RESNET, "--learn=nowhere"), "nowhere holds no planned run that has ended"),
        ((*RESNET, "--epochs=inf"), "epochs has to be above 0, not inf"),
        ((*RESNET, "--max_usd=nan"), "max_usd has to be above 0, not nan"),
        (
            ("--model=bert_large_seq128", "--examples=9", "--source_image=500x375"),
            "takes no images; leave --source_image out",
        ),
        ((*RESNET, "--source_image=-5x5"), "--source_image is WIDTHxHEIGHT or none"),
        ((*RESNET, "--strategies=parameter_server", "--max_machines=1"), "(--max_machines)"),
        ((*RESNET, "--validate=nowhere.csv"), "nowhere.csv"),
    ],
)
def test_what_is_wrong_is_said_in_a_line_with_its_remedy(flags, said):
    assert said in refused(*flags)


def test_all_known_models_are_listed():
    assert {"resnet50", "vgg16", "lenet", "bert_large_seq128"} <= set(
        planned("--model=list").split()
    )
