"""The sides of the comparison measure the same."""

import numpy as np
import pytest

from medspeed.benchmarks import metrics
from medspeed.common.data.label_files import write_label
from medspeed.common.inference.evaluation import evaluate_folders


@pytest.mark.filterwarnings("ignore:.*always_return_as_numpy.*:FutureWarning")
def test_both_sides_give_the_same_figures(tmp_path, monkeypatch, capsys):
    labels = np.zeros((20, 16, 12), np.uint8, order="F")
    labels[3:12, 4:12, 3:9] = 1
    for name in ("a.nii.gz", "b.nii.gz"):
        write_label(tmp_path / "true" / name, labels, np.diag([0.75, 1.0, 2.5, 1.0]))
    write_label(tmp_path / "found" / "a.nii.gz", np.roll(labels, 3, 0), np.diag([0.75, 1.0, 2.5, 1.0]))
    (ours,) = evaluate_folders(tmp_path / "found", tmp_path / "true").cases["a"]
    theirs = metrics.of_monai((tmp_path / "found" / "a.nii.gz", tmp_path / "true" / "a.nii.gz"))
    assert [ours[name] for name in ("dice", "nsd", "hd95_mm", "assd_mm")] == pytest.approx(theirs, rel=1e-5)
    monkeypatch.setattr("sys.argv", ["metrics.py", "--references", str(tmp_path / "true"), "--rounds", "1"])
    metrics.main()
    said = capsys.readouterr().out
    assert "evaluate: " in said
    assert "s for 2 pairs" in said
    assert "ratio: " in said
