"""A sweep on a cluster of several Ray nodes, one of which is killed: the records of one machine."""

import os
import re
import subprocess
import sys
import time

import pytest

if not os.environ.get("SAMEBITS_NIGHTLY"):
    pytest.skip("a cluster takes half a minute: with SAMEBITS_NIGHTLY=1 and ray installed", allow_module_level=True)
ray = pytest.importorskip("ray")

import samebits.ray
from ray.cluster_utils import Cluster

ASKED = tuple("--op rms_norm --op gemm --op softmax --op logprob --dtype bf16 --slice quick".split())


@pytest.fixture(scope="module")
def cluster():
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def records(folder):
    """The records, without the seconds that each took."""
    return re.sub(rb'"seconds":[^,}]*', b'"seconds":0', (folder / "records.jsonl").read_bytes())


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "out"
    command = [sys.executable, "-m", "samebits", "sweep", *ASKED, "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]
    return folder


@pytest.fixture
def doomed(cluster, tmp_path, monkeypatch):
    """A node that never ends a part; what kills it once it has begun one; and which parts were begun where."""
    nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
    cluster.wait_for_nodes()
    part, started, node = samebits.ray._part, tmp_path / "started", nodes[0].node_id

    def noted(arguments, number, shards, cpus):
        here = ray.get_runtime_context().get_node_id()
        with open(started, "a") as file:
            file.write(f"{number} {here}\n")
        if here == node:
            time.sleep(120)
        return part(arguments, number, shards, cpus)

    def begun():
        return [tuple(line.split()) for line in started.read_text().splitlines()]

    def kill():
        deadline = time.monotonic() + 60
        while node not in dict(map(reversed, begun())) and time.monotonic() < deadline:
            time.sleep(0.1)
        cluster.remove_node(nodes[0], allow_graceful=False)

    monkeypatch.setattr(samebits.ray, "_part", noted)
    yield node, kill, begun
    for other in nodes[1:]:
        cluster.remove_node(other)


def test_a_killed_node_loses_no_record(doomed, alone, tmp_path):
    node, kill, begun = doomed
    said = []

    def progress(*counts):
        said.append(counts)
        if counts[0] == 2:
            kill()

    assert samebits.ray.sweep(*ASKED, out=tmp_path / "out", shards=9, progress=progress) == 0
    assert records(tmp_path / "out") == records(alone)
    count = len(records(alone).splitlines())
    assert count > 100
    # The part that was lost was begun again, elsewhere.
    (lost,) = {number for number, where in begun() if where == node}
    assert [where != node for number, where in begun() if number == lost] == [False, True]
    assert [done for done, *_ in said] == list(range(1, 10)) and said[-1] == (9, 9, count, 0)


def test_a_part_that_may_not_be_run_again(doomed, tmp_path):
    _, kill, _ = doomed
    progress = lambda done, *_: kill() if done == 2 else None
    with pytest.raises(RuntimeError, match="part [0-9]+ of 9 was lost more often"):
        samebits.ray.sweep(*ASKED, out=tmp_path / "out", shards=9, retries=0, progress=progress)
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_red_or_broken(cluster, tmp_path):
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    with pytest.raises(RuntimeError, match="--impl nobody: use one of"):
        samebits.ray.sweep("--op", "add", "--impl", "nobody", out=tmp_path / "out", shards=2)
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_is_refused():
    for words, arguments, more in (
        ("--shard is not for the parts", ("--shard", "1/2"), {}),
        ("--out is not for the parts", ("--out=x",), {}),
        ("--op norm: use one of", ("--op", "norm"), {}),
        ("99999 shards; the selection has [0-9]+ groups", ("--op", "add"), {"shards": 99999}),
    ):
        with pytest.raises(ValueError, match=words):
            samebits.ray.sweep(*arguments, **more)
