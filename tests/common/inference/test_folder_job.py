import errno
import fcntl
import gc
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from medspeed.common.files import locked
from medspeed.common.inference.folder_job import FolderJob, Item


@pytest.fixture
def folder(tmp_path):
    """Three texts, a to c."""
    (tmp_path / "in").mkdir()
    for name in "abc":
        (tmp_path / "in" / name).write_text(name)
    return tmp_path


def doubling(folder, word="x", **more):
    """A job that writes each text after a word, and a table of all."""
    output = folder / "out"

    def item(path):
        outputs = (output / f"{path.name}.txt",)
        return Item(path.name, path, (path,), outputs, output / "records" / f"{path.name}.json", (output / path.name,))

    def write(item, text):
        if "bad" in text:
            raise ValueError(f"{item.name} is bad")
        item.outputs[0].write_text(text)
        return {"length": len(text)}

    job = FolderJob(
        "text",
        output,
        [item(path) for path in sorted((folder / "in").iterdir())],
        {"word": (word,)},
        lambda item: item.source.read_text(),
        lambda item, text: word + text,
        write,
        lambda record: f"{record['length']} letters",
        lambda records: (output / "table").write_text(" ".join(f"{a}={r['length']}" for a, r in records.items())),
    )
    return replace(job, **more)


def with_picture(item):
    return replace(item, outputs=(*item.outputs, *item.optional))


def do(job):
    left = job.unfinished()
    return [item.name for item in left], job.run(left).status


def test_reading_computing_and_writing_overlap(folder):
    """Each waits for the others: one after the other it would never end."""
    both = threading.Barrier(3, timeout=20)

    def meet(name):
        def work(item, *_):
            if item.name == name:
                both.wait()  # its number may be 0, which is no record
            return {}

        return work

    # While c is read, b is computed and a written.
    job = doubling(folder, read=meet("c"), compute=meet("b"), write=meet("a"), line=str, tables=None)
    assert job.work(job.items) == {}


def held_at_most(folder, slow, **more):
    """Return the most items, and the most bytes, that were held at once in a job of eight, and in which order."""
    alive: dict[str, int] = {}
    most: list[tuple[int, int]] = []
    order: list[str] = []
    for number in range(5):
        (folder / "in" / str(number)).touch()

    def work(stage):
        def run(item, *_):
            if stage == "read":
                alive[item.name] = job.need(item)
            if stage == "compute":
                order.append(item.name)
            most.append((len(alive), sum([*alive.values()])))
            time.sleep(0.02 if stage == slow else 0)
            if stage == "write":
                del alive[item.name]
            return {}

        return run

    stages = {stage: work(stage) for stage in ("read", "compute", "write")}
    job = doubling(folder, **stages, line=str, tables=None, **more)
    assert job.work(job.items) == {}
    assert len(most) == 24
    return [max(each) for each in zip(*most, strict=True)], order


@pytest.mark.parametrize("slow", ["read", "compute", "write"])
@pytest.mark.parametrize("threads", [1, 2])
def test_no_more_than_due_are_held_whichever_is_slow(folder, slow, threads):
    (items, _), order = held_at_most(folder, slow, threads=threads)
    assert items <= 2 * threads + 1
    assert order == [*"01234abc"]  # computed in order, whoever has read first


@pytest.mark.parametrize("slow", ["read", "compute", "write"])
def test_no_more_bytes_are_held_than_there_is_room_for_but_for_one_item(folder, slow):
    needs = dict(zip("01234abc", (3, 3, 4, 9, 1, 1, 1, 30), strict=True))
    (items, held), order = held_at_most(folder, slow, threads=4, need=lambda item: needs[item.name], room=10)
    assert held == 30  # the last one, alone
    assert items <= 4
    assert order == [*"01234abc"]
    del needs["c"]
    (folder / "in" / "c").unlink()
    (folder / "in" / "5").touch()
    needs["5"] = 2
    assert held_at_most(folder, slow, threads=4, need=lambda item: needs[item.name], room=10)[0][1] <= 10


@pytest.mark.parametrize("stage", ["read", "write"])
def test_threads_read_and_write_at_once(folder, stage):
    """Each of three waits for the others: one after the other it would never end."""
    three = threading.Barrier(3, timeout=20)

    def meet(*_):
        three.wait()
        return {}

    stages: dict[str, Any] = dict.fromkeys(("read", "compute", "write"), lambda item, *_: {})
    job = doubling(folder, **{**stages, stage: meet}, line=str, tables=None, threads=3)
    assert job.work(job.items) == {}


def test_nothing_more_is_read_once_writing_fails(folder):
    """Of many items those are read that wait in memory, and no more."""
    read: list[str] = []
    for number in range(20):
        (folder / "in" / str(number)).touch()

    def fails(item, *_):
        raise OSError("full")

    job = doubling(folder, read=lambda item: read.append(item.name), compute=lambda *_: "", write=fails, threads=2)
    with pytest.raises(OSError, match="full"):
        job.work(job.items)
    assert 1 <= len(read) <= job.in_flight + 2  # when the error is seen two more may have come


def test_torch_computes_on_one_core_in_each_thread_and_keeps_those_of_others(folder, capsys):
    before, computed = torch.get_num_threads(), []

    def compute(item, text):
        computed.append(torch.get_num_threads())
        return text

    try:
        torch.set_num_threads(3)
        job = doubling(folder, compute=compute, write=lambda *_: {"length": torch.get_num_threads()}, threads=2)
        assert job.work(job.items) == {}
        assert computed == [3, 3, 3]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    said = capsys.readouterr().out
    assert all(f"{name}: 1 letters" in said for name in "abc")


@pytest.mark.parametrize("stage", ["read", "compute", "write"])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("b is bad"), "failed: b is bad\n"),
        (ValueError("\x1b[2J\nc: fine"), "failed: b: \\x1b[2J\\nc: fine\n"),
        (RuntimeError("overflowed\nin C++"), "failed: b: RuntimeError: overflowed\n"),
        (MemoryError(), "failed: b: MemoryError: \n"),
        (OverflowError("infinity"), "failed: b: OverflowError: infinity\n"),
        (OSError(errno.ENAMETOOLONG, "File name too long"), "failed: b: [Errno 36] File name too long\n"),
    ],
)
def test_any_error_costs_its_item_alone(folder, stage, error, said, capsys):
    def fails(item, *_):
        if item.name == "b":
            raise error
        return {}

    stages: dict[str, Any] = dict.fromkeys(("read", "compute", "write"), lambda item, *_: {})
    job = doubling(folder, **{**stages, stage: fails}, line=str, tables=None)
    assert [*job.work(job.items)] == ["b"]
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("stage", ["read", "compute", "write"])
def test_a_wish_to_stop_is_no_bad_input(folder, stage):
    def stops(*_):
        raise KeyboardInterrupt

    job = doubling(folder, **{stage: stops})
    with pytest.raises(KeyboardInterrupt):
        job.work(job.items)


def test_a_file_that_is_gone_is_a_bad_input_and_a_full_disk_is_not(folder):
    def fails(item, *_):
        raise OSError("full")

    job = doubling(folder, read=fails)
    assert [*job.work(job.items)] == ["a", "b", "c"]
    job = doubling(folder, write=fails)
    with pytest.raises(OSError, match="full"):
        job.work(job.items)


def test_what_is_finished_is_kept_and_the_table_holds_all(folder, capsys):
    assert do(doubling(folder)) == (["a", "b", "c"], 0)
    assert (folder / "out" / "b.txt").read_text() == "xb"
    assert "b: 2 letters" in capsys.readouterr().out
    (folder / "out" / "table").unlink()
    assert do(doubling(folder)) == ([], 0)
    assert "3 texts already finished" in capsys.readouterr().out
    assert (folder / "out" / "table").read_text() == "a=2 b=2 c=2"


def test_what_changed_is_done_anew(folder):
    do(doubling(folder))
    (folder / "in" / "a").write_text("longer")
    (folder / "out" / "b.txt").unlink()
    assert do(doubling(folder))[0] == ["a", "b"]
    (folder / "out" / "records" / "c.json").write_text("{")
    assert do(doubling(folder))[0] == ["c"]
    assert do(doubling(folder, "y"))[0] == ["a", "b", "c"]
    assert (folder / "out" / "c.txt").read_text() == "yc"


def test_a_file_replaced_by_one_of_its_size_and_time_is_done_anew(folder):
    for text in ("one", "two"):
        (folder / "in" / "a").write_text(text)
        os.utime(folder / "in" / "a", (1e9, 1e9))
        do(doubling(folder))
        assert (folder / "out" / "a.txt").read_text() == f"x{text}"


def test_a_slice_replaced_by_an_older_one_of_its_size_is_seen(folder):
    """The latest change of all stays what it was."""
    files = (folder / "in" / "a", folder / "in" / "b")
    item = replace(doubling(folder).items[0], files=files)
    os.utime(files[1], (2e9, 2e9))
    before = item.stamp()
    os.utime(files[0], (1e9, 1e9))
    assert item.stamp() != before


def test_no_table_of_old_outputs_is_there_while_new_ones_are_made(folder):
    """A process that is killed then cannot write a new one."""
    table = folder / "out" / "table"
    do(doubling(folder, table_files=[table]))
    there = []

    def write(item, text):
        there.append(table.exists())
        item.outputs[0].write_text(text)
        return {"length": len(text)}

    do(doubling(folder, "yy", write=write, table_files=[table]))
    assert there == [False] * 3
    assert table.read_text() == "a=3 b=3 c=3"
    do(doubling(folder, "yy", write=write, table_files=[table]))  # nothing is left to do
    assert table.exists()


def test_a_job_that_dies_leaves_no_record_that_vouches_for_another_s_output(folder):
    do(doubling(folder))
    assert do(doubling(folder, items=[with_picture(item) for item in doubling(folder).items]))[0] == ["a", "b", "c"]

    def dies(item, text):
        item.outputs[0].write_text("wrong")
        raise KeyboardInterrupt

    other = doubling(folder, "y", write=dies)
    with pytest.raises(KeyboardInterrupt):
        do(other)
    assert json.loads((folder / "out" / "records" / "a.json").read_text()) == {
        "name": "a",
        "outputs": ["a.txt"],
        "begun": True,
    }
    assert not (folder / "out" / "a").exists()  # of the job before
    left = folder / "out" / "c.txt"  # perhaps the thread had begun with it
    assert not left.exists() or left.read_text() == "wrong"
    assert (folder / "out" / "table").read_text() == ""
    assert do(doubling(folder))[0] == ["a", "b", "c"]
    assert (folder / "out" / "a.txt").read_text() == "xa"


def test_a_file_that_changes_while_it_is_read_is_not_vouched_for(folder):
    def read(item):
        text = item.source.read_text()
        os.utime(item.source, (1, 1))
        return text

    assert do(doubling(folder, read=read)) == (["a", "b", "c"], 1)


def test_the_tables_are_written_by_one_process_at_a_time(folder):
    def tables(records):
        with (folder / "out" / ".lock").open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)

    assert do(doubling(folder, tables=tables)) == (["a", "b", "c"], 0)


def test_a_folder_stays_held_while_the_second_of_one_identity_works(folder):
    do(doubling(folder))
    with ExitStack() as second:
        with doubling(folder)._held():
            second.enter_context(doubling(folder)._held())
        with pytest.raises(BlockingIOError, match="with another model or options"), doubling(folder, "y")._held():
            pass


def test_what_another_process_has_finished_stays_so_while_it_is_done_again(folder):
    """Else the other one would miss it at its end."""
    job, there = doubling(folder), []

    def write(item, text):
        there.append(job.finished(item))
        item.outputs[0].write_text(text)
        return {"length": len(text)}

    do(job)
    assert replace(job, write=write).work(job.items) == {}
    assert [record["length"] for record in there] == [2, 2, 2]


def test_an_output_of_others_is_not_replaced(folder):
    (folder / "out").mkdir()
    (folder / "out" / "b.txt").write_text("theirs")
    with pytest.raises(FileExistsError, match=r"b\.txt: .* choose another --output"):
        do(doubling(folder))
    assert [path.name for path in (folder / "out").glob("*.txt")] == ["b.txt"]


def test_an_output_that_no_record_tells_of_is_not_replaced(folder):
    """The first run made no picture: one that lies there now is the user's."""
    do(doubling(folder))
    (folder / "out" / "a").write_text("theirs")
    with pytest.raises(FileExistsError, match=r"/a: already exists"):
        do(doubling(folder, "y", items=[with_picture(item) for item in doubling(folder).items]))
    do(doubling(folder, "y"))
    assert (folder / "out" / "a").read_text() == "theirs"


def test_an_item_with_its_picture_is_done_anew(folder):
    def with_pictures(identity):
        return doubling(folder, identity, items=[with_picture(item) for item in doubling(folder).items])

    do(with_pictures("x"))
    (folder / "out" / "a").write_text("an old picture")
    assert do(with_pictures("y")) == (["a", "b", "c"], 1)  # since no picture is made here
    assert not (folder / "out" / "a").exists()


def test_a_table_beside_the_lock_of_another_job_is_not_replaced(folder):
    (folder / "out").mkdir(exist_ok=True)
    (folder / "out" / ".lock").touch()
    (folder / "out" / "table.csv").write_text("theirs")
    job = replace(doubling(folder), tables=lambda records: None, table_files=[folder / "out" / "table.csv"])
    with pytest.raises(FileExistsError, match=r"table\.csv: already exists"):
        do(job)


def test_an_output_without_a_record_is_not_replaced_in_a_folder_of_ours_either(folder):
    do(doubling(folder))
    (folder / "in" / "d").write_text("d")
    (folder / "out" / "d.txt").write_text("theirs")
    with pytest.raises(FileExistsError, match=r"/d\.txt: already exists"):
        do(doubling(folder, "y"))
    assert (folder / "out" / "d.txt").read_text() == "theirs"


def test_a_table_of_others_is_not_replaced_however_often_one_tries(folder):
    table = folder / "out" / "table"
    table.parent.mkdir()
    table.write_text("theirs")
    for _ in range(2):
        with pytest.raises(FileExistsError, match=r"/table: already exists, not written by a run"):
            do(doubling(folder, table_files=[table]))
    assert table.read_text() == "theirs"
    table.unlink()
    for word in "xy":
        do(doubling(folder, word, table_files=[table]))
    assert table.read_text() == "a=2 b=2 c=2"


def test_which_tables_are_ours_is_only_ever_added_to(folder):
    """A process that is killed while it writes leaves what stood there."""
    do(doubling(folder, table_files=[folder / "out" / "table"]))
    before = (folder / "out" / ".lock").read_bytes()
    do(doubling(folder, table_files=[folder / "out" / "table", folder / "out" / "other"]))
    after = (folder / "out" / ".lock").read_bytes()
    assert after.startswith(before)
    assert after.split() == [b"table", b"other"]


def test_names_of_any_length_and_bytes_cost_no_others(folder, capsys):
    (folder / "in" / ("d" * 251)).touch()  # with .txt it is as long as a name can be; its record's is too long
    (folder / "in" / ("e" * 245)).touch()
    (folder / "in" / os.fsdecode(b"f\xe9\x1b")).touch()
    job = doubling(folder, tables=None)
    assert do(job)[1] == 1
    said = capsys.readouterr().out
    assert f"1 of 6 texts failed: {'d' * 251}" in said
    assert "f\\udce9\\x1b: 1 letters" in said
    assert do(job) == (["d" * 251], 1)


def test_what_a_killed_job_half_wrote_is_removed_and_nothing_else(folder):
    (folder / "out").mkdir()
    for name in ("a.txt", "other.txt"):
        (folder / "out" / f".part-abc_1-{name}").touch()
    (folder / "out" / ".part-abc_1-table").touch()
    do(doubling(folder, table_files=[folder / "out" / "table"]))
    assert [path.name for path in (folder / "out").glob(".part-*")] == [".part-abc_1-other.txt"]


def test_bad_items_are_named_and_cost_themselves_alone(folder, capsys):
    (folder / "in" / "a").write_text("bad")

    def full(item, text):
        if item.name == "b":
            raise torch.OutOfMemoryError("no room")
        return text

    assert do(doubling(folder, compute=full)) == (["a", "b", "c"], 1)
    said = capsys.readouterr().out
    assert "failed: a is bad" in said
    assert "failed: b: no room" in said
    assert "2 of 3 texts failed: a, b" in said
    assert (folder / "out" / "table").read_text() == "c=1"


class Image:
    """What lies on a device, or on the host."""


def test_an_item_that_failed_leaves_no_memory_to_the_next(folder):
    """A scan too large for a device must not keep its memory from the others: nobody may hold the error's frames."""
    left: dict[str, list[weakref.ref[Image]]] = {"a": [], "b": [], "c": []}
    found = {}

    def held(item):
        left[item.name].append(weakref.ref(image := Image()))
        return image

    def too_large(image):
        try:
            raise torch.OutOfMemoryError("no room")
        except torch.OutOfMemoryError as error:
            raise ValueError("one window does not fit") from error

    def unwrapped(image):
        cause: BaseException | None = None
        try:
            too_large(image)
        except ValueError as error:
            cause = error.__cause__
            raise (cause or error) from None  # behind which is itself

    def compute(item, image):
        found[item.name] = [each() is None for name in left if name < item.name for each in left[name]]
        return unwrapped(held(item)) if item.name != "c" else "text"

    gc.disable()  # which might come to it, or not
    try:
        assert do(doubling(folder, read=held, compute=compute)) == (["a", "b", "c"], 1)
    finally:
        gc.enable()
    assert found == {"a": [], "b": [True] * 2, "c": [True] * 4}  # what was read, and what was computed with


def test_processes_share_the_items_and_the_last_one_finds_all(folder, monkeypatch):
    monkeypatch.setattr("medspeed.common.inference.folder_job.wait_for_all", lambda: None)  # one after the other, here
    for rank, due in ((1, ["b"]), (0, ["a", "c"])):
        for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_RANK", rank)):
            monkeypatch.setenv(name, str(value))
        assert do(doubling(folder)) == (due, 0)
    assert (folder / "out" / "table").read_text() == "a=2 b=2 c=2"


def test_a_file_that_is_gone_is_named_without_its_folder(folder):
    job = doubling(folder)
    (folder / "in" / "b").unlink()
    with pytest.raises(ValueError, match=r"^b: a file cannot be read \(No such file"):
        job.items[1].stamp()
    assert job.finished(job.items[1]) is None


CHILD = """
from medspeed.common.inference.scan_files import peak_memory

before = peak_memory()
held = bytearray(2**28)
print(before, peak_memory() - before)
"""
PARENT = f"""
import subprocess, sys

held = bytearray(2**30)
del held
subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
"""


def test_the_peak_is_the_process_s_own_and_counts_what_it_takes():
    done = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, check=True)
    before, more = map(int, done.stdout.split())
    assert 2**22 < before < 2**30  # what the parent had; PyTorch's CUDA build takes more than half of it
    assert 0.9 * 2**28 < more < 2**29


def test_processes_share_a_folder_only_with_the_same_model_and_options(folder):
    seen: list[Any] = []

    def meanwhile(item, text):
        if item.name == "b":
            while outer.finished(outer.items[0]) is None:  # "a" is still being written: the other would do it, too
                time.sleep(0.01)
            seen.append(do(doubling(folder))[1])
            with pytest.raises(BlockingIOError, match=r"out: in use by another process, .*: wait, or choose another"):
                do(doubling(folder, "y"))
        return "x" + text

    outer = doubling(folder, compute=meanwhile)
    assert do(outer) == (["a", "b", "c"], 0)
    assert seen == [0]
    assert (folder / "out" / "a.txt").read_text() == "xa"
    assert do(doubling(folder, "y")) == (["a", "b", "c"], 0)


def test_a_file_system_without_locks_is_no_reason_to_fail(folder, monkeypatch):
    def unknown(*_):
        raise OSError(38, "Function not implemented")

    for name in ("flock", "lockf"):
        monkeypatch.setattr(fcntl, name, unknown)
    assert do(doubling(folder)) == (["a", "b", "c"], 0)
    with locked(folder / "lock") as alone:  # what seems left over may be another's
        assert not alone


def test_an_item_that_changes_or_vanishes_meanwhile_has_failed(folder, capsys):
    """Its row is missing in the table: nobody may take that for a finished job."""

    def read(item):
        if item.name == "c":  # the others are done, or kept
            while not (folder / "out" / "b.txt").exists():
                time.sleep(0.01)
            os.utime(folder / "in" / "a", (1, 1))
            (folder / "out" / "b.txt").unlink()
        return item.source.read_text()

    (folder / "in" / "c").rename(folder / "c")
    do(doubling(folder))
    (folder / "c").rename(folder / "in" / "c")
    job = doubling(folder, read=read)
    found = job.run(job.unfinished())
    assert (found.status, [*found.done], [*found.failed]) == (1, ["c"], ["a", "b"])
    assert found.failed["a"] == "a: its files changed or its outputs vanished meanwhile: run again"
    assert "2 of 3 texts failed: a, b" in capsys.readouterr().out
    assert (folder / "out" / "table").read_text() == "c=2"
