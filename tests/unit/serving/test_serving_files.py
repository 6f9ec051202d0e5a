"""Configuration files of TensorFlow Serving, parsed as it parses them."""

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf import wrappers_pb2 as wrappers
from tensorflow_serving.config import model_server_config_pb2

from kdist.serving.core.model_directory import all_needed_devices, write_serving_files
from kdist.serving.core.settings import BatchSettings, padded_sizes

# tensorflow_serving/servables/tensorflow/session_bundle_config.proto, which the package of its
# protocol leaves out: name -> (number, type).
BATCHING_PARAMETERS = {
    "max_batch_size": (1, "Int64Value"),
    "batch_timeout_micros": (2, "Int64Value"),
    "max_enqueued_batches": (3, "Int64Value"),
    "num_batch_threads": (4, "Int64Value"),
    "thread_pool_name": (5, "StringValue"),
}


def batching_parameters():
    """Returns the class of the message `BatchingParameters`."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="session_bundle_config.proto", package="tensorflow.serving", syntax="proto3"
    )
    file.dependency.append(wrappers.DESCRIPTOR.name)
    message = file.message_type.add(name="BatchingParameters")
    for name, (number, kind) in BATCHING_PARAMETERS.items():
        field = message.field.add(name=name, number=number, type=kinds.TYPE_MESSAGE)
        field.label, field.type_name = kinds.LABEL_OPTIONAL, f".google.protobuf.{kind}"
    sizes = message.field.add(name="allowed_batch_sizes", number=6, type=kinds.TYPE_INT64)
    sizes.label = kinds.LABEL_REPEATED
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(wrappers.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    found = pool.FindMessageTypeByName("tensorflow.serving.BatchingParameters")
    return message_factory.GetMessageClass(found)


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [(1, [1]), (2, [1, 2]), (24, [1, 2, 4, 8, 16, 24]), (32, [1, 2, 4, 8, 16, 32])],
)
def test_the_last_allowed_size_is_the_largest(largest, sizes, tmp_path):
    assert padded_sizes(largest) == sizes
    write_serving_files(tmp_path, BatchSettings(0.0015, largest))
    text = (tmp_path / "batching_parameters.txt").read_text()
    parsed = text_format.Parse(text, batching_parameters()())
    assert list(parsed.allowed_batch_sizes) == sizes
    assert parsed.max_batch_size.value == largest
    assert parsed.batch_timeout_micros.value == 1500
    assert parsed.num_batch_threads.value == 1
    assert parsed.max_enqueued_batches.value == 1000


def test_the_model_is_where_it_is_mounted(tmp_path):
    directory = tmp_path / 'my "fashion"'
    directory.mkdir()
    write_serving_files(directory, BatchSettings())
    text = (directory / "models.config").read_text()
    parsed = text_format.Parse(text, model_server_config_pb2.ModelServerConfig())
    (config,) = parsed.model_config_list.config
    assert config.name == 'my "fashion"'
    assert config.base_path == '/models/my "fashion"'
    assert config.model_platform == "tensorflow"
    assert len(list(directory.iterdir())) == 2  # no drafts


def test_devices_are_those_of_the_versions_that_are_served(tmp_path):
    for number, metadata in (
        (1, '{"devices": ["GPU:7"]}'),
        (2, '{"devices": ["CPU:0", "CPU:1"]}'),
        (3, "{}"),
        (10, '{"devices": '),
    ):
        version = tmp_path / str(number)
        (version / "assets.extra").mkdir(parents=True)
        (version / "saved_model.pb").touch()
        (version / "assets.extra" / "kdist.json").write_text(metadata)
    assert all_needed_devices([tmp_path], newest=1) == []
    assert all_needed_devices([tmp_path], newest=3) == ["CPU:0", "CPU:1"]
    assert all_needed_devices([tmp_path, tmp_path], newest=9) == ["CPU:0", "CPU:1", "GPU:7"]
