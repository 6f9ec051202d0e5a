"""Runs all programs in all modes, and writes the table of `docs/evidence/programs.md`.

    python -m tests.programs.table --directory=runs/programs            # all modes
    python -m tests.programs.table --modes two four --programs dcgan
    python -m tests.programs.table --modes --markdown=docs/evidence/programs.md   # of kept results

Results are kept in the directory, so that a run can be continued; `--again` repeats it.
"""

import argparse
import datetime
import importlib.metadata
import pathlib
import platform
import subprocess

from tests.programs import running
from tests.programs.modes import MODES
from tests.programs.program import programs

_HEAD = """\
# Programs as people publish them

Each row is a program in [tests/programs](../../tests/programs): 20 to 60 lines in the manner of the
guides and examples of Keras and TensorFlow. Plain Keras on one device gives the expected logs,
weights, predictions, and loaded models. The other columns run the same text in the scope of a
strategy; those of kdist after `kdist.patch_keras()`.

- *right*: no number differs by more than 1e-4, or by the `atol` of the program.
- ***wrong***: it trains without an error, to something else.
- *across examples*: it trains to something else, because the program computes across the examples
  of a batch, and each replica sees its own. A section below says how.
- *differs*: something else by design, for the reason below.
- –: not run in this mode.

Remake the page with `python -m tests.programs.table --again --markdown=docs/evidence/programs.md`.
Programs that are not in the repository are on [a page of their own](unseen_programs.md).

"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--directory", default="runs/programs", help="keeps results and logs")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument("--programs", nargs="+", help="names; all by default")
    parser.add_argument("--again", action="store_true", help="forget results of these modes")
    parser.add_argument("--markdown", help="write the table to this file")
    arguments = parser.parse_args()
    known = programs()
    names = arguments.programs or list(known)
    directory = pathlib.Path(arguments.directory).resolve()
    found = {}
    for mode in dict.fromkeys(["plain", *arguments.modes]):
        for name in names if arguments.again else ():
            (directory / mode / name).unlink(missing_ok=True)
        # What fails by design comes last, as it may end the collectives of the others' job.
        ordered = sorted(names, key=lambda name: mode in known[name].differs)
        found[mode] = running.run_all(mode, ordered, directory)
        _report(mode, found, known)
    if arguments.markdown:
        pathlib.Path(arguments.markdown).write_text(_page(_kept(directory, known), known))


def _kept(directory, known):
    """Returns all results in the directory: {mode: {name: (result, seconds)}}."""
    found = {
        mode: {name: running.read(directory / mode / name) for name in known} for mode in MODES
    }
    return {
        mode: {name: result for name, result in of.items() if result}
        for mode, of in found.items()
        if any(of.values())
    }


def verdicts(mode, found, known):
    """Returns {name: verdict} of a mode; `found` has the results of the mode and of `plain`."""
    return {
        name: running.verdict(result, found["plain"][name][0], known[name].atol)
        for name, (result, _) in found[mode].items()
        if name in found["plain"] and not isinstance(found["plain"][name][0], str)
    }


def _report(mode, found, known):
    """Prints what is not right in a mode."""
    texts = verdicts(mode, found, known)
    seconds = sum(took for _, took in found[mode].values())
    right = sum(text == running.RIGHT for text in texts.values())
    print(f"## {mode}: {right} of {len(texts)} right, {seconds:.0f} s")
    for name, (result, _) in found[mode].items() if mode == "plain" else ():
        if isinstance(result, str):
            print(f"{name}: {result[:300]}")
    for name, text in texts.items():
        remark = "across" if known[name].across else known[name].differs.get(mode, "")
        if text != running.RIGHT:
            print(f"{name}: {text[:300]!r} {remark and f'[{remark}]'}")


def _cell(text, program, mode):
    """Returns a cell of the table; "–" without a result."""
    if text is None:
        return "–"
    if text == running.RIGHT:
        return "right"
    if running.kind(text) == "wrong":
        if program.across:
            return "across examples"
        return "differs" if mode in program.differs else "**wrong**"
    return "hangs" if text.startswith("Hang") else f"fails: {running.kind(text)}"


def _page(found, known):
    modes = [mode for mode in found if mode != "plain"]
    texts = {mode: verdicts(mode, found, known) for mode in modes}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("tensorflow", "keras", "kdist")
    )
    head = [MODES[mode].title for mode in modes]
    lines = [
        *_HEAD.splitlines(),
        f"{datetime.date.today()}, commit {commit}, {versions}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, "
        "logical CPU devices, processes on loopback.",
        "",
        f"| {len(known)} programs | {' | '.join(head)} |",
        f"|--|{'--|' * len(modes)}",
        *_totals(texts, known),
        f"| **program** | {' | '.join(' ' for _ in modes)} |",
    ]
    subject = ""
    for name, program in known.items():
        if program.subject != subject:
            subject = program.subject
            lines.append(f"| **{subject}** |{' |' * len(modes)}")
        cells = [_cell(texts[mode].get(name), program, mode) for mode in modes]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "## What the programs are", ""]
    lines += [f"- {name}: {program.title}." for name, program in known.items()]
    lines += ["", "## Programs that compute across examples", ""]
    lines += [f"- {name}: {p.across}." for name, p in known.items() if p.across]
    lines += ["", "## What differs by design", ""]
    lines += [
        f"- {name}, {MODES[mode].title}: {reason}."
        for name, program in known.items()
        for mode, reason in program.differs.items()
    ]
    return "\n".join(lines) + "\n"


def _totals(texts, known):
    for kind in ("right", "**wrong**", "across examples", "differs", "fails", "hangs"):
        counts = [
            sum(_cell(text, known[name], mode).split(":")[0] == kind for name, text in of.items())
            for mode, of in texts.items()
        ]
        yield f"| {kind} | {' | '.join(map(str, counts))} |"


if __name__ == "__main__":
    main()
