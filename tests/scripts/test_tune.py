"""`kdist tune` on real trainings, and trials that crash or take too much memory."""

import json
import re
import subprocess
import sys

import psutil
import pytest

from kdist.commands.tuning_run import trials
from kdist.commands.tuning_run.trials import Trial, TrialError, TrialPool, is_out_of_memory
from kdist.tuning import Tuned
from tests.forked import python
from tests.scripts.test_train import program
from tests.telemetry.waiting import wait_until

# A trial without TensorFlow. Its arguments are bytes to allocate, and those at which it fails.
TRIAL = """
import json, sys
memory, failing = map(int, sys.argv[1:])
block = bytearray(memory)
say = lambda **facts: print("kdist-trial: " + json.dumps(facts), flush=True)
print("printed by the program of a user")
say(replicas=2, examples=100)
for line in sys.stdin:
    if memory == failing:
        raise MemoryError("too much")
    say(seconds=float(line), steps=4, gpu_bytes=None)
"""

# A trial that does not notice the end of its input.
HANGING = """
import os, sys, time
print(os.getpid(), end=".", file=open(sys.argv[1], "w"), flush=True)
time.sleep(120)
"""


def fake_command(arguments):
    return [sys.executable, "-c", TRIAL, *arguments]


def test_a_trial_trains_when_it_has_a_turn():
    with Trial(fake_command(["0", "1"]), 1e9) as trial:
        assert trial.facts == {"replicas": 2, "examples": 100}
        assert trial.turn(2.0).step_seconds == 0.5
        assert 1e6 < trial.turn(1.0).memory_bytes < 1e8


@pytest.mark.parametrize(
    ("code", "reason", "lacked"),
    [
        ("x = bytearray(400_000_000); import time; time.sleep(60)", "more memory", "memory"),
        ("import time; time.sleep(60)", "seconds were not enough", "time"),
        ("raise MemoryError", "out of memory", "memory"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "out of memory", "memory"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by signal 11", ""),
        ("raise ValueError('no such layer')", "no such layer", ""),
    ],
)
def test_the_reason_of_a_trial_that_fails(code, reason, lacked):
    with pytest.raises(TrialError, match=reason) as error:
        Trial([sys.executable, "-c", code], 200e6, max_wait_seconds=3)
    assert error.value.lacked == lacked


@pytest.mark.parametrize(
    ("code", "error", "expected"),
    [
        (-9, "", True),
        (1, "ResourceExhaustedError: OOM when allocating tensor", True),
        (1, "ValueError: unknown model", False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(code, error, expected):
    assert is_out_of_memory(code, error) == expected


def test_a_pool_keeps_trials_while_memory_lasts(monkeypatch):
    monkeypatch.setattr(trials, "trial_command", fake_command)
    sizes = [str(million * 1_000_000) for million in (150, 151, 152, 250)]
    with TrialPool(420e6, on_gpus=False) as pool:

        def live():
            return [key[0] for key in pool._trials]

        for size in sizes[:3]:
            pool.turn((size, "1"), 0.1)
        assert live() == [sizes[0], sizes[2]]  # the first is that of the present settings
        with pytest.raises(TrialError, match="memory"):
            pool.turn((sizes[3], "1"), 0.1)  # also when only the first is left
        assert live() == [sizes[0]]
        with pytest.raises(TrialError, match="out of memory"):
            pool.turn((sizes[1], sizes[1]), 0.1)  # it crashes in its turn
        assert live() == [sizes[0]]
        assert pool.turn((sizes[2], "1"), 1.0)[0].steps == 4


def test_a_trial_that_hangs_is_not_started_again(monkeypatch):
    monkeypatch.setattr(trials, "trial_command", fake_command)
    with TrialPool(1e9, on_gpus=False) as pool:
        pool.turn(("0", "1"), 0.1)
        pool.turn(("1", "2"), 0.1)
        started = []

        def hanging_command(arguments):
            started.append(arguments)
            return [sys.executable, "-c", "import time; time.sleep(60)"]

        monkeypatch.setattr(trials, "trial_command", hanging_command)
        pool.max_wait_seconds = 0.5
        with pytest.raises(TrialError, match="seconds were not enough"):
            pool.turn(("2", "3"), 0.1)
        assert len(started) == 1
        assert len(pool._trials) == 2  # the others need not make room


def test_trials_end_with_the_search(tmp_path):
    pid = tmp_path / "pid"
    program = (
        "import sys; from kdist.commands.tuning_run.trials import Trial; "
        f"Trial([sys.executable, '-c', {HANGING!r}, {str(pid)!r}], 1e12)"
    )
    search = subprocess.Popen([sys.executable, "-c", program])
    wait_until(lambda: pid.exists() and pid.read_text().endswith("."))
    trial = psutil.Process(int(pid.read_text().rstrip(".")))
    search.kill()
    search.wait()
    _, running = psutil.wait_procs([trial], timeout=30)
    assert not running


# A trial that starts a process of its own, such as a loader of data, and crashes or waits.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
print(child.pid, end=".", file=open(sys.argv[1], "w"), flush=True)
if sys.argv[2] == "crashes":
    raise ValueError("crashed")
time.sleep(120)
"""


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("how", "reason"), [("crashes", "crashed"), ("waits", "seconds were not")])
def test_processes_of_a_trial_end_with_it(how, reason, tmp_path):
    pid = tmp_path / "pid"
    with pytest.raises(TrialError, match=reason):
        Trial([sys.executable, "-c", PARENT, str(pid), how], 1e12, max_wait_seconds=5)
    child = int(pid.read_text().rstrip("."))
    if psutil.pid_exists(child):  # a zombie counts as ended
        _, running = psutil.wait_procs([psutil.Process(child)], timeout=10)
        assert not running


@pytest.mark.slow
def test_a_turn_counts_the_steps_of_groups_that_an_epoch_cuts_short():
    small = ["--model=mlp", "--dataset=digits", "--examples=96", "--local_batch_size=32"]
    with Trial(trials.trial_command([*small, "--steps_per_execution=8"]), 1e12) as trial:
        assert trial.facts == {"replicas": 1, "examples": 96, "in_memory": True}
        assert trial.turn(0.001).steps == 3  # of an epoch


# Prints the knobs of a training whose steps take some seconds, and flags of a batch twice as large.
KNOBS = """
import json, os, sys
from absl import flags
from kdist.commands import tune
from kdist.commands.tuning_run import speed
from kdist.commands.tuning_run.speed import TrainingWithKnobs
from kdist.commands.tuning_run.trials import Turn

cores = int(os.environ.get("CORES", 2))

class Pool:
    def turn(self, arguments, seconds):
        facts = {"replicas": 2, "examples": 4096, "in_memory": in_memory}
        return Turn(float(sys.argv[1]), 1, 1e8), facts

in_memory = "--operations" not in " ".join(sys.argv)
speed.count_cores = lambda environment: cores

flags.FLAGS(["tune", *sys.argv[2:]])
training = TrainingWithKnobs(Pool())
knobs, useless = training.knobs()
knobs = {knob.name: knob.values for knob in knobs}
both = {"intra_op_threads": 1, "parallel_calls": 3}
found = {"knobs": knobs, "useless": useless, "flags": training.flags({"batch": 2})}
rates = [training.examples_per_second({"batch": 2}) for _ in range(3)]
found |= {"rates": rates, "measured": training.measured({"batch": 2})}
print(json.dumps(found | {"of its own": training.flags(both)}))
"""


@pytest.mark.parametrize(("step_seconds", "groups"), [("0.1", ["8"]), ("1", None)])
def test_step_groups_that_take_long_are_not_tried(step_seconds, groups):
    knobs = python(KNOBS, [step_seconds])["knobs"]
    assert knobs.get("steps_per_execution") == groups
    assert "jit_compile" in knobs


@pytest.mark.parametrize(
    ("flags", "scale", "base"),
    [
        ([], "linear", 128),  # of the present batch
        (["--scale_learning_rate=linear", "--base_batch_size=32"], "linear", 32),
        (["--scale_learning_rate=sqrt", "--local_batch_size=16"], "sqrt", 128),
    ],
)
def test_the_learning_rate_follows_a_larger_batch(flags, scale, base):
    found = python(KNOBS, ["0.1", *flags])["flags"]
    assert (found["scale_learning_rate"], found["base_batch_size"]) == (scale, base)


def knobs_with_cores(cores, flags=()):
    found = python(KNOBS, ["0.1", *flags], {"CORES": str(cores)})
    names = ("intra_op_threads", "parallel_calls")
    return [found["knobs"].get(name) or found["useless"].get(name) for name in names], found


def test_threads_and_parallel_calls_are_searched_where_there_are_cores_for_them():
    reading = ["--operations=random_flip()"]
    values, found = knobs_with_cores(8, reading)
    assert values == [[4, 1], [8, 4]]
    assert found["rates"] == [2 * 64 * 2 / 0.1] * 3
    assert found["measured"] == [2 * 64 * 2 / 0.1, 2]  # for the planner
    assert found["of its own"] == {"intra_op_threads": 1, "parallel_calls": 3}
    assert knobs_with_cores(2, reading)[0] == ["each replica has one core", [2, 1]]
    assert knobs_with_cores(1, reading)[0][1] == "there is one core"
    assert knobs_with_cores(8)[0] == [[4, 1], "the examples are in memory"]
    given = ["--intra_op_threads=3", "--parallel_calls=2"]
    assert knobs_with_cores(8, [*reading, *given])[0] == [None, None]
    searched = [*reading, *given, "--search=intra_op_threads,parallel_calls"]
    assert knobs_with_cores(8, searched)[0] == [[4, 1], [8, 4]]


def test_local_sgd_keeps_its_devices():
    assert "devices" in python(KNOBS, ["0.1", "--search=devices"])["knobs"]
    assert "devices" not in python(KNOBS, ["0.1", "--search=devices", "--local_steps=4"])["knobs"]


def test_xla_is_not_tried_where_it_is_refused():
    assert "jit_compile" in python(KNOBS, ["0.1", "--shard=optimizer"])["knobs"]
    assert "jit_compile" not in python(KNOBS, ["0.1", "--shard=weights"])["knobs"]


# Runs `kdist tune` in this process; the model shows that nothing of it changed.
PROGRAM = """
import contextlib, io, json, sys
from absl import flags
import numpy as np
from kdist.checkpoint.snapshot import capture
from kdist.commands import tune
from kdist.commands.training_run import compiled_model as module

create, models = module.compiled_model, []

def created(*arguments, **options):
    model = create(*arguments, **options)
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    models.append((model, capture(model)))
    return model

module.compiled_model = created
flags.FLAGS(["tune", *tune._with_questions(sys.argv[1:])])
with contextlib.redirect_stdout(io.StringIO()) as printed:
    tune.main(None)
model, before = models[0]
after = capture(model)
state = [name for name in before if not name.startswith("metrics/")]
changed = [name for name in state if not np.array_equal(before[name], after[name])]
print(json.dumps({"printed": printed.getvalue(), "state": state, "changed": changed}))
"""
MLP = ["--model=mlp", "--dataset=digits", "--examples=512", "--num_devices=2"]


@pytest.mark.slow
def test_the_range_test_prints_a_rate_and_restores_the_state(tmp_path):
    plot = tmp_path / "plot.png"
    found = python(PROGRAM, ["--learning_rate", *MLP, f"--plot={plot}"])
    rate = re.search(r"suggested learning rate: ([\d.e-]+), with momentum.*falls", found["printed"])
    assert 1e-4 < float(rate[1]) < 10
    assert f" --learning_rate={rate[1]}" in found["printed"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert len(found["state"]) > 4
    assert found["changed"] == []


@pytest.mark.slow
def test_the_noise_scale_is_printed_for_each_epoch():
    found = python(PROGRAM, ["--noise_scale", *MLP, "--epochs=2", "--learning_rate", "0.1"])
    rows = re.findall(r"^ +([\d,]+) +([\d,]+|unknown)  .* to ", found["printed"], re.MULTILINE)
    assert [examples for examples, _ in rows] == ["0", "512", "1,024"]
    assert found["changed"]  # it trains in between
    assert re.search("largest useful global batch|noise hides", found["printed"])


@pytest.mark.slow
def test_tune_finds_settings_and_trains_with_them(tmp_path):
    output = tmp_path / "tuned.json"
    flags = ["--model=mlp", "--dataset=digits"]
    search = ["--num_devices=2", "--jit_compile", "--reduction=auto"]
    search += ["--intra_op_threads=1", "--parallel_calls=2"]
    tuned = program("tune", *flags, *search, "--minutes=0.2", f"--output={output}")
    assert tuned.returncode == 0, tuned.stderr
    assert "searching steps_per_execution for" in tuned.stdout  # the other knobs are given
    assert re.search(r"steps_per_execution=32 +[\d.]+ ×.* pairs +nothing", tuned.stdout)
    settings = Tuned.load(output).settings
    # The local batch is that of the default: the settings are fast for it.
    given = {"num_devices": 2, "jit_compile": True, "intra_op_threads": 1, "parallel_calls": 2}
    assert given.items() | {("local_batch_size", 64)} <= settings.items()
    run_dir = tmp_path / "run"
    trained = program("train", *flags, f"--tuned={output}", f"--run_dir={run_dir}", "--verbose=0")
    assert trained.returncode == 0, trained.stderr
    config = json.loads((run_dir / "config.json").read_text())
    assert settings.items() <= config.items()
    assert json.loads((run_dir / "summary.json").read_text())["num_replicas"] == 2


@pytest.mark.exhaustive
def test_tune_tries_batches_and_prints_a_command_that_trains(tmp_path):
    flags = ["--model=lenet", "--dataset=digits", "--num_devices=2"]
    tuned = program("tune", "--batch", *flags, "--local_batch_size=32", "--max_batch=128")
    assert tuned.returncode == 0, tuned.stderr
    rows = [
        list(map(int, row)) for row in re.findall(r"^ +(\d+) +(\d+) +[\d.]+ ms", tuned.stdout, re.M)
    ]
    assert rows == [[32, 64], [128, 256]]
    assert "largest that was tried and fits: a local batch of 128, and memory" in tuned.stdout
    command = tuned.stdout.strip().splitlines()[-1]
    found = re.search(r"kdist train (.*--local_batch_size=(\d+) .*--base_batch_size=64)", command)
    assert 1 <= int(found[2]) <= 128
    trained = program("train", *found[1].split(), f"--run_dir={tmp_path / 'run'}")
    assert trained.returncode == 0, trained.stderr
