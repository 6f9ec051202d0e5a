"""What a task of `kdist.launch.local` runs: a function that was pickled.

    python -m kdist.launch.call CALL DIRECTORY

CALL is the file that holds the function and its arguments. In the directory the task makes a file
of its own name. It holds a pair: whether the function returned, and what it did, or else the text
of the exception.
"""

import os
import pathlib
import pickle
import sys
import traceback

import cloudpickle

from kdist.cluster import Cluster


def main(call, directory):
    cluster = Cluster.resolve()
    try:
        function, arguments = pickle.loads(pathlib.Path(call).read_bytes())
        value = function(*arguments)
        # Nobody asks what the others returned, and it need not be something that can be sent.
        returned, data = True, _pickled(value if cluster.is_chief else None)
    except KeyboardInterrupt:
        return 130  # who interrupted it knows
    except Exception as error:
        traceback.print_exc()
        returned, data = False, pickle.dumps((False, f"{type(error).__name__}: {error}"))
    path = pathlib.Path(directory) / cluster.name
    path.with_suffix(".new").write_bytes(data)
    os.replace(path.with_suffix(".new"), path)
    return 0 if returned else 1


def _pickled(value):
    try:
        return cloudpickle.dumps((True, value))
    except Exception as error:
        raise TypeError(
            f"what the function returned ({type(value).__name__}) cannot be sent back: {error}; "
            "return numbers, arrays, or the path of a file"
        ) from error


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
