"""The engine of the model server: versions, batching, and the processes that compute."""
