"""The process that communicates with wandb; `WandbWriter` starts it and sends it commands.

It reads JSON objects from its standard input: first the settings of the run, then commands. Its
answers on standard output are where the run is, problems, and that the run has finished.
"""

import base64
import json
import netrc
import os
import pathlib
import ssl
import sys
import threading
import urllib.error
import urllib.request

from kdist.telemetry.provenance import git_commit, git_remote
from kdist.telemetry.samples import decoded
from kdist.telemetry.writers import DEVICE_KINDS, METRIC_KINDS, device_curves, metric_curves
from kdist.telemetry.writers.tracker import files_of, first_line, serve

# Settings of a run that `wandb.init` accepts by name.
_ABOUT = ("project", "group", "job_type", "name", "tags", "notes")
# Timeout of wandb.init, which reports it about 10 s later.
_INIT_SECONDS = 20.0


def main():
    """Opens a run, executes commands until the input ends, and finishes the run."""
    serve(_WandbRun)


class _WandbRun:
    """A run in W&B, online or offline."""

    def __init__(self, start, send):
        import wandb  # takes a second

        self._start, self._send = start, send
        self._settings = wandb.setup().settings
        self._run, reason = self._open(wandb)
        self._online = not self._run.offline
        self._files = str(pathlib.Path(self._run.dir).parent)
        for kind in METRIC_KINDS:
            self._run.define_metric(f"{kind}/*", step_metric="examples")
        for name in ("learning_rate", "epoch", "samples"):
            self._run.define_metric(name, step_metric="examples")
        for kind in DEVICE_KINDS:
            self._run.define_metric(f"{kind}/*", step_metric="seconds")
        # Devices at one time, collected until a record has another time.
        self._row, self._row_time = {}, None
        send(
            location=self._run.url if self._online else self._files,
            files=self._files,
            online=self._online,
            reason=reason,
        )
        self._finishing = threading.Event()
        if self._online:
            threading.Thread(target=self._watch, daemon=True).start()

    def write(self, record):
        """Adds a row of metrics."""
        self._write_row()
        self._run.log(metric_curves(record))

    def write_device(self, record):
        """Adds a device to the row of its time."""
        if record["time"] != self._row_time:
            self._write_row()
            self._row_time = record["time"]
            if record.get("seconds") is not None:
                self._row["seconds"] = record["seconds"]
        self._row.update(device_curves(record))

    def write_config(self, config):
        """Adds values to the configuration of the run."""
        self._run.config.update(config, allow_val_change=True)

    def write_console(self, stream, text):
        """Adds output of the training program to the run's log."""
        # wandb copies what this process writes to its own streams.
        getattr(sys, stream).write(text)

    def write_summary(self, summary):
        """Adds the results of the run."""
        self._write_row()
        self._run.summary.update(summary)

    def write_report(self, path):
        """Adds the page as an artifact of type "report"."""
        self._write_artifact(path, f"report-{self._run.id}", "report")

    def write_model(self, path, name, metadata, aliases):
        """Adds a file or a directory as an artifact of type "model"."""
        self._write_artifact(path, name, "model", metadata, aliases)

    def _write_artifact(self, path, name, kind, metadata=None, aliases=None):
        """Adds an artifact, which is uploaded from where it is, without a copy."""
        import wandb

        if self._online and self._why_not_online():
            # An artifact would wait for the server; `wandb sync` uploads saved files later.
            for file in files_of(path):
                self._run.save(str(file), base_path=os.path.dirname(path), policy="now")
            return
        artifact = wandb.Artifact(name, type=kind, metadata=metadata)
        add = artifact.add_dir if os.path.isdir(path) else artifact.add_file
        add(path, policy="immutable", skip_cache=True)
        self._run.log_artifact(artifact, aliases=aliases)

    def write_samples(self, record):
        """Adds sample predictions as a table."""
        import wandb

        rows = record.pop("rows")
        if self._online and self._why_not_online():
            return  # a table is an artifact, which would wait for the server
        if "image" in rows[0]:
            for row in rows:
                row["image"] = wandb.Image(decoded(row["image"]))
        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({**metric_curves({"kind": "epoch", **record}), "samples": table})

    def finish(self, exit_code):
        """Finishes the run and waits for the upload."""
        self._write_row()
        self._finishing.set()
        # wandb does not report a server that no longer accepts data.
        if self._online and (reason := self._why_not_online()):
            self._send(problem=reason)
        self._run.finish(exit_code=exit_code)

    def _write_row(self):
        row, self._row = self._row, {}
        if row:
            self._run.log(row)

    def _open(self, wandb):
        """Returns the run, and why it is not online if it should be."""
        mode, reason = self._start["mode"], None
        if mode == "auto":
            mode = os.environ.get("WANDB_MODE") or mode
        if mode in ("auto", "online"):
            if not (_api_key(self._settings) or self._settings.identity_token_file):
                reason = "there is no login (wandb login)" if mode == "online" else None
            else:
                reason = self._why_not_online()
                if reason is None:
                    try:
                        return self._init(wandb, "online"), None
                    except Exception as error:
                        url, why = self._settings.base_url, first_line(error)
                        reason = f"cannot create a run at {url} ({why})"
            mode = "offline"
        return self._init(wandb, mode), reason

    def _init(self, wandb, mode):
        return wandb.init(
            mode=mode,
            dir=self._start["directory"],
            config=self._start["config"],
            **{name: self._start[name] for name in _ABOUT},
            settings=wandb.Settings(
                silent=True,
                console="wrap",
                program=self._start["program"],
                init_timeout=_INIT_SECONDS,
                # W&B's system monitor measures the training program instead of this process.
                x_stats_pid=self._start["training_pid"],
                # The URL of a repository may hold a password or a token.
                git_remote_url=git_remote(self._start["program"]),
                git_commit=git_commit(self._start["program"]),
                disable_code=True,
                # Flushed often, so that a killed run can be uploaded almost to its end.
                x_transaction_log_flush_interval=1.0,
            ),
        )

    def _watch(self):
        """Reports a server that stops answering and a login that expires; runs in a thread."""
        while not self._finishing.wait(self._start["watch_seconds"]):
            if not (reason := self._why_not_online()):
                continue
            # One failed request may be an accident; two in a row are a problem.
            if self._finishing.wait(self._start["answer_seconds"]):
                return
            if self._why_not_online():
                self._send(problem=reason)
                return

    def _why_not_online(self):
        return why_not_online(
            self._settings.base_url, _api_key(self._settings), self._start["answer_seconds"]
        )


def why_not_online(base_url: str, api_key: str | None, timeout_seconds: float) -> str | None:
    """Returns why a W&B server does not accept runs; None if it does.

    `api_key` is None for other kinds of login, which are not checked.
    """
    request = urllib.request.Request(
        f"{base_url.rstrip('/')}/graphql",
        data=json.dumps({"query": "query Viewer { viewer { id } }"}).encode(),
        headers={"Content-Type": "application/json"},
    )
    if api_key is not None:
        login = base64.b64encode(f"api:{api_key}".encode()).decode()
        # Not sent to servers that this one redirects to.
        request.add_unredirected_header("Authorization", f"Basic {login}")
    try:
        with urllib.request.urlopen(request, timeout=timeout_seconds) as reply:
            viewer = (json.load(reply).get("data") or {}).get("viewer")
    except urllib.error.HTTPError as error:
        if error.code not in (401, 403):
            return f"{base_url} answers with {error.code}"
        viewer = None
    except (OSError, ValueError, AttributeError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):  # wandb may trust other certificates
            return None
        return f"{base_url} does not answer ({reason})"
    if viewer is None and api_key is not None:
        return f"{base_url} does not accept the API key (wandb login --relogin)"
    return None


def _api_key(settings):
    """Returns the key that wandb uses: from the environment, its settings, or netrc."""
    if settings.api_key:
        return settings.api_key
    try:
        known = netrc.netrc(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))
        login = known.authenticators(settings.base_url.partition("://")[2].split("/")[0])
    except (OSError, netrc.NetrcParseError):
        return None
    return login[2] if login else None
