"""Batch settings that a child process chooses."""

import asyncio

import pytest

from kdist.serving import Objective, choose, poisson
from kdist.serving.policy.selection import choose_in_subprocess
from tests.unit.serving.test_adapting import CURVE


def test_another_process_chooses_the_same():
    arrivals = poisson(400, 500)
    apart = asyncio.run(choose_in_subprocess(CURVE, arrivals, Objective(), max_batches=[8, 64]))
    assert apart == choose(CURVE, arrivals, Objective(), max_batches=[8, 64])
    with pytest.raises(RuntimeError, match="failed: ValueError: max_batch=65"):
        asyncio.run(choose_in_subprocess(CURVE, arrivals, Objective(), max_batches=[65]))
