import pytest

import kdist
from kdist.testing import python


def test_importing_kdist_imports_neither_tensorflow_nor_keras():
    loaded = python(
        "import json, sys, kdist; kdist.Batch(2); print(json.dumps(sorted(sys.modules)))"
    )
    assert not {"tensorflow", "keras", "tensorflow_datasets", "wandb"} & set(loaded)


def test_importing_telemetry_imports_neither_tensorflow_nor_wandb():
    loaded = python("import json, sys, kdist.telemetry; print(json.dumps(sorted(sys.modules)))")
    assert not {"tensorflow", "keras", "wandb"} & set(loaded)


def test_every_public_name_is_there():
    for name in kdist.__all__:
        assert getattr(kdist, name) is not None
    assert set(dir(kdist)) == set(kdist.__all__)


def test_an_unknown_name_says_what_there_is():
    with pytest.raises(AttributeError, match="no attribute 'fit'; it has .*'create_strategy'"):
        kdist.fit  # noqa: B018
