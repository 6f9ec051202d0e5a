"""Wrong flags of all programs are refused before TensorFlow is imported, with a remedy."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from kdist.commands.command_line import COMMANDS
from kdist.models import BUILDERS

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = sorted(
    [f"scripts/{name}.py" for name in COMMANDS if name != "compare"]  # which is in benchmarks/
    + [
        str(path.relative_to(ROOT))
        for path in (ROOT / "benchmarks").rglob("*.py")
        if "program.run(main" in path.read_text()
    ]
)
# Large values that are unusual, and the port that means none.
ACCEPTED = {"learning_rate": ["1e30", "1000000000000000000000000000000"], "grpc_port": ["-1"]}

FINE = ("--model=mlp", "--dataset=digits")
FALLBACK = ("--dataset=mnist", "--fallback_dataset=digits")
TWO_WORKERS = {"cluster": {"worker": ["localhost:1", "localhost:2"]}}
EVALUATED = {
    "cluster": {
        **{role: [f"localhost:{port}"] for port, role in enumerate(("chief", "worker", "ps"), 1)},
        "evaluator": ["localhost:4"],
    },
    "task": {"type": "chief", "index": 0},
}
SLURM = ("--engine=slurm", "--write=-")
ELASTIC = ("--workers=4", "--min_workers=3", "--max_restarts=1")
IMAGE_MODELS = ", ".join(name for name in BUILDERS if name != "transformer")

TRAIN = [
    # Names and values.
    (["--model=lenett"], "did you mean 'lenet'"),
    (["--model=transformer"], "add --dataset=text:PATH"),
    (["--dataset=text:a_file"], "add --model=transformer"),
    (["--dataset=text:a_file", "--model=resnet50"], "add --model=transformer"),
    (["--model=keras.applications.ResNet5"], "did you mean 'keras.applications.ResNet50'"),
    (["--model=resnet5O"], "did you mean 'resnet50'"),
    (["--model=nowhere.py:build"], "no file nowhere.py"),
    (["--model=no_module:build"], "no module no_module"),
    (["--model=my_code.py:biuld"], "did you mean 'build'"),
    (["--model=my_code:biuld"], "did you mean 'build'"),
    (["--model=broken.py:build"], "is no Python"),
    (["--model_args=8"], "an argument has no name"),
    (["--model_args=width=os.getcwd()"], "is no list of named values"),
    (["--model_args=depth=8"], "unexpected keyword argument 'depth'"),
    (["--model=my_code.py:build", "--model_args=depth=8"], "correct --model_args"),
    (["--model=my_code:large"], "missing a required argument: 'depth'"),
    (["--model=ResNet50", "--model_args=classes=3"], "is built for the images and classes"),
    (["--model=my_code.py:build", "--sync_batch_norm"], "synchronized=True"),
    (["--dataset=my_code.py:lod"], "did you mean 'load'"),
    (["--export=a_file"], "--export=a_file is not a directory"),
    (["--backend=jax", "--export=models/x"], "--export is not supported"),
    (["--backend=jax", "--weights=imagenet"], "--weights is not supported"),
    (["--weights=nowhere.keras"], "--weights=nowhere.keras: no such file"),
    (["--weights=finished"], "give a .keras or .weights.h5 file"),
    (["--weights="], "give a .keras or .weights.h5 file"),
    (["--weights=m.keras"], "--weights=m.keras is damaged"),
    (["--weights=bad.weights.h5"], "--weights=bad.weights.h5 is damaged"),
    (["--weights=imagenet"], "is for models of keras.applications, not for mlp"),
    (["--freeze=conv1,*"], "--freeze=* is no regular expression"),
    (["--ema=1"], "--ema=1"),
    (["--clip_norm=0"], "--clip_norm=0"),
    (["--early_stopping=0"], "--early_stopping=0"),
    (["--strategy=mirored"], "did you mean 'mirrored'"),
    (["--strategy=local_sgd"], "--strategy=mirrored --local_steps=8"),
    (["--strategy=mirrored", "--reduction=ring"], "use one of auto, nccl"),
    (["--strategy=tpu"], "set it to one that this machine can reach"),
    (["--shard=weight"], "should be one of <optimizer|gradients|weights>"),
    (["--strategy=central_storage", "--shard=optimizer"], "use --strategy=mirrored"),
    (["--shard=weights", "--jit_compile"], "gather all weights"),
    (["--layout=data=2,shard=weights", "--jit_compile"], "gather all weights"),
    (["--layout=data=2,shard=optimizer", "--split=auto"], "splits no model"),
    (["--layout=data=2,stages=2"], "write it as data=2,pipeline=2"),
    (["--steps=3"], "Unknown command line flag 'steps'"),
    (["--batch_size=3"], "or --local_batch_size?"),
    (["stray"], "unknown argument 'stray'"),
    (["--operations=rotate(3)"], "available are resize"),
    (["--operations=resize(100000,100000)"], "height=100000 must be from 1 to 16384 pixels"),
    (["--operations=random_crop(8, 8, padding=-1)"], "padding=-1"),
    (["--steps_per_execution=0"], "an integer from 1 to 999999"),
    (["--steps_per_execution=1000000000000"], "an integer from 1 to 999999"),
    (["--profile=10"], "FIRST:LAST"),
    (["--profile=20:10"], "LAST is at least FIRST"),
    (["--profile=1:1000000000"], "at most 1000 steps are traced"),
    (["--wandb_tags=a,b"], "no effect without --wandb_mode=auto"),
    (["--wandb_samples=4"], "no effect without --wandb_mode=auto"),
    # Numbers.
    (["--local_batch_size=0"], "--local_batch_size=0"),
    (["--num_devices=-1"], "--num_devices=-1"),
    (["--num_devices=100000"], "at most 256"),
    (["--devices=CPU:99999"], "from 0 to 255"),
    (["--devices=CPU"], "write it as 'GPU:0' or 'CPU:1'"),
    (["--layout=data=500,pipeline=2"], "at most 256"),
    (["--epochs=0"], "--epochs=0"),
    (["--learning_rate=0,05"], "--learning_rate=0,05 is not a number; write it as 0.05"),
    (["--seed=-1"], "[0, 4294967295]"),
    (["--checkpoint_minutes=nan"], "give a finite number"),
    (["--device_seconds=1e300"], "give at most 100,000,000 seconds"),
    # Files and directories.
    (["--dataset=./nowhere"], "no such directory"),
    (["--data_workers=cpu1"], "data_workers=cpu1: "),
    (["--data_workers=127.0.0.1:1"], "Start it there: kdist data_worker --port=1"),
    (["--dataset=/nowhere/at/all"], "no such directory"),
    (["--dataset=text:./nowhere", "--model=transformer"], "no such file or directory"),
    (["--dataset=a_file"], "a_file: no such directory"),
    (["--dataset="], "name of the dataset is empty"),
    (["--dataset=fashion_mnits"], "did you mean fashion_mnist"),
    (["--dataset=cats_vs_dog/large:4.0.0"], "did you mean cats_vs_dogs"),
    (["--fallback_dataset=digit"], "did you mean digits"),
    (["--fallback_dataset=./nowhere"], "no such directory"),
    (["--data_dir=nowhere", "--nodownload"], "--data_dir=nowhere: no such directory"),
    (["--data_dir=a_file"], "--data_dir=a_file: no such directory"),
    (["--run_dir=a_file"], "give another path"),
    (["--run_dir=a_file/run"], "give another path"),
    (["--run_dir=" + "x" * 300], "give another path"),
    (["--run_dir=gs://bucket/run"], "pip install 'kdist[gs]'"),
    (["--run_dir=gs:/bucket/run"], "is a URL; give a path"),
    (["--weights=gs://bucket/run"], "is a URL; give a path"),
    (["--data_dir=gs://bucket/tfds"], "pip install 'kdist[gs]'"),
    (["--dataset=s3://bucket/pets"], "pip install 'kdist[s3]'"),
    (["--resume=nowhere://bucket/run"], "fsspec knows no nowhere://"),
    (["--mlflow_uri=http://127.0.0.1:5000"], "pip install 'kdist[mlflow]'"),
    (["--mlflow_experiment=digits"], "no effect without --mlflow_uri"),
    (["--mirror=gs://bucket"], "names no directory of a bucket"),
    (["--mirror=runs/a"], "--mirror=runs/a is no URL"),
    (["--run_dir=memory://a/b", "--mirror=memory://c/d"], "leave one of them out"),
    (["--backend=jax", "--run_dir=memory://a/b"], "is not supported by --backend=jax"),
    (["--run_dir=finished"], "already holds a finished run"),
    (["--run_dir=interrupted"], "--epochs=7, but now it is 1"),
    (["--run_dir=on_fallback", *FALLBACK, "--fallback_epochs=30"], "--epochs=20, but now it is 30"),
    (["--run_dir=interrupted", "--epochs=7", "--resume=never"], "already holds another run"),
    (["--resume=nowhere"], "--resume=nowhere: no such checkpoint"),
    (["--resume=interrupted"], "--resume=interrupted: no such checkpoint"),
    (["--plan=nowhere.json"], "create it with kdist plan --output"),
    (["--plan="], "create it with kdist plan --output"),
    (["--plan=finished"], "create it with kdist plan --output"),
    (["--plan=a_file"], "a_file is no JSON"),
    (["--plan=binary"], "binary is no JSON"),
    (["--plan=list.json"], "list.json is no plan"),
    (["--tuned=nowhere.json"], "create it with kdist tune --output"),
    (["--tuned=list.json"], "list.json holds no tuned settings"),
    (["--tuned=tuned.json", "--num_devices=3"], "--num_devices=3 contradicts tuned.json"),
    (["--tuned=tuned.json", "--devices=CPU:0"], "--tuned=tuned.json: flags num_devices=2"),
    (["--tuned=tuned.json", "--plan=list.json"], "At most one"),
    (["--tuned=bad_precision.json"], "--tuned=bad_precision.json: flag --precision=float99"),
    (["--tuned=bad_batch.json"], "--tuned=bad_batch.json: flag --local_batch_size=0"),
    (["--tuned=bad_device.json"], "--tuned=bad_device.json: '1' is not a device name"),
    (["--tuned=bad_layout.json"], "--tuned=bad_layout.json: pipeline='x'"),
    (["--tuned=bad_packs.json"], "--tuned=bad_packs.json: reduction='auto' and num_packs=2"),
    (["--tuned=tuned.json", "--backend=jax"], "--tuned is not supported by --backend=jax"),
    (["--layout=pipeline=2", "--split=nowhere.json"], "use --split=auto"),
    (["--layout=pipeline=2", "--split=a_file"], "a_file is not JSON"),
    (["--layout=pipeline=2", "--split=list.json"], "stage(0)"),
    # Contradictions.
    (["--num_devices=2", "--devices=CPU:0"], "At most one of (num_devices, devices)"),
    (["--strategy=one_device", "--num_devices=2"], "--strategy=mirrored"),
    (["--layout=data=2", "--strategy=mirrored"], "leave --strategy out"),
    (["--split=list.json"], "places the layers of a --layout"),
    (["--unfreeze_after_epochs=1", "--epochs=2"], "no effect without --freeze"),
    (["--freeze=x", "--unfreeze_after_epochs=2", "--epochs=2"], "no epoch would follow"),
    (
        ["--layout=pipeline=2", "--freeze=x", "--unfreeze_after_epochs=1", "--epochs=2"],
        "train twice: with --freeze",
    ),
    (["--strategy=mirrored", "--max_staleness=2"], "no effect without --strategy=parameter_server"),
    (["--fallback_epochs=20"], "no effect without --fallback_dataset"),
    (["--sequence_length=64"], "no effect without --dataset=text:PATH"),
    (["--local_slots=reset"], "no effect without --local_steps"),
    (["--decay=0.1"], "no effect without --schedule=ramp"),
    (["--schedule=constant", "--ramp_epochs=1"], "no effect without --schedule=ramp or cosine"),
    (["--base_batch_size=64"], "no effect without --scale_learning_rate"),
    (["--strategy=central_storage", "--num_devices=2", "--local_steps=2"], "they share them"),
    (["--local_steps=2", "--sync_batch_norm"], "leave one of them out"),
    (["--layout=pipeline=2", "--jit_compile"], "leave one of them out"),
    (["--compile_cache=a_folder"], "Add --jit_compile"),
    (["--jit_compile", "--compile_cache=gs://bucket/a"], "give a path of the file system"),
    # Another backend.
    (["--backend=jax", "--strategy=mirrored"], "--strategy is not supported by --backend=jax"),
    (["--backend=jax", "--layout=pipeline=2"], "pipeline=2: on a JAX mesh"),
    (["--backend=jax", "--num_devices=100000"], "at most 256"),
    (["--backend=jax", "--run_dir=finished"], "already holds a finished run"),
    (["--backend=jax", "--model=lenett"], "did you mean 'lenet'"),
]
TUNED = {
    "tuned": {"num_devices": 2},
    "bad_precision": {"precision": "float99"},
    "bad_batch": {"local_batch_size": 0},
    "bad_device": {"devices": ["1"]},
    "bad_layout": {"layout": "data=2,pipeline=x"},
    "bad_packs": {"strategy": "one_device", "num_packs": 2},
}
ENVIRONMENTS = [
    (["--strategy=multi_worker"], {}, "needs tasks of the role worker"),
    (["--strategy=multi_worker"], {"TF_CONFIG": '{"cluster": []}'}, "TF_CONFIG is not"),
    (["--strategy=multi_worker"], {"SLURM_STEP_NUM_TASKS": "two"}, "is not a number"),
    (
        ["--strategy=multi_worker", "--minutes=1"],
        {"TF_CONFIG": json.dumps(TWO_WORKERS)},
        "use --examples on several",
    ),
    (
        ["--local_steps=2"],
        {"TF_CONFIG": json.dumps(TWO_WORKERS), "KDIST_PLANNED_WORKERS": "3"},
        "start the job without --min_workers",
    ),
    (
        ["--layout=pipeline=2"],
        {"TF_CONFIG": json.dumps(TWO_WORKERS), "KDIST_PLANNED_WORKERS": "3"},
        "a fixed number of workers",
    ),
    (["--backend=jax"], {"TF_CONFIG": json.dumps(TWO_WORKERS)}, "this job has 2 tasks"),
    (["--save_best"], {"TF_CONFIG": json.dumps(EVALUATED)}, "the evaluator validates"),
    (["--early_stopping=1"], {"TF_CONFIG": json.dumps(EVALUATED)}, "--early_stopping needs"),
    (
        ["--freeze=x", "--unfreeze_after_epochs=1", "--epochs=2"],
        {"TF_CONFIG": json.dumps(EVALUATED)},
        "a parameter_server trains the same weights to the end",
    ),
    (
        ["--model=keras.applications.MobileNetV2", "--weights=imagenet"],
        {"https_proxy": "http://127.0.0.1:9", "KERAS_HOME": "nowhere"},
        "pass --weights=MobileNetV2.weights.h5",
    ),
    ([], {"KERAS_BACKEND": "jax"}, "pass --backend=jax, or set KERAS_BACKEND"),
    ([], {"KERAS_BACKEND": "torch"}, "; set KERAS_BACKEND=tensorflow"),
]
IN_ENVIRONMENTS = [
    ("check", [], {"KERAS_BACKEND": "jax"}, "set KERAS_BACKEND=tensorflow"),
    ("check", ["--layout=data=2"], {"KERAS_BACKEND": "torch"}, "set KERAS_BACKEND=tensorflow"),
    ("plan", ["--calibrate=a.json"], {"KERAS_BACKEND": "jax"}, "set KERAS_BACKEND=tensorflow"),
    ("export", ["m.keras", "--output=m"], {"KERAS_BACKEND": "jax"}, "KERAS_BACKEND=tensorflow"),
    ("../benchmarks/equivalence/compare", [], {"KERAS_BACKEND": "jax"}, "=tensorflow"),
    ("tune", ["--model=mlp"], {"TF_CONFIG": json.dumps(TWO_WORKERS)}, "measures one machine"),
]
OTHERS = [
    ("tune", ["--strategy=multi_worker"], "kdist tune measures one machine"),
    ("tune", ["--run_dir=runs/a"], "--run_dir has no meaning for kdist tune"),
    ("tune", ["--backend=jax"], "--backend=jax is not supported by kdist tune"),
    ("tune", ["--memory_gb=nan"], "--memory_gb=nan"),
    ("tune", ["--checkpoint_minutes=nan"], "give a finite number"),  # a flag of kdist train
    ("tune", ["--search=presision"], "did you mean 'precision'"),
    ("tune", ["--model_args=depth=8"], "unexpected keyword argument 'depth'"),
    ("tune", ["--model=lenett"], "did you mean 'lenet'"),
    ("tune", ["--batch", "--num_packs=2", "--strategy=one_device"], "options of 'mirrored'"),
    ("tune", ["--batch", "--minutes=1"], "--minutes has no effect here; leave --batch out"),
    ("tune", ["--max_batch=8"], "--max_batch has no effect here; add --batch"),
    ("tune", ["--output=nowhere/tuned.json"], "in a directory that exists"),
    ("tune", ["--learning_rate", "--plot=nowhere/a.png"], "in a directory that exists"),
    ("tune", ["--plot=nowhere/a.png"], "add --learning_rate_range"),
    ("tune", ["--noise_scale", "--learning_rate"], "At most one"),
    ("plan", ["--model=resnet5O"], "did you mean resnet50"),
    ("plan", ["--model=resnet50"], "number of training examples"),
    ("plan", ["--model=lenet", "--examples=-3"], "--examples=-3"),
    ("plan", ["--model=lenet", "--examples=1.281.167"], "--examples=1.281.167 is not an integer"),
    ("plan", ["--model=lenet", "--examples=9", "--max_usd=-3"], "--max_usd=-3"),
    ("plan", ["--model=lenet", "--examples=9", "--input_shape=28,x"], "not a list of integers"),
    ("plan", ["--model=lenet", "--examples=9", "--local_batch_sizes=0"], "none below 1"),
    ("plan", ["--calibrate=here.json", "--num_devices=100000"], "--num_devices=100000"),
    ("plan", ["--calibrate=nowhere/here.json"], "in a directory that exists"),
    ("plan", ["--calibrate=finished"], "give the path of one"),
    ("plan", ["--output="], "give the path of one"),
    ("plan", ["--calibration=nowhere.json"], "create it with --calibrate"),
    ("plan", ["--tuned=nowhere.json"], "create it with kdist tune"),
    ("plan", ["--machines=nowhere.csv"], "give the path of a table"),
    ("plan", ["--prices=nowhere.csv"], "give the path of a table"),
    ("plan", ["--update_prices=nowhere/prices.csv"], "in a directory that exists"),
    ("plan", ["--update_prices=prices.csv", "--catalog=nowhere"], "with --catalog"),
    ("plan", ["--validate=nowhere.csv"], "give the path of a table"),
    ("plan", ["--output=a_file/plan.json"], "in a directory that exists"),
    ("plan", ["--page=nowhere/plan.html"], "in a directory that exists"),
    ("serve", [], "--model_dir=models/fashion"),
    ("serve", ["--model_dir=nowhere"], "nowhere is not a directory"),
    ("serve", ["--model_dir=empty"], "write one with kdist.serving.export"),
    ("serve", ["--model_dir=/a/m,/b/m"], "two models are named 'm'"),
    ("serve", ["--model_dir=models/m", "--max_batch=0"], "--max_batch=0"),
    ("serve", ["--model_dir=models/m", "--max_batch=1000000000"], "--max_batch=1000000000"),
    ("serve", ["--model_dir=models/m", "--workers=100000"], "--workers=100000"),
    ("serve", ["--model_dir=models/m", "--port=99999"], "--port=99999"),
    ("serve", ["--model_dir=models/m", "--platform=azure"], "--platform=azure"),
    ("serve", ["--platform=cloud_run"], "--model_dir=models/fashion"),
    ("serve", ["--model_dir=models/m", "--host="], "give an address of this machine"),
    ("serve", ["--model_dir=models/m", "extra"], "unknown argument 'extra'"),
    ("serve", ["--model_dir=models/m", "--batch_timeout_us=-5"], "auto, or an integer from 0"),
    ("serve", ["--model_dir=models/m", "--batch_timeout_us=1e9"], "auto, or an integer from 0"),
    ("serve", ["--model_dir=models/m", "--objective=throughput"], "--p99_ms=50"),
    ("serve", ["--model_dir=models/m", "--request_seconds=nan"], "give a finite number"),
    ("serve", ["--model_dir=models/m", "--all_bodies_mb=1"], "must not be lower"),
    ("serve", ["--model_dir=models/m", "--tune=nowhere/p.html"], "in a directory that exists"),
    ("serve", ["--model_dir=models/m", "--tune=a.html", "--kubernetes=b.yaml"], "At most one"),
    ("serve", ["--model_dir=models/m", "--tune=a.html", "--objective=throughput"], "--p99_ms=50"),
    ("export", [], "missing argument: a run directory"),
    ("export", ["nowhere"], "neither a run directory nor a .keras file"),
    ("export", ["interrupted"], "no model in checkpoints/"),
    ("export", ["a", "b"], "instead of 2"),
    ("export", ["m.keras"], "--output=models/fashion"),
    ("export", ["m.keras", "--output=a_file"], "give a directory"),
    ("export", ["m.keras", "--output=models/new", "--code=nowhere.py"], "give my_code.py"),
    ("export", ["m.keras", "--output=models/new", "--code=broken.py"], "is no Python"),
    ("export", ["m.keras", "--output=models/m", "--version=1"], "give another --version"),
    ("export", ["m.keras", "--output=models/m", "--version=0"], "--version=0"),
    ("report", [], "missing argument: run directories"),
    ("report", ["nowhere"], "is no run directory"),
    ("report", ["finished", "--output=nowhere/page.html"], "in a directory that exists"),
    ("report", ["finished", "--price_usd_per_hour=nan"], "--price_usd_per_hour"),
    ("data_worker", ["--host=192.0.2.1"], "--allow_remote"),
    ("data_worker", ["--port=65535"], "in the range [1, 65534]"),
    ("check", ["--strategies=mirored"], "did you mean 'mirrored'"),
    ("check", ["--num_devices=100000"], "at most 256"),
    ("check", ["--timeout_seconds=1000000000000"], "give at most 100,000,000 seconds"),
    ("check", ["--input", "--dataset=./nowhere"], "no such directory"),
    ("check", ["--input", "--dataset=fashion_mnits"], "did you mean fashion_mnist"),
    ("check", ["--input", "--dataset=digits", "--operations=rotate(3)"], "available are resize"),
    ("check", ["--input", "--layout=data=2"], "pass one of them"),
    ("check", ["--layout=stages=2"], "write it as data=2,pipeline=2"),
    ("check", ["--layout=data=1000"], "at most 256"),
    ("check", ["--layout=data=2", "--model=lenett"], "did you mean 'lenet'"),
    ("check", ["--layout=data=2", "--input_shape=28,x"], "not a list of integers"),
    ("check", ["--layout=data=2", "--split=list.json"], "stage(0)"),
    ("../benchmarks/compare_clusters", ["--only=ps"], "unknown --only 'ps'"),
    ("../benchmarks/compare_training", ["--models=lenett"], "did you mean 'lenet'"),
    ("../benchmarks/compare_telemetry", ["--variants=slow"], "unknown --variants 'slow'"),
    ("../benchmarks/serving_load", ["--contenders=x"], "unknown --contenders 'x'"),
    ("../benchmarks/serving_simulator", ["--devices=x"], "unknown --devices 'x'"),
    ("../benchmarks/predict_this_machine", ["--local_batch_sizes=x"], "not a list of integers"),
    ("launch", [], "missing argument: the program to start"),
    ("launch", ["--workers=100000", "--", "true"], "--workers=100000"),
    ("launch", ["--hang_seconds=nan", "--", "true"], "give a finite number"),
    ("launch", ["--", "trian.py"], "no script trian.py"),
    ("launch", ["--", "no-such-program"], "name a Python script"),
    ("launch", ["--run_dir=a_file", "--", "true"], "use another run directory"),
    ("launch", ["--engine=slrum", "--", "true"], "should be one of"),
    ("launch", ["--partition=gpu", "--", "true"], "choose an --engine"),
    ("launch", ["--follow", "--", "true"], "name a submitted job (--job)"),
    ("launch", ["--time_limit_hours=1", "--", "true"], "use --timeout_seconds"),
    ("launch", ["--wait_minutes=1", "--", "true"], "no effect without --min_workers"),
    ("launch", [*ELASTIC, "--", "true"], "--worker_check='nvidia-smi"),
    ("launch", [*ELASTIC, "--max_restarts=0", "--", "true"], "add --max_restarts"),
    ("launch", [*ELASTIC, "--min_workers=5", "--", "true"], "from 1 to --workers=4"),
    ("launch", [*ELASTIC, "--ps=1", "--", "true"], "--min_workers and --ps"),
    ("launch", [*SLURM, *ELASTIC, "--", "true"], "fixed number of nodes"),
    ("launch", [*SLURM, *ELASTIC, "--worker_check=x", "--", "true"], "knows its machines"),
    ("launch", ["--job=cats", "--", "true"], "leave 'true' out"),
    ("launch", ["--job=cats", "--workers=2"], "--workers does not apply to a submitted job"),
    ("launch", ["--job=cats", "--stop", "--cost"], "At most one of"),
    ("launch", ["--job=Cats"], "lower-case letters"),
    ("launch", ["--job=cats", "--engine=local"], "there is none to look at"),
    ("launch", [*SLURM, "--timeout_seconds=9", "--", "true"], "use --time_limit_hours"),
    ("launch", [*SLURM, "--evaluator", "--", "true"], "validation_data"),
    ("launch", [*SLURM, "--data_workers=2", "--", "true"], "start kdist data_worker"),
    ("launch", [*SLURM, "--option=mem", "--", "true"], "write it as NAME=VALUE"),
    ("launch", [*SLURM, "--option=memory=2G", "--", "true"], "has no option memory"),
    ("launch", [*SLURM, "--stop", "--", "true"], "name one (--job)"),
    ("launch", [*SLURM, "--image=a:1", "--max_usd=2", "--", "true"], "apptainer"),
    ("launch", [*SLURM, "--cloud=gcp,aws", "--", "true"], "without a --plan, name one cloud"),
    ("launch", [*SLURM, "--plan=nowhere.json", "--", "true"], "create it with kdist plan"),
    ("launch", [*SLURM, "--plan=list.json", "--", "true"], "list.json is no plan"),
    ("launch", [*SLURM, "--name=Cats", "--", "true"], "lower-case letters"),
    ("launch", ["--engine=gce", "--write=-", "--", "true"], "--machine_type=n1-standard-8"),
    ("launch", ["--engine=skypilot", "--write=-", "--", "true"], "--setup='pip install kdist'"),
    ("launch", ["--engine=ray", "--option=strategy=NEAR", "--", "true"], "STRICT_SPREAD"),
]
CASES = [
    *(("train", flags, {}, message) for flags, message in TRAIN),
    *(("train", *case) for case in ENVIRONMENTS),
    *IN_ENVIRONMENTS,
    *((name, flags, {}, message) for name, flags, message in OTHERS),
]


def run_all(cases, folder):
    """Returns [exit code, output] of each case, run in a folder without importing TensorFlow."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.scripts.without_tensorflow"],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return json.loads(process.stdout)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Returns the outcomes of all cases, in order."""
    folder = tmp_path_factory.mktemp("here")
    for name in ("finished", "interrupted", "on_fallback", "empty", "models/m/1"):
        (folder / name).mkdir(parents=True)
    (folder / "models" / "m" / "1" / "saved_model.pb").touch()
    (folder / "m.keras").touch()
    (folder / "a_file").write_text("not JSON")
    (folder / "my_code.py").write_text(
        "import keras\ndef build(): ...\ndef load(): ...\ndef large(depth): ...\n"
    )
    (folder / "broken.py").write_text("def build(:\n")
    (folder / "bad.weights.h5").write_text("not HDF5")
    (folder / "binary").write_bytes(b"\xff\xfe\x00")
    (folder / "list.json").write_text("[1]")
    for name, settings in TUNED.items():
        (folder / f"{name}.json").write_text(json.dumps({"settings": settings}))
    for name in ("finished", "interrupted"):
        (folder / name / "config.json").write_text('{"epochs": 7}')
    (folder / "on_fallback" / "config.json").write_text('{"epochs": 20, "dataset": "digits"}')
    (folder / "finished" / "summary.json").write_text("{}")
    # Another value of a flag follows it, and replaces it.
    return run_all(
        [
            [str(ROOT / "scripts" / f"{name}.py"), [*FINE * (name == "train"), *flags], variables]
            for name, flags, variables, _ in CASES
        ],
        folder,
    )


@pytest.mark.parametrize(
    "index", range(len(CASES)), ids=[f"{case[0]} {' '.join(case[1])}"[:80] for case in CASES]
)
def test_wrong_flags_are_refused_without_tensorflow(outcomes, index):
    code, output = outcomes[index]
    assert "Traceback" not in output
    assert CASES[index][-1] in output
    assert code == 1


def test_absurd_numbers_are_refused_by_all_programs():
    outcomes = run_all([[str(ROOT / path), None, {}] for path in PROGRAMS], ROOT)
    assert len(PROGRAMS) > 12
    for path, (code, output) in zip(PROGRAMS, outcomes, strict=True):
        assert code == 0, (path, output)
        accepted = {name: texts for name, texts in json.loads(output).items() if texts}
        assert accepted == {name: ACCEPTED[name] for name in accepted if name in ACCEPTED}, path
