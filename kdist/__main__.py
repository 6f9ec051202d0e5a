"""Runs the `kdist` command: `python -m kdist train --help`."""

import sys

from kdist.commands.command_line import main

if __name__ == "__main__":
    sys.exit(main())
