"""The launcher: programs of every kind, flags, and output."""

import json
import socket
import subprocess
import sys

import pytest


def test_lines_have_task_names_and_each_task_has_a_log_file(launcher):
    code, out, _, _ = launcher.run(
        """
for n in range(300):
    print(f"{index} says {n} " + 200 * "x")
sys.stdout.buffer.write(b"not text: \\xff\\n")
print("an error", file=sys.stderr)
print("no end", end="")
""",
        "--workers=3",
    )
    assert code == 0
    for n in range(3):
        written = launcher.log(f"worker-{n}").splitlines()
        assert written[:300] == [f"{n} says {m} ".encode() + 200 * b"x" for m in range(300)]
        assert written[300:] == [b"not text: \xff", b"an error", b"no end"]
        prefix = f"[worker {n}] "
        mine = [line.removeprefix(prefix) for line in out.splitlines() if line.startswith(prefix)]
        assert mine == [line.decode("utf-8", "replace") for line in written]
    assert len(out.splitlines()) == 3 * 303


def test_lines_are_shown_at_once(launcher):
    process = launcher.start("print('at once'); time.sleep(60)", "--workers=1")
    launcher.pids("worker-0")
    while "[worker 0] at once" not in launcher.read("out"):
        assert process.poll() is None


def test_a_second_run_appends_to_the_log_files(launcher):
    launcher.run("print('first')")
    launcher.run("print('second')")
    assert launcher.log("worker-0") == b"first\nsecond\n"


@pytest.mark.parametrize(
    ("flags", "counts"),
    [
        (["--workers=2"], {"worker": 2}),
        (["--workers=2", "--chief"], {"chief": 1, "worker": 2}),
        (["--workers=1", "--evaluator"], {"worker": 1, "evaluator": 1}),
        (["--workers=2", "--ps=1"], {"chief": 1, "worker": 2, "ps": 1}),
    ],
)
def test_every_task_gets_the_cluster(launcher, flags, counts):
    code, out, _, _ = launcher.run("print(json.dumps(config))", *flags)
    assert code == 0
    pairs = [line.removeprefix("[").split("] ", 1) for line in out.splitlines()]
    configs = {name: json.loads(text) for name, text in pairs}
    assert len(configs) == len(pairs) == sum(counts.values())
    (cluster,) = {json.dumps(config["cluster"]) for config in configs.values()}
    tasks = json.loads(cluster)
    assert {role: len(addresses) for role, addresses in tasks.items()} == counts
    for name, config in configs.items():
        role, index = config["task"]["type"], config["task"]["index"]
        assert name == (f"{role} {index}" if role in ("worker", "ps") else role)
    addresses = [address for role in tasks.values() for address in role]
    assert len(set(addresses)) == len(addresses)


def test_a_task_can_listen_on_its_address(launcher):
    code, _, err, _ = launcher.run(
        """
import socket
host, port = config["cluster"][role][index].split(":")
with socket.create_server((host, int(port))):
    time.sleep(0.2)
""",
        "--workers=3",
    )
    assert code == 0, err


def test_ports_are_reserved_until_the_job_ends(launcher, monkeypatch):
    from kdist.launch import local_engine

    launcher.start("print(json.dumps(config)); time.sleep(60)", "--workers=1")
    while "\n" not in launcher.read("out"):
        launcher.pids("worker-0")
    config = json.loads(launcher.read("out").removeprefix("[worker 0] "))
    port = int(config["cluster"]["worker"][0].split(":")[1])
    socket.create_server(("127.0.0.1", port)).close()  # no task listens there
    monkeypatch.setattr(local_engine, "_FIRST_PORT", port)
    monkeypatch.setattr(local_engine, "_LAST_PORT", port)
    with pytest.raises(OSError, match="only 0"):
        local_engine.reserve_ports(1).__enter__()


def test_gpus_and_threads_reach_the_tasks(launcher, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    show = """print(*map(os.environ.get, ["CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"]))
assert int(os.environ["TF_NUM_INTRAOP_THREADS"]) >= 1"""
    code, out, err, _ = launcher.run(show, "--workers=2", "--ps=1")
    assert code == 0, err
    assert sorted(out.splitlines()) == [
        "[chief]  3",
        "[ps 0]  3",
        "[worker 0] 5 3",
        "[worker 1] 7 3",
    ]
    code, _, err, _ = launcher.run(show, "--workers=3")
    assert (code, "Traceback" in err) == (1, False)
    assert "3 tasks compute, and there are 2 GPUs (5, 7); use fewer --workers, --share_gpus" in err
    assert launcher.run(show, "--workers=3", "--share_gpus")[0] == 0


def launch(program, *arguments, directory):
    return subprocess.run(
        [sys.executable, program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=directory,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "launch.py: missing argument: the program to start, after -- (--help)"),
        (["--", "nope.py"], "launch.py: no script nope.py in "),
        (["--", "trian.py"], "did you mean train.py?"),
        (["--", "no-such-program"], "cannot find an executable program 'no-such-program'"),
        (["--run_dir=train.py", "--", "true"], "cannot create the directory train.py/logs"),
        (["--workers=0", "--", "x"], "--workers=0: 0 is not an integer in the range [1, 256]"),
        (["--wrkers=2", "--", "x"], "Did you mean: worker_check, workers ?"),
    ],
)
def test_an_error_at_the_start_is_one_line(scripts, tmp_path, arguments, message):
    (tmp_path / "train.py").touch()
    process = launch(scripts / "launch.py", *arguments, directory=tmp_path)
    assert process.returncode == 1
    assert message in process.stderr
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "runs").exists()


def test_help_has_examples(scripts, tmp_path):
    process = launch(scripts / "launch.py", "--help", directory=tmp_path)
    assert "kdist launch --workers=2 -- my_script.py" in process.stdout


def test_any_program_can_be_a_task_and_makes_a_new_directory(scripts, tmp_path):
    process = launch(
        scripts / "launch.py", "--workers=2", "--", "sh", "-c", "echo it is me", directory=tmp_path
    )
    assert process.returncode == 0
    assert sorted(process.stdout.splitlines()) == ["[worker 0] it is me", "[worker 1] it is me"]
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert (run_dir / "logs" / "worker-1.log").read_text() == "it is me\n"


@pytest.mark.parametrize(
    ("flag", "own"),
    [
        (["--run_dir=own"], "own"),
        (["--run_dir", "own"], "own"),
        (["-run_dir=own"], "own"),
        (["--run_dir=gs://bucket/own"], "runs/gs/bucket/own"),
    ],
)
def test_logs_go_to_the_programs_own_run_directory(scripts, tmp_path, flag, own):
    process = launch(
        scripts / "launch.py", "--run_dir=other", "--", "echo", "hi", *flag, directory=tmp_path
    )
    assert process.returncode == 0
    assert (tmp_path / own / "logs" / "worker-0.log").exists()
    assert not (tmp_path / "other").exists()


def test_the_launcher_imports_no_tensorflow():
    code = (
        "import sys, kdist.launch.local_engine; print({'tensorflow', 'keras'} & sys.modules.keys())"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
