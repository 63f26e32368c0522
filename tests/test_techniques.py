"""docs/techniques.md names switches that exist, and records that are there."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from medspeed.apps.brats.config import BratsConfig
from medspeed.apps.pathology.config import PathologyConfig
from medspeed.apps.spleen.config import SpleenConfig
from medspeed.apps.spleen.export import SpleenExport
from medspeed.common.inference.options import InferConfig

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "techniques.md").read_text()
ROWS = [line.split(" | ") for line in TEXT.splitlines() if line.startswith("| ") and "`--" in line]
FLAGS = sorted({flag.replace("-", "_") for row in ROWS for flag in re.findall(r"--([\w-]+)", row[1])})
CONFIGS = (SpleenConfig, BratsConfig, PathologyConfig, InferConfig, SpleenExport)
TECHNIQUES = """
torch.profiler; NVTX; NVML; CacheDataset; PersistentDataset; LMDBDataset; SmartCache;
ThreadDataLoader; ThreadBuffer; pinned memory; DiceCE; DiceFocal; Novograd; mixed precision;
transforms on the GPU; cuCIM; cache on the GPU; several GPUs; several nodes; TensorRT; workers;
larger batches; smaller patches; less logging; fewer channels; gradient checkpointing;
other networks; torch.compile; iterations per epoch; deep supervision; augmentations; RAM disk;
gradient accumulation; CUDA graphs; overlap of windows; Horovod; DCGM; pillow-SIMD
"""
OTHERS = {"app", "standalone", "nproc_per_node", "nnodes", "node_rank", "master_addr"}  # of the doctor and of torchrun


def test_there_are_rows():
    assert len(ROWS) >= 30
    assert len(FLAGS) >= 20


@pytest.mark.parametrize("flag", FLAGS)
def test_each_switch_exists(flag):
    assert flag in OTHERS or any(flag in {field.name for field in fields(config)} for config in CONFIGS)


def test_they_are_parted_by_what_is_known_of_them():
    titles = re.findall(r"^## (.*)$", TEXT, re.MULTILINE)
    assert titles == ["Worth it", "Within the noise, or a trade-off", "Unproven, or not available"]
    for part in TEXT.split("\n## ")[1:-1]:
        assert "unproven without a GPU" not in part


@pytest.mark.parametrize("technique", [name.strip() for name in TECHNIQUES.replace("\n", " ").split(";")])
def test_every_technique_of_the_guides_is_a_row(technique):
    assert any(technique in line.split(" | ")[0] for line in TEXT.splitlines() if line.startswith("| ")), technique
