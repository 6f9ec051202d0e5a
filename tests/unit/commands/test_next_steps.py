"""Commands that a training prints, which run as they are."""

import json
import sys
import types

import pytest

from kdist import program as kdist_program
from kdist.commands.training_run import next_steps
from kdist.run_directory import RUN_DIR, RunDirectory


class Flags:
    """Flags of `kdist train`: those that are given, and the default of --dataset."""

    def __init__(self, **given):
        self._given = given
        vars(self).update({"model": "lenet", "export": None, **given})

    def __getitem__(self, name):
        value = self._given.get(name)
        return types.SimpleNamespace(
            value=value, present=name in self._given, default="fashion_mnist"
        )


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Returns a function that sets flags, in a directory without runs, where kdist is on PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(RUN_DIR, raising=False)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(next_steps, "best_model", lambda run: None)
    return lambda **given: monkeypatch.setattr(next_steps, "FLAGS", Flags(**given))


def finished_run(name):
    run = RunDirectory.create(f"runs/{name}", {})
    run.write_summary({})
    return run


def test_next_steps_are_about_runs_and_data_that_exist(program, capsys):
    program(operations="random_flip()")
    run = finished_run("first")
    next_steps.print_next_steps(run, "digits")
    printed = capsys.readouterr().out
    assert "  kdist report runs/first  " in printed
    assert "kdist train --model=resnet18 --dataset=digits '--operations=random_flip()'" in printed
    program(operations="random_flip()", export="models/digits")
    next_steps.print_next_steps(finished_run("second"), "fashion_mnist")
    printed = capsys.readouterr().out
    assert "  kdist serve --model_dir=models/digits  " in printed
    assert "  kdist report runs/second runs/first  " in printed
    assert "kdist train --model=resnet18 '--operations=random_flip()'" in printed


def test_the_export_of_a_users_model_names_the_code_of_its_layers(program, capsys):
    program(model="nets/my_code.py:build")
    next_steps.print_next_steps(finished_run("mine"), "digits")
    expected = "kdist export runs/mine --output=models/build --code=nets/my_code.py "
    assert expected in capsys.readouterr().out


def test_without_kdist_on_the_path_python_runs_it(program, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(sys, "executable", "/opt/my env/bin/python")
    assert kdist_program.command("check") == "'/opt/my env/bin/python' -m kdist check"


@pytest.mark.parametrize(
    ("roles", "launched"),
    [
        ({"worker": 2}, "--workers=2"),
        ({"chief": 1, "worker": 2, "ps": 1}, "--workers=2 --ps=1"),
        ({"chief": 1, "worker": 1, "evaluator": 1}, "--workers=1 --chief --evaluator"),
    ],
)
def test_a_task_of_a_launched_job_shows_how_to_launch_it_again(
    program, monkeypatch, roles, launched
):
    program()
    tasks = {role: [f"{role}{n}:1" for n in range(count)] for role, count in roles.items()}
    task = {"type": next(iter(roles)), "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": tasks, "task": task}))
    monkeypatch.setattr(sys, "argv", ["kdist train", "--epochs=3", "--run_dir=a"])
    assert next_steps.command_to_continue("a") == "kdist train --epochs=3 --run_dir=a"
    monkeypatch.setenv(RUN_DIR, "a")
    again = f"kdist launch {launched} -- kdist train --epochs=3 --run_dir=a"
    assert next_steps.command_to_continue("a") == again
