"""Measures which features of Keras give the same model on several devices as on one.

  kdist compare                                  # the whole table
  kdist compare --features=clipnorm,dropout      # two rows of it
  kdist compare --libraries=kdist --replicas=2   # one column
  kdist compare --markdown=README.md --json=compare.json

The reference of a feature is plain Keras on one device. The same training then runs with the same
global batches on logical devices: by plain Keras and by kdist under MirroredStrategy, and by
kdist under its other layouts. The weights must be the same. Each cell of the table is one of

  works        the largest difference of any weight, log, or prediction is within the tolerance
               (1e-5, 1e-9 with --floatx=float64, and 1e-3 for 16 bits)
  wrong by X   training raises no error and ends with other values
  error: ...   training fails; the first line of the message

Exits with 1 if kdist is wrong or raises anywhere.
"""

import concurrent.futures
import difflib
import importlib.metadata
import json
import os
import pathlib
import platform
import time

from absl import flags

import kdist
from benchmarks.equivalence import table
from benchmarks.equivalence.cells import COLUMNS, Cells, Setting
from kdist import program

FLAGS = flags.FLAGS

with program.flag_group("Rows and columns"):
    flags.DEFINE_list(
        "features", None, "Rows to measure, by name (--list prints all names). All by default."
    )
    flags.DEFINE_multi_enum(
        "libraries",
        ["Keras", "kdist"],
        ["Keras", "kdist"],
        "Library of the model class. Repeat the flag for several.",
    )
    flags.DEFINE_list(
        "replicas", ["1", "2", "4"], "Numbers of devices: 1, 2, 4, or several of them."
    )
    flags.DEFINE_list(
        "layouts",
        ["mirrored", "multi_worker", "parameter_server", "local_sgd"],
        "Layouts of kdist: mirrored (devices of one process), multi_worker (one process per "
        "device), parameter_server (one step after the other), local_sgd (each replica trains on "
        "all rows).",
    )
    flags.DEFINE_boolean("list", False, "Print the names of the features and exit.")

with program.flag_group("Devices and precision"):
    flags.DEFINE_enum(
        "device",
        "CPU",
        ["CPU", "GPU"],
        "Replicas are logical devices of the CPU, or of the first GPU with TF32 off. Layouts of "
        "several processes run on the CPU only.",
    )
    flags.DEFINE_enum("floatx", "float32", ["float32", "float64"], "Keras's default type.")

with program.flag_group("Output"):
    flags.DEFINE_string(
        "markdown",
        None,
        f"File for the table. In an existing file the table replaces what is between the lines "
        f"{table.BEGIN} and {table.END}.",
    )
    flags.DEFINE_string("json", None, "File for all cells in full, as JSON.")

program.writes_file("json")

with program.flag_group("Execution"):
    flags.DEFINE_integer(
        "jobs",
        None,
        "Features to measure at the same time. One per CPU core by default.",
        lower_bound=1,
    )
    flags.DEFINE_integer(
        "timeout_seconds",
        120,
        "Time limit of one training. A longer one is an error.",
        lower_bound=1,
    )


def main(_):
    program.check_backend()
    columns = chosen_columns()
    if FLAGS.markdown:
        table.check_can_be_written(pathlib.Path(FLAGS.markdown))
    started = time.perf_counter()
    with Cells(FLAGS.timeout_seconds, Setting(FLAGS.device, FLAGS.floatx)) as cells:
        features = chosen_features(cells.features())
        if FLAGS.list:
            print("\n".join(f"{feature.name:40} {feature.text}" for feature in features))
            return 0
        rows = measure(cells, features, columns)
    note = f"{versions()}; {len(rows)} features took {duration(time.perf_counter() - started)}."
    print(f"\n{table.as_text(rows, columns)}\n\n{summary(rows, columns)}\n{note}")
    write(rows, columns, note)
    return int(any(row[c].is_bad for row in rows.values() for c in columns if c.library == "kdist"))


def chosen_columns():
    """Returns the columns that --libraries, --replicas, and --layouts select."""
    unknown = set(FLAGS.replicas) - {"1", "2", "4"}
    if unknown:
        raise ValueError(f"--replicas={','.join(FLAGS.replicas)}: there are 1, 2 and 4")
    layouts = {column.layout for column in COLUMNS}
    if unknown := set(FLAGS.layouts) - layouts:
        raise ValueError(f"--layouts={','.join(unknown)}: there are {', '.join(sorted(layouts))}")
    columns = [
        column
        for column in COLUMNS
        if column.library in FLAGS.libraries
        and str(column.replicas) in FLAGS.replicas
        and column.layout in FLAGS.layouts
    ]
    if FLAGS.device == "GPU":  # NCCL rejects several processes on one GPU.
        columns = [column for column in columns if sum(column.tasks.values()) == 1]
    if not columns:
        raise ValueError("Keras on 1 device is the reference; take --replicas=2, 4 or both")
    return columns


def chosen_features(features):
    """The features that --features names; their names may hold commas themselves."""
    if not FLAGS.features:
        return features
    wanted, known = [], {feature.name: feature for feature in features}
    words = [word.strip() for word in FLAGS.features]
    while words:
        length = next((n for n in range(len(words), 0, -1) if ", ".join(words[:n]) in known), None)
        if length is None:
            close = difflib.get_close_matches(words[0], known, n=1, cutoff=0.4)
            hint = f"; did you mean {close[0]!r}?" if close else ";"
            raise ValueError(f"no feature {words[0]!r}{hint} --list shows all of them")
        wanted.append(known[", ".join(words[:length])])
        words = words[length:]
    return wanted


def measure(cells, features, columns):
    """Returns {feature: {column: verdict}}; prints each row when it is complete."""
    jobs = FLAGS.jobs or os.cpu_count() or 1
    rows = dict.fromkeys(features)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(cells.row, feature, columns): feature for feature in features}
        try:
            for number, done in enumerate(concurrent.futures.as_completed(waiting), 1):
                feature = waiting[done]
                rows[feature] = done.result()
                print(f"[{number}/{len(features)}] {feature.name}: {in_short(rows[feature])}")
        except BaseException:
            cells.end()
            pool.shutdown(cancel_futures=True)
            raise
    return rows


def in_short(row):
    """Returns one line of progress: the cells of a row that do not work."""
    bad = [f"{column.title} {verdict}"[:70] for column, verdict in row.items() if verdict.is_bad]
    return "; ".join(bad) or "works"


def summary(rows, columns):
    """Returns one line per column with its number of verdicts of each kind."""
    lines = []
    for column in columns:
        kinds = [row[column].kind for row in rows.values()]
        counts = [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]
        lines.append(f"{column.title}: {', '.join(counts)}")
    return "\n".join(lines)


def write(rows, columns, note):
    """Writes the files that the flags name."""
    if FLAGS.markdown:
        text = f"{note} Cells: the largest difference to plain Keras on one device."
        table.write_markdown(pathlib.Path(FLAGS.markdown), table.as_markdown(rows, columns, text))
    if FLAGS.json:
        pathlib.Path(FLAGS.json).write_text(
            json.dumps(table.as_data(rows, columns), indent=1, ensure_ascii=False) + "\n"
        )


def versions():
    """Returns the versions that the numbers depend on."""
    packages = ("tensorflow", "keras")
    names = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    names += f", kdist {kdist.__version__}, Python {platform.python_version()}"
    return f"{names}, logical {FLAGS.device} devices"


def duration(seconds):
    """Returns a duration as minutes and seconds."""
    return f"{int(seconds // 60)} min {seconds % 60:.0f} s"


if __name__ == "__main__":
    program.run(main)
