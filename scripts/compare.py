"""Measures which features of Keras give the same model on several devices as on one.

  python scripts/compare.py                                  # the whole table
  python scripts/compare.py --features=clipnorm,dropout      # two rows of it
  python scripts/compare.py --libraries=kdist --replicas=2   # one column
  python scripts/compare.py --markdown=README.md --json=compare.json

Each feature is trained by plain Keras on one device; that is the reference. Then it is trained
under MirroredStrategy on logical CPU devices, by plain Keras and by kdist, and by kdist under
one_device: with the same global batches, so that the weights have to be the same. A cell says

  works        the largest difference of any weight, log or prediction is within the tolerance
               (1e-5, and 1e-3 for 16 bits)
  wrong by X   it trains without a word, to something else
  error: ...   it raises; the first line of what it says

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

from kdist import program
from kdist.equivalence import table
from kdist.equivalence.cells import COLUMNS, Cells

FLAGS = flags.FLAGS

flags.DEFINE_list("features", None, "Which rows, by name (--list shows them); by default all.")
flags.DEFINE_boolean("list", False, "Print the names of the features, and stop.")
flags.DEFINE_multi_enum(
    "libraries", ["Keras", "kdist"], ["Keras", "kdist"], "Whose models; repeat it for several."
)
flags.DEFINE_list("replicas", ["1", "2", "4"], "On how many devices: 1, 2, 4 or several of them.")
flags.DEFINE_list(
    "layouts",
    ["mirrored", "multi_worker", "parameter_server", "local_sgd"],
    "Devices of one process, a process each, parameter servers (one step after the other), or "
    "local steps (each replica on all rows): one or several of them.",
)
flags.DEFINE_string(
    "markdown",
    None,
    f"Write the table to this file: between the lines {table.BEGIN} and {table.END} of one that "
    "exists, else to a new one.",
)
flags.DEFINE_string("json", None, "Write every cell in full to this file.")
flags.DEFINE_integer(
    "jobs", None, "Features measured at a time; by default one for each CPU core.", lower_bound=1
)
flags.DEFINE_integer("timeout_seconds", 120, "What takes longer is an error.", lower_bound=1)


def main(_):
    columns = chosen_columns()
    if FLAGS.markdown:
        table.check_can_be_written(pathlib.Path(FLAGS.markdown))
    started = time.perf_counter()
    with Cells(FLAGS.timeout_seconds) as cells:
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
    """The columns that --libraries and --replicas leave."""
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
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"no feature {words[0]!r}{hint} --list shows all of them")
        wanted.append(known[", ".join(words[:length])])
        words = words[length:]
    return wanted


def measure(cells, features, columns):
    """Feature -> {column: verdict}, in the features' order; says each row when it is there."""
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
            pool.shutdown(cancel_futures=True)
            raise
    return rows


def in_short(row):
    """A row in one line of progress: how many of its cells work, and what the others are."""
    bad = [f"{column.title} {verdict}"[:70] for column, verdict in row.items() if verdict.is_bad]
    return "; ".join(bad) or "works"


def summary(rows, columns):
    """For each column, how many features work."""
    lines = []
    for column in columns:
        kinds = [row[column].kind for row in rows.values()]
        counts = [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]
        lines.append(f"{column.title}: {', '.join(counts)}")
    return "\n".join(lines)


def write(rows, columns, note):
    """The files that were asked for."""
    if FLAGS.markdown:
        text = f"{note} Cells: the largest difference to plain Keras on one device."
        table.write_markdown(pathlib.Path(FLAGS.markdown), table.as_markdown(rows, columns, text))
    if FLAGS.json:
        pathlib.Path(FLAGS.json).write_text(
            json.dumps(table.as_data(rows, columns), indent=1, ensure_ascii=False) + "\n"
        )


def versions():
    """What the numbers depend on."""
    packages = ("tensorflow", "keras", "kdist")
    names = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return f"{names}, Python {platform.python_version()}, logical CPU devices"


def duration(seconds):
    """Minutes and seconds."""
    return f"{int(seconds // 60)} min {seconds % 60:.0f} s"


if __name__ == "__main__":
    program.run(main)
