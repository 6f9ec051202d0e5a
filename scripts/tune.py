"""Runs `kdist tune`, also in a clone in which kdist is not on the PATH; see `--help`."""

from kdist.commands.command_line import run

if __name__ == "__main__":  # processes that multiprocessing starts import this file
    run("tune")
