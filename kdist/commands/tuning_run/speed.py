"""The fastest settings of a training: `kdist tune` without a question of its own.

Knobs that change at most rounding and dropout masks are searched by default, the others if
`--search` names them. A knob whose flag is given keeps its value, unless `--search` names it.
"""

import collections
import os
import statistics

from absl import flags

from kdist import program
from kdist.commands.tuning_run.batch import learning_rate_scaling
from kdist.commands.tuning_run.trials import TrialPool, given_flags, memory_limits
from kdist.hardware import count_cores, find_gpus
from kdist.tuning.settings import FLAG_TYPES, Tuned, this_machine
from kdist.tuning.speed import TIME_OVER, Knob, MeasurementError, SpeedSearch

FLAGS = flags.FLAGS
_TURN_SECONDS = 0.5
# No step group takes longer than this: it would need the time of many turns, and save little.
_MAX_GROUP_SECONDS = 2.0
# Time that candidates may need for their first steps, even in a shorter search.
_MIN_WAIT_SECONDS = 60.0
_ROUNDING = "float rounding"
# Name of a knob -> its flag, and what it changes in the result of the training.
KNOBS = {
    "steps_per_execution": ("steps_per_execution", "nothing; callbacks run once per group"),
    "jit_compile": ("jit_compile", f"{_ROUNDING}; dropout"),
    "reduction": ("reduction", _ROUNDING),
    "precision": ("precision", "precision of the computation"),
    "batch": ("local_batch_size", "batch, so the learning rate"),
    "devices": ("num_devices", f"{_ROUNDING}; rows that BatchNorm sees; dropout"),
    "accumulate": ("accumulate", f"{_ROUNDING}; rows that BatchNorm sees; dropout"),
    "intra_op_threads": ("intra_op_threads", _ROUNDING),
    "parallel_calls": ("parallel_calls", "nothing"),
}
DEFAULT_KNOBS = (
    *("steps_per_execution", "jit_compile", "reduction", "intra_op_threads", "parallel_calls"),
)
# Knobs whose settings are values of their flags.
_OWN_VALUES = (
    *("steps_per_execution", "jit_compile", "precision", "intra_op_threads", "parallel_calls"),
)
_GROUPS, _BATCHES, _MICRO_STEPS = ("32", "8"), (4, 2, 8), (1, 2, 4)


def find_settings():
    """Searches fast settings, prints all that was measured, and writes --output.

    Raises:
        ValueError: there is no knob to search.
        RuntimeError: the training of the flags fails.
    """
    limit, process_limit = memory_limits()
    minutes = FLAGS.minutes
    with TrialPool(limit, on_gpus=process_limit > limit) as pool:
        training = TrainingWithKnobs(pool)
        knobs, useless = training.knobs()
        for name, reason in useless.items():
            print(f"not searched: {name}, as {reason}")
        if not knobs:
            raise ValueError(
                "there is nothing to search, as knobs are given or of no use here; leave some "
                f"flags out, or name knobs by --search: {', '.join(KNOBS)}"
            )
        pool.max_wait_seconds = min(pool.max_wait_seconds, max(60 * minutes, _MIN_WAIT_SECONDS))
        print(f"searching {', '.join(knob.name for knob in knobs)} for {minutes:g} minutes")
        search = SpeedSearch(knobs, training.examples_per_second, 60 * minutes, _print_progress)
        result = search.run()
    _print_table(result, knobs)
    changed = training.flags(result.settings)
    # The settings are fast for this batch, so the file has it, also if it is that of the default.
    settings = {
        name: FLAGS[name].value
        for name in FLAG_TYPES
        if FLAGS[name].present or name == "local_batch_size"
    } | changed
    _print_advice(result, changed)
    if FLAGS.output:
        rate, replicas = training.measured(result.settings)
        facts = FLAGS.model, this_machine(), replicas, rate
        Tuned(settings, result.gain, result.interval, *facts).save(FLAGS.output)
        print(f"written to {FLAGS.output}, for kdist train --tuned={FLAGS.output}")


class TrainingWithKnobs:
    """The training of the flags, whose knobs can be set and whose speed can be measured."""

    def __init__(self, pool):
        self._pool = pool
        arguments = tuple(given_flags("minutes"))
        turn, facts = pool.turn(arguments, _TURN_SECONDS)
        self._step_seconds = turn.step_seconds
        self._replicas, self._examples = facts["replicas"], facts["examples"]
        self._in_memory = facts["in_memory"]
        self._measured = collections.defaultdict(list)
        self._global = FLAGS.local_batch_size * self._replicas * FLAGS.accumulate

    def knobs(self):
        """Returns the knobs to search, and why others are of no use here.

        Returns:
            The knobs that have other values than the present one, and a dictionary from the names
            of knobs to reasons.
        """
        whole = not FLAGS.layout and not FLAGS.shard  # replicas with whole models
        is_uncompiled = FLAGS.layout or FLAGS.shard == "weights"
        gpus = find_gpus(os.environ)
        is_mirrored = whole and FLAGS.strategy in ("auto", "mirrored")
        # Local SGD with another number of replicas is another training.
        devices = is_mirrored and not gpus and not FLAGS.devices and not FLAGS.local_steps
        reductions = ("hierarchical_copy:0", "hierarchical_copy", *(["nccl"] if gpus else []))
        precisions = ("mixed_bfloat16", *(["mixed_float16"] if gpus else []), "float32")
        present = {
            "steps_per_execution": FLAGS.steps_per_execution,
            "jit_compile": FLAGS.jit_compile,
            "reduction": FLAGS.reduction,
            "precision": FLAGS.precision,
            "batch": 1,
            "devices": self._replicas,
            "accumulate": FLAGS.accumulate,
            "intra_op_threads": FLAGS.intra_op_threads,
            "parallel_calls": FLAGS.parallel_calls,
        }
        cores = count_cores(os.environ)
        useless = {}
        if gpus:
            useless["intra_op_threads"] = "GPUs compute"
        elif cores <= self._replicas:
            useless["intra_op_threads"] = "each replica has one core"
        if self._in_memory:
            useless["parallel_calls"] = "the examples are in memory"
        elif cores == 1:
            useless["parallel_calls"] = "there is one core"
        values = {
            "steps_per_execution": [
                n for n in _GROUPS if int(n) * self._step_seconds <= _MAX_GROUP_SECONDS
            ],
            "jit_compile": () if is_uncompiled else (not FLAGS.jit_compile,),
            "reduction": reductions if is_mirrored and self._replicas > 1 else (),
            "precision": precisions,
            "batch": [n for n in _BATCHES if n * self._global <= self._examples],
            "devices": [n for n in _device_numbers() if not self._global % n] if devices else (),
            "accumulate": [n for n in _MICRO_STEPS if not self._global % (n * self._replicas)],
            # By default an operation uses all cores, of which one replica has only its share.
            "intra_op_threads": sorted({cores // self._replicas, 1} - {cores}, reverse=True),
            "parallel_calls": sorted({cores, (cores + 1) // 2}, reverse=True),
        }
        knobs, reasons = [], {}
        for name, (flag, changes) in KNOBS.items():
            is_default = name in DEFAULT_KNOBS and not FLAGS[flag].present
            if not is_default and name not in FLAGS.search:
                continue
            others = tuple(value for value in values[name] if value != present[name])
            if name in useless:
                reasons[name] = useless[name]
            elif others:
                knobs.append(Knob(name, present[name], others, changes))
        return knobs, reasons

    def examples_per_second(self, settings):
        """Returns the measured speed of the training with some settings."""
        changed = self.flags(settings)
        given = given_flags("minutes", *changed)
        arguments = (*given, *(f"--{name}={value}" for name, value in changed.items()))
        turn, facts = self._pool.turn(arguments, _TURN_SECONDS)
        sizes = {name: FLAGS[name].value for name in ("local_batch_size", "accumulate")} | changed
        examples = sizes["local_batch_size"] * sizes["accumulate"] * facts["replicas"]
        rate = examples / turn.step_seconds
        self._measured[frozenset(settings.items())].append((rate, facts["replicas"]))
        return rate

    def measured(self, settings):
        """Returns (median of the measured examples per second, replicas) with some settings."""
        rates, replicas = zip(*self._measured[frozenset(settings.items())], strict=True)
        return statistics.median(rates), replicas[0]

    def flags(self, settings):
        """Returns the values of the flags that differ from the present ones.

        The global batch stays the same, unless the batch is a setting.

        Raises:
            MeasurementError: the global batch cannot be divided among replicas and micro-steps.
        """
        changed = {name: settings[name] for name in _OWN_VALUES if name in settings}
        if "reduction" in settings:
            name, _, packs = settings["reduction"].partition(":")
            changed |= {"reduction": name, **({"num_packs": int(packs)} if packs else {})}
        if settings.keys().isdisjoint(("batch", "devices", "accumulate")):
            return changed
        devices = settings.get("devices", self._replicas)
        accumulate = settings.get("accumulate", FLAGS.accumulate)
        total = self._global * settings.get("batch", 1)
        local, rest = divmod(total, devices * accumulate)
        if rest or not local:
            raise MeasurementError(
                f"a global batch of {total} has no equal parts for {devices} × {accumulate}"
            )
        changed["local_batch_size"] = local
        if "devices" in settings:
            changed["num_devices"] = devices
        if "accumulate" in settings:
            changed["accumulate"] = accumulate
        if "batch" in settings:
            changed |= learning_rate_scaling(self._global)
        return changed


def _device_numbers():
    """Returns the numbers of logical CPU devices for which each has at least one core."""
    cores = count_cores(os.environ)
    return [2**power for power in range(cores.bit_length()) if 2**power <= cores]


def _settings_text(settings):
    return " ".join(f"{name}={value}" for name, value in settings.items()) or "present settings"


def _ratio_text(candidate):
    if candidate.failure:
        return candidate.failure
    low_and_high = candidate.interval
    bounds = f" ({low_and_high[0]:.2f} to {low_and_high[1]:.2f})" if low_and_high else ""
    pairs = len(candidate.ratios)
    return f"{candidate.ratio:.2f} ×{bounds}, {pairs} pair{'s' * (pairs > 1)}"


def _print_progress(candidate):
    print(f"  {_settings_text(candidate.settings)}: {_ratio_text(candidate)}", flush=True)


def _print_table(result, knobs):
    """Prints a row for everything that was tried, and what it changes."""
    changes = {knob.name: knob.changes for knob in knobs}
    rows = [("setting", "speed", "changes"), ("present settings", "1.00 ×", "nothing")]
    for candidate in result.candidates:
        names = dict.fromkeys(changes[name] for name in candidate.settings)
        rows.append((_settings_text(candidate.settings), _ratio_text(candidate), "; ".join(names)))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    print()
    for setting, speed, words in rows:
        print(f"{setting:{widths[0]}}  {speed:{widths[1]}}  {words}")


def _print_advice(result, changed):
    """Prints the gain, and the command that trains with the settings."""
    if not result.settings:
        print("\nno setting is faster for certain; the present ones stay")
        if any(candidate.failure == TIME_OVER for candidate in result.candidates):
            print("the time was over before all were measured; use more --minutes")
        return
    low, high = result.interval
    print(
        f"\nfastest: {_settings_text(result.settings)}\n"
        f"gain: {result.gain:.2f} ×, with 95 % confidence from {low:.2f} to {high:.2f}, measured "
        "again after the choice"
    )
    texts = [f"--{name}={value}" for name, value in changed.items()]
    print(f"  {program.command('train', *given_flags(*changed, 'minutes'), *texts)}")
