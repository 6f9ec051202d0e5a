"""A search by Optuna with a good and a bad region, as a program that a test kills.

Run as `python optuna_program.py DIRECTORY NUM_TRIALS BAD…`. The first trials are in the bad region,
as many as there are BAD, and the next one is in the good one. BAD is what these and later trials of
the bad region do, besides being worse: "nothing", "crash", "raise", allocate more than a RLIMIT_AS
("limit") or a control group ("allocate") allows, or "wait", in all regions, until the file
DIRECTORY/continue exists. The last line of the output is a JSON object.
"""

import json
import os
import pathlib
import resource
import sys
import time

import optuna

import kdist

GIGABYTE = 1 << 30


def search(directory, num_trials, bad):
    """Runs the search, and returns what a test checks."""

    def objective(trial):
        region = trial.suggest_categorical("region", ["good", "bad"])
        x = trial.suggest_float("x", -1.0, 1.0)
        for step in range(3):
            trial.report(x * x, step)
        if "wait" in bad:
            while not (directory / "continue").exists():
                time.sleep(0.02)
        elif region == "bad":
            fail(bad[trial.number % len(bad)])
        return x * x + (region == "bad")

    def fail(how):
        if how == "crash":
            os.abort()
        if how == "raise":
            raise ValueError("planted")
        if how == "limit":
            resource.setrlimit(resource.RLIMIT_AS, (GIGABYTE, GIGABYTE))
        if how in ("limit", "allocate"):
            bytearray(4 * GIGABYTE)[:: 1 << 12] = b"x" * (1 << 20)

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=f"sqlite:///{directory}/study.db",
        study_name="planted",
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=6),
    )
    if not study.trials:
        for region in [*["bad"] * len(bad), "good"]:
            study.enqueue_trial({"region": region})
    kdist.tuning.optuna.optimize(study, objective, directory, num_trials, workers=2)
    return {
        "best": study.best_params["region"],
        "regions": [trial.params["region"] for trial in study.trials],
        "xs": [trial.params["x"] for trial in study.trials],
        "states": [trial.state.name for trial in study.trials],
        "failures": [trial.user_attrs.get("failure") for trial in study.trials],
        "tensorflow": "tensorflow" in sys.modules,
    }


if __name__ == "__main__":
    directory, num_trials, *bad = sys.argv[1:]
    print(json.dumps(search(pathlib.Path(directory), int(num_trials), bad)))
