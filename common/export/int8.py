"""INT8 by explicit QuantizeLinear and DequantizeLinear nodes in the fp32 ONNX model, calibrated on real windows.

The fp16 model is no better start: ONNX Runtime replaces a scale in half precision below 6.1e-5 by 1, which would
silence any channel of small weights.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from medspeed.common.export.onnx_model import read_metadata
from medspeed.common.files import atomic_path
from medspeed.common.inference.predictors import onnx_errors

# They hold nearly all of the arithmetic and of the bytes, and TensorRT fuses what follows them as it likes.
_QUANTISED = ["Conv", "ConvTranspose"]


def quantise(fp32: Path, int8: Path, windows: torch.Tensor) -> None:
    """Write an fp32 model of `export_onnx` with convolutions in INT8: symmetric scales, per channel for the weights.

    Ranges of activations are the least and the largest value over all windows [N, C, *sides] float32, N >= 1, real ones
    as the network is to see them, which go through one at a time. (Entropy or percentiles need all activations at once,
    and are no better: on networks trained on phantoms the Dice of three scans changes by 0.0007 and 0.0003.) The file
    is written whole or not at all; the same model and windows give the same bytes.

    Source:
        Placement: TensorRT documentation, "Q/DQ Placement Recommendations" (inputs of weighted operators, not outputs).
    """
    import onnx  # here, as torch.onnx: only the end of a run needs them
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    metadata = read_metadata(fp32)
    assert metadata["precision"] == "fp32"
    with onnx_errors(fp32):
        model: Any = onnx.load(str(fp32))
    # The model is simplified, as torch's exporter leaves it; else the quantiser logs an advice.
    onnx.helper.set_model_props(model, {"onnx.quant.pre_process": "onnxruntime.quant"})
    feeds = ({model.graph.input[0].name: window[None].float().cpu().contiguous().numpy()} for window in windows)
    with atomic_path(int8) as part, onnx_errors(fp32):
        quantize_static(
            model,
            part,
            SimpleNamespace(get_next=lambda: next(feeds, None)),  # all that a CalibrationDataReader does
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=_QUANTISED,
            per_channel=True,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
            extra_options={
                "ActivationSymmetric": True,
                "WeightSymmetric": True,
                "QuantizeBias": False,  # TensorRT-RTX refuses biases in int32
                "OpTypesToExcludeOutputQuantization": _QUANTISED,
            },
        )
        quantised: Any = onnx.load(str(part))
        onnx.helper.set_model_props(quantised, {**metadata, "precision": "int8"})
        onnx.save_model(quantised, str(part))
        onnx.checker.check_model(str(part), full_check=True)
