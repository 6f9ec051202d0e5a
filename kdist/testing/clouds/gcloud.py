"""Stand-in for `gcloud`, for the commands and flags that kdist uses.

It is a program that imports nothing of kdist, on the PATH of `ComputeEngineStandIn.environment`.
"""

import collections
import json
import os
import pathlib
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

# Environment variable of `gcloud`: the URL of the service.
ENDPOINT = "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE"
_LISTS = {"machine-types": "machineTypes", "accelerator-types": "acceleratorTypes"}


def gcloud(arguments: Sequence[str]) -> str:
    """Returns what `gcloud` would print; exits as it does."""
    names = [each for each in arguments if not each.startswith("--")]
    flags: dict[str, str] = collections.defaultdict(str)
    flags |= dict(each[2:].partition("=")[::2] for each in arguments if each.startswith("--"))
    _, group, verb, *names = names
    zone = f"zones/{flags['zone']}/instances"
    if group in _LISTS:
        found = _ask("GET", f"aggregated/{_LISTS[group]}")["items"]
        return "\n".join(each.removeprefix("zones/") for each in found)
    if verb == "list":
        condition = flags["filter"].removeprefix("labels.kdist-job=")
        lists = _ask("GET", "aggregated/instances")["items"].values()
        vms = [vm for each in lists for vm in each["instances"]]
        return json.dumps([vm for vm in vms if vm["labels"]["kdist-job"] == condition])
    if verb == "get-serial-port-output":
        return json.dumps(_ask("GET", f"{zone}/{names[0]}/serialPort?start={flags['start']}"))
    for name in names:
        if verb == "create":
            _ask("POST", zone, _instance(name, flags))
        else:
            suffix = {"delete": "", "reset": "/reset"}[verb]
            _ask("DELETE" if verb == "delete" else "POST", f"{zone}/{name}{suffix}", {})
    return "[]"


def _instance(name, flags):
    files = (each.partition("=")[::2] for each in flags["metadata-from-file"].split(","))
    items = [{"key": key, "value": pathlib.Path(path).read_text()} for key, path in files]
    labels = dict([flags["labels"].split("=")])
    return {
        "name": name,
        "machineType": flags["machine-type"],
        "labels": labels,
        "metadata": {"items": items},
        "scheduling": {
            "provisioningModel": flags["provisioning-model"],
            "instanceTerminationAction": flags["instance-termination-action"],
            "maxRunDuration": {"seconds": flags["max-run-duration"].rstrip("s")},
        },
    }


def _ask(method, path, body=None):
    url = f"{os.environ[ENDPOINT]}projects/p/{path}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, method=method)) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        sys.exit(f"ERROR: {error.read().decode()}")
    if "error" in found:
        sys.exit(f"ERROR: (gcloud) Could not fetch resource: {found['error']}")
    return found


if __name__ == "__main__":
    sys.stdout.write(f"{gcloud(sys.argv[1:])}\n")
