"""VMs put together from what clouds sell apart."""

import os

import pytest

from kdist.planner.selection.constraints import price_rejections
from kdist.planner.tables.catalog import read_catalog
from kdist.planner.tables.prices import (
    known_offers,
    prices_text,
    read_offers,
    read_prices,
    write_offers,
)

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


@pytest.mark.parametrize(
    ("head", "row", "message"),
    [
        (HEAD, "gcp,mine (4x V100),vm+gpu,here,nan,,16,,my own,2026", "line 2: .*demand is nan"),
        (HEAD, "gcp,mine (4x V100),vm+gpu,here,3,-1,16,,my own,2026", "line 2: .*spot is -1"),
        (
            f"usd,{HEAD}",
            "1,gcp,mine (4x V100),vm+gpu,here,3,,16,,own,2026",
            "line 1: 'usd' is unkn",
        ),
        (HEAD, "gcp,mine (4x V100),vm+gpu,here,3,,16,,my own,2026,x", "line 2: has more cells"),
    ],
)
def test_invalid_tables_are_rejected_with_the_line(tmp_path, head, row, message):
    path = tmp_path / "prices.csv"
    path.write_text(f"{head}{row}\n")
    with pytest.raises(ValueError, match=message):
        read_offers(path)


def test_one_date_and_the_source_of_prices(tmp_path):
    assert prices_text(known_offers()).startswith("Prices of 2017 or later: vm_prices.csv")
    path = tmp_path / "prices.csv"
    path.write_text(HEAD + "gcp,mine (4x V100),vm+gpu,here,3,,16,,my own,Mar 2026\n")
    assert prices_text(read_offers(path)) == f"Prices of 2026-03: {path}; my own."
    assert prices_text([]) == ""


def test_machines_without_a_price_are_counted(tmp_path):
    path = tmp_path / "prices.csv"
    rows = ("aws,p3.16xlarge (8x V100)", "gcp,mine (4x V100)", "gcp,other (4x Voodoo)")
    path.write_text(HEAD + "".join(f"{row},vm+gpu,here,3,,16,,my own,2026\n" for row in rows))
    absent, unknown = price_rejections(read_prices(path), "prices.csv")
    assert absent.count == len(known_offers()) - 1
    assert "prices.csv has no price of these machines of vm_prices.csv" in absent.reason
    assert (unknown.limit, unknown.count) == ("prices", 1)
    assert "gcp other (4x Voodoo)" in unknown.reason


CATALOG = {
    "v7/aws": "of an older version",
    # Google's GPUs are charged on top; the VM in us-west4 is cheap, but has no GPUs there.
    "v8/gcp": """InstanceType,vCPUs,AcceleratorName,AcceleratorCount,Region,Price,SpotPrice
a2-highgpu-8g,96.0,,,us-central1,6.0,3.0
a2-highgpu-8g,96.0,,,us-west4,4.0,1.0
a2-megagpu-16g,96.0,,,us-central1,9.0,4.0
n1-standard-8,8.0,,,us-central1,0.4,0.1
,,A100,8,us-central1,24.0,8.0
,,T4,1,us-central1,0.35,0.2
,,T4,1,us-central1,0.35,0.1
,,tpu-v6e-1,1,us-central1,2.7,0.5
""",
    "v8/aws": """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,GpuInfo,Price,SpotPrice,Region
a1.xlarge,,,4.0,,0.102,0.0649,us-east-2
p3.8xlarge,V100,4.0,32.0,"{'Gpus': [{'Name': 'V100'}]}",12.24,5.1,us-east-1
p3.8xlarge,V100,4.0,32.0,"{'Gpus': [{'Name': 'V100'}]}",12.24,4.9,us-east-1
p3.8xlarge,V100,4.0,32.0,"{'Gpus': [{'Name': 'V100'}]}",13.22,,eu-west-1
p3.16xlarge,V100,8.0,64.0,"{'Gpus': [{'Name': 'V100'}]}",,9.0,us-east-1
g5.xlarge,A10G,1.0,4.0,"{'Gpus': [{'Name': 'A10G'}]}",1.006,0.45,us-east-1
""",
}


@pytest.fixture
def catalog(tmp_path):
    for name, content in CATALOG.items():
        path = tmp_path / name / "vms.csv"
        path.parent.mkdir(parents=True)
        path.write_text(content)
        os.utime(path, (1.79e9, 1.79e9))
    return tmp_path


def test_the_newest_catalog_of_skypilot_becomes_a_table(catalog):
    found = read_catalog(catalog)
    prices = {each.name: (each.usd_per_hour, each.spot_usd_per_hour) for each in found.offers}
    assert prices == {
        "a2-highgpu-8g (8x A100-40GB)": (30, 11),
        "p3.8xlarge (4x V100)": (12.24, 4.9),
        "n1-standard-8 + 1 x T4": (0.75, pytest.approx(0.2)),
        "n1-standard-8 + 2 x T4": (pytest.approx(1.1), pytest.approx(0.3)),
        "n1-standard-8 + 4 x T4": (pytest.approx(1.8), pytest.approx(0.5)),
    }
    assert found.left_out == ("aws g5.xlarge (1x A10G)", "gcp a2-megagpu-16g (host only)")
    assert prices_text(found.offers) == "Prices of 2026-09-21: SkyPilot catalog v8."

    write_offers(found.offers, catalog / "prices.csv")
    read = read_offers(catalog / "prices.csv")
    assert [(each.machine, each.region) for each in read] == [
        (each.machine, each.region) for each in found.offers
    ]
    assert [each.usd_per_hour for each in read] == pytest.approx(
        [each.usd_per_hour for each in found.offers]
    )


@pytest.mark.parametrize(("cell", "says"), [("nan", "Price is nan"), ("-3", "Price is -3")])
def test_invalid_prices_of_a_catalog_are_rejected_with_the_line(catalog, cell, says):
    path = catalog / "v8" / "aws" / "vms.csv"
    path.write_text(path.read_text().replace("12.24,5.1", f"{cell},5.1"))
    with pytest.raises(ValueError, match=f"line 3: {says}"):
        read_catalog(catalog)


def test_without_a_catalog_the_error_says_where_it_comes_from(tmp_path):
    with pytest.raises(ValueError, match="--catalog"):
        read_catalog(tmp_path)
