"""Cross-validation: five runs of one folder, interrupted and resumed, and the table over their cases."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from medspeed.apps.brats.config import BratsConfig
from medspeed.apps.folds import main, parse, tabulate
from medspeed.apps.pathology.config import PathologyConfig
from medspeed.common.config import config_to_yaml
from medspeed.common.files import release
from medspeed.data_scripts.make_phantoms import make_phantoms

ROOT = Path(__file__).parents[2]


def finished(root, name, cases, fold_of, **files):
    """Write what the run of a fold leaves of some cases, as {case: (Dice of A, Dice of B)}."""
    (root / name).mkdir(parents=True)
    rows = {case: [{"label": each, "dice": dice} for each, dice in zip("AB", found, strict=False)]
            for case, found in cases.items()}  # fmt: skip
    evaluation = {"interval": "", "summary": {}, "tolerance_mm": 2.0, "cases": rows, "missing": [], "refused": {}}
    split = {"training": [], "validation": [*cases], "fold_of": fold_of}
    plan = {"run": name, "window": [0, 1]}
    for file, content in {"split": split, "evaluation": evaluation, "summary": {}, "plan": plan, **files}.items():
        if content is not None:
            (root / name / f"{file}.json").write_text(json.dumps(content))
    (root / name / "config.yaml").touch()
    return root / name


def table(path):
    return [*csv.DictReader(path.read_text().splitlines())]


def test_the_table_is_that_of_the_hand(tmp_path, capsys):
    """Three cases in two folds: means of a fold are over its cases, those of all over three, not over two folds."""
    fold_of = {"one": 0, "two": 1, "three": 0}
    runs = [
        finished(tmp_path, "fold-0", {"one": (0.5, 1.0), "three": (0.7, None)}, fold_of),
        finished(tmp_path, "fold-1", {"two": (0.9, 0.0)}, fold_of),
    ]
    whole = tabulate(runs)
    rows = table(tmp_path / "folds.csv")
    found = {(row["fold"], row["label"]): (row["cases"], row["dice"]) for row in rows}
    assert found["fold-0", "A"] == ("2", "0.6")
    assert found["fold-0", "B"] == ("1", "1.0")
    assert found["fold-1", "A"] == ("1", "0.9")
    assert found["mean", "A"] == ("3", str((0.5 + 0.7 + 0.9) / 3))
    assert found["mean", "B"] == ("2", "0.5")  # undefined for one case
    assert float(found["low", "A"][1]) == 0.5  # 2000 resamples of three cases: the extremes come up 1 in 27 times
    assert float(found["high", "A"][1]) == 0.9
    content = json.loads((tmp_path / "folds.json").read_text())
    assert content["fold-1"] == [{"label": "A", "cases": 1, "dice": 0.9}, {"label": "B", "cases": 1, "dice": 0.0}]
    assert (
        json.loads((tmp_path / "evaluation.json").read_text())["cases"].keys() == fold_of.keys() == whole.cases.keys()
    )
    said = capsys.readouterr().out
    assert "3 of 3 cases held out once; means with 95 percent intervals" in said
    assert "fold-1: A 0.9, B 0.0" in said
    assert "A               3 cases  dice 0.700 [0.500, 0.900]" in said


def test_cases_that_a_fold_could_not_measure_are_said(tmp_path, capsys):
    fold_of, evaluation = {"one": 0, "two": 1}, {"tolerance_mm": 2.0, "cases": {}, "refused": {"two": "too large"}}
    runs = [
        finished(tmp_path, "fold-0", {"one": (0.5, 1.0)}, fold_of),
        finished(tmp_path, "fold-1", {"two": ()}, fold_of, evaluation=evaluation),
    ]
    assert tabulate(runs).refused == {"two": "too large"}
    assert "two: left out of the means: too large" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fold_of", "validation"),
    [({"one": 0, "two": 0}, ["two"]), ({"one": 0, "two": 1}, ["one"]), ({"one": 0, "two": 1}, ["other"])],
)
def test_folds_that_do_not_divide_the_same_cases_are_refused(fold_of, validation, tmp_path):
    runs = [
        finished(tmp_path, "fold-0", {"one": (1.0, 1.0)}, {"one": 0, "two": 1}),
        finished(tmp_path, "fold-1", dict.fromkeys(validation, (1.0, 1.0)), fold_of),
    ]
    with pytest.raises(ValueError, match="fold-1: its split is not that of fold-0"):
        tabulate(runs)


def test_an_evaluation_of_other_cases_is_refused(tmp_path):
    fold_of = {"one": 0, "two": 1}
    runs = [finished(tmp_path, f"fold-{fold}", {name: (1.0, 1.0)}, fold_of) for name, fold in fold_of.items()]
    assert tabulate(runs).cases.keys() == {"one", "two"}
    shutil.copy(runs[0] / "evaluation.json", runs[1])
    with pytest.raises(ValueError, match=r"fold-1: evaluation\.json lists other cases; remove summary\.json"):
        tabulate(runs)


def test_a_fold_whose_cases_the_initial_weights_know_is_said(tmp_path, capsys):
    runs = [finished(tmp_path, "fold-0", {"one": (1.0, 1.0)}, {"one": 0})]
    split = json.loads((runs[0] / "split.json").read_text())
    (runs[0] / "split.json").write_text(json.dumps({**split, "held_out": False}))
    tabulate(runs)
    assert "fold-0: NOT HELD OUT: the weights of --init were trained on some of its cases" in capsys.readouterr().out


def test_folds_that_were_prepared_in_different_ways_are_said(tmp_path, capsys):
    """As where a later version chose for those that came after."""
    fold_of = {"one": 0, "two": 1}
    runs = [finished(tmp_path, f"fold-{fold}", {name: (1.0, 1.0)}, fold_of) for name, fold in fold_of.items()]
    tabulate(runs)
    assert "differs" not in capsys.readouterr().out
    (runs[1] / "plan.json").write_text(json.dumps({"run": "fold-1", "window": [0, 2]}))
    tabulate(runs)
    said = "window differs between the folds: [[0, 1], [0, 2]]; did several versions or machines train them?"
    assert said in capsys.readouterr().out


def test_folds_that_saw_other_files_are_said(tmp_path, capsys):
    """As where label maps were corrected between an interruption and the same command again."""
    fold_of = {"one": 0, "two": 1}
    runs = [finished(tmp_path, f"fold-{fold}", {name: (1.0, 1.0)}, fold_of) for name, fold in fold_of.items()]
    for run, size in ((runs[0], 5), (runs[1], 5), (runs[1], 6)):
        split = json.loads((run / "split.json").read_text())
        (run / "split.json").write_text(json.dumps({**split, "bytes": {"one": [9, 5], "two": [9, size]}}))
        if run == runs[1]:
            tabulate(runs)
            assert ("fold-1: its files had other sizes than fold-0's" in capsys.readouterr().out) == (size == 6)


def test_several_ranks_train_no_folds(tmp_path, monkeypatch):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="start without torchrun"):
        main(PathologyConfig(run=tmp_path, fold=0, folds=2))


def test_of_patches_each_fold_is_a_case(tmp_path, capsys):
    runs = []
    for fold, value in enumerate((0.5, 1.0)):
        quality = {
            "name": "",
            "value": value,
            "per_case": {"validation AUC": value},
            "selected_on": "",
            "per_region": {},
        }
        folds = {"a": 0, "b": 1}
        runs.append(
            finished(tmp_path, f"fold-{fold}", {"ab"[fold]: ()}, folds, evaluation=None, summary={"quality": quality})
        )
    assert tabulate(runs).summary["patches"]["validation AUC"]["mean"] == 0.75
    assert "patches         2 cases  validation AUC 0.750 [0.500, 1.000]" in capsys.readouterr().out


def test_flags_are_those_of_the_training_and_five_folds_the_default():
    config = parse(["brats", "--run", "runs/cv", "--epochs", "3"])
    assert config == BratsConfig(run=Path("runs/cv"), fold=0, folds=5, epochs=3)
    assert parse(["pathology", "--run", "cv", "--folds=3", "--recipe", "guide", "--groups", "(.*)_"]).folds == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "app: required"),
        (["lung"], "app lung: expected one of"),
        (["spleen"], "--run is missing"),
        (["spleen", "--run", "cv", "--fold", "2"], "--fold and --resume are set here"),
        (["spleen", "--run", "cv", "--fold", "0"], "--fold and --resume are set here"),
        (["spleen", "--run", "cv", "--resume", "cv"], "--fold and --resume are set here"),
        (["spleen", "--run", "cv", "--folds", "1"], "--folds 1: must be 2 or more"),
        (["spleen", "--run", "cv", "--split", "0.5"], "--split 0.5: must be left out with fold"),
        (["spleen", "--run", "cv", "--fodls", "3"], "did you mean --fold"),
    ],
)
def test_wrong_words_are_one_line(words, said, capsys):
    with pytest.raises(SystemExit) as end:
        parse(words)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_other_flags_than_the_stored_ones_are_refused(tmp_path):
    config = replace(
        PathologyConfig(data=Path("here"), fold=0, folds=2, init=Path("wéights-\U0001f600.pth"), learning_rate=1e-5),
        run=tmp_path / "cv",
    )
    for fold in (0, 1):
        finished(tmp_path / "cv", f"fold-{fold}", {"ab"[fold]: (1.0, 1.0)}, {"a": 0, "b": 1})

    def again(**flags):
        try:
            return main(replace(config, **flags))
        finally:
            release(tmp_path / "cv" / ".lock")  # as the end of the program does

    with pytest.raises(FileNotFoundError, match=r"config\.yaml: missing beside folds; restore it, or choose another"):
        again()  # any flags would pass for those of the folds
    (tmp_path / "cv" / "config.yaml").write_text(config_to_yaml(config))
    assert again().cases.keys() == {"a", "b"}
    assert again(device="cpu").cases.keys() == {"a", "b"}  # what may differ when a run goes on
    with pytest.raises(ValueError, match=r"config\.yaml: has epochs None, not 3; repeat its flags, or change --run"):
        again(epochs=3)
    with pytest.raises(ValueError, match="has folds 2, not 3"):
        again(folds=3)
    with pytest.raises(ValueError, match=r"has until None, not auc=0\.9"):
        again(until="auc=0.9")
    with pytest.raises(ValueError, match=r"has data .*here, not None; repeat its flags"):
        again(data=None)
    assert again(data=Path("there")).cases.keys() == {"a", "b"}  # it was moved
    for path in (tmp_path / "cv").glob("fold-*/config.yaml"):
        path.unlink()  # as if a mistake had ended the first fold at once: its flags do not count
    assert again(epochs=3).cases.keys() == {"a", "b"}


def test_the_folder_of_a_single_run_is_left_as_it_is(tmp_path):
    stored = config_to_yaml(PathologyConfig())
    (tmp_path / "config.yaml").write_text(stored)
    with pytest.raises(ValueError, match=r"config\.yaml: has fold None, not 0; repeat its flags, or change --run"):
        main(PathologyConfig(run=tmp_path, fold=0, folds=2))
    release(tmp_path / ".lock")
    assert (tmp_path / "config.yaml").read_text() == stored


def test_tables_of_the_users_are_not_overwritten(tmp_path):
    (tmp_path / "folds.csv").write_text("mine")
    with pytest.raises(FileExistsError, match="the folder is not empty; choose another --run"):
        main(PathologyConfig(run=tmp_path, fold=0, folds=2))
    release(tmp_path / ".lock")
    assert (tmp_path / "folds.csv").read_text() == "mine"
    assert not (tmp_path / "config.yaml").exists()


@pytest.mark.slow
def test_folds_that_are_killed_go_on_and_hold_out_each_case_once(tmp_path):
    """Killed with -9 twice: the program, whose training saves and ends with it; and the training."""
    make_phantoms("ct", tmp_path / "data", 4)
    names = sorted(path.name.removesuffix(".nii.gz") for path in (tmp_path / "data" / "imagesTr").iterdir())
    (tmp_path / "patients.csv").write_text(
        "case,patient\n" + "".join(f"{name},{i % 2}\n" for i, name in enumerate(names))
    )
    flags = (
        "spleen --run cv --data data --store store --folds 2 --groups patients.csv:patient --spacing 6 6 6 "
        "--channels 4 8 --crop-size 16 16 16 --windows.size 32 32 32 --epochs 3 --batch-size 1 --engine none "
        "--device cpu"
    )
    environ = {**os.environ, "MEDSPEED_CHECKPOINT_SECONDS": "0", "PYTHONPATH": str(ROOT)}
    command, lock = [sys.executable, f"{ROOT}/apps/folds.py", *flags.split()], tmp_path / "cv" / "fold-0" / ".lock"

    def saved():
        return {path.name for path in (tmp_path / "cv" / "fold-0" / "checkpoints").glob("epoch-*")}

    def begin_and_kill(which):
        """Kill one of the two processes as soon as the training has saved a step; return the training's id."""
        before = saved()
        with subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True) as program:
            while program.poll() is None and saved() <= before:
                time.sleep(0.01)
            training = int(lock.read_text().split()[1])
            os.kill(training if which == "training" else program.pid, signal.SIGKILL)
            program.wait()
        return program.returncode, training

    status, training = begin_and_kill("program")
    assert status == -signal.SIGKILL
    while psutil.pid_exists(training):  # it saves, and ends
        time.sleep(0.05)
    assert "resume with" in (tmp_path / "cv" / "fold-0" / "run.log").read_text()
    assert begin_and_kill("training")[0] == 137
    assert not (tmp_path / "cv" / "fold-0" / "summary.json").exists()

    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert "fold 0: resumed" in done.stdout
    assert "fold 1: started" in done.stdout
    held = [json.loads((tmp_path / "cv" / f"fold-{fold}" / "split.json").read_text()) for fold in (0, 1)]
    assert sorted(held[0]["validation"] + held[1]["validation"]) == names
    assert [sorted(each["validation"]) for each in held] in ([names[::2], names[1::2]], [names[1::2], names[::2]])
    rows = table(tmp_path / "cv" / "evaluation.csv")
    assert sorted(row["case"] for row in rows) == names
    dice: dict[str, float] = {}
    for fold in (0, 1):
        dice |= json.loads((tmp_path / "cv" / f"fold-{fold}" / "summary.json").read_text())["quality"]["per_case"]
    assert {row["case"]: float(row["dice"]) for row in rows} == pytest.approx(dice, abs=1e-6)
    (mean,) = (row for row in table(tmp_path / "cv" / "folds.csv") if row["fold"] == "mean")
    assert float(mean["dice"]) == pytest.approx(sum(dice.values()) / 4, abs=1e-6)

    again = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert again.stdout.count(": finished, ") == 2
    assert "epoch" not in again.stdout


def lives(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells a process of the end of its parent")
def test_a_process_ends_with_the_one_that_started_it():
    """Also where that is killed, and cannot tell it."""
    program = """if True:
        import subprocess, sys
        from medspeed.apps import end_with_parent
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], preexec_fn=end_with_parent)
        print(child.pid, flush=True)
        child.wait()
    """
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    began = time.monotonic()
    while lives(child):
        assert time.monotonic() - began < 30
        time.sleep(0.1)
