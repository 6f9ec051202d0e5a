"""Prices of tasks by SkyPilot's own parser and optimizer, with kdist's prices as its catalog.

    HOME=EMPTY_DIRECTORY python skypilot_program.py VM_PRICES.csv TASK.yaml…

Run in an environment that has SkyPilot. No server, account, or network is used. Prints a line of
JSON per task: nodes, VM, accelerators, spot, and the price of all nodes per hour.
"""

import csv
import json
import pathlib
import sys

# SkyPilot's names of GPUs, and their memory in GiB.
_NAMES = {"A100-40GB": "A100"}
_GIB = {"K80": 12, "P100": 16, "V100": 16, "T4": 16, "P4": 8, "A100-40GB": 40, "L4": 24}
_COLUMNS = ["InstanceType", "vCPUs", "MemoryGiB", "AcceleratorName", "AcceleratorCount"]
_COLUMNS += ["GpuInfo", "Region", "AvailabilityZone", "Price", "SpotPrice"]


def write_catalog(prices):
    """Writes Google's VMs and GPUs of kdist's table to where SkyPilot looks for its download."""
    catalog = pathlib.Path.home() / ".sky/catalogs/v8"
    (catalog / "gcp").mkdir(parents=True)
    (catalog / "common").mkdir()
    gpus, vms = set(), []
    where = ["us-central1", "us-central1-a"]
    for row in csv.DictReader(pathlib.Path(prices).read_text().splitlines()):
        cost = [row["usd_per_hour_on_demand"], row["usd_per_hour_spot"]]
        name = row["item"].removesuffix(" (host only)")
        if row["cloud"] != "gcp" or not row["usd_per_hour_spot"]:
            continue
        if row["kind"].startswith("vm"):
            vms.append([name, row["vcpus"], row["memory_gb"], "", "", "", *where, *cost])
        elif name in _GIB:
            gpu = _NAMES.get(name, name)
            gpus.add(gpu)
            for count in (1, 2, 4) if name in ("P100", "T4", "P4") else (1, 2, 4, 8):
                memory = {"SizeInMiB": 1024 * _GIB[name]}
                info = {
                    "Gpus": [{"Name": gpu, "Count": float(count), "MemoryInfo": memory}],
                    "TotalGpuMemoryInMiB": 1024 * _GIB[name] * count,
                }
                usd = [count * float(each) for each in cost]
                vms.append(["", "", "", gpu, float(count), repr(info), *where, *usd])
    with open(catalog / "gcp/vms.csv", "w") as file:
        csv.writer(file).writerows([_COLUMNS, *vms])
    with open(catalog / "common/accelerators.csv", "w") as file:
        rows = [["AcceleratorName", "Clouds"], *([gpu, "['GCP']"] for gpu in sorted(gpus))]
        csv.writer(file).writerows(rows)


def main(prices, *tasks):
    write_catalog(prices)

    import sky  # reads the catalog's place
    from sky import check, clouds, optimizer

    check.get_cached_enabled_clouds_or_refresh = lambda *_, **__: [clouds.GCP()]
    for path in tasks:
        task = sky.Task.from_yaml(path)
        with sky.Dag() as dag:
            dag.add(task)
        optimizer.Optimizer.optimize(dag, quiet=True)
        best = task.best_resources
        usd = best.get_cost(3600) * task.num_nodes
        found = [task.num_nodes, best.instance_type, best.accelerators, best.use_spot, usd]
        print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
