#!/usr/bin/env bash
# A trained run becomes a model repository that Triton serves.
set -euo pipefail
source "$(dirname "$0")/tiny.sh"

spleen_run
medspeed export spleen --model "$shared/spleen" --to triton --output models

ls -R models
(cd models/*/ && sha256sum --check --strict --quiet SHA256SUMS)
python - <<'PY'
from pathlib import Path
import numpy, onnxruntime
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
(folder,) = Path("models").iterdir()
config = text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
assert config.name == folder.name and config.backend == "onnxruntime"
session = onnxruntime.InferenceSession(folder / "1" / "model.onnx", providers=["CPUExecutionProvider"])
(given,) = session.get_inputs()
window = numpy.zeros([1, *given.shape[1:]], numpy.float32)
(logits,) = session.run(None, {given.name: window})
assert logits.shape[0] == 1 and logits.shape[2:] == window.shape[2:] and numpy.isfinite(logits).all()
compile((folder / "client.py").read_text(), "client.py", "exec")
PY
