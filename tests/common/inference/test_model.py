"""A trained network as inference opens it: `model.json`, and the weights beside it."""

import json
import sys
import tracemalloc
import zipfile
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from medspeed.common.inference.labels import LabelScheme, Region
from medspeed.common.inference.measure import warn_of_training
from medspeed.common.inference.model import initialise, load_weights, save_weights, write_model
from medspeed.common.inference.postprocessing import Postprocessing
from medspeed.common.inference.runs import RunModel, import_weights, load_models
from medspeed.models import find_network
from medspeed.models.segresnet3d import segresnet3d
from tests.support import note_of, unet_model

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(3)}
UNET = unet_model((1.5, 1.5, 2.0), (4, 8), (16, 16, 16))
SCHEME = LabelScheme(("background", "a", "", "b"), (Region("A", (1, 3), 1), Region("B", (3,), 3)), exclusive=False)
SEGRESNET = replace(
    UNET,
    network=segresnet3d,
    arguments={"filters": 8, "blocks_down": (1, 1), "dropout": 0.0},
    labelling=SCHEME,
    preparation=replace(UNET.preparation, normalisation="zscore", window=None, channels=4),
)


@pytest.mark.parametrize("model", [UNET, SEGRESNET], ids=["unet", "segresnet"])
def test_every_network_of_volumes_is_written_in_one_shape_and_comes_back(model, tmp_path):
    write_model(tmp_path, "heart", model)
    again = load_models([tmp_path], "heart", find_network)
    assert again == RunModel(**vars(replace(model, arguments=again.arguments)))
    assert again.arguments == json.loads(json.dumps(model.arguments))  # tuples are lists
    content = json.loads((tmp_path / "model.json").read_text())
    assert (content["app"], content["network"]) == ("heart", model.network.__name__)
    assert content["labelling"]["labels"] == list(model.labelling.labels)  # what the report names labels by


def test_post_processing_comes_back_and_names_structures_of_the_model(tmp_path):
    model = replace(
        UNET, postprocessing=(Postprocessing(("spleen",), largest=True), Postprocessing(("spleen",), smallest_ml=0.5))
    )
    write_model(tmp_path, "heart", model)
    assert load_models([tmp_path], "heart", find_network).postprocessing == model.postprocessing
    content = json.loads((tmp_path / "model.json").read_text())
    for name, value, words in (
        ("structures", ["liver"], r"postprocessing \['liver'\]: must be of the structures \['spleen'\]"),
        ("smallest_ml", -1.0, r"smallest_ml -1.0: must be a volume in ml"),
        ("threshold", 1.0, r"threshold 1.0: must be a probability"),
        ("largest", "yes", r"Expected `bool`"),
    ):
        wrong = json.loads(json.dumps(content))
        wrong["postprocessing"][0][name] = value
        (tmp_path / "model.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=rf"model\.json: .*{words}"):
            load_models([tmp_path], "heart", find_network)


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A run whose model.json names a module that says when it is imported."""
    (tmp_path / "says_so.py").write_text("from medspeed.models.unet3d import unet3d as net\nprint('imported')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_model(tmp_path, "heart", UNET)
    content = json.loads((tmp_path / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps({**content, "network": "says_so:net"}))
    yield tmp_path
    sys.modules.pop("says_so", None)


def test_no_module_is_imported_because_a_file_says_so(foreign, capsys):
    model = load_models([foreign], "heart", find_network)
    assert model.network.__name__ == "says_so:net"  # so that its exports can be used
    with pytest.raises(PermissionError, match=r"^network says_so:net: runs the code .*--network says_so:net"):
        model.build()
    with pytest.raises(ValueError, match="its network is says_so:net, not dynunet"):
        load_models([foreign], "heart", find_network, "dynunet")
    assert capsys.readouterr().out == ""


def test_a_network_of_ones_own_is_imported_where_it_is_named(foreign, capsys):
    model = load_models([foreign], "heart", find_network, "says_so:net")
    assert capsys.readouterr().out == "imported\n"
    assert model.build().eval()(torch.zeros(1, 1, 16, 16, 16)).shape == (1, 2, 16, 16, 16)
    write_model(foreign, "heart", model)
    assert json.loads((foreign / "model.json").read_text())["network"] == "says_so:net"


def test_the_network_is_built_of_its_arguments():
    image = torch.zeros(1, 4, 16, 16, 16)
    assert SEGRESNET.build().eval()(image).shape == (1, 2, 16, 16, 16)


@pytest.mark.parametrize(
    ("content", "words"),
    [({"app": "spleen"}, "the app 'spleen'"), ({"app": "heart", "network": "resnet"}, "resnet"), ({}, "app")],
)
def test_what_is_no_model_of_the_app_is_named(content, words, tmp_path):
    (tmp_path / "model.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"model\.json: not the model file of a run of heart .*{words}"):
        load_models([tmp_path], "heart", find_network)


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("window_size", [0, 16, 16], r"window_size \(0, 16, 16\): must be 1 to 4096"),
        ("window_size", [100000, 16, 16], "window_size"),
        ("window_batch", 0, "window_batch 0: must be 1 to 4096"),
        ("overlap", 1.0, r"overlap 1.0: must be in \[0, 1\)"),
        ("overlap", "x", "Expected `float`, got `str`"),
        ("precision", "fp8", "Invalid enum value 'fp8'"),
        ("arguments", {"channels": [4, 8], "residual_units": 10**6}, "residual_units.*must be numbers of at most 4096"),
        ("arguments", {"channels": [10**9, 10**9]}, "channels"),
        ("preparation", {**asdict(UNET.preparation), "spacing": [1e-3, 1, 1]}, "spacing .*: must be 0.01 to 100 mm"),
        ("preparation", {**asdict(UNET.preparation), "window": None}, "window=None"),
        ("labelling", {**asdict(UNET.labelling), "labels": []}, "numbers of the 0 labels"),
        ("labelling", {**asdict(SCHEME), "regions": [{"name": "a", "members": [1], "value": 1}] * 2}, "its own name"),
    ],
)
def test_values_out_of_their_bounds_are_named(part, value, words, tmp_path):
    write_model(tmp_path, "heart", UNET)
    content = json.loads((tmp_path / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps({**content, part: value}))
    with pytest.raises(ValueError, match=rf"model\.json: not the model file of a run of heart .*{words}"):
        load_models([tmp_path], "heart", find_network)


@pytest.mark.parametrize(
    "arguments", [{"channels": "ab"}, {"channels": None}, {"channels": [4.5, 8]}, {"residual_units": "x"}, {"more": 1}]
)
def test_arguments_that_make_no_network_are_named(arguments):
    with pytest.raises(ValueError, match=r"model\.json: invalid arguments"):
        replace(UNET, arguments={**UNET.arguments, **arguments}).build()


@pytest.mark.parametrize(
    ("summary", "said"),
    [({"data": {"synthetic": True}}, True), ({"data": {"synthetic": False}}, False), ({"data": 5}, False), ([], False)],
)
def test_a_model_of_phantoms_is_said_to_be_one(summary, said, tmp_path, capsys):
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    warn_of_training(tmp_path)
    assert ("SYNTHETIC DATA" in capsys.readouterr().out) == said


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("foreground Dice, native grid", 0.0, True),
        ("foreground Dice, native grid", 0.01, False),
        ("patch AUC, testing patches", 0.5, True),
        ("patch AUC, testing patches", 0.55, False),
        ("foreground Dice, native grid", "0", False),
        (None, None, False),
    ],
)
def test_a_model_that_learned_nothing_is_said_to_be_one(name, value, said, tmp_path, capsys):
    (tmp_path / "summary.json").write_text(json.dumps({"quality": {"name": name, "value": value}}))
    warn_of_training(tmp_path)
    assert ("LEARNED NOTHING" in capsys.readouterr().out) == said


@pytest.mark.parametrize(("learned", "asked", "said"), [("", "x", True), ("xyz", "yz", False), ("x", "xy", True)])
def test_flips_that_a_model_has_not_learned_are_said(learned, asked, said, tmp_path, capsys):
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "plan.json").write_text(json.dumps({"crops": {"flips": learned}}))
    warn_of_training(tmp_path, flips=asked)
    assert ("trained without flips of" in capsys.readouterr().out) == said


@pytest.mark.parametrize(
    ("model", "words"), [(UNET, r"channels \(4, 8\), residual_units 1"), (SEGRESNET, "filters 8, blocks_down")]
)
def test_weights_of_another_network_name_what_this_one_is_made_of(model, words, tmp_path):
    save_weights(tmp_path / "w.safetensors", WEIGHTS, {})
    with pytest.raises(ValueError, match=f"does not fit; .*built with {words}"):
        import_weights(tmp_path / "run", "heart", model, tmp_path / "w.safetensors")
    assert not (tmp_path / "run").exists()


def test_weights_with_a_note(tmp_path):
    save_weights(tmp_path / "w.safetensors", WEIGHTS, {"dice": "0.9"})
    assert note_of(tmp_path / "w.safetensors")["dice"] == "0.9"
    assert torch.equal(load_weights(tmp_path / "w.safetensors")["a"], WEIGHTS["a"])


def test_weights_that_share_memory_and_some_not_dense_come_back(tmp_path):
    drawn = torch.arange(6.0).reshape(2, 3)
    weights = {"tied": drawn, "again": drawn, "turned": drawn.T, "part": drawn[1], "none": torch.empty(0)}
    save_weights(tmp_path / "w.safetensors", weights, {})
    found = load_weights(tmp_path / "w.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
     torch.uint8, torch.bool],
)  # fmt: skip
def test_the_librarys_own_reader_finds_every_kind_of_number(dtype, tmp_path):
    weights = {"b": torch.arange(7).to(dtype), "a": torch.arange(6).reshape(2, 3).to(dtype), "one": torch.tensor(1)}
    save_weights(tmp_path / "w.safetensors", weights, {"dice": "0.9"})
    found = load_file(tmp_path / "w.safetensors")
    assert found.keys() == weights.keys()
    assert all(found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in weights.items())


def test_saving_weights_takes_no_memory_for_a_copy(tmp_path):
    """What is traced includes Python's bytes, so that a copy of the 64 MiB as bytes would show."""
    weights = {"a": torch.zeros(8, 2**20), "b": torch.zeros(8, 2**20)}
    tracemalloc.start()
    save_weights(tmp_path / "w.safetensors", weights, {})
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**20


def test_truncated_weights_are_named(tmp_path):
    path = tmp_path / "w.safetensors"
    save_weights(path, WEIGHTS, {})
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"w\.safetensors: truncated, or not a safetensors file"):
        load_weights(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such weights file"):
        load_weights(tmp_path / "model.pt")


def test_a_bundle_state_dict_and_a_ddp_one_are_understood(tmp_path):
    torch.save({"model": WEIGHTS}, tmp_path / "model.pt")
    assert torch.equal(load_weights(tmp_path / "model.pt")["a"], WEIGHTS["a"])
    torch.save({f"module.{name}": value for name, value in WEIGHTS.items()}, tmp_path / "ddp.pt")
    assert load_weights(tmp_path / "ddp.pt").keys() == WEIGHTS.keys()


def test_weights_that_do_not_fit_are_named(tmp_path):
    save_weights(tmp_path / "w.safetensors", {"weight": torch.zeros(3, 2), "left": torch.zeros(1)}, {})
    with pytest.raises(
        ValueError, match=r"missing \['bias'\], unexpected \['left'\].*weight \(3, 2\) instead of \(3, 4\)"
    ):
        initialise(nn.Linear(4, 3), tmp_path / "w.safetensors")


def test_initialise_copies(tmp_path):
    source, target = nn.Linear(4, 3), nn.Linear(4, 3)
    save_weights(tmp_path / "w.safetensors", source.state_dict(), {})
    initialise(target, tmp_path / "w.safetensors")
    assert torch.equal(source.weight, target.weight)


def test_equal_weights_give_equal_bytes_in_every_process(tmp_path):
    """Several entries beside the tensors would come in any order."""
    notes = {str(number): "x" for number in range(20)}
    for name in "ab":
        save_weights(tmp_path / f"{name}.safetensors", WEIGHTS, notes if name == "a" else dict(reversed(notes.items())))
    one, other = ((tmp_path / f"{name}.safetensors").read_bytes() for name in "ab")
    assert one == other


def test_weights_with_a_flipped_bit_are_refused(tmp_path):
    path = tmp_path / "best.safetensors"
    save_weights(path, {"weight": torch.ones(100)}, {"dice": "0.9"})
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="the file has changed"):
        load_weights(path)


def test_a_damaged_file_of_torchs_own_is_refused(tmp_path):
    """torch reads other weights than were written: it does not look at the checksums, nor name a file that is cut."""
    path = tmp_path / "model.pt"
    torch.save({"weight": torch.ones(1000)}, path)
    whole = path.read_bytes()
    load_weights(path)
    place = whole.index(torch.ones(8).numpy().tobytes()) + 403
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
    with pytest.raises(ValueError, match=r"model\.pt: cannot be loaded .*data/0 in it is damaged.*restore a copy"):
        load_weights(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("data.pkl", b"0123456789" * 100)
    content = bytearray(path.read_bytes())
    content[45:50] = b"\xff" * 5
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.pt: cannot be loaded safely"):
        load_weights(path)
    for length in (10, len(whole) // 2, len(whole) - 9):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"model\.pt: cannot be loaded safely"):
            load_weights(path)


def test_a_file_of_torchs_own_without_checksums_is_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weight": torch.ones(1000)}, tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(load_weights(tmp_path / "model.pt")["weight"], torch.ones(1000))


def test_weights_of_other_programs_have_no_digest(tmp_path):
    save_file({"weight": torch.ones(3)}, tmp_path / "other.safetensors", {"format": "pt"})
    assert torch.equal(load_weights(tmp_path / "other.safetensors")["weight"], torch.ones(3))
