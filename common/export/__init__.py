"""From weights to ONNX and TensorRT, through the parity gate."""
