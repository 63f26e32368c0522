"""What the watch makes of beats that come, come late, or do not come; time is a number here."""

import time

import pytest

from common import watch as module
from common.watch import Place, Watch


class Ranks:
    """Some watches around one store and one clock."""

    def __init__(self, world):
        self.now, self.values, self.cut = 0.0, {}, False
        self.watches = [Watch(self, rank, world, self.ended.append, lambda: self.now) for rank in range(world)]
        for watch in self.watches:
            watch._tell()

    ended: list[str] = []  # noqa: RUF012 - nothing is ever ended here

    def set(self, key, value):
        if self.cut:
            raise RuntimeError("Connection reset by peer")
        self.values[key] = value

    def multi_get(self, keys):
        if self.cut:
            raise RuntimeError("Connection reset by peer")
        return [self.values[key].encode() for key in keys]

    def pass_time(self, seconds, beating=(0, 1)):
        """Let time pass in seconds; return the first verdict of each rank, and when it came."""
        verdicts = {}
        for _ in range(int(seconds)):
            self.now += 1.0
            for rank in beating:
                if not self.cut:
                    self.watches[rank].beat()
                verdict = self.watches[rank].verdict()
                if verdict and rank not in verdicts:
                    verdicts[rank] = (self.now, verdict)
        return verdicts

    def steps(self, count, seconds=1, ranks=(0, 1)):
        """Let all ranks go some steps together."""
        for number in range(count):
            for rank in ranks:
                self.watches[rank].at_step(number + 1)
            assert not self.pass_time(seconds)


def test_a_place_is_read_as_it_was_written():
    place = Place("saving", 7, 4, "a host with spaces")
    assert Place.read(place.text()) == place


@pytest.mark.parametrize(("phase", "seconds"), [("step", 15), ("saving", 15), ("validating", 15), ("busy", 20)])
def test_a_rank_without_beats_is_dead(phase, seconds):
    ranks = Ranks(2)
    with ranks.watches[1].phase(phase):
        assert not ranks.pass_time(5)
        verdicts = ranks.pass_time(30, beating=[0])
    when, why = verdicts[0]
    assert when == 5 + 1 + seconds + 1  # rank 0 hears before rank 1 speaks
    assert why.startswith("rank 1 (host ")
    assert why.endswith(f"has given no sign of life for {seconds + 1} s")


def test_a_rank_that_has_left_is_not_dead_and_one_that_ended_ends_all():
    ranks = Ranks(2)
    ranks.watches[1].stop()
    assert not ranks.pass_time(100, beating=[0])
    ranks.watches[1]._place = Place("ended")
    ranks.watches[1]._tell()
    assert "has ended the run" in ranks.pass_time(1, beating=[0])[0][1]


def test_a_cut_link_ends_every_rank():
    ranks = Ranks(2)
    with ranks.watches[0].phase("step"), ranks.watches[1].phase("step"):
        ranks.steps(3)
        ranks.cut = True
        verdicts = ranks.pass_time(30)
    assert [verdicts[rank][0] for rank in (0, 1)] == [19, 19]
    assert verdicts[0][1].startswith("no word from the other ranks for 16 s")


def test_a_main_thread_that_hangs_is_found_by_those_that_wait():
    ranks = Ranks(3)
    for watch in ranks.watches:
        watch._enter("step")
    ranks.steps(4, ranks=(0, 1, 2))
    for rank in (0, 2):
        ranks.watches[rank].at_step(5)  # rank 1 stays in step 4
    verdicts = ranks.pass_time(60, beating=[0, 1, 2])
    assert verdicts.keys() == {0, 2}
    for rank in (0, 2):
        assert verdicts[rank][1].startswith("rank 1 (host ")
        assert "hangs: it has stood in step 4 for 41 s, while this rank waits in 5" in verdicts[rank][1]


def test_the_longest_step_before_stretches_what_counts_as_hung():
    ranks = Ranks(2)
    for watch in ranks.watches:
        watch._enter("step")
    ranks.steps(4, seconds=30)
    ranks.watches[0].at_step(5)
    verdicts = ranks.pass_time(200)
    assert verdicts[0][0] == 4 * 30 + 4 * 30 + 1  # the hour of the start, and four times the longest step


@pytest.mark.parametrize("phase", ["saving", "validating", "busy"])
def test_long_honest_work_is_never_hung(phase):
    ranks = Ranks(2)
    for watch in ranks.watches:
        watch._enter("step")
    ranks.steps(4)
    with ranks.watches[0].phase(phase):
        ranks.watches[1].at_step(5)
        assert not ranks.pass_time(3600)
    assert not ranks.pass_time(39)  # and back in the loop it has time to catch up


def test_the_first_step_may_take_its_time():
    ranks = Ranks(2)
    for watch in ranks.watches:
        watch._enter("step")
        watch.at_step(1)
    ranks.watches[0].at_step(1)
    assert not ranks.pass_time(3600)


def test_a_machine_that_slept_judges_nobody_for_it():
    ranks = Ranks(2)
    assert not ranks.pass_time(5)
    ranks.now += 3600
    assert ranks.watches[0].verdict() is None
    assert not ranks.pass_time(10)


def test_the_hint_names_the_last_checkpoint(tmp_path):
    watch = Ranks(2).watches[0]
    assert watch.hint() == "there is no checkpoint of this run yet"
    watch.run_directory = tmp_path
    assert "no checkpoint was written yet" in watch.hint()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last").symlink_to("epoch-000001-step-000002")
    last = tmp_path / "checkpoints" / "last"
    assert watch.hint() == f"the last checkpoint is {last} -> epoch-000001-step-000002; resume with --resume {tmp_path}"


def test_the_threads_beat_judge_and_stop(monkeypatch):
    for name, value in {"BEAT_SECONDS": 0.02, "SILENT_SECONDS": 0.3, "SILENT_BUSY_SECONDS": 0.3}.items():
        monkeypatch.setattr(module, name, value)
    ranks, lines = Ranks(2), list[str]()
    watches = [Watch(ranks, rank, 2, lines.append) for rank in range(2)]
    for watch in watches:
        watch.start()
    time.sleep(0.6)
    assert lines == []
    watches[1].stop(left=False)
    end = time.monotonic() + 10
    while not lines and time.monotonic() < end:
        time.sleep(0.01)
    assert lines[0].startswith("rank 0 of 2: rank 1 (host ")
    watches[0].stop()
    assert not any(thread.is_alive() for watch in watches for thread in watch._threads)
