"""Models split over devices by layers, branches, pipeline stages, or weights.

Imports TensorFlow only with the first name that needs it.

Example:
    layout = kdist.Layout(pipeline=2)
    with kdist.create_strategy(layout).scope():
        model = kdist.parallel.split(plain, kdist.parallel.suggest(plain, layout))
        model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(train)
"""

from kdist.public_names import import_on_demand

# Public name -> the module that defines it.
_PUBLIC = {
    "Mesh": "jax_mesh",
    "SplitModel": "split_model",
    "Suggestion": "search",
    "column": "placement",
    "device": "placement",
    "heads": "placement",
    "measure_costs": "search.costs",
    "merged": "split_model",
    "read_placement": "placement.files",
    "resolve_placement": "placement.files",
    "row": "placement",
    "split": "split_model",
    "stage": "placement",
    "suggest": "search",
    "write_placement": "placement.files",
}
# Deprecated name -> the public name that replaces it.
_DEPRECATED = {
    "joined": "merged",
    "plan_as_said": "resolve_placement",
    "read_plan": "read_placement",
    "write_plan": "write_placement",
}

__all__ = sorted(_PUBLIC)

# `split_as` is deprecated, and warns when it is called.
__getattr__ = import_on_demand(__name__, {**_PUBLIC, "split_as": "placement.files"}, _DEPRECATED)


def __dir__():
    return __all__
