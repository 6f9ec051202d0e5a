"""One replica's step as a pipeline: stages that work on micro-batches at the same time.

All is in one TensorFlow function. Each piece of work, a micro-batch going through a stage forward
or back, waits for the stage's piece before it, as the schedule says; what crosses from stage to
stage is copied to the device that takes it. The gradients of the micro-batches are added up on
the devices of their variables, and the weights are updated once.

A layout that recomputes has a stage forget what it has computed of a micro-batch, and compute it
again before it goes back: with the same seeds and statistics, and without writing them.

Loss, gradients and metrics are those of all rows at once (`kdist.parallel.micro_batches` says how),
but for layers that see micro-batches:

- BatchNorm normalises each micro-batch by itself, and moves its statistics after each, in order;
- Dropout, and all else that is random, draws for each micro-batch, other numbers than it would
  draw for all rows;
- what layers add to the loss (`add_loss`, `activity_regularizer`) is a mean over micro-batches,
  each weighed by its rows: the same where it is a mean over rows, and not where it is a sum;
- so are losses that look at several rows at once, such as Keras's `Dice` and `Tversky`.
"""

import dataclasses

import keras
import tensorflow as tf

from kdist.parallel import recomputation, timeline
from kdist.parallel.micro_batches import MicroBatches
from kdist.parallel.passing import Passed, copied, sum_of
from kdist.parallel.schedule import merged_order
from kdist.parallel.stage_graphs import CutModel, cut
from kdist.training.beside import beside_inputs
from kdist.training.keras_internals import get_keras_mask, set_keras_mask
from kdist.training.step import this_replica


def passes(model, data):
    """Forward and backward pass of one replica's rows, by micro-batches.

    Args:
        model: a `SplitModel` in the scope of a `GroupStrategy` whose layout has stages.
        data: (x, y, sample_weight).

    Returns:
        The loss, the model's outputs, and gradients of what is trainable, of the loss as the
        optimizer scales it.

    Raises:
        ValueError: a sparse or ragged tensor crosses from stage to stage, or a stage takes
            something from a later one.
    """
    cut_model = cut(model, model.places, model.distribute_strategy.layout)
    step = _PipelinedStep(model, cut_model, data)
    step.run()
    return step.loss(), step.predictions(), step.gradients(model.trainable_weights)


class _PipelinedStep:
    """Forward and backward work of all stages on all micro-batches.

    Args:
        model: the model.
        cut_model: its stages.
        data: (x, y, sample_weight).
    """

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
        self._passed: dict[tuple, Passed] = {}  # (stage, micro-batch) -> its last forward pass
        self._arrived: dict[tuple, list] = {}  # (micro-batch, key) -> gradients of what it gave
        self._outputs: list[list] = [[] for _ in self._micro.parts]
        self._losses: list = [None] * layout.micro_batches
        self._sums: dict[int, tf.Tensor] = {}  # of gradients
        self._done: dict[int, list] = {}  # what each stage's piece of work has given last
        self._began: list = []  # what the piece of work waits for that is under way
        self._regularization = None
        recorder = timeline.current()
        self._stamp = recorder.on(this_replica()) if recorder else None

    def run(self):
        """Does all work but the updates."""
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
        """The context in which losses and metrics are computed: at the end of the last stage."""
        return self._strategy.on(self._cut.stages[-1].last_place)

    def loss(self):
        """The loss of the replica's rows; with a value for each row if it is not reduced."""
        with self.at_the_loss():
            if self._losses[0].shape.rank:
                return self._micro.joined(self._losses)
            total = tf.add_n(self._losses)
            if self._regularization is not None:
                total += tf.cast(self._regularization, total.dtype)
            return total

    def gradients(self, variables):
        """Of the loss as the optimizer scales it, one for each of `variables`; None for none."""
        sums = [self._sums.get(id(variable)) for variable in variables]
        if self._stamp is None:
            return sums
        ends = [tensor for done in self._done.values() for tensor in done]
        with tf.control_dependencies(ends), beside_inputs():  # the last time stamps are taken
            return [total if total is None else tf.identity(total) for total in sums]

    def predictions(self):
        """The model's outputs for all rows, as `model(x)` gives them."""
        with self.at_the_loss():
            flat = [self._joined(outputs) for outputs in zip(*self._outputs, strict=True)]
        return self._packed(flat)

    # Forward.

    def _forward(self, work):
        micro, values = self._micro.steps[work.micro_batch], self._values[work.micro_batch]
        places = self._places_taken(work)
        with micro.running(remembers=work in self._repeated) as state:
            taken = self._crossing(work, {key: (values[key], at) for key, at in places.items()})
            passed = self._through(work, taken)
        values.update((key, tensor) for key, (tensor, _) in passed.gives.items())
        if work.stage == self._last:
            self._outputs[work.micro_batch] = passed.outputs
            self._losses[work.micro_batch] = passed.loss
        self._end(work, passed.ends)
        if work in self._repeated:
            recomputation.check_written(state)
            passed = Passed(taken, state=state)  # all else is computed again
        self._passed[work.stage, work.micro_batch] = passed

    def _places_taken(self, work):
        """What a stage takes -> the number of the device that it goes to."""
        stage = self._cut.stages[work.stage]
        if work.stage < self._last:
            return stage.takes
        # What layers of earlier stages have added to the loss, the last stage takes as well.
        added = [key for key in self._values[work.micro_batch] if isinstance(key, tuple)]
        return {**stage.takes, **dict.fromkeys(added, stage.last_place)}

    def _through(self, work, taken):
        """What a stage computes of what it has taken."""
        stage, here, added = self._cut.stages[work.stage], dict(taken), []
        for call in stage.calls:
            given = call(here)
            here.update(zip(call.gives, given, strict=True))
            added += call.added_losses()
        if work.stage == self._last:
            added = [loss for key, loss in taken.items() if isinstance(key, tuple)] + added
            outputs = [here[key] for key in self._cut.outputs]
            return Passed(taken, outputs=outputs, loss=self._loss_of(work, outputs, added))
        gives = {key: (here[key], place) for key, place in stage.gives.items()}
        for index, loss in enumerate(added):
            gives["added", work.stage, index] = loss, stage.last_place
        return Passed(taken, gives)

    def _loss_of(self, work, outputs, added):
        """The loss of a micro-batch, its part of the replica's.

        Args:
            outputs: the model's, flat.
            added: what layers have added to the loss.
        """
        micro = self._micro.steps[work.micro_batch]
        x, y, sample_weight = self._micro.parts[work.micro_batch]
        micro.added_losses = added
        with self.at_the_loss():
            y_pred = self._packed(outputs)
            loss = self._model._compute_loss(x, y, y_pred, sample_weight, training=True)
            return micro.weighed(loss)

    def _forward_again(self, work):
        """A stage's forward pass once more, of the same inputs, seeds and statistics.

        All of it waits for the stage's piece of work before: what does not depend on the inputs,
        such as the masks of dropout, would be there all the time, or be the first pass's own.
        """
        key = work.stage, work.micro_batch
        passed, places = self._passed[key], self._places_taken(work)
        sent = {name: (tensor, places[name]) for name, tensor in passed.taken.items()}
        taken = self._crossing(work, sent)
        with tf.control_dependencies(self._began), beside_inputs():
            state = [(variable, tf.identity(value)) for variable, value in passed.state]
        repeating = self._micro.steps[work.micro_batch].running_again(state)
        with recomputation.checked(), tf.control_dependencies(self._began), repeating:
            self._passed[key] = again = self._through(work, taken)
        if self._stamp:  # else nobody asks for its ends, of which gradients may need none
            self._end(work, again.ends)

    def _crossing(self, work, sent):
        """Copies of what a stage takes, on its devices, once its piece of work before is done.

        Args:
            work: the piece of work that begins.
            sent: {key: (tensor or None, number of the device that it goes to)}.
        """
        taken = {}
        for key, (tensor, place) in sent.items():
            self._check_crosses(key, tensor)
            with self._strategy.on(place), tf.control_dependencies(self._done.get(work.stage, [])):
                taken[key] = copied(tensor)
        self._began = self._done.get(work.stage, [])
        return self._begin(work, taken, sent)

    def _check_crosses(self, key, tensor):
        is_dense = tensor is None or isinstance(tensor, tf.Tensor)
        if not is_dense and not self._is_input(key):
            raise ValueError(
                f"a {type(tensor).__name__} crosses from stage to stage: put the layer that makes "
                "it and those that take it on one stage"
            )

    # Back.

    def _backward(self, work):
        number = work.micro_batch
        passed = self._passed.pop((work.stage, number))
        targets, gradients = self._targets(work, passed)
        crossed = {
            key: tensor
            for key, tensor in passed.taken.items()
            if not self._is_input(key) and (tensor.dtype.is_floating or tensor.dtype.is_complex)
        }
        variables = self._variables[work.stage]
        copies = [self._strategy.local(variable.value) for variable in variables]
        found = [None] * (len(crossed) + len(copies))
        if targets:
            inputs = list(crossed.values())
            found = tf.gradients(targets, inputs + copies, gradients, stop_gradients=inputs)
        with beside_inputs():
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

    def _targets(self, work, passed):
        """What a stage goes back from: (tensors, their gradients), on its devices."""
        number = work.micro_batch
        if work.stage == self._last:
            with self.at_the_loss():
                loss = self._model.optimizer.scale_loss(passed.loss)
            place = self._cut.stages[-1].last_place
            # The loss itself comes along for the time stamp, which cannot be of constants alone.
            taken = self._crossing(work, {"one": (tf.ones_like(loss), place), "at": (loss, place)})
            return [loss], [taken["one"]]
        given = {key: at for key, at in passed.gives.items() if (number, key) in self._arrived}
        sent = {
            (key, index): (gradient, place)
            for key, (_, place) in given.items()
            for index, gradient in enumerate(self._arrived[number, key])
        }
        taken = self._crossing(work, sent)
        gradients = []
        for key, (_, place) in given.items():
            mine = [gradient for (other, _), gradient in taken.items() if other == key]
            with self._strategy.on(place):
                gradients.append(mine[0] if len(mine) == 1 else tf.add_n(mine))
        return [tensor for tensor, _ in given.values()], gradients

    def _regularize(self):
        """Adds the losses of the weights' regularizers and their gradients: once a step."""
        terms = []
        for variable in self._model.trainable_weights:
            if variable.regularizer is None:
                continue
            with beside_inputs():
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
        """The sum of the variable's gradients so far, with this one."""
        before = self._sums.get(id(variable))
        with beside_inputs():
            total = gradient if before is None else sum_of(before, gradient)
        self._sums[id(variable)] = total
        return total

    # Order.

    def _begin(self, work, taken, sent):
        """Notes the time when all that a piece of work takes has arrived; gives what it takes."""
        if self._stamp is None or not any(isinstance(t, tf.Tensor) for t in taken.values()):
            return taken
        stamp = self._stamp(work, False, list(taken.values()))
        self._began = [stamp]
        with tf.control_dependencies([stamp]):
            stamped = {}
            for key, tensor in taken.items():
                with self._strategy.on(sent[key][1]):
                    stamped[key] = copied(tensor)
        return stamped

    def _end(self, work, tensors):
        """The stage's next piece of work waits for these tensors."""
        flat = [t for t in tf.nest.flatten(tensors, expand_composites=True) if t is not None]
        self._done[work.stage] = [self._stamp(work, True, flat)] if self._stamp and flat else flat

    # What the model has.

    def _variables_of(self, stage):
        """The trainable variables of a stage, in the model's order."""
        operations = [call.operation for call in stage.calls]
        layers = [each for each in operations if isinstance(each, keras.layers.Layer)]
        here = {id(variable) for layer in layers for variable in layer.trainable_weights}
        return [variable for variable in self._model.trainable_weights if id(variable) in here]

    def _is_input(self, key):
        return isinstance(key, int) and self._cut.is_input(key)

    def _joined(self, outputs):
        """One output of all micro-batches, with its mask."""
        whole = self._micro.joined(outputs)
        masks = [get_keras_mask(output) for output in outputs]
        if masks[0] is not None:
            set_keras_mask(whole, self._micro.joined(masks))
        return whole

    def _packed(self, flat):
        """Outputs in the structure that the model gives them in."""
        packed = keras.tree.pack_sequence_as(self._cut.graph._outputs_struct, flat)
        is_single = isinstance(packed, list | tuple) and len(packed) == 1
        return packed[0] if is_single else packed
