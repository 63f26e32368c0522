"""Two hosts that train together, for real but for the wire: two network namespaces joined by a virtual cable."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support import last_weights

HOSTS, ADDRESSES = ("medspeed-a", "medspeed-b"), ("10.77.0.1", "10.77.0.2")
WISH = {"epochs": 2, "steps": 40, "step_seconds": 0.1, "checkpoint_seconds": 1.0}

pytestmark = pytest.mark.slow


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def cable() -> Iterator[Callable[[str], None]]:
    """Make two hosts; yield a function that turns their cable "down" or "up"."""
    if os.geteuid() != 0:
        pytest.skip("making network namespaces needs root")
    try:
        for host in HOSTS:
            ip("netns", "add", host)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        ip("link", "add", "wire", "netns", HOSTS[0], "type", "veth", "peer", "name", "wire", "netns", HOSTS[1])
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            ip("-n", host, "addr", "add", f"{address}/24", "dev", "wire")
            for device in ("lo", "wire"):
                ip("-n", host, "link", "set", device, "up")
        yield lambda state: ip("-n", HOSTS[0], "link", "set", "wire", state)
    finally:
        for host in HOSTS:
            ip("netns", "del", host)


@pytest.fixture
def start_nodes(torchrun):
    def start(wish, port):
        programs = []
        for node, host in enumerate(HOSTS):
            options = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node), "--max-restarts", "0"]
            options += ["--master-addr", ADDRESSES[0], "--master-port", str(port)]
            before = ("ip", "netns", "exec", host, "env", "GLOO_SOCKET_IFNAME=wire")
            own = wish if node == 0 else {**wish, "run": wish["run"] + "-nowhere"}  # the hosts share no files
            programs.append(torchrun(options, json.dumps(own), before))
        return programs

    return start


def ends(programs, seconds):
    """Return status and output of each node, none later than so many seconds from now."""
    until = time.monotonic() + seconds
    try:
        texts = [program.communicate(timeout=max(1.0, until - time.monotonic()))[0] for program in programs]
    finally:
        for program in programs:
            program.kill()
            program.wait()
    return [program.returncode for program in programs], texts


def test_a_cut_cable_ends_both_hosts_and_the_run_goes_on_exactly(cable, start_nodes, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    statuses, texts = ends(start_nodes({**WISH, "run": str(whole), "step_seconds": 0}, 29511), 120)
    assert statuses == [0, 0], texts
    programs = start_nodes({**WISH, "run": str(run)}, 29512)
    end = time.monotonic() + 90
    while not (run / "checkpoints" / "last").exists():
        assert time.monotonic() < end, ends(programs, 1)
        time.sleep(0.05)
    cable("down")
    statuses, texts = ends(programs, 60)
    cable("up")
    assert statuses == [1, 1], texts
    for rank, text in enumerate(texts):
        lines = [line for line in text.split("\n") if line.startswith(f"rank {rank} of 2: ")]
        assert len(lines) == 1, text
        assert f"resume={str(run)!r}" in lines[0]
    statuses, texts = ends(start_nodes({**WISH, "run": str(run), "resume": True, "step_seconds": 0}, 29513), 120)
    assert statuses == [0, 0], texts
    one, two = (last_weights(folder) for folder in (whole, run))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "run", "whole"]  # the leader alone wrote
