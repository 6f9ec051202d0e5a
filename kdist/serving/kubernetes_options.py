"""What TensorFlow Serving is given in a Kubernetes cluster."""

import dataclasses
import re

# Of the version of TensorFlow that kdist is tested with.
_IMAGE = "tensorflow/serving:2.21.0"

_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_TAGGED = re.compile(
    r"[^\s@:]+(:\d+)?(/[^\s@:]+)*(:(?!latest$)[\w][\w.-]{0,127}|@sha256:[0-9a-f]{64})"
)


@dataclasses.dataclass(frozen=True)
class KubernetesOptions:
    """What `kdist.serving.kubernetes` writes.

    Attributes:
        name: of all objects; by default the model's.
        namespace: by default the one that `kubectl` is set to.
        image: of TensorFlow Serving, with a tag; by default 2.21.0, for GPUs 2.21.0-gpu.
        min_replicas: pods at least.
        max_replicas: pods at most; the load decides.
        cpu_percent: of the requested cores in use, the mean over pods that their number aims at.
        cpu: cores that each pod requests, such as `"2"` or `"500m"`; it may use more.
        memory: that each pod has, such as `"2Gi"`.
        gpus: of NVIDIA, that each pod has.
        storage: size of the claimed volume.
        storage_class: of the claimed volume; by default the cluster's.
        access_mode: of the claimed volume: pods on several machines read it, one writes versions.
        host_path: a directory on each machine that holds what is in the model's directory;
            instead of a claimed volume.
        user: number of the user that the server runs as; not root's.

    Raises:
        ValueError: a value that Kubernetes would refuse, or an image whose tag says no version.
    """

    name: str | None = None
    namespace: str | None = None
    image: str | None = None
    min_replicas: int = 1
    max_replicas: int = 4
    cpu_percent: int = 70
    cpu: str = "1"
    memory: str = "2Gi"
    gpus: int = 0
    storage: str = "10Gi"
    storage_class: str | None = None
    access_mode: str = "ReadWriteMany"
    host_path: str | None = None
    user: int = 1000

    def __post_init__(self):
        self._check_names()
        self._check_numbers()
        if self.access_mode not in _ACCESS_MODES:
            raise ValueError(
                f"access_mode={self.access_mode!r}: there are {', '.join(_ACCESS_MODES)}"
            )
        if self.host_path is not None and not self.host_path.startswith("/"):
            raise ValueError(f"host_path={self.host_path!r}: give a path that begins with /")

    def _check_names(self):
        for field in ("name", "namespace"):
            if (value := getattr(self, field)) is not None:
                check_name(field, value)
        if self.image is not None and not _TAGGED.fullmatch(self.image):
            raise ValueError(
                f"image={self.image!r}: give a tag that says the version, such as {_IMAGE}"
            )

    def _check_numbers(self):
        for field, least in _LEAST.items():
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{field}={value!r}: give a whole number from {least} on")
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas={self.max_replicas}: give at least min_replicas={self.min_replicas}"
            )
        for field in ("cpu", "memory", "storage"):
            value = getattr(self, field)
            if not (_QUANTITY.fullmatch(str(value)) and re.search("[1-9]", str(value))):
                raise ValueError(
                    f"{field}={value!r}: give a quantity, such as '500m', '2' or '4Gi'"
                )

    @property
    def image_or_default(self) -> str:
        """With its tag."""
        return self.image or _IMAGE + ("-gpu" if self.gpus else "")


_ACCESS_MODES = ("ReadWriteMany", "ReadOnlyMany", "ReadWriteOnce")

_LEAST = {"min_replicas": 1, "max_replicas": 1, "cpu_percent": 1, "gpus": 0, "user": 1}


def check_name(field: str, value: str) -> None:
    """Raises ValueError for what is no label by RFC 1035, as a Service's name has to be.

    Such a label is one by RFC 1123 too, which other objects ask for.
    """
    if not _LABEL.fullmatch(value):
        near = re.sub("[^a-z0-9]+", "-", value.lower()).strip("-0123456789")[:63].rstrip("-")
        raise ValueError(
            f"{field}={value!r}: Kubernetes takes up to 63 of a-z, 0-9 and -, with a letter first "
            f"and no - last (RFC 1035): give {field}={near or 'model'!r}, for one"
        )
