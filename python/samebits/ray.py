"""A sweep on a Ray cluster: its parts run where there is room, and the whole has the records of one machine.

    import samebits.ray
    samebits.ray.sweep("--slice", "exhaustive", out="sweep")

Every node has samebits of one version in the Python that Ray runs, and processors of one kind: what a run asks depends on
their instruction sets and cores, and parts of two kinds are refused.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable

import ray

from .judging import RED

__all__ = ["sweep"]

# Options of the command that say what is asked, and so are those of `list`; and those that `merge` takes as well.
_SELECT = ("--slice", "--op", "--dtype", "--case", "--judgment", "--axis", "--seed")
_PLACE = ("--root", "--contract")
_MERGE = (*_PLACE, "--impls", "--waivers")
_OURS = ("--shard", "--out", "--resume", "--jobs")
_FILES = ("run.json", "records.jsonl")


def sweep(
    *arguments: str,
    out: str | os.PathLike[str] = "samebits-report",
    shards: int | None = None,
    cpus: int = 1,
    retries: int = 5,
    progress: Callable[[int, int, int, int], None] | None = None,
) -> int:
    """Runs `samebits sweep` with these arguments as parts on a Ray cluster, and joins them to the report folder `out`.

    Its exit code is 0 if the contract holds and 1 if it does not. The records are those that one machine would have written,
    in its order; only their `seconds` are others. There are `shards` parts, by default four for each processor of the cluster;
    each has `cpus` processors. A part whose node is lost is run again elsewhere, up to `retries` times. Paths among the
    arguments must be there on every node. Without a connection to a cluster `ray.init()` makes one.

    `progress` is called with (parts that are done, all parts, judgments so far, red ones so far) whenever a part is done; by
    default a line goes to stderr.

    Raises ValueError for arguments that do not fit, and RuntimeError with the one line of the command where a part is broken.
    """
    for argument in arguments:
        if argument.partition("=")[0] in _OURS:
            raise ValueError(f"sweep: {argument.partition('=')[0]} is not for the parts; out, shards and cpus say it here")
    groups = _groups(_only(arguments, (*_SELECT, *_PLACE)))
    if not ray.is_initialized():
        ray.init()
    if shards is None:
        shards = max(1, min(groups, 4 * int(ray.cluster_resources().get("CPU", 1)) // cpus))
    if not 1 <= shards <= groups:
        raise ValueError(f"sweep: {shards} shards; the selection has {groups} groups of cases, so use 1 to {groups}")
    part = ray.remote(num_cpus=cpus, max_retries=retries)(_part)
    with tempfile.TemporaryDirectory(prefix="samebits-") as folder:
        places = [Path(folder, str(number)) for number in range(1, shards + 1)]
        running = {part.remote(arguments, number, shards, cpus): place for number, place in enumerate(places, 1)}
        try:
            _collect(running, shards, progress or _say)
        finally:
            for left in running:
                ray.cancel(left, force=True)
        if shards == 1:
            # There is nothing to join.
            command = ["report", _moved(places[0], Path(out))]
        else:
            command = ["merge", *map(str, places), "--out", os.fspath(out), *_only(arguments, _MERGE)]
        done = subprocess.run([sys.executable, "-m", "samebits", *command], stderr=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(_line(done.stderr))
    return done.returncode


def _moved(place: Path, out: Path) -> str:
    out.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        (out / name).write_bytes((place / name).read_bytes())
    return str(out)


def _collect(running: dict[Any, Path], shards: int, progress: Callable[[int, int, int, int], None]) -> None:
    """Writes the parts down as they are done; what is left in `running` is not."""
    plan, judged, red = None, 0, 0
    while running:
        (done,), _ = ray.wait(list(running), num_returns=1)
        try:
            files = ray.get(done)
        except ray.exceptions.RayTaskError as e:
            raise RuntimeError(_line(str(e.cause))) from e
        except ray.exceptions.RayError as e:
            name = running[done].name
            raise RuntimeError(f"part {name} of {shards} was lost more often than it may be run again: {type(e).__name__}") from e
        run = json.loads(files["run.json"])
        found = {key: run["plan"][key] for key in ("digest", "implementations")} | {"contract": run["contract"]}
        plan = plan or (found, run["machine"])
        if found != plan[0]:
            machines = " and ".join(f"`{m['cpu']}` with {m['cores']} cores" for m in (plan[1], run["machine"]))
            raise RuntimeError(f"two nodes ask different questions, so their parts cannot be joined: {machines}")
        place = running.pop(done)
        place.mkdir()
        for name, data in files.items():
            (place / name).write_bytes(data)
        verdicts = [json.loads(line)["verdict"] for line in files["records.jsonl"].splitlines()]
        judged += len(verdicts)
        red += sum(verdict in RED for verdict in verdicts)
        progress(shards - len(running), shards, judged, red)


def _part(arguments: tuple[str, ...], number: int, shards: int, cpus: int) -> dict[str, bytes]:
    """One part, on a node: the files of its run folder."""
    with tempfile.TemporaryDirectory(prefix="samebits-") as folder:
        more = ["--shard", f"{number}/{shards}", "--jobs", str(cpus), "--out", folder]
        command = [sys.executable, "-m", "samebits", "sweep", *arguments, *more]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"part {number} of {shards}: {_line(done.stderr)}")
        return {name: Path(folder, name).read_bytes() for name in _FILES}


def _line(said: str) -> str:
    lines = said.strip().splitlines()
    return lines[-1].removeprefix("samebits: ") if lines else "the command ended without a word"


def _only(arguments: tuple[str, ...], options: tuple[str, ...]) -> list[str]:
    """Those of the arguments that are these options, with their values."""
    kept: list[str] = []
    for at, argument in enumerate(arguments):
        name, equals, _ = argument.partition("=")
        if name in options:
            kept += [argument] if equals else list(arguments[at : at + 2])
    return kept


def _groups(select: list[str]) -> int:
    """How many groups of cases that share inputs there are; a part has whole ones."""
    command = [sys.executable, "-m", "samebits", "list", *select, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"sweep: {_line(done.stderr)}")
    return len({json.loads(line)["name"].rpartition("-")[0] for line in done.stdout.splitlines()})


def _say(done: int, parts: int, judged: int, red: int) -> None:
    print(f"samebits: {done} of {parts} parts, {judged} judgments, {red} red", file=sys.stderr, flush=True)
