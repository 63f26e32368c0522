"""The tables are the records' figures, and nothing else."""

import pytest

from benchmarks.tables import results_table
from common.files import write_json

PREPARATION = {
    "guide, s per case": 3.0, "cold, s per case": 1.5, "warm, s per case": 0.1,
    "guide / fast cold": 2.01, "guide / fast warm, digests checked": 30.0,
}  # fmt: skip
INFERENCE = {
    "precision that fast chooses here": "fp32",
    "guide, s per case": 40.0, "fast fp32, s per case": 10.0, "fast bf16, s per case": 20.0,
    "guide / fast fp32": 4.0, "guide / fast bf16": 2.0,
}  # fmt: skip
QUALITY = {"guide, Dice by seed": [0.5, 0.7], "fast, Dice by seed": [0.7, 0.75]}


def step(half):
    return {
        "guide fp32, s": 6.0, f"guide {half}, s": 8.0, "guide with its batch, s": 9.0,
        "fast fp32, s": 3.0, "fast bf16, s": 5.0, "fast with its batch, s": 3.1,
        "guide / fast": 2.5, "guide / fast, both fp32": 2.04, "guide / fast, both half": 1.6,
        "guide / fast, with their batches": 2.9,
    }  # fmt: skip


def table(folder, device, half, chosen):
    crops = {"precision that fast chooses here": chosen, "1 x 96x96x96": step(half), "2 x 64x64x64": step(half)}
    environment = {"device": device, "cores": 2}
    parts = {"preparation": PREPARATION, "step": crops, "inference": INFERENCE, "quality": QUALITY}
    write_json(folder / "record.json", {"app": "brats", "environment": environment, **parts})
    return results_table(folder).splitlines()


def test_brats_on_a_cpu_without_bf16(tmp_path):
    lines = table(tmp_path, "cpu", "bf16", "fp32")
    assert lines == [
        "| on two CPU cores | guide | fast | ratio |",
        "|---|---|---|---|",
        "| preparation, cold | 3 s | 1.5 s | 2.0x |",
        "| preparation, warm | 3 s | 0.1 s | 30.0x |",
        "| training step, 1 x 96x96x96, fp32 | 6 s | 3 s | 2.5x |",
        "| training step, 1 x 96x96x96, both bf16 | 8 s | 5 s | 1.6x |",
        "| training step, 1 x 96x96x96, with the making of the batch | 9 s | 3.1 s | 2.9x |",
        "| training step, 2 x 64x64x64, fp32 | 6 s | 3 s | 2.5x |",
        "| training step, 2 x 64x64x64, both bf16 | 8 s | 5 s | 1.6x |",
        "| training step, 2 x 64x64x64, with the making of the batch | 9 s | 3.1 s | 2.9x |",
        "| scan to mask, file to file, fp32 | 40 s | 10 s | 4.0x |",
        "| scan to mask, file to file, bf16 | 40 s | 20 s | 2.0x |",
        "| Dice on phantoms, 2 seeds, equal epochs | 0.600 | 0.725 | +0.125 |",
    ]


@pytest.mark.parametrize(
    ("device", "half", "chosen", "rows"),
    [
        ("cpu", "bf16", "bf16", ["guide fp32, fast bf16", "both fp32", "both bf16"]),
        ("NVIDIA X", "fp16", "bf16", ["guide fp16, fast bf16", "both fp32"]),
    ],
)
def test_what_the_step_rows_compare_follows_from_the_device(tmp_path, device, half, chosen, rows):
    lines = table(tmp_path, device, half, chosen)
    assert lines[0].startswith("| on two CPU cores |" if device == "cpu" else "| on NVIDIA X |")
    found = [line.split("|")[1].strip() for line in lines if "training step, 1 x" in line]
    assert found == [f"training step, 1 x 96x96x96, {row}" for row in [*rows, "with the making of the batch"]]


def test_pathology_has_rates_and_scores(tmp_path):
    best = "guide, regions, workers"
    figures = {
        "preparation": {
            "the guide that counts": best, f"{best}, patches per s": 200.0, "guide, patches per s": 100.0,
            "fast, first epoch, patches per s": 600.0, "fast, later epoch, patches per s": 1100.0,
            "guide / fast, first epoch": 3.01, "guide / fast, later epochs": 5.52,
        },
        "step": {
            "precision that fast chooses here": "fp32",
            "18 x 224x224": {
                "guide fp32, s": 6.0, "guide bf16, s": 8.0, "fast fp32, s": 3.0, "fast bf16, s": 5.0,
                "guide / fast": 2.0, "guide / fast, both fp32": 2.0, "guide / fast, both half": 1.6,
                "the guide that counts": best, f"{best}, with its batch, s": 9.0, "fast, with its batch, s": 3.0,
                "guide / fast, with their batches": 3.0,
            },
        },
        "inference": {
            "precision that fast chooses here": "fp32", "the guide that counts": "guide, workers",
            "guide, workers, s per slide": 60.0, "fast fp32, s per slide": 6.0, "fast bf16, s per slide": 4.0,
            "guide / fast fp32": 10.0, "guide / fast bf16": 15.0,
            "FROC, guide, workers": 0.9, "FROC, fast fp32": 0.95, "slide AUC, guide, workers": 1.0,
            "slide AUC, fast fp32": 0.9,
        },
        "quality": {"guide, patch AUC by seed": [0.8, 0.9], "fast, patch AUC by seed": [0.9, 0.92]},
    }  # fmt: skip
    write_json(tmp_path / "record.json", {"app": "pathology", "environment": {"device": "cpu", "cores": 2}, **figures})
    assert results_table(tmp_path).splitlines()[2:] == [
        "| loading and colour jitter, first epoch | 200/s | 600/s | 3.0x |",
        "| loading and colour jitter, later epochs | 200/s | 1100/s | 5.5x |",
        "| training step, 18 x 224x224, fp32 | 6 s | 3 s | 2.0x |",
        "| training step, 18 x 224x224, both bf16 | 8 s | 5 s | 1.6x |",
        "| training step, 18 x 224x224, with the making of the batch | 9 s | 3 s | 3.0x |",
        "| scan of a slide, fp32 | 60 s | 6 s | 10.0x |",
        "| scan of a slide, bf16 | 60 s | 4 s | 15.0x |",
        "| FROC of these scans | 0.900 | 0.950 | +0.050 |",
        "| slide AUC of these scans | 1.000 | 0.900 | -0.100 |",
        "| patch AUC on synthetic slides, 2 seeds, equal epochs | 0.850 | 0.910 | +0.060 |",
    ]
