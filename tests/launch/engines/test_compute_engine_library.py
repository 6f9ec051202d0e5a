"""Google's own library for Compute Engine uses the stand-in as it uses the service."""

import time

import pytest
from google.api_core.exceptions import GoogleAPICallError, NotFound
from google.auth.credentials import AnonymousCredentials
from google.cloud import compute_v1

from kdist.testing.clouds import gcloud
from kdist.testing.clouds.compute_engine import ZONES


@pytest.fixture
def connect(compute_engine):
    """A function that returns a client of the library, given its class."""
    address = compute_engine.environment[gcloud.ENDPOINT].partition("/compute/")[0]

    def connect(client_class):
        transport_class = client_class.get_transport_class("rest")
        transport = transport_class(
            host=address, credentials=AnonymousCredentials(), url_scheme="http"
        )
        return client_class(transport=transport)

    return connect


def _instance(zone):
    script = compute_v1.Items(key="startup-script", value="echo started")
    return compute_v1.Instance(
        name="cats-worker-0",
        machine_type=f"zones/{zone}/machineTypes/n1-standard-8",
        metadata=compute_v1.Metadata(items=[script]),
        scheduling=compute_v1.Scheduling(provisioning_model="SPOT"),
    )


def test_a_vm_is_created_found_preempted_and_deleted(connect, compute_engine):
    client, zone = connect(compute_v1.InstancesClient), ZONES[0]
    client.insert(project="p", zone=zone, instance_resource=_instance(zone))
    vm = client.get(project="p", zone=zone, instance="cats-worker-0")
    assert (vm.status, vm.scheduling.provisioning_model) == ("RUNNING", "SPOT")
    listed = client.aggregated_list(project="p")
    assert [each.name for _, scope in listed for each in scope.instances] == ["cats-worker-0"]
    output = ""
    while "started" not in output:
        output = client.get_serial_port_output(
            project="p", zone=zone, instance="cats-worker-0"
        ).contents
        time.sleep(0.05)
    compute_engine.preempt("cats-worker-0", seconds=60)
    vm = client.get(project="p", zone=zone, instance="cats-worker-0")
    assert vm.status == "STOPPING"
    client.delete(project="p", zone=zone, instance="cats-worker-0")
    with pytest.raises(NotFound, match="cats-worker-0"):
        client.get(project="p", zone=zone, instance="cats-worker-0")


def test_without_capacity_the_operation_says_so(connect, compute_engine):
    zone = ZONES[0]
    compute_engine.without_capacity.add(("n1-standard-8", zone))
    instances = connect(compute_v1.InstancesClient)
    operation = instances.insert(project="p", zone=zone, instance_resource=_instance(zone))
    with pytest.raises(GoogleAPICallError, match="503"):
        operation.result(timeout=10)
    operations = connect(compute_v1.ZoneOperationsClient)
    found = operations.get(project="p", zone=zone, operation=operation.name)
    assert found.error.errors[0].code == "ZONE_RESOURCE_POOL_EXHAUSTED"
    assert compute_engine.vms == {}
