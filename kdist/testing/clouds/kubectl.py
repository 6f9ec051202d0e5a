"""Stand-in for `kubectl`, which passes its arguments and its input to a `KubernetesCluster`.

It is first on the PATH of the cluster's environment, as a program that imports nothing of kdist.
"""

import json
import os
import sys
import urllib.error
import urllib.request

# Environment variable: the URL of the cluster.
URL = "KDIST_STAND_IN_KUBERNETES"


def main():
    """Prints the answer as it comes; exits with 1 and its text if it is an error."""
    text = sys.stdin.read() if "-" in sys.argv else ""
    request = json.dumps({"arguments": sys.argv[1:], "text": text}).encode()
    try:
        with urllib.request.urlopen(os.environ[URL], request) as answer:
            for line in answer:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
    except urllib.error.HTTPError as error:
        sys.exit(error.read().decode())


if __name__ == "__main__":
    main()
