"""Settings chosen in a process of its own: simulating takes a second of pure Python, in which a
server would answer nobody.

    choice = await choose_apart(curve, arrivals, Objective("latency"))

The process lives as long as the choice takes, at low priority; it imports NumPy, no TensorFlow, and
nothing of the program that starts it (which a pool of `multiprocessing` would run again).
"""

import asyncio
import os
import pickle
import sys

from kdist.serving.tuning import Choice, choose

_LESS_URGENT = 10  # `nice`
_LONGEST_SECONDS = 60.0


async def choose_apart(*arguments, **named) -> Choice:
    """What `kdist.serving.choose` gives for the same arguments.

    Raises:
        RuntimeError: the process failed, or took a minute.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        __name__,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        talk = process.communicate(pickle.dumps((arguments, named)))
        out, said = await asyncio.wait_for(talk, _LONGEST_SECONDS)
    except TimeoutError as error:
        raise RuntimeError(f"choosing settings took {_LONGEST_SECONDS:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = said.decode(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"choosing settings failed: {' '.join(last) or process.returncode}")
    return pickle.loads(out)


def _main():
    os.nice(_LESS_URGENT)
    arguments, named = pickle.loads(sys.stdin.buffer.read())
    sys.stdout.buffer.write(pickle.dumps(choose(*arguments, **named)))


if __name__ == "__main__":
    _main()
