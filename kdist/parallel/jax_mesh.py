"""Layouts and placements on Keras's JAX backend: data and tensor parallelism.

JAX computes as if there were one device, and divides operations according to their inputs (GSPMD:
Xu et al., 2021, arXiv:2105.04663). Results are therefore those of one device; `BatchNormalization`,
for example, normalizes over the whole batch. The model remains a Keras model, in files as well.
"""

import contextlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence

import keras

from kdist.compat.keras import check_is_jax, set_layout
from kdist.layout import Layout
from kdist.parallel.placement import (
    Device,
    Placement,
    divisions_by_name,
    layer_placement,
    operations_by_name,
    places_by_name,
)
from kdist.parallel.tensor.divisibility import check_division, divided_axes
from kdist.public_names import renamed_argument

# The axes of the mesh, named like the degrees of a layout.
_AXES = ("data", "tensor")


class Mesh(keras.distribution.ModelParallel):
    """A `keras.distribution` for a layout: a mesh of devices in which each row is a replica.

    Create it before JAX computes anything. On a machine without GPUs it makes JAX divide the CPU
    into as many devices as the layout has.

    Args:
        layout: a `kdist.Layout` with `data` and `tensor`. A mesh has no stages or branches.
        devices: names of the devices, such as `["cpu:0", "cpu:1"]`. Defaults to the first devices.

    Attributes:
        layout: the layout.

    Raises:
        ValueError: if the layout has stages or branches, or the number of devices differs.
        RuntimeError: if Keras has another backend, or JAX has started with too few devices.

    Example:
        os.environ["KERAS_BACKEND"] = "jax"                       # before Keras is imported
        mesh = kdist.parallel.Mesh(kdist.Layout(data=2, tensor=2))
        model = kdist.models.transformer(input_shape=(128,), num_classes=2)
        mesh.place(model, {".*_ffn_up": column(), ".*_ffn_down": row(), ".*_attention": heads()})
        model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(train.dataset(), steps_per_epoch=train.steps_per_epoch)
    """

    def __init__(self, layout: Layout, devices: Sequence[str] | None = None):
        check_is_jax("kdist.parallel.Mesh")
        layout.check_mesh()
        names = _first_devices(layout) if devices is None else list(devices)
        if len(names) != layout.devices:
            raise ValueError(
                f"{layout} is for {layout.devices} devices and there are {len(names)} "
                f"({', '.join(names)}). Pass {layout.devices} devices, or use another layout"
            )
        self.layout = layout
        mesh = keras.distribution.DeviceMesh((layout.data, layout.tensor), _AXES, names)
        super().__init__(layout_map=keras.distribution.LayoutMap(mesh), batch_dim_name="data")

    @renamed_argument("plan", "placement")
    def place(self, model: keras.Model, placement: Placement | None = None) -> keras.Model:
        """Puts the variables of `model` on the mesh, and makes Keras use the mesh from now on.

        Each device of a row holds a part of each divided variable. All other variables are whole on
        every device. Slots are placed like their variables, even if the model is already compiled
        and trained. `keras.distribution.set_distribution(None)` undoes this.

        Args:
            model: built model. It is not copied.
            placement: pattern -> `column()`, `row()` or `heads()`, or axes of variables, as for
                `kdist.parallel.split`. By default nothing is divided.

        Returns:
            `model`.

        Raises:
            ValueError: if the model is not built, or the placement does not fit it or the layout.
            TypeError: if the placement names a device, a layer cannot be divided in this way, or
                layers are divided and the model is neither functional nor Sequential.
        """
        if not model.built:
            raise ValueError(f"{model.name!r} is not built. Call it on a batch, or `build` it")
        axes = self._divided_axes(model, placement or {})
        _check_batch_norm(model)
        keras.distribution.set_distribution(self)
        for variable in {id(v): v for v in (*model.variables, *model.metrics_variables)}.values():
            self._lay_out(variable, axes.get(id(variable)))
        if getattr(model, "optimizer", None) is not None:
            self._place_optimizer(model.optimizer, model.trainable_variables)
        # These were compiled for the previous devices.
        model.train_function = model.test_function = model.predict_function = None
        return model

    def get_data_layout(self, data_shape):
        """Returns Keras's layout of a batch: rows are divided over the replicas.

        Raises:
            ValueError: if the rows cannot be divided equally.
        """
        if data_shape[0] % self.layout.data:
            raise ValueError(
                f"a batch of {data_shape[0]} rows, which data={self.layout.data} does not divide. "
                "Use a multiple, or drop the last batch of an epoch (drop_remainder=True)"
            )
        return super().get_data_layout(data_shape)

    def _divided_axes(self, model, placement):
        """Returns {id of a variable: the axis that is divided}."""
        if self.layout.tensor == 1 and not placement:
            return {}
        _check_no_devices(placement)
        placement = layer_placement(model, placement)
        places_by_name(model, placement, self.layout)
        divisions = divisions_by_name(model, placement, self.layout)
        layers, axes = operations_by_name(model), {}
        for name, how in divisions.items():
            check_division(name, layers[name], how, self.layout.tensor)
            axes.update({id(variable): axis for variable, axis in divided_axes(layers[name], how)})
        return axes

    def _lay_out(self, variable, divided_axis):
        axes = [None] * len(variable.shape)
        if divided_axis is not None:
            axes[divided_axis] = "tensor"
        set_layout(variable, keras.distribution.TensorLayout(axes, self.device_mesh))

    def _place_optimizer(self, optimizer, trainable_variables):
        """Lays out an optimizer's variables like those of a new optimizer."""
        twin = type(optimizer).from_config(optimizer.get_config())
        if optimizer.built:
            twin.build(trainable_variables)
        for variable, new in zip(optimizer.variables, twin.variables, strict=True):
            set_layout(variable, new._layout)


def bytes_per_device(variables: Iterable) -> Mapping[str, int]:
    """Returns the bytes of JAX variables on each device: `{"cpu:0": 1024, "cpu:1": 1024}`."""
    held: dict[str, int] = {}
    for variable in variables:
        for shard in variable.value.addressable_shards:
            name = f"{shard.device.platform}:{shard.device.id}"
            held[name] = held.get(name, 0) + math.prod(shard.data.shape) * shard.data.dtype.itemsize
    return held


def _check_no_devices(placement):
    for pattern, where in placement.items():
        if isinstance(where, Device):
            raise TypeError(
                f"{pattern!r} is placed on device {where.number}, but on a JAX mesh no layer is on "
                "one device alone. Use column(), row() or heads(), or remove the pattern"
            )


def _check_batch_norm(model):
    for layer in model._flatten_layers():
        if getattr(layer, "synchronized", False):
            raise ValueError(
                f"{layer.name!r} has synchronized=True, which Keras does not support on JAX. "
                "Statistics cover the whole batch there anyway. Build the model without it, or "
                "set `layer.synchronized = False`"
            )


def _first_devices(layout):
    """Returns the names of the first devices; divides the CPU if there are no others."""
    import jax  # optional dependency, slow to import

    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        wanted = max(layout.devices, jax.config.jax_num_cpu_devices)
        with contextlib.suppress(RuntimeError):  # JAX has started, maybe with enough devices
            jax.config.update("jax_num_cpu_devices", wanted)
    names = keras.distribution.list_devices()
    if len(names) >= layout.devices:
        return names[: layout.devices]
    if names[0].startswith("cpu"):
        raise RuntimeError(
            f"{layout} is for {layout.devices} devices, and JAX has already started with "
            f"{len(names)} CPU device{'s' * (len(names) > 1)}. Create the Mesh before anything "
            "else runs on JAX (in a notebook: restart the kernel), and remove "
            "--xla_force_host_platform_device_count from XLA_FLAGS"
        )
    raise ValueError(
        f"{layout} is for {layout.devices} devices, and JAX finds {len(names)} "
        f"({', '.join(names)}). Use a smaller layout, or JAX_PLATFORMS=cpu for CPU devices"
    )
