"""Machines are read as they are meant, or refused with what is wrong."""

import pytest

from kdist.planner.tables.gpus import find_gpu
from kdist.planner.tables.machines import Machine, known_links, known_machines, read_machines

HEAD = "machine,gpu,gpus_per_node,link,peer_to_peer,node_gbit_s,cpu_cores,note\n"


@pytest.fixture
def table(tmp_path):
    def write(rows, head=HEAD):
        path = tmp_path / "machines.csv"
        path.write_text(head + rows)
        return path

    return write


def test_own_machines_match_their_table():
    machines = known_machines()
    v100 = machines["dgx1-v100-32gb"]
    assert (v100.ring_bytes_per_s, v100.pcie_bytes_per_s) == (125e9, 12e9)
    assert v100.network_bytes_per_s == 50e9
    assert v100.nvlink
    assert v100.cube_mesh
    assert not machines["dgxa100-80gb"].cube_mesh
    assert machines["dgxa100-80gb"].pcie_generation == 4
    assert not machines["epyc-8xrtx3090"].direct
    assert machines["gce-n1-8xk80"].paired_dies
    assert [name for name, machine in machines.items() if machine.vcpus] == [
        "gce-n1-8xk80",
        "gce-n1-standard-4-4xk80",
        "ec2-p3.16xlarge",
        "alibaba-gn6e-8xv100",
        "ec2-p2.8xlarge",
        "azure-nd40s-v2",
    ]


def test_all_gpus_of_own_machines_are_known():
    assert all(find_gpu(machine.gpu) for machine in known_machines().values())


def test_links_are_slower_than_published():
    assert all(link.ring_gb_s >= link.pcie_gb_s for link in known_links().values())
    assert known_links()["pcie4"].ring_gb_s < 31.5


def test_missing_values_have_defaults():
    machine = Machine("mine", "A100 40GB SXM", gpus_per_node=4, link="pcie4")
    assert machine.cores == 20
    assert machine.network_bytes_per_s == 1.25e9
    assert machine.direct


@pytest.mark.parametrize(
    ("gpu", "link", "stated", "direct"),
    [
        ("RTX 3090", "pcie4", None, False),
        ("RTX 4090 24GB", "pcie4", None, False),
        ("RTX 3090", "nvlink3", None, True),
        ("RTX 3090", "pcie4", True, True),
        ("T4", "pcie3", None, True),
        ("T4", "pcie3", False, False),
    ],
)
def test_geforce_cards_have_no_peer_to_peer_over_pcie(gpu, link, stated, direct):
    assert Machine("mine", gpu, 4, link, stated).direct is direct


def test_a_user_s_machines_are_read(table):
    path = table('mine,T4,4,pcie3,no,25,32,"a vCPU each"\nother,L4,1,unknown,unknown,,,\n')
    machines = read_machines(path)
    assert machines["mine"] == Machine("mine", "T4", 4, "pcie3", False, 25.0, 32.0, "a vCPU each")
    assert machines["mine"].vcpus
    assert machines["other"] == Machine("other", "L4", 1, "unknown", None, None, None, "")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("x,T4,4,,no,25,32,\n", "link is empty"),
        (
            "x,T4,4,pcie3,perhaps,25,32,\n",
            "peer_to_peer is 'perhaps', but must be yes, no, or unknown",
        ),
        ("x,T4,0,pcie3,no,25,32,\n", "gpus_per_node is 0"),
        ("x,T4,4,pcie3,no,nan,32,\n", "node_gbit_s is nan"),
        ("x,T4,4,pcie3,no,25,-1,\n", "cpu_cores is -1"),
        ("x,T4,1,pcie3,no,,,\nx,T4,2,pcie3,no,,,\n", "two machines named 'x'"),
    ],
)
def test_a_wrong_table_is_refused(table, row, says):
    with pytest.raises(ValueError, match="machines.csv") as raised:
        read_machines(table(row))
    assert says in str(raised.value)


def test_a_table_without_a_column_is_refused(table):
    with pytest.raises(ValueError, match="lacks the columns peer_to_peer, node_gbit_s"):
        read_machines(table("x,T4,4,pcie3\n", "machine,gpu,gpus_per_node,link\n"))


def test_an_unknown_link_is_refused_when_it_is_used(table):
    machines = read_machines(table("x,T4,1,usb,no,,,\ny,T4,1,pcie3,no,,,\n"))
    assert machines["y"].ring_bytes_per_s == 12e9
    for rate in ("kind_of_link", "ring_bytes_per_s", "pcie_bytes_per_s", "pcie_generation"):
        with pytest.raises(ValueError, match="link of the machine 'x' is 'usb'.*pcie3, .*nvlink4"):
            getattr(machines["x"], rate)


@pytest.mark.parametrize(
    ("gpu", "link", "row"),
    [
        ("T4", "PCIe3", "pcie3"),
        ("T4", "pcie", "pcie3"),
        ("T4", "PCIe Gen4 x16", "pcie4"),
        ("T4", "PCIe 4.0", "pcie4"),
        ("T4", "pcie 16 lanes", "pcie3"),
        ("K80", "pcie2", "pcie2"),
        ("H100 PCIe", "pcie5", "pcie5"),
        ("P100", "nvlink", "nvlink1"),
        ("V100 SXM2 16GB", "NVLink hybrid cube-mesh", "nvlink2"),
        ("v100", "nvswitch", "nvlink2"),
        ("A100_SXM4_40GB", "NVSwitch", "nvlink3"),
        ("H100 80GB SXM", "nvlink nvswitch", "nvlink4"),
        ("H200", "NVLink", "nvlink4"),
        ("H200", "nvlink3", "nvlink3"),
        ("B200", "NVLink 5.0", "nvlink5"),
        ("T4", "Unknown", "unknown"),
    ],
)
def test_links_are_known_however_they_are_written(gpu, link, row):
    machine = Machine("mine", gpu, 8, link)
    assert machine.kind_of_link is known_links()[row]
    assert machine.nvlink is row.startswith("nvlink")


@pytest.mark.parametrize(
    ("gpu", "link"), [("T4", "nvlink"), ("A100", "nvlink9"), ("MI250", "xgmi"), ("T4", "pcieish")]
)
def test_a_link_of_no_known_generation_is_refused(gpu, link):
    with pytest.raises(ValueError, match=f"is '{link}', which is unknown for a {gpu}"):
        _ = Machine("mine", gpu, 8, link).kind_of_link


def test_a_cube_mesh_is_known_however_it_is_written():
    assert Machine("mine", "V100", 8, "NVLink2 Hybrid Cube-Mesh").cube_mesh


@pytest.mark.parametrize("link", ["nvlink3 bridges between pairs", "NVLink bridge", "NVL pairs"])
def test_bridges_link_two_gpus_and_no_more(link):
    two, four = (Machine("mine", "A100", gpus, link) for gpus in (2, 4))
    assert two.nvlink
    assert two.ring_bytes_per_s == 230e9
    assert not four.nvlink
    assert four.ring_bytes_per_s == four.pcie_bytes_per_s == 24e9


def test_bridged_geforce_cards_have_no_peer_to_peer_beyond_pairs():
    assert Machine("mine", "RTX_3090", 2, "nvlink3 bridge").direct
    assert not Machine("mine", "RTX_3090", 4, "nvlink3 bridge").direct


@pytest.mark.parametrize(
    "name",
    [
        "a2-highgpu-8g",
        "g2-standard-4",
        "n1-highmem-8",
        "Standard_ND96asr_v4",
        "aws_p4d",
        "gce_n1",
        "p3dn.24xlarge",
        "g5",
        "google_cloud",
    ],
)
def test_clouds_are_recognized_by_name(name):
    assert Machine(name, "T4", 4, "pcie3", cpu_cores=16).vcpus


@pytest.mark.parametrize("name", ["dgx-a2", "p100-node", "rack-p3-7", "standard-node", "n1"])
def test_other_names_are_not_clouds(name):
    assert not Machine(name, "T4", 4, "pcie3", cpu_cores=16).vcpus


def test_default_cores_are_physical():
    machine = Machine("aws p3", "V100", 8, "nvlink2")
    assert (machine.cores, machine.vcpus) == (40, False)


def test_a_column_tells_whether_cores_are_vcpus(table):
    rows = "gce-1,T4,4,pcie3,no,,16,,no\nmine,T4,4,pcie3,no,,16,,yes\n"
    rows += "gce-2,T4,4,pcie3,no,,16,,\nbare,T4,4,pcie3,no,,,,yes\n"
    machines = read_machines(table(rows, HEAD.strip() + ",vcpus\n"))
    assert [machine.vcpus for machine in machines.values()] == [False, True, True, False]
    with pytest.raises(ValueError, match="vcpus is 'some', but must be yes, no, or unknown"):
        read_machines(table("x,T4,4,pcie3,no,,,,some\n", HEAD.strip() + ",vcpus\n"))
