"""The gate for Python callables: `samebits.judge`."""

from __future__ import annotations

import ast
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


def reason_of(record: dict[str, Any]) -> str:
    """Why the verdict is what it is, in one line; empty where it is a pass."""
    return record.get("evidence", {}).get("message") or record.get("reason", "")


@dataclass(frozen=True)
class Report:
    """What came of a run of `judge`.

    `ok` is whether the contract holds, `records` are the lines of records.jsonl (one a judgment of a case), `table` is what
    `samebits check` prints, `skipped` says which cases and judgments could not be asked and why. Of a red record, `again` is
    the call that asks it again. `str` of a report is for people to read.
    """

    ok: bool
    records: list[dict[str, Any]]
    table: str
    skipped: dict[str, str] = field(default_factory=dict)
    slice: str = "quick"
    _html: str = ""

    @property
    def verdicts(self) -> dict[str, dict[str, int]]:
        """How many records have which verdict, by judgment: `accuracy`, `invariance/batch` and so on."""
        counts: dict[str, dict[str, int]] = {}
        for record in self.records:
            of = counts.setdefault(judgment_of(record), {})
            of[record["verdict"]] = of.get(record["verdict"], 0) + 1
        return counts

    @property
    def red(self) -> list[dict[str, Any]]:
        """The records that went against the contract."""
        return [record for record in self.records if record["verdict"] in RED]

    def html(self) -> str:
        """The report as a page that stands by itself."""
        return self._html

    def __str__(self) -> str:
        lines = [self.table.rstrip()]
        reasons: dict[str, list[str]] = {}
        for name, why in self.skipped.items():
            reasons.setdefault(why, []).append(name)
        for why, names in reasons.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"not asked: {names[0]}{more}: {why}")
        if self.slice != "exhaustive":
            larger = '"default" and "exhaustive"' if self.slice == "quick" else '"exhaustive"'
            lines.append(f"asked: the slice {self.slice}; {larger} ask more")
        return "\n".join(lines)


def judgment_of(record: dict[str, Any]) -> str:
    """The judgment of a record, with its axis: `accuracy`, `invariance/batch`."""
    return record["judgment"] + (f"/{record['axis']}" if record.get("axis") else "")


def describe(record: dict[str, Any]) -> str:
    """A record in one line, and a red one with how to ask it again in another."""
    again = f"\n    again: {record['again']}" if "again" in record else ""
    return f"{record['verdict']}: {record['case']} {judgment_of(record)}: {reason_of(record)}{again}"


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
    by name, `dtype` the dtype of outputs. What of them its signature does not have is not offered: cases in which it has not
    its default are not asked, and the report says so; raising NotImplementedError in one that is asked is red. It returns the op's outputs. It is
    called in this thread, a request at a time, and axis `threads` sets the threads of torch and of `samebits.ops`.

    `canonical` is the claim to have the bits of NUMERICS: goldens are judged as well; that sums have one order is judged
    always. `slice` is "quick" (if not given), "default" or "exhaustive"; `cases`, `axes` and `judgments` take a part: an axis
    may name one setting, "batch=again:3", as a red record does. `layouts` names how inputs may lie in
    memory (all by default: offset, fused, heads_first, strided, transposed). `waivers` are files of failures that are known
    (docs/GATE.md), which know the callable as `name`, by default its `__name__`. `out` is a folder for the report.

    Axes `restart` and `soak` are for processes of their own, which import `fn` by its name; of one that cannot be imported
    they are not asked, and the report says so. A script needs `if __name__ == "__main__":` around the call: else they would come by
    the call themselves, and RuntimeError says so before anything runs.

    Of a module of torch it is `forward` that is asked for its parameters. A callable that writes to its inputs is red.

    Raises ValueError or TypeError for what does not fit, RuntimeError where the run is broken.
    """
    if "SAMEBITS_JUDGED" in os.environ:
        raise RuntimeError('judge: called while it is imported to be judged; put the call behind `if __name__ == "__main__":`')
    if library not in wire.LIBRARIES:
        raise ValueError(f"library {library}: use one of {', '.join(wire.LIBRARIES)}")
    waivers = [waivers] if isinstance(waivers, (str, os.PathLike)) else list(waivers)
    subject = wire.Subject(fn, op, library, device)
    known = _native.axes(op)
    named = [axis.partition("=")[0] for axis in axes]
    for axis in named:
        if axis not in known:
            raise ValueError(f"axis {axis}: {op} has {', '.join(known)}")
    load, skipped, asked = wire.packed(fn, op, library, device), {}, list(axes)
    varies = not judgments or "invariance" in judgments
    own = [axis for axis in ("restart", "soak") if varies and axis in known and (not axes or axis in named)]
    if load is None and own:
        asked = [axis for axis in axes or known if axis.partition("=")[0] not in own]
        why = f"another process cannot import {subject.describe()}; define it at the top of a module"
        skipped = {f"invariance/{axis}": why for axis in own}
        if not asked:
            raise ValueError(f"judge: nothing is left to ask: {why}")
    elif own and (line := _called_on_import(fn)):
        raise RuntimeError(line)
    own_name = name
    name = name or re.sub(r"[^\w.-]+", "-", getattr(fn, "__name__", type(fn).__name__)).strip("-") or "callable"
    select = ["--slice", slice, "--op", op]
    for option, values in (("--dtype", dtypes), ("--case", cases)):
        select += [word for value in values for word in (option, value)]
    with tempfile.TemporaryDirectory(prefix="samebits-") as folder:
        listed = [json.loads(line) for line in _command(["list", *select, "--json"]).splitlines()]
        lacks = {case["name"]: _lack(subject, case) for case in listed}
        if all(lacks.values()):
            raise ValueError(f"judge: no case of the selection can be asked: {next(iter(lacks.values()))}")
        chosen = [case for case, lack in lacks.items() if lack is None]
        skipped = {case: lack for case, lack in lacks.items() if lack is not None} | skipped
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
        command = ["check", "--slice", slice, "--impls", str(impls), "--impl", name, "--jobs", "1", "--out", str(place)]
        command += [word for case in chosen for word in ("--case", case)]
        command += ["--called", _called(subject, op, dtypes, library, device, canonical, slice, layouts, waivers, own_name, timeout)]
        command += ["--narrowed"] if cases or axes or judgments else []
        for option, values in (("--axis", asked), ("--judgment", judgments), ("--waivers", map(os.fspath, waivers))):
            command += [word for value in values for word in (option, value)]
        code, printed, said = _serve(subject, load, Path(folder, "line"), command)
        if code not in (0, 1):
            raise RuntimeError(said.strip().rpartition("\n")[2] or f"`samebits check` ended with {code}")
        lines = Path(place, "records.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        html = Path(place, "report.html").read_text(encoding="utf-8")
    table = "\n".join(line for line in printed.splitlines() if out is not None or not line.startswith("report: "))
    if all(record["verdict"] == "unsupported" for record in records):
        raise ValueError("judge: nothing of the selection was judged; everything is unsupported")
    return Report(code == 0, records, table, skipped, slice, html)


def _called_on_import(fn: Callable[..., Any]) -> str | None:
    """What to say where another process, which imports the callable, would come by this very call: a module that is being imported
    calls `judge`, the main one outside of what asks for `__name__`.
    """
    main = sys.modules["__main__"]
    anew = {getattr(fn, "__module__", None): sys.modules.get(getattr(fn, "__module__", None) or "")}
    if getattr(main, "__file__", None):
        anew["__main__"] = main
    frame = sys._getframe(1)
    while frame is not None:
        of = anew.get(frame.f_globals.get("__name__"))
        if frame.f_code.co_name == "<module>" and of is not None and vars(of) is frame.f_globals and not _guarded(frame):
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            return (
                f"judge: {where} calls it while the module is imported, and axes `restart` and `soak` import it in other processes; put the "
                'call behind `if __name__ == "__main__":`, or name `axes` without these'
            )
        frame = frame.f_back
    return None


def _guarded(frame: Any) -> bool:
    """Whether the line of a module that runs stands in something that asks for `__name__`; so too where that cannot be seen."""
    if frame.f_globals.get("__name__") != "__main__":
        # To another process it has the same name.
        return False
    try:
        tree = ast.parse(Path(frame.f_code.co_filename).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return True
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.IfExp, ast.BoolOp)) and node.lineno <= frame.f_lineno <= (node.end_lineno or 0):
            test = node if isinstance(node, ast.BoolOp) else node.test
            if any(isinstance(name, ast.Name) and name.id == "__name__" for name in ast.walk(test)):
                return True
    return False


def _lack(subject: wire.Subject, case: dict[str, Any]) -> str | None:
    inputs = {i["name"] for i in subject.form["inputs"] if not i["optional"] or case["shape"].get(i["name"])}
    inputs |= set(case.get("inputs", ()))
    return subject.lacks(inputs, case["params"], case["dtype"], case["out"])


def _called(
    subject: wire.Subject, op: str, dtypes: Sequence[str], library: str, device: str, canonical: bool, slice: str,
    layouts: Sequence[str] | None, waivers: Iterable[str | os.PathLike[str]], name: str | None, timeout: float,
) -> str:
    """The call that asks a part of this one again; {} stands for the part."""
    words = [subject.describe(), f"op={json.dumps(op)}", f"dtypes={json.dumps(list(dtypes))}"]
    for word, value, usual in (
        ("library", library, "torch"), ("device", device, "cpu"), ("canonical", canonical, False), ("slice", slice, "quick"),
        ("layouts", None if layouts is None else list(layouts), None), ("waivers", [os.fspath(file) for file in waivers], []),
        ("name", name, None), ("timeout", timeout, 60),
    ):
        if value != usual:
            words.append(f"{word}={value!r}")
    return f"samebits.judge({', '.join(words)}, {{}})"


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
