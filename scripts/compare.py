"""Runs `kdist compare`, also in a clone in which kdist is not on the PATH; see `--help`."""

from kdist.commands.command_line import run

run("compare")
