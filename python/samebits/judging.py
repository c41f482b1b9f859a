"""The gate for Python callables: `samebits.judge`."""

from __future__ import annotations

import json
import os
import re
import selectors
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterable, Sequence

from . import _native, wire

__all__ = ["Report", "judge"]

RED = ("fail", "error", "untested", "stale_waiver")


def verdict_of(record: dict[str, Any]) -> str:
    """The verdict of a record: pass, fail, waived, stale_waiver, unsupported, error or untested."""
    verdict = record["verdict"]
    return verdict if isinstance(verdict, str) else next(iter(verdict))


def reason_of(record: dict[str, Any]) -> str:
    """Why the verdict is what it is, in one line; empty where it is a pass."""
    verdict = record["verdict"]
    said = {} if isinstance(verdict, str) else next(iter(verdict.values()))
    return said.get("message") or said.get("reason") or ""


@dataclass(frozen=True)
class Report:
    """What came of a run of `judge`.

    `ok` is whether the contract holds, `records` are the lines of records.jsonl (one a judgment of a case), `table` is what
    `samebits check` prints, `skipped` says what could not be asked and why. `str` of a report is for people to read.
    """

    ok: bool
    records: list[dict[str, Any]]
    table: str
    skipped: dict[str, str] = field(default_factory=dict)
    _html: str = ""

    @property
    def verdicts(self) -> dict[str, dict[str, int]]:
        """How many records have which verdict, by judgment: `accuracy`, `invariance/batch` and so on."""
        counts: dict[str, dict[str, int]] = {}
        for record in self.records:
            of = counts.setdefault(judgment_of(record), {})
            of[verdict_of(record)] = of.get(verdict_of(record), 0) + 1
        return counts

    @property
    def red(self) -> list[dict[str, Any]]:
        """The records that went against the contract."""
        return [record for record in self.records if verdict_of(record) in RED]

    def html(self) -> str:
        """The report as a page that stands by itself."""
        return self._html

    def __str__(self) -> str:
        lines = [self.table.rstrip()]
        lines += [f"not asked: {name}: {why}" for name, why in self.skipped.items()]
        return "\n".join(lines)


def judgment_of(record: dict[str, Any]) -> str:
    """The judgment of a record, with its axis: `accuracy`, `invariance/batch`."""
    return record["judgment"] + (f"/{record['axis']}" if record.get("axis") else "")


def describe(record: dict[str, Any]) -> str:
    """A record in one line."""
    return f"{verdict_of(record)}: {record['case']} {judgment_of(record)}: {reason_of(record)}"


def judge(
    fn: Callable[..., Any],
    op: str,
    dtypes: Sequence[str] = ("bf16",),
    *,
    library: str = "torch",
    device: str = "cpu",
    canonical: bool = False,
    slice: str = "quick",
    cases: Sequence[str] = (),
    axes: Sequence[str] = (),
    judgments: Sequence[str] = (),
    layouts: Sequence[str] | None = None,
    waivers: Iterable[str | os.PathLike[str]] = (),
    name: str | None = None,
    timeout: float = 60,
    out: str | os.PathLike[str] | None = None,
) -> Report:
    """Holds a callable to the contract of `op`, by `samebits check`.

    `fn` takes the op's inputs (`help(samebits.ops.OP)` has names and shapes), as tensors of `library` ("torch" or "numpy")
    on `device`: by name where its parameters are called so, else by place, the required ones first. It takes attributes
    by name, `dtype` the dtype of outputs. What of them its signature does not have is not offered: only cases in which it
    has its default are asked for; raising NotImplementedError in one of those is red. It returns the op's outputs. It is
    called in this thread, a request at a time, and axis `threads` sets the threads of torch and of `samebits.ops`.

    `canonical` is the claim to have the bits of NUMERICS: goldens and the order of sums are judged as well. `slice` is
    "quick", "default" or "exhaustive"; `cases`, `axes` and `judgments` take a part, `layouts` names how inputs may lie in
    memory (all by default: offset, fused, heads_first, strided, transposed). `waivers` are files of failures that are known
    (docs/GATE.md), which know the callable as `name`, by default its `__name__`. `out` is a folder for the report.

    Axes `restart` and `soak` are for processes of their own, which import `fn` by its name; of one that cannot be imported
    they are not asked, and the report says so. A script needs `if __name__ == "__main__":` around the call.

    Raises ValueError or TypeError for what does not fit, RuntimeError where the run is broken.
    """
    if "SAMEBITS_JUDGED" in os.environ:
        raise RuntimeError('judge: called while it is imported to be judged; put the call behind `if __name__ == "__main__":`')
    if library not in wire.LIBRARIES:
        raise ValueError(f"library {library}: use one of {', '.join(wire.LIBRARIES)}")
    if isinstance(waivers, (str, os.PathLike)):
        waivers = [waivers]
    subject = wire.Subject(fn, op, library, device)
    known = _native.axes(op)
    for axis in axes:
        if axis not in known:
            raise ValueError(f"axis {axis}: {op} has {', '.join(known)}")
    load, skipped, asked = wire.packed(fn, op, library, device), {}, list(axes)
    own = [axis for axis in ("restart", "soak") if axis in known and (not axes or axis in axes)]
    if load is None and own:
        asked = [axis for axis in axes or known if axis not in own]
        why = f"another process cannot import {subject.describe()}; define it at the top of a module"
        skipped = {f"invariance/{axis}": why for axis in own}
        if not asked:
            raise ValueError(f"judge: nothing is left to ask: {why}")
    name = name or re.sub(r"[^\w.-]+", "-", getattr(fn, "__name__", "")).strip("-") or "callable"
    select = ["--slice", slice, "--op", op]
    for option, values in (("--dtype", dtypes), ("--case", cases)):
        select += [word for value in values for word in (option, value)]
    with tempfile.TemporaryDirectory(prefix="samebits-") as folder:
        listed = [json.loads(line) for line in _command(["list", *select, "--json"]).splitlines()]
        lacks = {case["name"]: _lack(subject, case) for case in listed}
        if all(lacks.values()):
            raise ValueError(f"judge: no case of the selection can be asked: {next(iter(lacks.values()))}")
        entry = {
            "name": name,
            "about": f"{subject.describe()}, a Python callable",
            "command": [sys.executable, "-m", "samebits.wire", os.path.join(folder, "line")],
            "version": [sys.executable, "-c", f"print({_version(fn, subject)!r})"],
            # What a child imports is what this process would.
            "env": {"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)},
            "timeout": float(timeout),
            "threads": list(subject.library.threads),
            "layouts": list(subject.library.layouts if layouts is None else layouts),
            "judgments": ["accuracy", "invariance", *(["golden"] if canonical else []), "arithmetic", "coverage"],
            "required": _required(op, listed, lacks),
        }
        impls = Path(folder, "impls.toml")
        impls.write_text(_toml(entry), encoding="utf-8")
        place = Path(out) if out is not None else Path(folder, "report")
        command = ["check", *select, "--impls", str(impls), "--impl", name, "--jobs", "1", "--out", str(place)]
        for option, values in (("--axis", asked), ("--judgment", judgments), ("--waivers", map(os.fspath, waivers))):
            command += [word for value in values for word in (option, value)]
        code, printed, said = _serve(subject, load, Path(folder, "line"), command)
        if code not in (0, 1):
            raise RuntimeError(said.strip().rpartition("\n")[2] or f"`samebits check` ended with {code}")
        lines = Path(place, "records.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        html = Path(place, "report.html").read_text(encoding="utf-8")
    table = "\n".join(line for line in printed.splitlines() if out is not None or not line.startswith("report: "))
    if not any(verdict_of(record) not in ("unsupported",) for record in records):
        raise ValueError("judge: nothing of the selection was judged; everything is unsupported")
    return Report(code == 0, records, table, skipped, html)


def _lack(subject: wire.Subject, case: dict[str, Any]) -> str | None:
    inputs = {i["name"] for i in subject.form["inputs"] if not i["optional"] or case["shape"].get(i["name"])}
    return subject.lacks(inputs, case["params"], case["dtype"], case["out"])


def _required(op: str, cases: list[dict[str, Any]], lacks: dict[str, str | None]) -> list[dict[str, Any]]:
    """What it must offer: the cases that its signature has room for."""
    stems: dict[tuple[str, str], set[str]] = {}
    for case in cases:
        if lacks[case["name"]] is None:
            stem = case["name"].rpartition("/")[2].removesuffix(f"-{case['fill']}-{case['out']}")
            stems.setdefault((case["dtype"], case["out"]), set()).add(stem)
    return [{"ops": [op], "dtypes": [d], "outs": [o], "stems": sorted(names)} for (d, o), names in stems.items()]


def _version(fn: Callable[..., Any], subject: wire.Subject) -> str:
    return f"{getattr(fn, '__module__', None) or '?'}.{subject.describe()}, {subject.library.version}"


def _toml(entry: dict[str, Any]) -> str:
    """An entry of impls.toml. JSON's strings, numbers and lists are TOML's."""

    def value(of: Any) -> str:
        if isinstance(of, dict):
            return "{ " + ", ".join(f"{json.dumps(k)} = {value(v)}" for k, v in of.items()) + " }"
        if isinstance(of, list):
            return "[" + ", ".join(map(value, of)) + "]"
        return json.dumps(of, ensure_ascii=False)

    return "[[implementation]]\n" + "".join(f"{key} = {value(of)}\n" for key, of in entry.items())


def _command(arguments: list[str]) -> str:
    done = subprocess.run([sys.executable, "-m", "samebits", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr.strip().removeprefix("samebits: "))
    return done.stdout


class _Lines:
    """The connections of processes that the harness started."""

    def __init__(self, subject: wire.Subject, load: bytes | None) -> None:
        self.subject, self.load = subject, load
        # The one that is answered here; others, while it is open, are asked for to be processes of their own.
        self.open: BinaryIO | None = None

    def accept(self, line: socket.socket, selector: selectors.BaseSelector) -> None:
        pipe = line.makefile("rwb")
        if self.open is None:
            self.open = pipe
            wire.write_frame(pipe, b"")
            selector.register(line, selectors.EVENT_READ, (line, pipe))
            return
        if self.load is not None:
            wire.write_frame(pipe, self.load)
        pipe.close()
        line.close()

    def answer(self, line: socket.socket, pipe: BinaryIO, selector: selectors.BaseSelector) -> None:
        try:
            request = wire.read_frame(pipe)
            if request is not None:
                wire.write_frame(pipe, self.subject.answer(request))
                return
        except (OSError, EOFError):
            # It was ended in the middle, for want of patience.
            pass
        selector.unregister(line)
        self.open = None
        line.close()


def _serve(subject: wire.Subject, load: bytes | None, place: Path, command: list[str]) -> tuple[int, str, str]:
    """Runs the command and answers what it asks; its exit code, and what it wrote to stdout and stderr."""
    lines = _Lines(subject, load)
    with (
        socket.socket(socket.AF_UNIX) as listener,
        selectors.DefaultSelector() as selector,
        tempfile.TemporaryFile("w+") as printed,
        tempfile.TemporaryFile("w+") as said,
    ):
        listener.bind(str(place))
        listener.listen()
        selector.register(listener, selectors.EVENT_READ)
        program = [sys.executable, "-m", "samebits", *command]
        with subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=printed, stderr=said) as check:
            try:
                while check.poll() is None:
                    for key, _ in selector.select(0.05):
                        if key.fileobj is listener:
                            lines.accept(listener.accept()[0], selector)
                        else:
                            lines.answer(*key.data, selector)
            except BaseException:
                check.kill()
                raise
        printed.seek(0)
        said.seek(0)
        return check.returncode, printed.read(), said.read()
