"""Settings of a served model adapt to its load, or stay fixed."""

import asyncio
import shutil

import keras
import numpy as np
import pytest

from kdist.serving.core.settings import BatchSettings, Objective
from kdist.serving.engine.models import Models
from kdist.serving.exporting.export import export


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "line"
    export(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]), directory, examples={})
    return directory


def run(directory, scenario, **options):
    async def main():
        models = Models({"line": directory}, **options)
        await models.refresh()
        try:
            await scenario(models)
        finally:
            await models.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def row(value=1.0):
    return {"inputs": np.full([1, 3], value, "float32")}


def test_what_comes_is_told_to_the_tuner(directory):
    async def scenario(models):
        version = models.model("line").version()
        await asyncio.gather(*(version.predict(row(n)) for n in range(20)))
        totals = version.tuner.load.totals()
        assert totals.answered == totals.rows == 20
        assert 1 <= totals.batches <= 20
        assert version.tuner.load.in_flight == 0
        assert version.batcher().settings == BatchSettings(0.0, 8)

    run(directory, scenario, settings=BatchSettings(0.002, 8), objective=Objective())


def test_a_refused_request_leaves_nothing_behind(directory):
    async def scenario(models):
        version = models.model("line").version()
        with pytest.raises(ValueError, match="rows"):
            await version.predict({"inputs": np.zeros([0, 3], "float32")})
        with pytest.raises(ValueError, match="Matrix size-incompatible"):
            await version.predict({"inputs": np.zeros([1, 4], "float32")})
        await version.predict(row())
        assert version.tuner.load.in_flight == 0

    run(directory, scenario, objective=Objective())


def test_settings_without_an_objective_stay(directory):
    async def scenario(models):
        version = models.model("line").version()
        await version.predict(row())
        assert version.tuner is None
        assert version.batcher().settings == BatchSettings(0.001, 4)

    run(directory, scenario, settings=BatchSettings(0.001, 4))


def test_settings_are_shown_while_the_version_is_served(directory):
    async def scenario(models):
        shown = models.metrics.text().decode()
        assert 'kdist_serving_batch_timeout_seconds{model="line",version="1"} 0.001' in shown
        assert 'kdist_serving_max_batch{model="line",version="1"} 4.0' in shown

    run(directory, scenario, settings=BatchSettings(0.001, 4))


def test_of_a_version_that_has_gone_nothing_is_kept(directory, tmp_path):
    served = tmp_path / "line"
    shutil.copytree(directory, served)

    async def scenario(models):
        await models.model("line").version().predict(row())
        shutil.copytree(served / "1", served / "2")
        await models.refresh()
        shown = models.metrics.text().decode()
        assert 'version="2"' in shown
        assert 'version="1"' not in shown
        assert models.model("line").states == {1: ("END", ""), 2: ("AVAILABLE", "")}
        shutil.rmtree(served / "1")
        await models.refresh()
        assert models.model("line").states == {2: ("AVAILABLE", "")}

    run(served, scenario)
