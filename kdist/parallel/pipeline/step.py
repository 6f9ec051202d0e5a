"""One replica's step as a pipeline: stages that process micro-batches at the same time.

The whole step is one TensorFlow function. Each pass of a micro-batch through a stage waits for the
stage's previous pass in the schedule. Tensors that cross stages are copied to the device that needs
them. The gradients of the micro-batches are added on the devices of their variables, and the
weights are updated once.

A layout that recomputes makes a stage discard the activations of a micro-batch and compute them
again before the backward pass, with the same seeds and statistics, and without writing them.

Loss, gradients and metrics are those of all rows at once (see
`kdist.parallel.pipeline.micro_batches`), except for computations that depend on the batch:

- BatchNormalization normalizes each micro-batch separately, and updates its statistics after each.
- Dropout and other random layers draw numbers per micro-batch, which differ from those of a whole
  batch.
- Losses that combine rows, such as Keras's `Dice` and `Tversky`, are means over micro-batches,
  weighted by their rows.
"""

import dataclasses

import keras
import tensorflow as tf

from kdist.compat.keras import attach, attached_to, get_keras_mask, set_keras_mask
from kdist.parallel.pipeline.micro_batches import MicroBatches
from kdist.parallel.pipeline.schedule import merged_order
from kdist.parallel.pipeline.stages import CutModel, StagePass, copy_here, cut
from kdist.parallel.pipeline.timeline import active_timeline
from kdist.training.replica import step as steps
from kdist.training.replica.colocation import colocate_with_inputs
from kdist.training.replica.gradients import sum_of_steps
from kdist.training.scopes import this_replica


def forward_and_backward(model, data):
    """Returns loss, outputs and gradients of one replica's rows, computed by micro-batches.

    The gradients are those of the loss, scaled by the optimizer, with respect to the trainable
    weights of a `SplitModel`, in the scope of a `GroupStrategy` whose layout has stages. The data
    are (x, y, sample_weight). Raises ValueError if a sparse or ragged tensor crosses stages, or a
    stage needs something from a later one.
    """
    cut_model = cut(model, model.places, model.distribute_strategy.layout)
    step = _PipelinedStep(model, cut_model, data)
    step.run()
    return step.loss(), step.predictions(), step.gradients(model.trainable_weights)


class _PipelinedStep:
    """Forward and backward passes of all micro-batches through all stages."""

    def __init__(self, model, cut_model: CutModel, data):
        self._model, self._cut = model, cut_model
        self._last = len(cut_model.stages) - 1
        self._strategy = model.distribute_strategy
        layout = self._strategy.layout
        self._order = merged_order(
            layout.schedule, layout.pipeline, layout.micro_batches, layout.recompute
        )
        self._repeated = {
            dataclasses.replace(work, is_again=False) for work in self._order if work.is_again
        }
        self._micro = MicroBatches(model, data, layout.micro_batches, self.at_the_loss)
        self._variables = [self._variables_of(stage) for stage in cut_model.stages]
        self._values: list[dict] = [
            dict(enumerate(cut_model.graph._standardize_inputs(x))) for x, *_ in self._micro.parts
        ]
        self._passes: dict[tuple, StagePass] = {}  # (stage, micro-batch) -> last forward pass
        self._arrived: dict[tuple, list] = {}  # (micro-batch, key) -> gradients of a sent tensor
        self._outputs: list[list] = [[] for _ in self._micro.parts]
        self._losses: list = [None] * layout.micro_batches
        self._sums: dict[int, tf.Tensor] = {}  # of gradients
        self._done: dict[int, list] = {}  # stage -> results of its last pass
        self._began: list = []  # control inputs of the current pass
        self._regularization = None
        recorder = active_timeline()
        self._stamp = recorder.on(this_replica()) if recorder else None

    def run(self):
        """Runs all passes, without the updates."""
        for work in self._order:
            with tf.name_scope(f"{work.kind}_{work.micro_batch}_on_stage_{work.stage}"):
                if work.is_backward:
                    self._backward(work)
                elif work.is_again:
                    self._forward_again(work)
                else:
                    self._forward(work)
        with tf.name_scope("regularization"):
            self._regularize()

    def at_the_loss(self):
        """Returns the context of losses and metrics: the device at the end of the last stage."""
        return self._strategy.on(self._cut.stages[-1].last_place)

    def loss(self):
        """Returns the loss of the replica's rows; values per row if it is not reduced."""
        with self.at_the_loss():
            if self._losses[0].shape.rank:
                return self._micro.concatenate(self._losses)
            total = tf.add_n(self._losses)
            if self._regularization is not None:
                total += tf.cast(self._regularization, total.dtype)
            return total

    def gradients(self, variables):
        """Returns the gradient of the scaled loss for each variable; None without a gradient."""
        sums = [self._sums.get(id(variable)) for variable in variables]
        if self._stamp is None:
            return sums
        ends = [tensor for done in self._done.values() for tensor in done]
        with tf.control_dependencies(ends), colocate_with_inputs():  # after the last timestamps
            return [total if total is None else tf.identity(total) for total in sums]

    def predictions(self):
        """Returns the model's outputs for all rows, in the structure of `model(x)`."""
        with self.at_the_loss():
            flat = [self._concatenate(outputs) for outputs in zip(*self._outputs, strict=True)]
        return self._packed(flat)

    # Forward.

    def _forward(self, work):
        micro, values = self._micro.steps[work.micro_batch], self._values[work.micro_batch]
        places = self._input_places(work)
        with micro.running(is_repeated=work in self._repeated) as state:
            inputs = self._receive(work, {key: (values[key], at) for key, at in places.items()})
            result = self._compute(work, inputs)
        for key, mask in result.masks.items():
            if mask is not None and get_keras_mask(inputs[key]) is None:
                set_keras_mask(values[key], None)  # detached, as for later layers of one device
        values.update((key, tensor) for key, (tensor, _) in result.sends.items())
        if work.stage == self._last:
            self._outputs[work.micro_batch] = result.outputs
            self._losses[work.micro_batch] = result.loss
        self._end(work, result.ends)
        if work in self._repeated:
            # Everything else is computed again.
            result = StagePass(inputs, result.masks, state=state)
        self._passes[work.stage, work.micro_batch] = result

    def _input_places(self, work):
        """Returns {input of a stage: number of the device that needs it}."""
        stage = self._cut.stages[work.stage]
        if work.stage < self._last:
            return stage.inputs
        # The last stage also receives the losses that layers of earlier stages added.
        added = [key for key in self._values[work.micro_batch] if isinstance(key, tuple)]
        return {**stage.inputs, **dict.fromkeys(added, stage.last_place)}

    def _compute(self, work, inputs):
        """Returns the forward pass of a stage for its inputs."""
        stage, here, added = self._cut.stages[work.stage], dict(inputs), []
        masks = {key: get_keras_mask(tensor) for key, tensor in inputs.items()}
        micro = self._micro.steps[work.micro_batch]
        for call in stage.calls:
            here.update(zip(call.outputs, call(here), strict=True))
            with colocate_with_inputs():
                added += map(micro.as_mean, call.added_losses())
        if work.stage == self._last:
            added = [loss for key, loss in inputs.items() if isinstance(key, tuple)] + added
            outputs = [here[key] for key in self._cut.outputs]
            loss = self._loss_of(work, outputs, added)
            return StagePass(inputs, masks, outputs=outputs, loss=loss)
        sends = {key: (here[key], place) for key, place in stage.outputs.items()}
        for index, loss in enumerate(added):
            sends["added", work.stage, index] = loss, stage.last_place
        return StagePass(inputs, masks, sends)

    def _loss_of(self, work, outputs, added):
        """Returns a micro-batch's part of the replica's loss, with the losses that layers added."""
        micro = self._micro.steps[work.micro_batch]
        x, y, sample_weight = self._micro.parts[work.micro_batch]
        micro.added_losses = added
        with self.at_the_loss():
            y_pred = self._packed(outputs)
            loss = self._model._compute_loss(x, y, y_pred, sample_weight, training=True)
            return micro.scaled(loss)

    def _forward_again(self, work):
        """Repeats a stage's forward pass with the same inputs, seeds and statistics.

        The whole pass waits for the stage's previous pass. Otherwise operations that do not depend
        on the inputs, such as dropout masks, would stay in memory, or be shared with the first
        pass.
        """
        key = work.stage, work.micro_batch
        first, places = self._passes[key], self._input_places(work)
        for name, mask in first.masks.items():
            if mask is not None:
                set_keras_mask(first.inputs[name], mask)
        kept = {name: (tensor, places[name]) for name, tensor in first.inputs.items()}
        inputs = self._receive(work, kept)
        with tf.control_dependencies(self._began), colocate_with_inputs():
            state = [(variable, tf.identity(value)) for variable, value in first.state]
        repeating = self._micro.steps[work.micro_batch].running_again(state)
        with tf.control_dependencies(self._began), repeating:
            self._passes[key] = again = self._compute(work, inputs)
        if self._stamp:  # otherwise nothing waits for its ends, which gradients may not need
            self._end(work, again.ends)

    def _receive(self, work, sent):
        """Returns copies of a stage's inputs on its devices, after the stage's previous pass.

        `sent` is {key: (tensor or None, number of the device that needs it)}.
        """
        inputs = {}
        for key, (tensor, place) in sent.items():
            self._check_is_dense(key, tensor)
            with self._strategy.on(place), tf.control_dependencies(self._done.get(work.stage, [])):
                inputs[key] = copy_here(tensor)
        self._began = self._done.get(work.stage, [])
        return self._begin(work, inputs, sent)

    def _check_is_dense(self, key, tensor):
        is_dense = tensor is None or isinstance(tensor, tf.Tensor)
        if not is_dense and not self._is_input(key):
            raise ValueError(
                f"a {type(tensor).__name__} crosses from stage to stage. Put the layer that "
                "creates it and the layers that use it on one stage"
            )

    # Backward.

    def _backward(self, work):
        number = work.micro_batch
        forward = self._passes.pop((work.stage, number))
        targets, gradients = self._targets(work, forward)
        crossed = {
            key: tensor
            for key, tensor in forward.inputs.items()
            if not self._is_input(key) and (tensor.dtype.is_floating or tensor.dtype.is_complex)
        }
        variables = self._variables[work.stage]
        copies = [self._strategy.local(variable.value) for variable in variables]
        found = [None] * (len(crossed) + len(copies))
        if targets:
            inputs = list(crossed.values())
            found = tf.gradients(targets, inputs + copies, gradients, stop_gradients=inputs)
        with colocate_with_inputs():
            to_earlier = [None if g is None else tf.convert_to_tensor(g) for g in found]
        ends = []
        for key, gradient in zip(crossed, to_earlier, strict=False):
            if gradient is not None:
                self._arrived.setdefault((number, key), []).append(gradient)
                ends.append(gradient)
        for variable, gradient in zip(variables, found[len(crossed) :], strict=True):
            if gradient is not None:
                ends.append(self._add(variable, gradient))
        self._end(work, ends)

    def _targets(self, work, forward):
        """Returns (outputs of a stage, their gradients), on the stage's devices."""
        number = work.micro_batch
        if work.stage == self._last:
            with self.at_the_loss():
                loss = self._model.optimizer.scale_loss(forward.loss)
            place = self._cut.stages[-1].last_place
            # The timestamp needs the loss, since it cannot depend on constants alone.
            sent = {"one": (tf.ones_like(loss), place), "at": (loss, place)}
            return [loss], [self._receive(work, sent)["one"]]
        outputs = {key: at for key, at in forward.sends.items() if (number, key) in self._arrived}
        sent = {
            (key, index): (gradient, place)
            for key, (_, place) in outputs.items()
            for index, gradient in enumerate(self._arrived[number, key])
        }
        received = self._receive(work, sent)
        gradients = []
        for key, (_, place) in outputs.items():
            own = [gradient for (other, _), gradient in received.items() if other == key]
            with self._strategy.on(place):
                gradients.append(own[0] if len(own) == 1 else tf.add_n(own))
        return [tensor for tensor, _ in outputs.values()], gradients

    def _regularize(self):
        """Adds the losses of the weights' regularizers and their gradients, once per step."""
        terms = []
        for variable in self._model.trainable_weights:
            if variable.regularizer is None:
                continue
            with colocate_with_inputs():
                term = self._model._aggregate_additional_loss(variable.regularizer(variable))
                terms.append(term)
                scaled = self._model.optimizer.scale_loss(term)
            copy = self._strategy.local(variable.value)
            (gradient,) = tf.gradients(scaled, [copy])
            self._add(variable, gradient)
        if terms:
            with self.at_the_loss():
                self._regularization = tf.add_n(terms)

    def _add(self, variable, gradient):
        """Returns the sum of the variable's gradients so far, including this one."""
        before = self._sums.get(id(variable))
        with colocate_with_inputs():
            total = gradient if before is None else _sum_gradients(before, gradient)
        self._sums[id(variable)] = total
        return total

    # Order.

    def _begin(self, work, inputs, sent):
        """Returns the inputs of a pass, after a timestamp if times are recorded."""
        if self._stamp is None or not any(isinstance(t, tf.Tensor) for t in inputs.values()):
            return inputs
        stamp = self._stamp(work, False, list(inputs.values()))
        self._began = [stamp]
        with tf.control_dependencies([stamp]):
            stamped = {}
            for key, tensor in inputs.items():
                with self._strategy.on(sent[key][1]):
                    stamped[key] = copy_here(tensor)
        return stamped

    def _end(self, work, tensors):
        """Makes the stage's next pass wait for these tensors."""
        flat = [t for t in tf.nest.flatten(tensors, expand_composites=True) if t is not None]
        self._done[work.stage] = [self._stamp(work, True, flat)] if self._stamp and flat else flat

    # The model.

    def _variables_of(self, stage):
        """Returns the trainable variables of a stage, in the model's order."""
        operations = [call.operation for call in stage.calls]
        layers = [each for each in operations if isinstance(each, keras.layers.Layer)]
        here = {id(variable) for layer in layers for variable in layer.trainable_weights}
        return [variable for variable in self._model.trainable_weights if id(variable) in here]

    def _is_input(self, key):
        return isinstance(key, int) and self._cut.is_input(key)

    def _concatenate(self, outputs):
        """Returns one output of all micro-batches, with its mask and its logits."""
        attached = [attached_to(output) for output in outputs]
        parts = {name: [each[name] for each in attached] for name in attached[0]}
        whole = {name: self._micro.concatenate(values) for name, values in parts.items()}
        return attach(self._micro.concatenate(outputs), **whole)

    def _packed(self, flat):
        """Returns outputs in the model's structure."""
        packed = keras.tree.pack_sequence_as(self._cut.graph._outputs_struct, flat)
        is_single = isinstance(packed, list | tuple) and len(packed) == 1
        return packed[0] if is_single else packed


def _sum_gradients(total, gradient):
    """Returns the sum of two gradients; sparse if both are `IndexedSlices`."""
    if isinstance(total, tf.IndexedSlices) and isinstance(gradient, tf.IndexedSlices):
        return sum_of_steps([steps.current().split_slices(g) for g in (total, gradient)]).joined()
    return tf.convert_to_tensor(total) + tf.convert_to_tensor(gradient)
