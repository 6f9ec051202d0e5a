"""Measures kdist on this machine's NVIDIA GPU, in parts, and writes a page about it.

  # everything, at most 25 minutes; `make gpu` also creates an environment with CUDA
  python -m benchmarks.gpu

  # the most telling parts, within ten minutes; the next call continues with the parts not yet done
  python -m benchmarks.gpu --minutes=10

  # parts whose names start so; --list prints all names
  python -m benchmarks.gpu --only=train-resnet50,serving

  # the same program with small sizes on CPUs, to test it: its figures mean nothing
  python -m benchmarks.gpu --tiny --results_dir=/tmp/tiny

Each part is a process with a time limit. A part that fails or exceeds its limit is shown on the
page, with the rows that it had measured, and the others still run. After each part the page and a
JSON file are written. The next call at the same commit reads the file and skips parts that are
done.
"""

import contextlib
import datetime
import importlib.metadata
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

from absl import flags

from benchmarks import tables
from benchmarks.gpu import page, parts
from benchmarks.serving.servers import GPU_VARIABLE
from kdist import program

FLAGS = flags.FLAGS
_INTERRUPTED = "interrupted"

flags.DEFINE_list("only", [], "Names of parts, or what they start with; all by default.")
flags.DEFINE_boolean("list", False, "Print the names of the parts and exit.")
flags.DEFINE_float("minutes", 25, "Time for all parts. Others run in the next call.", 0.1)
flags.DEFINE_integer(
    "max_variants", None, "Most telling variants that each training measures; all by default.", 1
)
flags.DEFINE_float("limit_seconds", None, "Time limit of each part; by default its own.", 1)
flags.DEFINE_boolean("again", False, "Also run parts that are done at this commit.")
flags.DEFINE_boolean("tiny", False, "Small sizes on the CPU. The figures mean nothing.")
flags.DEFINE_string("torch_python", sys.executable, "A Python with PyTorch and torchvision.")
flags.DEFINE_string("jax_python", sys.executable, "A Python with Keras and JAX for the GPU.")
flags.DEFINE_string(
    "results_dir", str(parts.ROOT / "benchmarks" / "results"), "Directory of page and JSON file."
)


def main(_):
    # A runner that is ended ends its part as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen = _chosen()
    if FLAGS.list:
        print("\n".join(f"{part.name:28} {part.title}" for part in chosen))
        return 0
    about = _about()
    if about["GPU"] == "none" and not FLAGS.tiny:
        raise ValueError("nvidia-smi finds no GPU; --tiny runs the program on the CPU")
    file = _file(about)
    results = json.loads(file.read_text())["parts"] if file.exists() else {}
    deadline = time.monotonic() + 60 * FLAGS.minutes
    for number, part in enumerate(chosen, 1):
        where = f"[{number}/{len(chosen)}] {part.name}"
        if results.get(part.name, {}).get("state") == "done" and not FLAGS.again:
            print(f"{where}: done before", flush=True)
            continue
        left = deadline - time.monotonic()
        if left < 1:
            print(f"{where}: no time left", flush=True)
            continue
        print(f"{where} …", flush=True)
        rows = [row for result in results.values() for row in result["rows"]]
        if part.name == parts.PROFILE:
            part = parts.for_slowest_row(part, rows, FLAGS.tiny)
        results[part.name] = _result(part, min(left, FLAGS.limit_seconds or part.seconds))
        print(f"    {results[part.name]['state']}", flush=True)
        _write(file, about, results)
        if results[part.name]["state"] == _INTERRUPTED:
            break
    print(f"{file.with_suffix('.md')} has all results")
    return int(any(results.get(part.name, {}).get("state") != "done" for part in chosen))


def _chosen():
    pythons = {"torch": FLAGS.torch_python, "jax": FLAGS.jax_python}
    for library, packages in {"torch": ("torch", "torchvision"), "jax": ("jax", "keras")}.items():
        if not _has(pythons[library], packages):
            print(f"{library} is omitted: {pythons[library]} lacks {' or '.join(packages)}")
            del pythons[library]
    device = "CPU" if FLAGS.tiny else "GPU"
    every = parts.all_parts(FLAGS.tiny, pythons, device, FLAGS.max_variants)
    chosen = [part for part in every if not FLAGS.only or part.name.startswith(tuple(FLAGS.only))]
    if not chosen:
        names = ", ".join(part.name for part in every)
        raise ValueError(f"--only={','.join(FLAGS.only)} selects no part; there are {names}")
    return chosen


def _has(python, packages):
    # Importing the packages would take half a minute.
    code = (
        "import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))"
    )
    try:
        return subprocess.run([python, "-c", code, *packages]).returncode == 0
    except OSError:
        return False


def _about():
    """Returns the facts on the page about machine and versions."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    name, driver, memory = "none", "none", "none"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60)
        name, driver, memory = (text.strip() for text in shown.stdout.splitlines()[0].split(","))
    packages = ("tensorflow", "keras")
    versions = ", ".join(f"{each} {importlib.metadata.version(each)}" for each in packages)
    return {
        "commit": tables.commit(parts.ROOT),
        "GPU": name,
        "memory": memory,
        "driver": driver,
        "machine": tables.machine(),
        "libraries": versions,
        **({"sizes": "tiny, on the CPU; the figures mean nothing"} if FLAGS.tiny else {}),
    }


def _file(about):
    """Returns the JSON file of this commit and GPU; a new one has today's date."""
    name = "tiny" if FLAGS.tiny else re.sub(r"\W+", "-", about["GPU"].lower()).strip("-")
    ending = f"{about['commit'].split()[0]}-gpu-{name}.json"
    directory = pathlib.Path(FLAGS.results_dir)
    directory.mkdir(parents=True, exist_ok=True)
    existing = sorted(directory.glob(f"????-??-??-{ending}"))
    return existing[-1] if existing else directory / f"{datetime.date.today()}-{ending}"


def _result(part, limit):
    """Runs a part; returns its title, state, seconds, rows, and other output."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            part.command,
            cwd=parts.ROOT,
            env=_environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # So that the part ends with all of its processes.
        )
        try:
            code = process.wait(limit)
            state = "done" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            state = f"stopped after {limit:.0f} s"
        except (KeyboardInterrupt, SystemExit):  # What was measured so far is still written.
            state = _INTERRUPTED
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        rows, text = _rows_and_text(output)
    if state == "done" and any("error" in row for row in rows):
        state = "done, some rows failed"
    seconds = time.monotonic() - began
    return {"title": part.title, "state": state, "seconds": seconds, "rows": rows, "text": text}


def _environment():
    path = os.pathsep.join(filter(None, [str(parts.ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Otherwise the first process of a part, such as the client of a server, takes all memory.
    environment["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    # One GPU, on which the parts follow each other.
    visible = "-1" if FLAGS.tiny else os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return {**environment, "CUDA_VISIBLE_DEVICES": visible, GPU_VARIABLE: visible}


def _rows_and_text(lines):
    rows, text = [], []
    for raw in lines:
        # Pages show no paths of the machine.
        line = raw.replace(sys.executable, "python").replace(str(parts.ROOT), ".")
        if line.startswith('{"row": '):
            with contextlib.suppress(ValueError):  # The process was killed within the line.
                rows.append(json.loads(line)["row"])
        else:
            text.append(line)
    return rows, "".join(text)


def _write(file, about, results):
    title = f"kdist on {about['GPU'] if not FLAGS.tiny else 'the CPU, tiny'}, {file.name[:10]}"
    file.write_text(json.dumps({"about": about, "parts": results}, indent=1) + "\n")
    file.with_suffix(".md").write_text(page.page(about, results, title))


if __name__ == "__main__":
    program.run(main)
