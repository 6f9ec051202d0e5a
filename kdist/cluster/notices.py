"""Preemption notices of clouds: this process receives SIGTERM before its VM is taken away.

    watch = notices.watch()       # None on machines that are no VM of GCE, AWS, or Azure
    ...
    watch.close()

A cloud announces the end of a spot VM on its metadata server, 30 seconds (GCE, Azure) or two
minutes (AWS) before. A thread waits for it, and then sends one SIGTERM to this process, which saves
as after any other SIGTERM. The kind of VM is read from files of the kernel, so that other machines
never wait for a network.

The environment variable KDIST_METADATA_URL replaces the kernel's answer and the address of the
server, such as gce=http://127.0.0.1:8099 for a stand-in. If it is empty, no thread is started.
"""

import json
import logging
import os
import pathlib
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

_logger = logging.getLogger(__name__)

URL_VARIABLE = "KDIST_METADATA_URL"
# Time between a notice and the end of a VM, by kdist's name of the cloud in its price table. AWS:
# docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html. Google Cloud:
# cloud.google.com/compute/docs/instances/spot#preemption-process. Azure:
# learn.microsoft.com/azure/virtual-machines/spot-vms.
NOTICE_SECONDS = {"gcp": 30.0, "aws": 120.0, "azure": 30.0}
GRACE_SECONDS = min(NOTICE_SECONDS.values())

_URL = "http://169.254.169.254"
_DMI = pathlib.Path("/sys/class/dmi/id")
# learn.microsoft.com/azure/virtual-machines/instance-metadata-service: the tag of all Azure VMs.
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"

# AWS recommends to ask every 5 seconds, Azure every second. GCE answers when there is news.
_POLL_SECONDS = {"gce": 1.0, "aws": 5.0, "azure": 1.0}
_RETRY_SECONDS = 10.0
# GCE answers after this time if nothing has changed. Azure's first answer may take two minutes.
_CHANGE_SECONDS, _ANSWER_SECONDS = 20, 130.0


def find_cloud(dmi: pathlib.Path = _DMI) -> str:
    """Returns `"gce"`, `"aws"`, or `"azure"` on a VM of these clouds, otherwise `""`."""
    if _read(dmi / "product_name") == "Google Compute Engine":
        return "gce"
    # The version of the BIOS names Amazon on VMs under Xen, such as those with a V100.
    if _read(dmi / "sys_vendor") == "Amazon EC2" or _read(dmi / "bios_version").endswith("amazon"):
        return "aws"
    return "azure" if _read(dmi / "chassis_asset_tag") == _AZURE_TAG else ""


def watch(environment: Mapping[str, str] | None = None) -> "Watch | None":
    """Starts to wait for a preemption notice if this machine is a VM of a cloud.

    Returns:
        The running watch, or None.

    Raises:
        ValueError: If KDIST_METADATA_URL is malformed.
    """
    environment = os.environ if environment is None else environment
    given = environment.get(URL_VARIABLE)
    if given is None:
        cloud, url = find_cloud(), _URL
    else:
        cloud, _, url = given.partition("=")
        if given and (cloud not in _POLLS or not url.startswith("http://")):
            raise ValueError(
                f"{URL_VARIABLE}={given}; write the cloud and the address of its metadata server, "
                "such as gce=http://127.0.0.1:8099, or leave it empty to ignore notices"
            )
    return Watch(cloud, url.rstrip("/")) if cloud else None


class Watch:
    """Thread that sends SIGTERM to this process once its VM has a preemption notice.

    Args:
        cloud: `"gce"`, `"aws"`, or `"azure"`.
        url: Address of the metadata server.
    """

    def __init__(self, cloud: str, url: str):
        self._cloud, self._poll = cloud, _POLLS[cloud](url)
        self._closed = threading.Event()
        self._failed = False
        self.has_notice = False
        threading.Thread(target=self._run, name="kdist-notices", daemon=True).start()

    def close(self):
        """Stops waiting; a later notice has no effect."""
        self._closed.set()

    def _run(self):
        seconds = 0.0
        while not self._closed.wait(seconds):
            notice, seconds = self._ask()
            if notice and not self._closed.is_set():
                self.has_notice = True
                _logger.warning("%s takes this machine away soon (%s)", self._cloud, notice)
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def _ask(self):
        """Returns the notice, or "", and the seconds until the next question."""
        try:
            return self._poll(), _POLL_SECONDS[self._cloud]
        except Exception as error:  # whatever a server answers, training continues
            if not self._failed:  # such as in a container that may not use the metadata server
                _logger.info("no preemption notices from %s: %s", self._cloud, error)
            self._failed = True
            return "", _RETRY_SECONDS


# Each class asks the metadata server of one cloud, and returns the notice, or "".


class _Gce:
    """GCE: cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption."""

    def __init__(self, url):
        self._url = f"{url}/computeMetadata/v1/instance/preempted"
        self._query = ""

    def __call__(self):
        text, headers = _get(self._url + self._query, {"Metadata-Flavor": "Google"})
        # From the second question on, the answer comes when it differs from the last one.
        self._query = f"?wait_for_change=true&timeout_sec={_CHANGE_SECONDS}"
        if etag := headers.get("ETag"):
            self._query += f"&last_etag={etag}"
        return "preempted" if text.strip().upper() == "TRUE" else ""


class _Aws:
    """AWS: docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html."""

    def __init__(self, url):
        self._url = f"{url}/latest"

    def __call__(self):
        ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        token, _ = _get(f"{self._url}/api/token", ttl, method="PUT")
        try:
            text, _ = _get(
                f"{self._url}/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}
            )
        except urllib.error.HTTPError as error:
            if error.code == 404:  # no notice
                return ""
            raise
        action = json.loads(text)
        # A hibernated process continues later.
        return "" if action["action"] == "hibernate" else f"{action['action']}, {action['time']}"


class _Azure:
    """Azure: learn.microsoft.com/azure/virtual-machines/linux/scheduled-events."""

    def __init__(self, url):
        self._url = f"{url}/metadata"
        self._name = ""

    def __call__(self):
        headers = {"Metadata": "true"}
        if not self._name:
            query = "api-version=2021-02-01&format=text"
            self._name, _ = _get(f"{self._url}/instance/compute/name?{query}", headers)
        text, _ = _get(f"{self._url}/scheduledevents?api-version=2020-07-01", headers)
        for event in json.loads(text)["Events"]:
            # The events of all VMs of a scale set are listed.
            ends = event["EventType"] in ("Preempt", "Terminate")
            if ends and self._name in event["Resources"]:
                return f"{event['EventType']}, {event['NotBefore']}"
        return ""


_POLLS: dict[str, Callable[[str], Callable[[], str]]] = {"gce": _Gce, "aws": _Aws, "azure": _Azure}


def _get(url, headers, method="GET"):
    """Returns (text, headers) of a metadata server's answer. Proxies are not for such addresses."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=headers, method=method)
    with opener.open(request, timeout=_ANSWER_SECONDS) as answer:
        return answer.read().decode(), answer.headers


def _read(path):
    try:
        return path.read_text().strip()
    except OSError:
        return ""
