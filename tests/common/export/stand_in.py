"""A stand-in for NVIDIA Triton: its gRPC service as far as our client asks, with ONNX Runtime behind it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import onnxruntime
from google.protobuf import text_format  # type: ignore[import-untyped]
from tritonclient.grpc import (  # type: ignore[import-untyped]
    model_config_pb2,
    service_pb2,
    service_pb2_grpc,
)


def configuration(folder: Path) -> Any:
    """Return what Triton itself would read: the published protobuf, which refuses an unknown field."""
    return text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


class StandIn(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Triton's gRPC service as far as the client asks: it runs the repository's own model, by its own configuration."""

    def __init__(self, folder: Path) -> None:
        self.name, self.most, self.calls = folder.name, configuration(folder).max_batch_size, 0
        self.session = onnxruntime.InferenceSession(folder / "1" / "model.onnx", providers=["CPUExecutionProvider"])

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        self.calls += 1
        (given,), (wanted,) = request.inputs, request.outputs
        assert (request.model_name, given.datatype) == (self.name, "FP32")
        assert given.shape[0] <= self.most
        windows = np.frombuffer(request.raw_input_contents[0], np.float32).reshape(given.shape)
        logits = self.session.run([wanted.name], {given.name: windows})[0]
        answer = service_pb2.ModelInferResponse(model_name=self.name, raw_output_contents=[logits.tobytes()])
        answer.outputs.add(name=wanted.name, datatype="FP32", shape=logits.shape)
        return answer


@contextmanager
def serving(folder: Path) -> Iterator[tuple[StandIn, str]]:
    """Serve a model's folder; yields the service and its address."""
    stand_in = StandIn(folder)
    running = grpc.server(ThreadPoolExecutor(1))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(stand_in, running)
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    yield stand_in, f"127.0.0.1:{port}"
    running.stop(None).wait()
