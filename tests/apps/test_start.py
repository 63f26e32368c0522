"""What a run of recipe fast loads before its first step: seconds of a start are lost to what it does not need."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Not pydicom and PIL: nibabel loads them where they are installed.
NEEDLESS = {
    "IPython", "cc3d", "highdicom", "ignite", "imagecodecs", "jinja2", "matplotlib", "monai", "onnx", "onnxruntime",
    "onnxscript", "pandas", "scipy.ndimage", "scipy.spatial", "scipy.stats", "skimage", "sympy", "tensorboard",
    "tifffile", "torch._dynamo", "torch._inductor", "torch.utils.flop_counter", "triton",
}  # fmt: skip
IMPORTED = "import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
TO_THE_SECOND_STEP = """
import json, os, sys
import medspeed.apps.{app}.config as config
CONFIG = config.parse(sys.argv[1:])
import medspeed.apps.{app}.train as train
from torch.nn.modules.module import register_module_forward_pre_hook

called = []

def at_each_call(module, batch):
    assert module.training
    if called[:1] == [module]:
        print(json.dumps(sorted(sys.modules)), flush=True)
        os._exit(0)
    called.append(module)

register_module_forward_pre_hook(at_each_call)
train.main(CONFIG)
"""


def loaded(program: str, *arguments: str) -> set[str]:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return set(found)


@pytest.mark.parametrize("app", ["spleen", "brats", "pathology"])
def test_importing_an_app_loads_nothing_that_the_fast_recipe_does_not_need(app):
    found = loaded(IMPORTED.format(module=f"medspeed.apps.{app}.train")) & NEEDLESS
    assert found == set()


def test_what_a_guides_recipe_loads_is_seen():
    """The test above can fail."""
    assert "monai" in loaded(IMPORTED.format(module="medspeed.common.training.monai_batches")) & NEEDLESS


def test_nothing_needless_is_loaded_until_the_first_step_is_done(phantoms, store, tmp_path):
    small = ["--crop_size", "[16,16,16]", "--windows.size", "[32,32,32]", "--channels", "[4,8]", "--batch_size", "1"]
    small += ["--data", str(phantoms), "--store", str(store), "--run", str(tmp_path / "run"), "--device", "cpu"]
    found = loaded(TO_THE_SECOND_STEP.format(app="spleen"), *small) & NEEDLESS
    assert found == set()
