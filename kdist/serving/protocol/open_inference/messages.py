"""gRPC messages of the Open Inference Protocol, made from the list of their fields.

    messages.ModelInferRequest(model_name="m").SerializeToString()

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/open_inference_grpc.proto

The messages are in a pool of their own: a process that also imports a client of the protocol, such
as Triton's, has the same names in the default pool.
"""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "inference"
SERVICE = f"{_PACKAGE}.GRPCInferenceService"

# Message -> its fields, numbered from 1 in this order. "*" marks a repeated field, and "map:" one
# from strings to values of the type that follows.
_FIELDS = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "bool live",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "bool ready",
    "ModelReadyRequest": "string name, string version",
    "ModelReadyResponse": "bool ready",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "string name, string version, string* extensions",
    "ModelMetadataRequest": "string name, string version",
    "ModelMetadataResponse": "string name, string* versions, string platform, "
    "ModelMetadataResponse.TensorMetadata* inputs, "
    "ModelMetadataResponse.TensorMetadata* outputs, map:string properties",
    "ModelMetadataResponse.TensorMetadata": "string name, string datatype, int64* shape",
    "ModelInferRequest": "string model_name, string model_version, string id, "
    "map:InferParameter parameters, "
    "ModelInferRequest.InferInputTensor* inputs, "
    "ModelInferRequest.InferRequestedOutputTensor* outputs, bytes* raw_input_contents",
    "ModelInferRequest.InferInputTensor": "string name, string datatype, int64* shape, "
    "map:InferParameter parameters, InferTensorContents contents",
    "ModelInferRequest.InferRequestedOutputTensor": "string name, map:InferParameter parameters",
    "ModelInferResponse": "string model_name, string model_version, string id, "
    "map:InferParameter parameters, "
    "ModelInferResponse.InferOutputTensor* outputs, bytes* raw_output_contents",
    "ModelInferResponse.InferOutputTensor": "string name, string datatype, int64* shape, "
    "map:InferParameter parameters, InferTensorContents contents",
    "InferParameter": "bool bool_param, int64 int64_param, string string_param, "
    "double double_param, uint64 uint64_param",
    "InferTensorContents": "bool* bool_contents, int32* int_contents, int64* int64_contents, "
    "uint32* uint_contents, uint64* uint64_contents, float* fp32_contents, "
    "double* fp64_contents, bytes* bytes_contents",
}
_PARAMETER, _CHOICE = "InferParameter", "parameter_choice"
_Field = descriptor_pb2.FieldDescriptorProto


def _add_field(message, path, number, kind, name):
    label = _Field.LABEL_OPTIONAL
    if kind.startswith("map:"):
        entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
        entry.options.map_entry = True
        _add_field(entry, "", 1, "string", "key")
        _add_field(entry, "", 2, kind[4:], "value")
        label, kind = _Field.LABEL_REPEATED, f"{path}.{entry.name}"
    elif kind.endswith("*"):
        label, kind = _Field.LABEL_REPEATED, kind[:-1]
    field = message.field.add(name=name, number=number, label=label)
    if kind[0].isupper():
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        field.type = _Field.Type.Value(f"TYPE_{kind.upper()}")
    if path == _PARAMETER:
        field.oneof_index = 0


def _create_messages():
    file = descriptor_pb2.FileDescriptorProto(
        name="open_inference_grpc.proto", package=_PACKAGE, syntax="proto3"
    )
    made = {}
    for path, fields in _FIELDS.items():
        outer, _, name = path.rpartition(".")
        made[path] = made[outer].nested_type.add() if outer else file.message_type.add()
        made[path].name = name
        for number, text in enumerate(filter(None, fields.split(", ")), start=1):
            _add_field(made[path], path, number, *text.split())
    made[_PARAMETER].oneof_decl.add(name=_CHOICE)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        path: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{path}"))
        for path in _FIELDS
        if "." not in path
    }


_MESSAGES = _create_messages()
ServerLiveRequest = _MESSAGES["ServerLiveRequest"]
ServerLiveResponse = _MESSAGES["ServerLiveResponse"]
ServerReadyRequest = _MESSAGES["ServerReadyRequest"]
ServerReadyResponse = _MESSAGES["ServerReadyResponse"]
ModelReadyRequest = _MESSAGES["ModelReadyRequest"]
ModelReadyResponse = _MESSAGES["ModelReadyResponse"]
ServerMetadataRequest = _MESSAGES["ServerMetadataRequest"]
ServerMetadataResponse = _MESSAGES["ServerMetadataResponse"]
ModelMetadataRequest = _MESSAGES["ModelMetadataRequest"]
ModelMetadataResponse = _MESSAGES["ModelMetadataResponse"]
ModelInferRequest = _MESSAGES["ModelInferRequest"]
ModelInferResponse = _MESSAGES["ModelInferResponse"]
