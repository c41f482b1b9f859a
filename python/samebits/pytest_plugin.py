"""pytest and the contract: a test for each judgment of a callable.

    @pytest.mark.samebits(my_rms_norm, op="rms_norm", dtypes=["bf16"], waivers="waivers.toml")
    def test_my_rms_norm():
        pass

The marker takes what `samebits.judge` takes. The callable is judged once, before the first of its tests; each fails
with what went against the contract. The body runs before, and may look at the judgment by the fixture `samebits_judgment`.
The fixture `samebits_mismatch` holds log-probabilities that were recorded to thresholds: `samebits_mismatch(recorded, recomputed)`.
A failure that a waiver covers is an expected failure; a waiver that nothing needed fails the test of its judgment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Iterator

import pytest

from . import _native
from .judging import Report, describe, judge, judgment_of, reason_of
from .records import Mismatch
from .records import mismatch as compare

_reports: pytest.StashKey[dict[str, Report]] = pytest.StashKey()


@dataclass(frozen=True)
class Judgment:
    """One judgment of a callable: its name (`accuracy`, `invariance/batch`), its records, and the whole report."""

    name: str
    records: list[dict[str, Any]]
    report: Report


def pytest_configure(config: pytest.Config) -> None:
    text = "samebits(fn, op, ...): judge a callable as samebits.judge does, a test for each judgment"
    config.addinivalue_line("markers", text)
    config.stash[_reports] = {}


def _arguments(marker: pytest.Mark) -> dict[str, Any]:
    """What `judge` is given."""
    if not 1 <= len(marker.args) <= 2 or len(marker.args) == 1 and "op" not in marker.kwargs:
        raise pytest.UsageError('the marker samebits needs a callable and an op: samebits(fn, op="rms_norm")')
    return {"fn": marker.args[0], **({"op": marker.args[1]} if len(marker.args) == 2 else {}), **marker.kwargs}


def _names(arguments: dict[str, Any]) -> list[str]:
    """The judgments that will be asked for."""
    kinds = arguments.get("judgments") or ["accuracy", "invariance", "golden", "arithmetic", "order", "coverage"]
    names = []
    for kind in kinds:
        if kind == "invariance":
            axes = [axis.partition("=")[0] for axis in arguments.get("axes") or _native.axes(arguments["op"])]
            names += dict.fromkeys(f"invariance/{axis}" for axis in axes)
        # Golden bits are claimed or not; one order is asked of those that do not.
        elif kind not in ("golden", "order") or (kind == "golden") == bool(arguments.get("canonical")):
            names.append(kind)
    return names


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("samebits")
    if marker is None:
        return
    try:
        names = _names(_arguments(marker))
    except KeyError as e:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: the marker samebits: {e.args[0]}") from e
    if "samebits_judgment" not in metafunc.fixturenames:
        metafunc.fixturenames.append("samebits_judgment")
    metafunc.parametrize("samebits_judgment", names, indirect=True)


def _judgment(item: pytest.Function) -> Judgment:
    """The judgment that a test is for; its callable is judged where no other test has done it."""
    reports, key = item.config.stash[_reports], item.nodeid.partition("[")[0]
    if key not in reports:
        reports[key] = judge(**_arguments(item.get_closest_marker("samebits")))
    name = item.callspec.params["samebits_judgment"]
    return Judgment(name, [record for record in reports[key].records if judgment_of(record) == name], reports[key])


@pytest.fixture
def samebits_judgment(request: pytest.FixtureRequest) -> Judgment:
    """The judgment that a test with the marker `samebits` is for."""
    if request.node.get_closest_marker("samebits") is None:
        raise pytest.UsageError("the fixture samebits_judgment is for tests with the marker samebits")
    return _judgment(request.node)


@pytest.fixture
def samebits_mismatch() -> Callable[..., Mismatch]:
    """Holds recorded log-probabilities to gates: `samebits.mismatch`, which fails the test where one does not hold."""

    def held(*args: Any, **kwargs: Any) -> Mismatch:
        found = compare(*args, **kwargs)
        if not found.ok:
            pytest.fail(str(found), pytrace=False)
        return found

    return held


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    result = yield
    if pyfuncitem.get_closest_marker("samebits") is not None:
        _conclude(_judgment(pyfuncitem))
    return result


def _conclude(judgment: Judgment) -> None:
    """Ends the test as its records do."""
    red = [record for record in judgment.report.red if judgment_of(record) == judgment.name]
    if red:
        more = [f"and {len(red) - 10} more"] if len(red) > 10 else []
        pytest.fail("\n".join([*map(describe, red[:10]), *more]), pytrace=False)
    if judgment.name in judgment.report.skipped:
        pytest.skip(judgment.report.skipped[judgment.name])
    verdicts = {record["verdict"]: record for record in judgment.records}
    if "waived" in verdicts:
        pytest.xfail(reason_of(verdicts["waived"]))
    if "pass" not in verdicts:
        pytest.skip(reason_of(verdicts["unsupported"]) if verdicts else "no case of the selection asks for it")
