"""The `kdist` command, which runs one of the programs in this package.

    kdist                  # lists the programs
    kdist train --help     # the flags of one
    python -m kdist train  # the same, if kdist is not on the PATH

The module of a program is imported when it runs, so that the list appears at once.
"""

import importlib
import sys
import textwrap
from collections.abc import Sequence

from kdist.exit_codes import INTERRUPTED

# Command -> what it does, and an example.
COMMANDS = {
    "train": (
        "Trains a model on one device or several.",
        "kdist train --model=lenet --dataset=digits --epochs=20",
    ),
    "launch": (
        "Starts a script as a job of several processes, on this machine or a cluster.",
        "kdist launch --workers=2 -- my_script.py",
    ),
    "data_worker": (
        "Prepares batches for trainings on other machines.",
        "kdist data_worker --host=cpu1 --allow_remote",
    ),
    "check": (
        "Reports what works on this machine: versions, devices, and strategies.",
        "kdist check",
    ),
    "plan": (
        "Recommends a strategy and a machine, with time, memory, and cost.",
        "kdist plan --model=resnet50 --examples=1281167 --epochs=90 --max_usd=100",
    ),
    "tune": (
        "Finds fast settings, the largest batch that fits, and a learning rate.",
        "kdist tune --model=lenet --dataset=digits --output=tuned.json",
    ),
    "report": (
        "Writes a web page about one or several runs.",
        "kdist report runs/a runs/b",
    ),
    "serve": (
        "Serves exported models over REST and gRPC.",
        "kdist serve --model_dir=models/fashion",
    ),
    "export": (
        "Exports a trained model to a directory that `kdist serve` reads.",
        "kdist export runs/a --output=models/fashion",
    ),
    "compare": (
        "Compares training on several devices with one device, feature by feature.",
        "kdist compare --features=clipnorm,dropout",
    ),
}
_HELP = ("help", "-h", "-?", "--help", "--helpshort", "--helpfull")


def main(arguments: Sequence[str] | None = None) -> int | None:
    """Runs the program that the first argument names, with the other arguments.

    Args:
        arguments: the arguments of the command. Defaults to those of this process.

    Returns:
        The exit code, unless a program runs, which exits itself.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in _HELP:
        return _print(help_text())
    name, *rest = arguments
    if name == "--version":
        from kdist import __version__

        return _print(f"kdist {__version__}\n")
    if name not in COMMANDS:
        from kdist.program import check_name

        try:
            check_name("command", name, tuple(COMMANDS))
        except ValueError as error:
            sys.stderr.write(f"kdist: {error} (kdist --help)\n")
        return 1
    sys.argv = [f"kdist {name}", *rest]
    try:
        return run(name)
    except KeyboardInterrupt:  # while the program is imported; later it reports this itself
        sys.stderr.write(f"\nkdist {name}: stopped by Ctrl-C\n")
        return INTERRUPTED


def _print(text):
    """Returns the exit code of a command that prints a text."""
    try:
        print(text, end="", flush=True)  # does nothing if standard output is closed
    except OSError as error:
        sys.stdout = None  # Python would write the rest when it ends
        if not isinstance(error, BrokenPipeError):
            sys.stderr.write(f"kdist: the output cannot be written ({error.strerror})\n")
            return 1
    return 0


def run(name: str):
    """Runs a program with the arguments in `sys.argv`, and exits.

    Args:
        name: a key of `COMMANDS`.
    """
    importlib.import_module(f"kdist.commands.{name}").run()


def help_text() -> str:
    """Returns the list of the programs, with an example of each."""
    width = max(map(len, COMMANDS))
    lines = [
        f"  {name:{width}}  {words}\n  {'':{width}}  {example}"
        for name, (words, example) in COMMANDS.items()
    ]
    return (
        "Distributed training of Keras models.\n\nUsage: kdist COMMAND [--flag=value ...]\n\n"
        + "\n".join(lines)
        + textwrap.dedent(
            """

            kdist COMMAND --help shows the flags of a command, kdist --version the version.
            """
        )
    )
