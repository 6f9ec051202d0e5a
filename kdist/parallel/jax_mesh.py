"""The layouts and plans of split models on Keras's JAX backend: data and tensor parallelism.

    os.environ["KERAS_BACKEND"] = "jax"                       # before Keras is imported
    mesh = kdist.parallel.Mesh(kdist.Layout(data=2, tensor=2))
    model = kdist.models.transformer(input_shape=(128,), num_classes=2)
    mesh.place(model, {".*_ffn_up": column(), ".*_ffn_down": row(), ".*_attention": heads()})
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(train.dataset(), steps_per_epoch=train.steps_per_epoch)

JAX computes as though there were one device, and divides operations by what they are given (GSPMD:
Xu et al., 2021, arXiv:2105.04663); so all is as it is on one device, BatchNorm over the whole batch
included. The model stays Keras's own, in files as well.
"""

import contextlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence

import keras

from kdist.backend import check_is_jax
from kdist.layout import Layout
from kdist.parallel.split_plan import (
    Device,
    SplitPlan,
    divisions_by_name,
    operations_by_name,
    places_by_name,
)
from kdist.parallel.tensor.checks import check_division
from kdist.parallel.variable_patterns import on_layers
from kdist.parallel.whole_weights import divided_axes
from kdist.training.keras_internals import lay_out

# The axes of the mesh, named as the degrees of a layout.
_AXES = ("data", "tensor")


class Mesh(keras.distribution.ModelParallel):
    """A `keras.distribution` of a layout: devices of which each row is a replica.

    To be made before JAX computes anything: on a machine without GPUs it has JAX divide the CPU
    into as many devices as the layout has.

    Args:
        layout: `data` and `tensor`; on a mesh there are no stages and branches.
        devices: their names, such as `["cpu:0", "cpu:1"]`; by default the first ones.

    Attributes:
        layout: the same.

    Raises:
        ValueError: a layout with stages or branches, or another number of devices than it has.
        RuntimeError: Keras has another backend, or JAX has started with too few devices.
    """

    def __init__(self, layout: Layout, devices: Sequence[str] | None = None):
        check_is_jax("kdist.parallel.Mesh")
        _check_layout(layout)
        names = _first_devices(layout) if devices is None else list(devices)
        if len(names) != layout.devices:
            raise ValueError(
                f"{layout} is for {layout.devices} devices and there are {len(names)} "
                f"({', '.join(names)}): name as many, or take another layout"
            )
        self.layout = layout
        mesh = keras.distribution.DeviceMesh((layout.data, layout.tensor), _AXES, names)
        super().__init__(layout_map=keras.distribution.LayoutMap(mesh), batch_dim_name="data")

    def place(self, model: keras.Model, plan: SplitPlan | None = None) -> keras.Model:
        """Puts the variables of `model` on the mesh, which Keras uses from then on.

        What the plan divides has a part on each device of a row, everything else is on each
        device whole. Slots are where their variables are, also those of a model that is compiled
        and has trained. `keras.distribution.set_distribution(None)` is the way back.

        Args:
            model: built. It is not copied.
            plan: a name's pattern -> `column()`, `row()` or `heads()`, or axes of variables, as
                `kdist.parallel.split` takes them. By default nothing is divided.

        Returns:
            `model`.

        Raises:
            ValueError: the model is not built, or a plan that does not fit it or the layout.
            TypeError: the plan says a device; a layer that cannot be divided so; or layers are
                divided, and the model is neither functional nor Sequential.
        """
        if not model.built:
            raise ValueError(f"{model.name!r} is not built: call it on a batch, or `build` it")
        axes = self._divided_axes(model, plan or {})
        _check_batch_norm(model)
        keras.distribution.set_distribution(self)
        for variable in {id(v): v for v in (*model.variables, *model.metrics_variables)}.values():
            self._lay_out(variable, axes.get(id(variable)))
        if getattr(model, "optimizer", None) is not None:
            self._place_optimizer(model.optimizer, model.trainable_variables)
        # They would keep to the devices that they were compiled for.
        model.train_function = model.test_function = model.predict_function = None
        return model

    def get_data_layout(self, data_shape):
        """Keras's: rows are divided over the replicas.

        Raises:
            ValueError: there are not equally many for each.
        """
        if data_shape[0] % self.layout.data:
            raise ValueError(
                f"a batch of {data_shape[0]} rows, which data={self.layout.data} does not divide: "
                "take a multiple, or leave the last batch of an epoch out (drop_remainder=True)"
            )
        return super().get_data_layout(data_shape)

    def _divided_axes(self, model, plan):
        """id of a variable -> the axis that is divided."""
        if self.layout.tensor == 1 and not plan:
            return {}
        _check_no_devices(plan)
        plan = on_layers(model, plan)
        places_by_name(model, plan, self.layout)
        divisions = divisions_by_name(model, plan, self.layout)
        layers, axes = operations_by_name(model), {}
        for name, how in divisions.items():
            check_division(name, layers[name], how, self.layout.tensor)
            axes.update({id(variable): axis for variable, axis in divided_axes(layers[name], how)})
        return axes

    def _lay_out(self, variable, divided_axis):
        axes = [None] * len(variable.shape)
        if divided_axis is not None:
            axes[divided_axis] = "tensor"
        lay_out(variable, keras.distribution.TensorLayout(axes, self.device_mesh))

    def _place_optimizer(self, optimizer, trainable_variables):
        """Lays its variables out as they are in one that is made now."""
        twin = type(optimizer).from_config(optimizer.get_config())
        if optimizer.built:
            twin.build(trainable_variables)
        for variable, new in zip(optimizer.variables, twin.variables, strict=True):
            lay_out(variable, new._layout)


def bytes_per_device(variables: Iterable) -> Mapping[str, int]:
    """Bytes that each device holds of some variables: `{"cpu:0": 1024, "cpu:1": 1024}`.

    Args:
        variables: `keras.Variable`s on the JAX backend, such as `model.weights`.
    """
    held: dict[str, int] = {}
    for variable in variables:
        for shard in variable.value.addressable_shards:
            name = f"{shard.device.platform}:{shard.device.id}"
            held[name] = held.get(name, 0) + math.prod(shard.data.shape) * shard.data.dtype.itemsize
    return held


def _check_layout(layout):
    said = [f"{name}={n}" for name in ("pipeline", "branch") if (n := getattr(layout, name)) > 1]
    if said:
        raise ValueError(
            f"{' and '.join(said)}: on a JAX mesh all devices of a replica compute each layer, and "
            "there are data and tensor alone; leave the others out, or take Keras's TensorFlow "
            "backend and kdist.create_strategy (--backend=tensorflow)"
        )


def _check_no_devices(plan):
    for pattern, where in plan.items():
        if isinstance(where, Device):
            raise TypeError(
                f"{pattern!r} goes to device {where.number}: on a JAX mesh no layer is on one "
                "device alone; say column(), row() or heads(), or leave it out"
            )


def _check_batch_norm(model):
    for layer in model._flatten_layers():
        if getattr(layer, "synchronized", False):
            raise ValueError(
                f"{layer.name!r} has synchronized=True, which Keras does not take on JAX, where "
                "statistics are over the whole batch in any case: build the model without it, or "
                "set `layer.synchronized = False`"
            )


def _first_devices(layout):
    """The names of the first devices, which are made where the CPU has to be divided."""
    import jax  # takes a second, and is not there without the extra

    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        wanted = max(layout.devices, jax.config.jax_num_cpu_devices)
        with contextlib.suppress(RuntimeError):  # JAX has started; it may have enough
            jax.config.update("jax_num_cpu_devices", wanted)
    names = keras.distribution.list_devices()
    if len(names) >= layout.devices:
        return names[: layout.devices]
    if names[0].startswith("cpu"):
        raise RuntimeError(
            f"{layout} is for {layout.devices} devices, and JAX has already started with "
            f"{len(names)} CPU device{'s' * (len(names) > 1)}: make the Mesh before anything else "
            "runs on JAX (in a notebook: restart the kernel), and leave "
            "--xla_force_host_platform_device_count out of XLA_FLAGS"
        )
    raise ValueError(
        f"{layout} is for {layout.devices} devices, and JAX sees {len(names)} "
        f"({', '.join(names)}): take a smaller layout, or JAX_PLATFORMS=cpu for CPU devices"
    )
