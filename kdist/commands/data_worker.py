"""Prepares batches for trainings on other machines, which read them over the network.

  # two of them on this machine, for as long as the training runs
  kdist launch --data_workers=2 -- kdist train --model=mobilenet_v2 --dataset=/data/pets …

  # on each machine with spare cores; it reads the same files as the training, at the same paths
  kdist data_worker --host=cpu1 --port=5050 --allow_remote

  # on the machine with the devices
  kdist train --model=mobilenet_v2 --dataset=/data/pets --operations="resize(160, 160)" \\
    --data_workers=cpu1:5050,cpu2:5050

The batches are the same as without data workers, each once and in the same order. Two ports are
used: --port and --batch_port. Ctrl-C ends the data worker.
"""

import signal

from absl import flags

from kdist import program
from kdist.cluster.remote_access import check_remote_access
from kdist.data.worker_addresses import addresses_of

FLAGS = flags.FLAGS

with program.flag_group("Common"):
    flags.DEFINE_integer("port", 5050, "Port that trainings connect to.", 1, 65534)
    flags.DEFINE_integer(
        "batch_port", None, "Port that batches are read from; by default the next one.", 1, 65535
    )
    flags.DEFINE_string(
        "host", "127.0.0.1", "This machine's name or address, as trainings reach it."
    )
    flags.DEFINE_boolean(
        "allow_remote",
        False,
        "Allow other machines to connect. TensorFlow's services have no authentication: only the "
        "machines of the job should reach the ports.",
    )


def main(argv):
    del argv
    check_remote_access(addresses_of(FLAGS.host, FLAGS.port, FLAGS.batch_port), FLAGS.allow_remote)
    from kdist.data.workers import start  # imports TensorFlow

    server = start(FLAGS.host, FLAGS.port, FLAGS.allow_remote, FLAGS.batch_port)
    print(f"Data worker at {FLAGS.host}:{FLAGS.port}. Ctrl-C ends it.", flush=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # `join` waits in C++
    server.join()


def run():
    """Runs the program with the arguments in `sys.argv`, and exits."""
    program.run(main)
