import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from medspeed.common import console
from medspeed.common import run as run_module
from medspeed.common.clock import Clock
from medspeed.common.files import point_link, read_json_lines, release
from medspeed.common.ranks import Ranks, choose_device, torchrun_place
from medspeed.common.run import (
    STOP_SIGNALS,
    environment,
    exit_by_signal,
    how_to_go_on,
    is_our_program,
    one_line_errors,
    open_run,
    take_signals,
)
from medspeed.common.training.config import TrainingConfig

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def keep_logging():
    handlers = logging.root.handlers[:]
    yield
    logging.root.handlers[:] = handlers


def test_an_unnamed_run_gets_a_folder_by_the_time_and_a_latest_link(tmp_path):
    first = open_run(tmp_path, None, None, "cpu", "a: 1\n", 0)
    second = open_run(tmp_path, None, None, "cpu", "a: 2\n", 0)
    assert first.directory != second.directory
    assert not (tmp_path / "latest").exists()
    for run in (first, second):
        point_link(tmp_path / "latest", run.directory.name)
        assert (tmp_path / "latest").resolve() == run.directory
    assert (second.directory / "config.yaml").read_text() == "a: 2\n"
    assert json.loads((second.directory / "environment.json").read_text())["versions"]["torch"]


def test_opening_a_run_leaves_signals_and_logging_to_the_program(tmp_path):
    before = logging.root.handlers[:], [signal.getsignal(number) for number in STOP_SIGNALS]
    open_run(tmp_path, None, None, "cpu", "a: 1\n", 0)
    assert (logging.root.handlers, [signal.getsignal(number) for number in STOP_SIGNALS]) == before


def test_a_folder_in_use_is_refused_and_one_to_resume_is_kept(tmp_path, capsys):
    run = open_run(tmp_path, tmp_path / "run", None, "cpu", "a: 1\n", 0)
    with pytest.raises(FileExistsError, match="the run folder is not empty; choose another, or --resume"):
        open_run(tmp_path, run.directory, None, "cpu", "a: 2\n", 0)
    release(run.directory / ".lock")
    again = open_run(tmp_path, None, run.directory, "cpu", "a: 3\n", 0)
    assert again.resumed
    assert "another version" not in capsys.readouterr().out
    assert (run.directory / "config.yaml").read_text() == "a: 1\n"
    with pytest.raises(FileNotFoundError, match="no run to resume"):
        open_run(tmp_path, None, tmp_path / "none", "cpu", "", 0)
    (run.directory / "fold-0").mkdir()
    release(run.directory / ".lock")
    with pytest.raises(FileNotFoundError, match="run: no run but a folder of folds; repeat the command `medspeed fo"):
        open_run(tmp_path, None, run.directory, "cpu", "", 0)


def test_a_run_that_another_version_began_is_said(tmp_path, capsys):
    run = open_run(tmp_path, tmp_path / "run", None, "cpu", "a: 1\n", 0)
    release(run.directory / ".lock")
    path = run.directory / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "git": "abc"}))
    open_run(tmp_path, None, run.directory, "cpu", "a: 1\n", 0)
    assert "environment.json: the run last had another version (git abc)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "ours"),
    [
        ("apps/brats/train.py", True),
        (str(Path(__file__).parents[2] / "apps/brats/train.py"), True),
        ("medspeed train brats", True),
        ("{own}/train.py", False),
        ("apps/doctor.py", False),
    ],
)
def test_a_users_program_of_the_name_train_is_not_ours(program, ours, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr("sys.argv", [program.format(own=tmp_path)])
    assert is_our_program() == ours
    assert ("medspeed.train(APP, resume=" in how_to_go_on(tmp_path)) != ours


def test_a_disk_that_is_full_at_the_start_leaves_an_empty_folder(tmp_path, monkeypatch):
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(run_module, "write_json", fails)
        with pytest.raises(OSError, match="No space left"):
            open_run(tmp_path, tmp_path / "run", None, "cpu", "a: 1\n", 0)
    assert [path.name for path in (tmp_path / "run").iterdir()] in ([], [".lock"])
    assert not open_run(tmp_path, tmp_path / "run", None, "cpu", "a: 1\n", 0).resumed


def test_a_folder_whose_start_was_killed_is_taken(tmp_path):
    """It has a lock and nothing to resume; what else lies there is not offered to be resumed."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    open_run(tmp_path, tmp_path / "run", None, "cpu", "a: 1\n", 0)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(FileExistsError, match=r"other: the run folder is not empty; choose another$"):
        open_run(tmp_path, tmp_path / "other", None, "cpu", "a: 1\n", 0)


def test_what_a_killed_process_half_wrote_is_removed_by_the_next(tmp_path):
    run = open_run(tmp_path, tmp_path / "run", None, "cpu", "a: 1\n", 0).directory
    release(run / ".lock")
    part, other = run / ".part-0123abcd-summary.json", run / "store" / ".part-0123abcd-case.safetensors"
    other.parent.mkdir()  # which another process may be writing into
    for each in (part, other):
        each.touch()
    open_run(tmp_path, None, run, "cpu", "", 0)
    assert (part.exists(), other.exists()) == (False, True)


def test_a_run_resumed_by_a_link_stays_where_it_is_when_the_link_moves(tmp_path):
    first, second = (open_run(tmp_path, tmp_path / name, None, "cpu", "a: 1\n", 0) for name in "ab")
    release(first.directory / ".lock")
    point_link(tmp_path / "latest", first.directory.name)
    config = TrainingConfig(resume=tmp_path / "latest")
    point_link(tmp_path / "latest", second.directory.name)
    assert open_run(tmp_path, None, config.resume, "cpu", "", 0).directory == first.directory


def test_a_run_folder_that_is_not_utf_8_is_refused(tmp_path):
    folder = tmp_path / os.fsdecode(b"r\xe9")
    with pytest.raises(
        ValueError, match="the name or the locale is not UTF-8: choose another --run, or set PYTHONUTF8=1"
    ):
        open_run(tmp_path, folder, None, "cpu", "a: 1\n", 0)
    assert not folder.exists()


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "tpu:0", ""])
def test_a_device_that_is_none_is_refused(name):
    with pytest.raises(ValueError, match="must be auto, cpu, cuda or cuda:N"):
        choose_device(name)


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device cuda:1: found 0 CUDA devices"):
        choose_device("cuda:1")
    assert choose_device("auto") == CPU


def test_json_lines_leave_out_what_a_crash_cut_short(tmp_path):
    path = tmp_path / "m.jsonl"
    assert read_json_lines(path) == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": ')
    assert read_json_lines(path) == [{"a": 1}, {"a": 2}]
    path.write_text("garbage\n{}\n")
    with pytest.raises(ValueError, match=r"m\.jsonl: expected lines of JSON"):
        read_json_lines(path)


def test_what_is_said_is_kept(tmp_path, capsys):
    run = open_run(tmp_path, tmp_path / "run", None, "cpu", "", 0)
    run.say("hello")
    run.say("in detail", "detail")
    assert capsys.readouterr().out == "hello\n"
    assert (tmp_path / "run" / "run.log").read_text() == "hello\nin detail\n"


def test_an_explained_error_is_one_line_and_status_1(capsys, monkeypatch):
    with pytest.raises(SystemExit, match="1"), one_line_errors():
        raise ValueError("scan.nii.gz: empty")
    assert capsys.readouterr().err.startswith("error: scan.nii.gz: empty\n")
    monkeypatch.setattr(console, "_verbosity", "verbose")
    with pytest.raises(ValueError, match="empty"), one_line_errors():
        raise ValueError("empty")


def test_an_output_that_nobody_reads_stops_no_program_at_its_start(monkeypatch):
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as unread:
        unread.write("said before the program began")
        os.close(reader)
        monkeypatch.setattr(sys, "stdout", unread)
        done = []
        with one_line_errors():
            done.append(True)
        monkeypatch.undo()
        with pytest.raises(BrokenPipeError):
            unread.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # closing flushes again
    assert done == [True]


@pytest.mark.parametrize("stream", [1, 2])
def test_an_output_that_is_closed_stops_no_program(stream):
    command = [sys.executable, "-m", "medspeed.apps.doctor", "--help"]
    done = subprocess.run(["sh", "-c", f'exec "$@" {stream}>&-', "sh", *command], check=False, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_programmers_error_keeps_its_traceback():
    with pytest.raises(AssertionError), one_line_errors():
        raise AssertionError


def test_the_clock_adds_up():
    clock = Clock()
    with clock.stage("train"):
        pass
    clock.add("train", 2.0)
    clock.add("train", 3.0)
    clock.add("total", 10.0)
    seconds = clock.seconds()
    assert seconds["train"] == pytest.approx(5.0, abs=0.01)
    assert seconds["total"] >= 10.0 + seconds["start"] - 0.001  # each is rounded


def test_the_environment_names_what_numbers_depend_on():
    found = environment(CPU)
    assert found["device"] == "cpu"
    assert found["versions"]["monai"]
    assert found["cores"] >= 1


def test_a_package_in_somebody_elses_repository_has_no_revision(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(run_module, "__file__", str(tmp_path / "run.py"))
    assert environment(CPU)["git"] is None
    (tmp_path / "run.py").touch()
    subprocess.run([*git, "add", "run.py"], check=True)
    assert environment(CPU)["git"].endswith("+changes")


class Follower(Ranks):
    """The second of two processes; `once` fails or gives what the leader has."""

    def once(self, make):
        return self.control


def test_a_process_that_does_not_lead_writes_and_says_nothing(tmp_path, capsys):
    run = open_run(tmp_path, None, None, "cpu", "a: 1\n", 0, Follower(1, 2, control=tmp_path / "run"))
    run.say("hello")
    assert run.directory == tmp_path / "run"
    assert not run.ranks.leader
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_several_processes_take_a_gpu_each_and_none_by_name(monkeypatch):
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name, value in {"WORLD_SIZE": "3", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert choose_device("auto") == torch.device("cuda:1")
    assert choose_device("cpu") == CPU
    with pytest.raises(ValueError, match="device cuda:0: each of several ranks uses"):
        choose_device("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert choose_device("cuda") == torch.device("cuda:0")
    assert chosen == [1, 0]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="device cuda:2: found 2 CUDA devices"):
        choose_device("auto")


def test_ranks_without_all_their_numbers_are_told_what_is_missing(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.setenv(name, "2")
    with pytest.raises(ValueError, match="WORLD_SIZE 2: LOCAL_RANK must be set, too; start the ranks with torchrun"):
        torchrun_place()


def test_among_several_an_error_says_whose_it_is(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match="1"), one_line_errors():
        raise ValueError("scan.nii.gz: empty")
    line = capsys.readouterr().err
    assert line.startswith("rank 1 of 2: error: scan.nii.gz: empty ")
    assert line.count("\n") == 1
    with pytest.raises(KeyError), one_line_errors():
        raise KeyError("name")
    assert capsys.readouterr().err == "rank 1 of 2: KeyError: 'name'\n"


def test_it_is_told_where_weights_are_and_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["apps/spleen/train.py", "--data", "x"])
    assert how_to_go_on(tmp_path) == f"resume with python apps/spleen/train.py --resume {tmp_path}"
    monkeypatch.setattr("sys.argv", ["notebooks/mine.py"])
    assert how_to_go_on(tmp_path) == f"resume with medspeed.train(APP, resume={str(tmp_path)!r})"
    monkeypatch.setattr("sys.argv", ["medspeed train spleen", "--epochs", "3"])
    assert how_to_go_on(tmp_path) == f"resume with medspeed train spleen --resume {tmp_path}"
    last = tmp_path / "checkpoints" / "last"
    last.parent.mkdir()
    last.symlink_to("epoch-000001-step-000002")
    (tmp_path / "best.safetensors").touch()
    assert how_to_go_on(tmp_path).startswith(
        f"the last checkpoint is {last} -> epoch-000001-step-000002; the best weights are {tmp_path}/best.safetensors; "
    )


def test_a_notebook_is_told_how_to_go_on_in_python(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/lib/ipykernel_launcher.py", "-f", "kernel.json"])
    assert how_to_go_on(tmp_path) == f"resume with medspeed.train(APP, resume={str(tmp_path)!r})"


def test_a_run_folder_belongs_to_one_process(tmp_path):
    """Until that process ends, in whatever way; its own forked workers do not hold on to it."""
    run = open_run(tmp_path, tmp_path / "run", None, "cpu", "a: 1\n", 0)
    program = (
        "import sys; from pathlib import Path; from medspeed.common.run import one_line_errors, open_run\n"
        "with one_line_errors():\n"
        "    open_run(Path(), None, Path(sys.argv[1]), 'cpu', '', 0)\n"
    )
    command = [sys.executable, "-c", program, str(run.directory)]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"error: {run.directory}: in use by process {os.getpid()} on ")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").touch()
    subprocess.run([*command[:-1], str(tmp_path / "other")], check=True)
    open_run(tmp_path, None, tmp_path / "other", "cpu", "", 0)  # that process has ended


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_output_cannot_print_does_not_end_a_run(tmp_path, monkeypatch, encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr("sys.stdout", stream)
    run = open_run(tmp_path, tmp_path / "run", None, "cpu", "", 0)
    with one_line_errors():
        run.say("case 脾\udcff\x1b[31m")
    stream.flush()
    assert stream.buffer.getvalue() == b"case \\u813e\\udcff\\x1b[31m\n"
    assert (tmp_path / "run" / "run.log").read_text(encoding="utf-8") == "case 脾\\udcff\\x1b[31m\n"


def handlers():
    return [signal.getsignal(number) for number in STOP_SIGNALS]


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_ends_the_block_as_an_error_does_and_is_given_back(number):
    before = handlers()
    with pytest.raises(SystemExit) as ended, take_signals(STOP_SIGNALS, exit_by_signal):
        os.kill(os.getpid(), number)
    assert ended.value.code == 128 + number
    assert handlers() == before


def test_what_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with take_signals(STOP_SIGNALS, exit_by_signal):
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_no_signal_is_taken_outside_of_the_main_thread():
    before, found = handlers(), []

    def work():
        with take_signals(STOP_SIGNALS, exit_by_signal):
            found.append(handlers())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before]


def test_a_handler_that_python_does_not_know_becomes_the_default(monkeypatch):
    """A library in C may have set one; Python shows it as None, and cannot set it again."""
    given: list[object] = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: given.append(handler))
    take_signals([signal.SIGUSR1], exit_by_signal).close()
    assert given == [exit_by_signal, signal.SIG_DFL]


def test_a_run_keeps_the_whole_path_of_its_data(tmp_path, monkeypatch):
    """It may go on from another folder."""
    monkeypatch.chdir(tmp_path)
    assert TrainingConfig(data=Path("scans")).data == tmp_path / "scans"
