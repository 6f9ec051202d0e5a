"""Compares the runs of a search: the best one, parallel coordinates, importance of parameters.

found = find_search(runs)
text, plot = search_text(found), search_plot(found)

The group `search` of a run's configuration has its parameters and its result, as
`kdist.tuning.optuna` writes them. For other runs, the parameters are the settings that differ.
"""

import dataclasses
import html
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kdist.report.plots import COLORS, Plot
from kdist.report.records import number
from kdist.report.runs import Run
from kdist.report.tables import NO_SETTINGS, percent, settings_of, shown, table

# Fewer runs than this without the group `search` are a comparison, not a search.
_MIN_RUNS = 4
# Results of runs without the group `search`; the first that any run has counts.
_RESULTS = {
    "test_accuracy": "maximize",
    "val_accuracy": "maximize",
    "test_loss": "minimize",
    "val_loss": "minimize",
    "loss": "minimize",
}
_MAX_PARAMETERS = 12
# Importance: groups of a numeric parameter, runs that it needs, and permutations for chance.
_MAX_GROUPS, _MIN_RESULTS, _PERMUTATIONS = 4, 8, 200
# Numbers are placed on a logarithmic axis if they span at least this ratio.
_LOGARITHMIC_FROM = 50.0
_MAX_LABELS, _MAX_LETTERS = 6, 12
_ROW_PIXELS = 72
_BEST = "#D55E00"


@dataclasses.dataclass(frozen=True)
class Search:
    """Parameters and results of the runs of a search.

    `results` is the objective of each run that completed, else None. `importance` and `chance` are
    by parameter, see `importance_of`; None if too few runs completed.
    """

    runs: Sequence[Run]
    parameters: Mapping[str, Sequence[Any]]  # name -> its value in each run
    objective: str
    maximizes: bool
    results: Sequence[float | None]
    states: Sequence[str]
    importance: Mapping[str, tuple[float, float]] | None

    @property
    def best(self) -> int | None:
        """Place of the run with the best result; None if no run completed."""
        known = [(result, place) for place, result in enumerate(self.results) if result is not None]
        choose = max if self.maximizes else min
        return choose(known, key=lambda pair: pair[0], default=(None, None))[1]


def find_search(runs: Sequence[Run]) -> Search | None:
    """Returns the search that the runs belong to; None if they are no search."""
    groups = [_group(run) for run in runs]
    if any(groups):
        own = [each.get("parameters") for each in groups]
        settings = [each if isinstance(each, dict) else {} for each in own]
    elif len(runs) < _MIN_RUNS:
        return None
    else:
        settings = settings_of(runs)
    names = dict.fromkeys(name for each in settings for name in each if name not in NO_SETTINGS)
    columns = {name: [each.get(name) for each in settings] for name in names}
    parameters = {
        name: values
        for name, values in columns.items()
        if len(set(map(shown, values))) > 1 and all(map(_is_scalar, values))
    }
    objective, maximizes, results = _results(runs, groups)
    if not parameters or objective is None:
        return None
    importance = importance_of(parameters, results)
    if importance:
        order = sorted(parameters, key=lambda name: -importance[name][0])
        parameters = {name: parameters[name] for name in order[:_MAX_PARAMETERS]}
    else:
        parameters = dict(list(parameters.items())[:_MAX_PARAMETERS])
    states = [
        shown(group.get("state")) if group else "complete" if run.finished else "not finished"
        for run, group in zip(runs, groups, strict=True)
    ]
    return Search(runs, parameters, objective, maximizes, results, states, importance)


def _group(run):
    group = run.config.get("search")
    return group if isinstance(group, dict) else {}


def _is_scalar(value):
    return value is None or isinstance(value, str | bool) or number(value) is not None


def _results(runs, groups):
    """Returns the name of the objective, whether it is maximized, and the result of each run."""
    first = next((each for each in groups if isinstance(each.get("objective"), str)), None)
    if first:
        results = [
            number(group.get("value")) if group.get("state") == "complete" else None
            for group in groups
        ]
        return first["objective"], first.get("direction") == "maximize", results
    for name, direction in _RESULTS.items():
        results = [run.figure(name) for run in runs]
        if any(result is not None for result in results):
            return name, direction == "maximize", results
    return None, False, []


def importance_of(
    parameters: Mapping[str, Sequence[Any]], results: Sequence[float | None]
) -> dict[str, tuple[float, float]] | None:
    """Returns by parameter how much of the results it explains alone, and how much by chance.

    The measure is the squared correlation ratio of the ranks of the results, adjusted for the
    number of groups (Kelley's epsilon squared): the part of their variance that lies between groups
    of runs with similar values. Numbers form up to four groups of about equal size, other values
    one group each. It finds effects that rise and fall, and none that only act together. The second
    number is exceeded by 5 % of 200 random permutations of the results.

    Args:
        parameters: values by name, one for each run.
        results: result of each run; None for those that are left out.

    Returns:
        The two numbers, from 0 to 1, by name; None if fewer than eight runs have a result.
    """
    known = [place for place, result in enumerate(results) if result is not None]
    if len(known) < _MIN_RESULTS:
        return None
    ranks = _ranks([results[place] for place in known])
    random = np.random.default_rng(0)
    permuted = [random.permutation(ranks) for _ in range(_PERMUTATIONS)]
    found = {}
    for name, values in parameters.items():
        groups = _groups([values[place] for place in known])
        by_chance = [_explained(groups, each) for each in permuted]
        found[name] = _explained(groups, ranks), float(np.quantile(by_chance, 0.95))
    return found


def _ranks(values):
    """Returns ranks from 0; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]


def _groups(values):
    """Returns the group of each value: numbers by size, other values by equality."""
    if all(number(value) is not None for value in values):
        distinct = np.unique(values)
        if len(distinct) <= _MAX_GROUPS:
            return np.searchsorted(distinct, values)
        return (_ranks(values) * _MAX_GROUPS / len(values)).astype(int)
    return np.unique([shown(value) for value in values], return_inverse=True)[1]


def _explained(groups, ranks):
    count, used = len(ranks), np.unique(groups)
    total = float(((ranks - ranks.mean()) ** 2).sum())
    if not total or len(used) in (1, count):
        return 0.0
    within = sum(
        float(((ranks[groups == group] - ranks[groups == group].mean()) ** 2).sum())
        for group in used
    )
    return max(0.0, 1 - within / (count - len(used)) * (count - 1) / total)


def search_text(search: Search) -> str:
    """Returns the best run, and a table of the parameters, as HTML."""
    counts = {state: list(search.states).count(state) for state in dict.fromkeys(search.states)}
    trials = ", ".join(f"{count} {state}" for state, count in counts.items())
    direction = "highest" if search.maximizes else "lowest"
    text = f"{len(search.runs)} runs ({trials})."
    best = search.best
    if best is not None:
        value = shown(search.results[best])
        text += (
            f" Best: {search.runs[best].name}, with the {direction} {search.objective}, {value}."
        )
    headings = ["Parameter", *(["Best run"] if best is not None else []), "Values"]
    rows = []
    for name, values in search.parameters.items():
        row = [name, _values_in_words(values)]
        if best is not None:
            row.insert(1, shown(values[best]))
        if search.importance:
            row += map(percent, search.importance[name])
        rows.append(row)
    if search.importance:
        headings += ["Importance", "Reached by chance"]
        note = (
            "Importance is the part of the variance of the results’ ranks that a parameter "
            f"explains alone (adjusted correlation ratio, over up to {_MAX_GROUPS} groups of "
            "similar values), among complete runs. In 5 % of random orders of the results it "
            "exceeds the last column: a parameter below it may have no effect. Effects of several "
            "parameters together are not seen, and a search that favors good values blurs all."
        )
    else:
        note = f"Importance needs at least {_MIN_RESULTS} complete runs."
    return (
        f"<p>{html.escape(text)}</p>\n{table('Parameters', headings, rows)}\n"
        f"<p>{html.escape(note)}</p>\n"
        "<p>The line of the best run is thick. The better a run, the stronger its line; runs that "
        "did not complete are dotted.</p>"
    )


def _values_in_words(values):
    known = [value for value in values if value is not None]
    if all(number(value) is not None for value in known):
        return f"{_short(min(known))} to {_short(max(known))}"
    return ", ".join(dict.fromkeys(map(shown, known)))


def _short(value):
    return f"{value:.3g}" if isinstance(value, float) else shown(value)


def search_plot(search: Search) -> Plot:
    """Returns parallel coordinates: a row for each parameter and the objective, a line per run.

    The rows are horizontal, so that their labels have room on narrow screens too.
    """
    sign = "right" if search.maximizes else "left"
    plot = Plot("Parallel coordinates", "parameters and result of each run", has_legend=False)
    columns = {**search.parameters, f"{search.objective} (best on the {sign})": search.results}
    rows = len(columns)
    positions, annotations = [], []
    for place, (name, values) in enumerate(columns.items()):
        height = rows - 1 - place
        position, labels = _axis(values)
        positions.append(position)
        common = {"y": height, "showarrow": False, "yanchor": "bottom"}
        annotations.append(
            {**common, "x": 0, "xanchor": "left", "yshift": 3, "text": f"<b>{_escaped(name)}</b>"}
        )
        for at, text in labels:
            anchor = "left" if at < 0.01 else "right" if at > 0.99 else "center"
            label = {"x": at, "xanchor": anchor, "yanchor": "top", "yshift": -3}
            annotations.append({**common, **label, "text": _escaped(text)})
    order = _worst_first(search)  # so that the best line is on top
    for rank, place in enumerate(order, 1):
        plot.data.append(_line(search, place, rank / len(order), positions, columns))
    plot.layout |= {
        "height": 60 + _ROW_PIXELS * rows,
        "annotations": annotations,
        "margin": {"l": 10, "r": 10, "t": 40, "b": 30},
        "xaxis": {"range": [-0.02, 1.02], "showgrid": False, "showticklabels": False},
        "yaxis": {
            **plot.layout["yaxis"],
            "range": [-0.6, rows - 0.4],
            "tickvals": list(range(rows)),
            "showticklabels": False,
            "fixedrange": True,
        },
    }
    headings = ["Run", *columns, "State"]
    cells = [[shown(values[i]) for values in columns.values()] for i in range(len(search.runs))]
    plot.table = (
        headings,
        [
            [run.name, *row, state]
            for run, row, state in zip(search.runs, cells, search.states, strict=True)
        ],
    )
    return plot


def _escaped(text):
    return html.escape(text, quote=False)  # plotly interprets tags


def _axis(values):
    """Returns the position of each value from 0 to 1, None without one, and pairs with labels."""
    known = [value for value in values if value is not None]
    if known and all(number(value) is not None for value in known):
        low, high = min(known), max(known)
        if low == high:
            return [None if v is None else 0.5 for v in values], [(0.5, _short(low))]
        is_logarithmic = low > 0 and high / low >= _LOGARITHMIC_FROM
        scale = np.log if is_logarithmic else float
        width = scale(high) - scale(low)
        middle = float(np.sqrt(low * high)) if is_logarithmic else (low + high) / 2
        labels = [(0.0, _short(low)), (0.5, f"{middle:.3g}"), (1.0, _short(high))]
        return [
            None if v is None else float((scale(v) - scale(low)) / width) for v in values
        ], labels
    kinds = sorted({shown(value) for value in values if value is not None})
    place = {kind: i / max(len(kinds) - 1, 1) for i, kind in enumerate(kinds)}
    named = kinds if len(kinds) <= _MAX_LABELS else [kinds[0], kinds[-1]]
    labels = [(place[kind], _cut(kind)) for kind in named]
    return [None if v is None else place[shown(v)] for v in values], labels


def _cut(text):
    return text if len(text) <= _MAX_LETTERS else f"{text[: _MAX_LETTERS - 1]}…"


def _worst_first(search):
    sign = 1 if search.maximizes else -1
    results = [float("-inf") if r is None else sign * r for r in search.results]
    # Of equal runs, the first is the best one.
    return sorted(range(len(results)), key=lambda place: (results[place], -place))


def _line(search, place, strength, positions, columns):
    is_best, is_complete = place == search.best, search.results[place] is not None
    name = _escaped(search.runs[place].name)
    texts = [f"{_escaped(key)}: {_escaped(shown(v[place]))}" for key, v in columns.items()]
    if not is_complete:
        texts.append(_escaped(search.states[place]))
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [each[place] for each in positions],
        "y": list(range(len(positions) - 1, -1, -1)),
        "connectgaps": True,  # a parameter that the run does not have
        "name": name,
        "showlegend": False,
        "meta": {"run": search.runs[place].name},
        "line": {
            "color": _BEST if is_best else COLORS[0] if is_complete else "#808080",
            "width": 4 if is_best else 1.5,
            "dash": "solid" if is_complete else "dot",
        },
        "marker": {"size": 9 if is_best else 5},
        "opacity": 1 if is_best else 0.2 + 0.6 * strength if is_complete else 0.5,
        "hovertemplate": "<br>".join(texts) + f"<extra>{name}</extra>",
    }
