"""VMs put together from what clouds sell apart."""

import pytest

from kdist.planner.tables.prices import known_offers, read_offers

HEAD = (
    "cloud,item,kind,region,usd_per_hour_on_demand,usd_per_hour_spot,vcpus,memory_gb,source,as_of\n"
)


@pytest.fixture
def offers():
    return {f"{offer.cloud} {offer.name}": offer for offer in known_offers()}


def test_four_k80s_on_an_n1_standard_4(offers):
    offer = offers["gcp n1-standard-4 + 4 x K80"]
    assert offer.usd_per_hour == pytest.approx(0.19 + 4 * 0.45)
    assert offer.spot_usd_per_hour == pytest.approx(0.04 + 4 * 0.038)
    assert offer.machine.gpus_per_node == 4
    assert offer.machine.cpu_cores == 4
    assert offer.machine.vcpus
    assert offer.machine.paired_dies
    assert offer.machine.node_gbit_s == 10


def test_gpus_with_a_separate_price(offers):
    offer = offers["gcp a2-highgpu-8g (8x A100-40GB)"]
    assert offer.usd_per_hour == pytest.approx(5.91582 + 8 * 2.934)
    assert offer.machine.nvlink


def test_a_price_that_includes_the_gpus(offers):
    offer = offers["aws p3.16xlarge (8x V100)"]
    assert offer.usd_per_hour == 24.48
    assert offer.spot_usd_per_hour is None
    assert offer.machine.cube_mesh
    assert offer.machine.node_gbit_s == 25


def test_no_more_vcpus_than_the_cloud_allows_and_one_for_each_gpu_at_least(offers):
    assert "gcp n1-standard-8 + 1 x K80" in offers
    assert "gcp n1-standard-16 + 1 x K80" not in offers
    assert "gcp n1-standard-4 + 8 x V100" not in offers


def test_every_offer_has_its_date_and_source(offers):
    assert len(offers) > 40
    assert all(offer.as_of and offer.source for offer in offers.values())


def test_a_table_of_the_user(tmp_path):
    path = tmp_path / "prices.csv"
    path.write_text(HEAD + "gcp,mine (4x V100),vm+gpu,here,3.5,,16,,my own,2026\n")
    (offer,) = read_offers(path)
    assert offer.machine.gpus_per_node == 4
    assert offer.usd_per_hour == 3.5


def test_a_table_without_gpus_is_refused_with_an_example(tmp_path):
    path = tmp_path / "prices.csv"
    path.write_text(HEAD + "gcp,mine,vm,here,3.5,,16,,my own,2026\n")
    with pytest.raises(ValueError, match=r"has no VM with GPUs.*\(4x V100\)"):
        read_offers(path)


def test_a_negative_price_is_named_with_its_line(tmp_path):
    path = tmp_path / "prices.csv"
    path.write_text(HEAD + "gcp,mine (4x V100),vm+gpu,here,-3.5,,16,,my own,2026\n")
    with pytest.raises(ValueError, match="line 2: usd_per_hour_on_demand is -3.5"):
        read_offers(path)
