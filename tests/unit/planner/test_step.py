"""Time of an update, term by term, against values computed by hand; and its inverse."""

import dataclasses
import itertools

import numpy as np
import pytest

from kdist.planner.cost.constants import known_constants
from kdist.planner.cost.setup import (
    Gradients,
    InputWork,
    Setup,
    make_features,
    stack_features,
)
from kdist.planner.cost.step import infer_micro_step_seconds, step_seconds
from kdist.planner.cost.update import update_seconds
from kdist.planner.report.arithmetic import term_texts
from kdist.planner.tables.machines import Machine, known_machines

CONSTANTS = dataclasses.replace(
    known_constants(),
    nvlink_share=0.8,
    network_share=0.5,
    host_server_share=1.0,
    host_server_overlap=0.5,
    horovod_ms=5.0,
    straggling_per_doubling=0.01,
    paired_dies_slowdown=0.03,
    node_spread=0.05,
    hop_ms=0.01,
    soft_maximum_exponent=2.0,
    in_graph_copy_gb_s=10.0,
)
MACHINES = known_machines()
DGX = MACHINES["dgx1-v100-32gb"]
NO_INPUT = InputWork()
GRADIENTS = Gradients(100e6)
IMAGES = InputWork(0.19, 0.05, decoder="tf.data")


def terms(setup, gradients=GRADIENTS, work=NO_INPUT, micro_step=0.1):
    time = step_seconds(setup, gradients, work, micro_step, CONSTANTS)
    assert sum(term.seconds for term in time.terms) == pytest.approx(time.total)
    return {term.name: term.seconds for term in time.terms}


def total(setup, gradients=GRADIENTS, work=NO_INPUT, micro_step=0.1):
    return step_seconds(setup, gradients, work, micro_step, CONSTANTS).total


def test_one_device_only_computes():
    time = step_seconds(Setup(DGX, 1, 64, accumulate=3), GRADIENTS, NO_INPUT, 0.1, CONSTANTS)
    assert [term.name for term in time.terms] == ["compute"]
    assert time.total == pytest.approx(0.3)
    assert time.examples == 192
    assert time.rate == pytest.approx(640)


def test_ring_in_a_node():
    found = terms(Setup(DGX, 8, 64))
    assert found == {
        "compute": pytest.approx(0.1),
        "straggling": pytest.approx(0.1 * 0.03),
        "exchange in node": pytest.approx(2 * 7 / 8 * 100e6 / 100e9),
        "latency": pytest.approx(14 * 1e-5),
    }


def test_two_neighbors_in_a_cube_mesh_share_a_third_of_their_links():
    two = terms(Setup(DGX, 2, 64))["exchange in node"]
    assert two == pytest.approx(3 * 100e6 / 100e9)


def test_nccl1_ring_crosses_the_sockets():
    constants = dataclasses.replace(CONSTANTS, socket_share=1.0)
    setup = Setup(DGX, 8, 64, nccl1=True)
    time = step_seconds(setup, GRADIENTS, NO_INPUT, 0.1, constants)
    by_name = {term.name: term.seconds for term in time.terms}
    assert by_name["exchange in node"] == pytest.approx(2 * 7 / 8 * 100e6 / 9.6e9)


def test_nodes_wait_for_the_slowest():
    found = terms(Setup(DGX, 32, 64, library="horovod", in_graph=False))
    assert found["exchange between nodes"] == pytest.approx(2 * 3 / 4 * 100e6 / 25e9)
    assert found["coordination"] == pytest.approx(0.005)
    others = sum(seconds for name, seconds in found.items() if name != "slowest node")
    # The largest of four normally distributed numbers: 1.03 expected, 1.05 by Blom's formula.
    assert found["slowest node"] == pytest.approx(0.05 * 1.049 * others, rel=1e-3)


def test_recent_hosts_straggle_less():
    constants = dataclasses.replace(CONSTANTS, recent_core_speed=2.0)
    shares = []
    for name in ("dgx1-v100-32gb", "dgxa100-80gb"):
        setup = Setup(MACHINES[name], 32, 64)
        time = step_seconds(setup, GRADIENTS, NO_INPUT, 0.1, constants)
        shares.append(time.terms[-1].seconds / (time.total - time.terms[-1].seconds))
    assert shares[0] == pytest.approx(2 * shares[1])


def test_computation_hides_variables_on_the_host():
    machine = MACHINES["gce-n1-8xk80"]
    plain = terms(Setup(machine, 8, 64, update="server_on_host"), Gradients(100e6, 0.0))
    whole = 2 * 100e6 * 2 / 12e9 + 14e-5
    exposed = whole - 0.05 * (1 - np.exp(-whole / 0.05))
    assert plain["exchange in node"] + plain["latency"] == pytest.approx(exposed)
    assert plain["straggling"] == pytest.approx(0.1 * (0.03 + 0.03))
    large = terms(Setup(machine, 8, 64, update="server_on_host"), Gradients(100e6, 0.9))
    assert large["exchange in node"] > plain["exchange in node"]


def test_overlap_hides_a_ring():
    shown = terms(Setup(DGX, 8, 64))["exchange in node"]
    hidden = terms(Setup(DGX, 8, 64, overlap=0.7))["exchange in node"]
    assert hidden < 0.1 * shown


def test_local_steps_divide_the_exchange():
    often, rarely = (terms(Setup(DGX, 32, 64, local_steps=n, library="horovod")) for n in (1, 4))
    for name in ("exchange in node", "exchange between nodes", "latency", "coordination"):
        assert rarely[name] == pytest.approx(often[name] / 4)
    assert rarely["compute"] == often["compute"]


def test_large_model_without_peer_to_peer_is_slower_on_more_devices():
    machine = MACHINES["epyc-8xrtx3090"]
    vgg = Gradients(277e6, 0.74, 32, weight_bytes=554e6)
    rates = [
        step_seconds(
            Setup(machine, n, 64, update="server_on_devices"), vgg, NO_INPUT, 0.152, CONSTANTS
        ).rate
        for n in (1, 2, 4, 8)
    ]
    assert rates[1] > rates[0]
    assert rates[3] < rates[2]


def test_parameter_servers_synchronous_and_asynchronous():
    ec2 = MACHINES["ec2-p3.16xlarge"]
    gradients = Gradients(100e6, 0.0)
    network = 25e9 / 8 * 0.5
    alone = dataclasses.replace(ec2, gpus_per_node=1)
    kwargs = {"update": "parameter_servers", "servers": 2}
    waited = terms(Setup(alone, 8, 64, **kwargs, asynchronous=True), gradients, micro_step=10.0)
    assert waited["exchange between nodes"] == pytest.approx(200e6 / network)
    assert "straggling" not in waited
    assert "slowest node" not in waited
    busy = total(Setup(alone, 8, 64, **kwargs, asynchronous=True), gradients, micro_step=1e-3)
    # Gradients come in while weights go out.
    assert busy == pytest.approx(8 * 100e6 / 2 / network, rel=0.01)
    one, two = (
        total(Setup(alone, 8, 64, update="parameter_servers", servers=n), gradients) for n in (1, 2)
    )
    assert two < one


def test_input_overlaps_with_devices():
    setup = Setup(DGX, 8, 64, library="horovod", in_graph=False)
    found = terms(setup, work=IMAGES)
    ready = found["input wait"]
    busy = sum(seconds for name, seconds in found.items() if name != "input wait")
    few = Machine("few", DGX.gpu, 8, DGX.link, True, 400.0, cpu_cores=4)
    slow = terms(dataclasses.replace(setup, machine=few), work=IMAGES)["input wait"]
    assert 0 < ready < busy
    assert slow > 5 * ready


def test_one_process_copies_images_to_all_devices():
    found = terms(Setup(DGX, 8, 64), work=IMAGES)
    assert found["feed"] == pytest.approx(512 * 0.05e6 * 12 / 10e9)
    assert "feed" not in terms(Setup(DGX, 8, 64, in_graph=False), work=IMAGES)
    arrays = terms(Setup(DGX, 8, 64), work=InputWork(host_bytes=1e6))
    assert arrays["feed"] == pytest.approx(512e6 / 10e9)


SETUPS = [
    Setup(machine, devices, batch, accumulate=accumulate, update=update, library=library)
    for machine, devices, batch, accumulate, update, library in itertools.product(
        [MACHINES[n] for n in ("gce-n1-8xk80", "dgx1-p100", "epyc-8xrtx3090", "dgx2h-cluster")],
        (1, 3, 8, 64),
        (1, 256),
        (1, 16),
        ("all_reduce", "server_on_host", "server_on_devices", "parameter_servers"),
        ("horovod", "tf.distribute"),
    )
]


def test_inverse_of_the_step_time():
    missed = []
    for setup in SETUPS:
        for micro_step in (1e-4, 0.3):
            rate = step_seconds(setup, GRADIENTS, IMAGES, micro_step, CONSTANTS).rate
            back = infer_micro_step_seconds(setup, GRADIENTS, IMAGES, rate, CONSTANTS)
            again = step_seconds(setup, GRADIENTS, IMAGES, back, CONSTANTS).rate
            if again != pytest.approx(rate, rel=1e-6):
                missed.append((setup, micro_step, rate, again))
    assert not missed


def test_arrays_of_setups_match_single_setups():
    features = [make_features(setup, GRADIENTS, IMAGES) for setup in SETUPS]
    together = sum(update_seconds(stack_features(features), 0.1, CONSTANTS).values())
    alone = [total(setup, work=IMAGES) for setup in SETUPS]
    np.testing.assert_allclose(together, alone)


def test_more_work_never_takes_less_time():
    for setup in SETUPS:
        base = total(setup, work=IMAGES)
        assert total(setup, work=IMAGES, micro_step=0.11) > base
        assert total(setup, Gradients(120e6), IMAGES) >= base
        more = dataclasses.replace(IMAGES, source_megapixels=1.0)
        assert total(setup, work=more) > base


def test_arithmetic_of_every_term():
    setup = Setup(DGX, 32, 64, library="horovod", accumulate=2, local_steps=4)
    how = term_texts(setup, Gradients(102e6), IMAGES, 0.1, CONSTANTS)
    assert how["compute"] == "2 micro-steps x 100 ms for 64 examples on each device"
    assert how["exchange in node"] == "2 x (8 - 1) / 8 x 102 MB / (100 GB/s), every 4 updates"
    assert "5 ms of Horovod's cycle" in how["coordination"]
    assert "slowest of 4 nodes is 1.05 standard" in how["slowest node"]
    assert "1024 examples" in how["input wait"]


@pytest.mark.parametrize(
    ("update", "work", "name", "says"),
    [
        ("server_on_host", NO_INPUT, "exchange in node", "hides"),
        ("all_reduce", NO_INPUT, "exchange in node", "no peer-to-peer"),
        ("parameter_servers", NO_INPUT, "exchange between nodes", "8 workers on 3 servers"),
        ("all_reduce", InputWork(0, 0.05, decoder="numpy"), "feed", "one Python thread"),
    ],
)
def test_arithmetic_names_the_mechanism(update, work, name, says):
    setup = Setup(MACHINES["epyc-8xrtx3090"], 64, 64, update=update, servers=3)
    assert says in term_texts(setup, GRADIENTS, work, 0.1, CONSTANTS)[name]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"devices": 0}, "devices is a whole number from 1 on, not 0"),
        ({"devices": 2.5}, "devices is a whole number from 1 on, not 2.5"),
        ({"accumulate": float("nan")}, "accumulate is a whole number from 1 on, not nan"),
        ({"local_batch": float("nan")}, "local_batch is above 0, not nan"),
        ({"local_batch": 0}, "local_batch is above 0"),
        ({"accumulate": 0}, "accumulate is a whole number from 1 on, not 0"),
        ({"update": "gossip"}, "update 'gossip' is not known; use one of all_reduce"),
        ({"library": "mpi"}, "library 'mpi'"),
        ({"overlap": 1.5}, "overlap is from 0 to 1"),
        ({"asynchronous": True}, 'asynchronous needs update="parameter_servers"'),
    ],
)
def test_invalid_setup_is_rejected(wrong, says):
    with pytest.raises(ValueError, match=says):
        Setup(**{"machine": DGX, "devices": 8, "local_batch": 64, **wrong})


def test_invalid_sizes_are_rejected():
    for size in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="sizes are numbers from 0 on: Gradients"):
            Gradients(size)
    with pytest.raises(ValueError, match="largest_share"):
        Gradients(1.0, 2.0)
    with pytest.raises(ValueError, match="decoder 'torch'"):
        InputWork(decoder="torch")
    with pytest.raises(ValueError, match="sizes are numbers from 0 on: InputWork"):
        InputWork(source_megapixels=-1)
    with pytest.raises(ValueError, match="threads is 1 or more"):
        InputWork(threads=0)


def test_impossible_rates_are_rejected():
    setup = Setup(MACHINES["gce-n1-standard-4-4xk80"], 4, 32)
    with pytest.raises(ValueError, match="1e\\+06 examples/s is impossible: .* on 4 x K80"):
        infer_micro_step_seconds(setup, GRADIENTS, IMAGES, 1e6, CONSTANTS)
    with pytest.raises(ValueError, match="above 0, not nan"):
        infer_micro_step_seconds(setup, GRADIENTS, IMAGES, float("nan"), CONSTANTS)
    with pytest.raises(ValueError, match="above 0, not 0"):
        step_seconds(setup, GRADIENTS, IMAGES, 0, CONSTANTS)
