"""From trained networks to label maps. Here: the words for what computes in what."""

from typing import Literal

Precision = Literal["fp32", "bf16", "fp16"]  # what torch trains and computes in
ModelPrecision = Literal["fp32", "fp16", "int8"]  # of ONNX models and engines: INT8 is made from the export in fp32
AnyPrecision = Literal[Precision, ModelPrecision]
Backend = Literal["tensorrt", "onnxruntime", "torch"]
TOLERANCE = 2.0  # mm, of the normalised surface Dice
