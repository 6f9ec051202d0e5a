"""HTTP and gRPC protocols of the model server."""
