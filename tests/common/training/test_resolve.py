"""What a run decides before it starts, and finds again when it goes on."""

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml

from medspeed.common.clock import Clock
from medspeed.common.config import config_content, config_to_yaml
from medspeed.common.data import cache as tiers
from medspeed.common.data import fingerprint
from medspeed.common.data.cache import prepared_bytes
from medspeed.common.data.preparation import Preparation
from medspeed.common.files import write_text
from medspeed.common.inference.labels import one_region_per_label
from medspeed.common.ranks import Ranks
from medspeed.common.run import Run
from medspeed.common.training.config import Parallel, TrainingConfig, decided
from medspeed.common.training.resolve import Defaults, check_partitions, choose_volumes, keep_plan, volume_model
from medspeed.common.training.sources import our_batches, read_volumes
from medspeed.common.training.volume_config import Crops, SegmentationConfig, Windows
from medspeed.models.unet3d import unet3d

PLAIN = TrainingConfig(batch_size=4, parallel=Parallel(partitions=2))
USUAL = Defaults(
    {"crops.per_case": 2, "crops.flips": "x"}, crop=(16, 16, 8), window=(32, 32, 32), window_batch=1, batch_size=4,
    steps=12, validations=3,
)  # fmt: skip


class ToyConfig(SegmentationConfig):
    def halvings(self):
        return 2


@pytest.fixture
def run(tmp_path):
    write_text(tmp_path / "run" / "config.yaml", config_to_yaml(PLAIN))
    return Run(tmp_path / "run", torch.device("cpu"), Clock(), resumed=False)


@pytest.fixture
def scans(tmp_path):
    """Three CT scans of a set named Spleen, whose labels leave out 2."""
    rng = np.random.default_rng(0)
    training = []
    for kind in ("imagesTr", "labelsTr"):
        (tmp_path / "data" / kind).mkdir(parents=True)
    for number in range(3):
        image, label = rng.integers(-50, 150, (20, 24, 10)).astype(np.int16), np.zeros((20, 24, 10), np.uint8)
        label[4:9, 4:9, 4:9], label[12:14, 12:14, 2:4] = 1, 3
        for kind, voxels in (("imagesTr", image), ("labelsTr", label)):
            nib.save(
                nib.Nifti1Image(voxels, np.diag([2.0, 2.0, 4.0, 1.0])), tmp_path / "data" / kind / f"{number}.nii.gz"
            )
        training.append({"image": f"./imagesTr/{number}.nii.gz", "label": f"./labelsTr/{number}.nii.gz"})
    content = {
        "name": "Spleen", "modality": {"0": "CT"}, "labels": {"0": "background", "1": "spleen", "3": "cyst"},
        "training": training,
    }  # fmt: skip
    (tmp_path / "data" / "dataset.json").write_text(json.dumps(content))
    return tmp_path / "data"


def read(scans, tmp_path, run, known=None, **fields):
    config = ToyConfig(data=scans, store=tmp_path / "store", **fields)
    return config, read_volumes(config, run, "ct-small-0", "Task00", known or {})


def test_labels_may_have_gaps_and_a_name_alone_is_no_reason_to_skip_the_fingerprint(scans, tmp_path, run):
    _, data = read(scans, tmp_path, run)
    assert data.dataset.labels == ("background", "spleen", "", "cyst")
    assert data.figures.foreground is not None
    assert data.known is None
    assert len(data.split.training) == 2


def test_what_the_app_knows_spares_reading_all_scans(scans, tmp_path, run, monkeypatch):
    monkeypatch.setattr(fingerprint, "_KNOWN_READ", 1)
    known = Preparation((1.5, 1.5, 2.0), "window", (-57.0, 164.0))
    config, data = read(scans, tmp_path, run, {"Spleen: spleen, , cyst": known})
    assert (data.figures.cases, len(data.split.training)) == (1, 2)
    assert choose_volumes(config, data, USUAL, unet3d, run).spacing == (1.5, 1.5, 2.0)


def test_what_the_app_knows_is_not_taken_for_other_labels(scans, tmp_path, run):
    known = Preparation((1.5, 1.5, 2.0), "window", (-57.0, 164.0))
    _, data = read(scans, tmp_path, run, {"Spleen: spleen": known})
    assert data.known is None


def test_a_run_is_not_resumed_with_files_that_have_changed(scans, tmp_path, run):
    _, data = read(scans, tmp_path, run)
    (run.directory / "plan.json").write_text("{}")
    assert read(scans, tmp_path, replace(run, resumed=True))[1].split.training == data.split.training
    shutil.copyfile(data.split.training[0].image, data.split.training[1].label)
    with pytest.raises(ValueError, match=rf"split\.json: {data.split.training[1].name}: files have changed since"):
        read(scans, tmp_path, replace(run, resumed=True))


@pytest.mark.parametrize("wrong", [[1], {"case": "x"}, 1e30])
def test_a_damaged_split_of_a_run_is_named(wrong, scans, tmp_path, run):
    read(scans, tmp_path, run)
    (run.directory / "plan.json").write_text("{}")
    split = run.directory / "split.json"
    split.write_text(json.dumps({**json.loads(split.read_text()), "bytes": wrong}))
    with pytest.raises(ValueError, match=r"split\.json: Expected .*bytes"):
        read(scans, tmp_path, replace(run, resumed=True))


@pytest.mark.parametrize(("cache", "epochs"), [("auto", 3), ("smart:2", 3), ("smart:1", 6)])
def test_with_a_smart_cache_a_run_has_as_many_steps(cache, epochs, scans, tmp_path, run):
    config, data = read(scans, tmp_path, run, cache=cache, batch_size=1)
    assert choose_volumes(config, data, USUAL, unet3d, run).epochs == epochs


def test_a_smart_cache_of_what_fits_has_as_many_steps_and_tells_of_cases_that_never_train(
    scans, tmp_path, run, monkeypatch, capsys
):
    """Of 3 cases 1 and the next fit: in 2 epochs 2 of them train, in 3 all."""
    steps = {}
    for cache, epochs in (("auto", 3), ("smart", 3), ("smart", 2)):
        config, data = read(scans, tmp_path, run, cache=cache, batch_size=1, split="all", epochs=epochs)
        config = choose_volumes(config, data, USUAL, unet3d, run)
        model = volume_model(config, data, unet3d, one_region_per_label(data.dataset.labels), 1, run)
        room = int(2.5 * prepared_bytes(data.split.training[0], model.preparation))
        monkeypatch.setattr(tiers, "measure_budgets", lambda *_, room=room: {"ram": room, "disk": 2**30})
        steps[cache, epochs] = our_batches(data, model, config, run)[0].steps_per_epoch
        assert ("some cases are never trained on" in capsys.readouterr().out) == (epochs == 2)
        assert (run.directory / "smart_cache.json").is_file() == (cache == "smart")
    assert len({*steps.values()}) == 1


def test_initial_weights_keep_spacing_and_window_of_any_app(scans, tmp_path, run):
    was = Preparation((1.9375, 2.0, 4.125), "window", (-12.0, 186.0))
    write_text(tmp_path / "model.json", json.dumps({"labelling": {}, "preparation": asdict(was)}))
    config, data = read(scans, tmp_path, run, init=tmp_path / "best.safetensors")
    chosen = choose_volumes(config, data, USUAL, unet3d, run)
    assert (chosen.spacing, chosen.window) == (was.spacing, was.window)
    model = volume_model(chosen, data, unet3d, one_region_per_label(data.dataset.labels), 1, run)
    assert model.preparation == was


@pytest.mark.parametrize(
    ("fields", "crops_per_scan", "spacing"),
    [
        ({}, 12, (2.0, 2.0, 4.0)),  # 4.8 crops of 16 x 16 x 8 voxels fill a scan of 20 x 24 x 10
        # 40 x 48 x 40 mm in 1.2 crops: a voxel of 31.25 cubic mm, of side 3.15; the thick slices stay as they are.
        ({}, 1.2, (3.1, 3.1, 4.0)),
        ({"crop_size": (16, 16, 16)}, 1.2, (2.5, 2.5, 4.0)),  # twice the crop, half the voxel
        ({"crop_size": (16, 16, 16)}, 0.1, (5.7, 5.7, 5.7)),
        ({"spacing": (1.0, 1.0, 1.0)}, 1.2, (1.0, 1.0, 1.0)),
        ({"init": Path("weights.safetensors")}, 1.2, (2.0, 2.0, 4.0)),  # made for a spacing
        ({"cache": "monai"}, 1.2, (2.0, 2.0, 4.0)),  # the guide's
    ],
)
def test_small_crops_get_a_coarser_spacing(fields, crops_per_scan, spacing, scans, tmp_path, run):
    config, data = read(scans, tmp_path, run, **fields)
    chosen = choose_volumes(config, data, replace(USUAL, crops_per_scan=crops_per_scan), unet3d, run)
    assert chosen.spacing == spacing
    said = (run.directory / "run.log").read_text(encoding="utf-8")
    assert ("but no finer than" in said) == (spacing[0] in (3.1, 2.5, 5.7))


@pytest.mark.parametrize(
    ("names", "flips"),
    [
        (("left kidney", "kidney"), "yz"),
        (("hippocampus_RIGHT", "b"), "yz"),
        (("Left-Cerebral-Cortex", "b"), "yz"),
        (("kidney.left", "b"), "yz"),
        (("LeftKidney", "b"), "yz"),
        (("ctx-lh-insula", "b"), "yz"),
        (("Parotid_L", "Parotid_R"), "yz"),
        (("vertebra L", "b"), "xyz"),
        (("lefty", "cleft", "bright", "upright"), "xyz"),
    ],
)
def test_labels_of_a_side_are_not_mirrored_by_default(names, flips, scans, tmp_path, run):
    config, data = read(scans, tmp_path, run)
    data = replace(data, dataset=replace(data.dataset, labels=("background", *names)))
    usual = replace(USUAL, fields={**USUAL.fields, "crops.flips": "xyz"})
    assert choose_volumes(config, data, usual, unet3d, run).crops.flips == flips
    asked = replace(config, crops=replace(config.crops, flips="x"))
    assert choose_volumes(asked, data, usual, unet3d, run).crops.flips == "x"


def test_every_open_field_is_decided_and_what_was_given_wins(scans, tmp_path, run):
    config, data = read(scans, tmp_path, run, spacing=(2.0, 2.0, 2.0), crops=Crops(per_case=3))
    chosen = choose_volumes(config, data, USUAL, unet3d, run)
    assert (chosen.crop_size, chosen.windows.size) == ((16, 16, 8), (20, 24, 20))  # halved twice: multiples of 4
    assert (chosen.crops.per_case, chosen.crops.flips, chosen.spacing) == (3, "x", (2.0, 2.0, 2.0))
    assert (chosen.batch_size, chosen.parallel.partitions) == (4, 1)
    assert (chosen.epochs, chosen.validate_every) == (6, 2)  # two cases of three crops are two steps
    assert chosen.precision in ("bf16", "fp32")


@pytest.mark.parametrize(
    ("given", "optimizer", "rate"),
    [
        ({}, "muon", 0.025),
        ({"optimizer": "novograd"}, "novograd", 0.01),
        ({"optimizer": "adam", "learning_rate": 0.001}, "adam", 0.001),
        ({"learning_rate": 0.02}, "muon", 0.02),
    ],
)
def test_the_learning_rate_is_that_of_the_optimizer_unless_given(given, optimizer, rate, scans, tmp_path, run):
    config, data = read(scans, tmp_path, run, **given)
    chosen = choose_volumes(config, data, replace(USUAL, fields={**USUAL.fields, "optimizer": "muon"}), unet3d, run)
    assert (chosen.optimizer, chosen.learning_rate) == (optimizer, rate)
    assert choose_volumes(config, data, USUAL, unet3d, run).optimizer == given.get("optimizer", "novograd")


@pytest.mark.parametrize(
    "wish",
    [{"crop_size": (4096, 4096, 4096)}, {"batch_size": 10**9}, {"windows": Windows(size=(100_000, 100_000, 100_000))}],
)
def test_what_cannot_fit_into_memory_is_refused_before_it_is_allocated(wish, scans, tmp_path, run):
    config, data = read(scans, tmp_path, run, **wish)
    with pytest.raises(
        ValueError, match=r"^(crop_size|batch_size|windows.size) .*: takes \d+\.\d GiB for .* GiB are free"
    ):
        choose_volumes(config, data, USUAL, unet3d, run)


def test_a_plan_is_said_and_kept_and_found_again(run, capsys):
    given = replace(PLAIN, epochs=None)
    plan = keep_plan(given, lambda: replace(given, epochs=7), run)
    assert plan.epochs == 7
    assert capsys.readouterr().out == "defaults for this CPU (override any with its flag): --epochs 7\n"
    later = Run(run.directory, run.device, Clock(), resumed=True)
    again = keep_plan(replace(given, workers=3), lambda: pytest.fail("it is decided"), later)
    assert again == replace(plan, workers=3)  # where it computes may differ


def test_a_plan_that_the_device_of_a_resumed_run_cannot_follow_is_refused(run):
    keep_plan(PLAIN, lambda: replace(PLAIN, precision="fp16"), run)
    with pytest.raises(ValueError, match="precision fp16: needs a CUDA device"):
        keep_plan(PLAIN, lambda: pytest.fail("it is decided"), replace(run, resumed=True))


def test_the_batch_divides_into_the_parts_that_are_asked_for(scans, tmp_path, run):
    config, data = read(scans, tmp_path, run, parallel=Parallel(partitions=1, accumulate=3))
    assert choose_volumes(config, data, USUAL, unet3d, run).batch_size == 6


def test_a_label_that_no_training_case_has_is_named(scans, tmp_path, run, capsys):
    path = scans / "dataset.json"
    path.write_text(path.read_text().replace('"3": "cyst"', '"3": "cyst", "4": "stone"'))
    read(scans, tmp_path, run)
    assert "none of 2 measured cases has stone: it may not be learned" in capsys.readouterr().out


def test_a_label_of_the_fold_s_held_out_cases_alone_is_named(scans, tmp_path, run, capsys):
    label = nib.load(scans / "labelsTr" / "1.nii.gz")
    for number in (0, 2):
        voxels = np.asarray(label.dataobj) * (np.asarray(label.dataobj) < 3)
        nib.save(nib.Nifti1Image(voxels.astype(np.uint8), label.affine), scans / "labelsTr" / f"{number}.nii.gz")
    for fold in range(3):
        (tmp_path / str(fold)).mkdir()
        _, data = read(scans, tmp_path, replace(run, directory=tmp_path / str(fold)), fold=fold, folds=3)
        said = "none of 2 measured cases has cyst" in capsys.readouterr().out
        assert said == (data.split.validation[0].name == "1")


@pytest.mark.parametrize(
    ("began", "later", "refused"),
    [
        ("monai", "ram", True), ("ram", "monai", True), ("smart:2", "ram", True), ("ram:1", "ram", True),
        ("ram", "disk", False), ("gpu:2", "ram:2", False), ("auto", "none", False),
        ("monai", "uncached", False),
    ],
)  # fmt: skip
def test_a_cache_that_trains_on_something_else_is_refused(began, later, refused, run):
    given = ToyConfig(cache=began, batch_size=4, precision="fp32", parallel=Parallel(partitions=1))
    write_text(run.directory / "config.yaml", config_to_yaml(given))
    keep_plan(given, lambda: given, run)
    again = replace(run, resumed=True)
    if not refused:
        assert keep_plan(replace(given, cache=later), lambda: pytest.fail("it is decided"), again).cache == later
        return
    with pytest.raises(ValueError, match=f"cache {later}: the run began with {began}, which trains on other data"):
        keep_plan(replace(given, cache=later), lambda: pytest.fail("it is decided"), again)


@pytest.mark.parametrize(
    ("ranks", "words"), [(3, "3 ranks cannot share them evenly"), (2, "batch_size 3: must be a multiple of 2")]
)
def test_ranks_that_cannot_share_a_plan_are_told(ranks, words):
    batch = 4 if ranks == 3 else 3
    with pytest.raises(ValueError, match=words):
        check_partitions(replace(PLAIN, batch_size=batch), ranks)


def test_a_batch_that_does_not_divide_leaves_no_plan(run):
    with pytest.raises(ValueError, match="must be a multiple of 8"):
        keep_plan(PLAIN, lambda: replace(PLAIN, parallel=replace(PLAIN.parallel, accumulate=4)), run)
    assert not (run.directory / "plan.json").exists()


def test_a_resumed_run_is_checked_against_its_ranks(run):
    keep_plan(PLAIN, lambda: PLAIN, run)
    later = Run(run.directory, run.device, Clock(), True, Ranks(world=1))
    monai = replace(PLAIN, parallel=replace(PLAIN.parallel, accumulate=4))
    with pytest.raises(ValueError, match="must be a multiple of 8"):
        keep_plan(monai, lambda: pytest.fail("it is decided"), later)


@pytest.mark.parametrize(("parts", "kept"), [(1, (2, 1)), (2, (2, 2)), (99, (3, 3))])
def test_of_a_fast_dev_run_a_few_cases_are_left_or_one_for_each_part(scans, tmp_path, run, capsys, parts, kept):
    fields = {"fast_dev_run": True, "split": "all", "parallel": Parallel(partitions=parts)}
    split = read(scans, tmp_path, run, **fields)[1].split
    assert (len(split.training), len(split.validation)) == kept
    assert split.description.endswith("; shortened")
    assert "the results of this run are meaningless" in "".join(capsys.readouterr())


def test_an_app_without_phantoms_asks_for_data(tmp_path, run):
    with pytest.raises(ValueError, match="no synthetic phantoms; pass a dataset folder with --data"):
        read_volumes(ToyConfig(store=tmp_path), run)


def test_a_run_whose_plan_is_gone_decides_nothing_anew(scans, tmp_path, run):
    later = replace(run, resumed=True)
    assert not later.planned  # it ended before it had one
    (run.directory / "checkpoints").mkdir()
    (run.directory / "checkpoints" / "epoch-000001-step-000000.safetensors").touch()
    for go_on in (lambda: read(scans, tmp_path, later), lambda: keep_plan(PLAIN, lambda: PLAIN, later)):
        with pytest.raises(FileNotFoundError, match=r"plan\.json: missing beside checkpoints; restore it"):
            go_on()
    assert not (run.directory / "split.json").exists()


def test_a_resumed_run_keeps_what_its_labels_mean(scans, tmp_path, run):
    config, data = read(scans, tmp_path, run)
    config = choose_volumes(config, data, USUAL, unet3d, run)
    first, other = (one_region_per_label(("background", name)) for name in ("organ", "tumour"))
    volume_model(config, data, unet3d, first, 1, run)
    later, kept = replace(run, resumed=True), run.directory / "model.json"
    kept.write_text(kept.read_text().replace("{", '{"postprocessing": [],', 1))
    before = kept.read_bytes()
    assert volume_model(config, data, unet3d, first, 1, later).labelling == first
    assert kept.read_bytes() == before  # with what an earlier end has chosen
    with pytest.raises(ValueError, match=r"model\.json: the run began with .*organ.* give .*tumour.*: it cannot"):
        volume_model(config, data, unet3d, other, 1, later)
    content = json.loads(kept.read_text())
    kept.write_text(json.dumps({name: value for name, value in content.items() if name != "modality"}))
    assert volume_model(config, data, unet3d, first, 1, later).modality == ()  # what an older version did not keep
    with pytest.raises(ValueError, match=r"model\.json: the run began with preparation .*: it cannot resume"):
        volume_model(replace(config, spacing=(2.0, 2.0, 7.0)), data, unet3d, first, 1, later)


@pytest.mark.parametrize(("last", "told"), [(1, False), (4, False), (255, True)])
def test_label_numbers_that_cost_many_channels_are_told(scans, tmp_path, run, capsys, last, told):
    config, data = read(scans, tmp_path, run)
    labels = one_region_per_label(("background", "organ", *("",) * (last - 2), "tumour")[: last + 1])
    volume_model(choose_volumes(config, data, USUAL, unet3d, run), data, unet3d, labels, 1, run)
    said = "labels: 253 of 256 numbers are not used, and each takes a channel of the network: renumber"
    assert (said in "".join(capsys.readouterr())) == told


def test_a_plan_that_lacks_fields_is_one_line(run):
    (run.directory / "plan.json").write_text("{}")
    with pytest.raises(ValueError, match=r"plan\.json: lacks .*precision.*; restore it, or start a new run"):
        keep_plan(PLAIN, lambda: PLAIN, replace(run, resumed=True))
    with pytest.raises(ValueError, match=r"a field is open in plan\.json \(restore it, or start a new run\)"):
        decided(None)


def test_a_run_of_an_earlier_version_goes_on_without_the_fields_of_later_ones(run):
    content = config_content(PLAIN)
    for later in ("fold", "folds", "groups"):
        del content[later]
    (run.directory / "config.yaml").write_text(yaml.safe_dump(content))
    (run.directory / "plan.json").write_text(json.dumps(content))
    assert keep_plan(PLAIN, lambda: pytest.fail("it is decided"), replace(run, resumed=True)) == PLAIN


def test_a_fold_is_held_out_and_recorded_and_found_again(scans, tmp_path, run):
    config = ToyConfig(data=scans, store=tmp_path / "store", fold=1, folds=3, seed=4)
    data = read_volumes(config, run)
    split = data.split
    assert data.figures.cases == 3  # of all folds, which so have one preparation
    kept = json.loads((run.directory / "split.json").read_text())
    assert [case.name for case in split.validation] == kept["validation"]
    assert kept["fold_of"][kept["validation"][0]] == 1
    assert (kept["fold"], kept["folds"], kept["seed"], kept["group_of"]) == (1, 3, 4, {"0": "0", "1": "1", "2": "2"})
    assert "fold 1 of 3 (from 0): 1 of 3 cases held out" in (run.directory / "run.log").read_text()
    (run.directory / "plan.json").touch()
    assert read_volumes(config, replace(run, resumed=True)).split.validation == split.validation


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"fold": 0}, "folds None: must be 2 or more, with --fold"),
        ({"folds": 5}, "folds 5: must be 2 or more, with --fold"),
        ({"fold": 5, "folds": 5}, "fold 5: must be 0 or more, and below folds"),
        ({"fold": -1, "folds": 5}, "fold -1: must be 0 or more"),
        ({"groups": "(.*)_"}, "must be given with --fold and --folds"),
        ({"fold": 0, "folds": 5, "split": "0.3"}, "split 0.3: must be left out with fold"),
    ],
)
def test_flags_of_folds_go_together(fields, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        ToyConfig(**fields)
