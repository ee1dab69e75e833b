"""How `tests/run strangers` compares two runs of a suite. The suites themselves run for minutes, with a network: on demand only."""

import tarfile
from pathlib import Path

from tests.e2e.strangers import PINS, Comparison, differing, outcomes, read_pins, settle, unpack

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_passes"/>
<testcase classname="tests.test_a" name="test_fails"><failure message="no"/></testcase>
<testcase classname="tests.test_a" name="test_fails"><error message="nor is it torn down"/></testcase>
<testcase classname="tests.test_a" name="test_is_skipped"><skipped message="elsewhere"/></testcase>
<testcase classname="tests.test_a" name="test_is_not_set_up"><error message="no"/></testcase>
</testsuite></testsuites>"""


def test_a_source_distribution_is_unpacked_by_every_release_of_python(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("x = 1\n")
    with tarfile.open(tmp_path / "one.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "one.py", "one-1.0/one.py")
    unpack(tmp_path / "one.tar.gz", tmp_path)
    assert (tmp_path / "one-1.0" / "one.py").read_text() == "x = 1\n"


def test_a_report_is_read_test_by_test(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(REPORT)
    assert outcomes(tmp_path / "junit.xml") == {
        "tests.test_a::test_passes": "passed",
        "tests.test_a::test_fails": "failed",
        "tests.test_a::test_is_skipped": "skipped",
        "tests.test_a::test_is_not_set_up": "error",
    }


def test_what_ends_otherwise_or_is_missing_differs() -> None:
    local = {"same": "failed", "worse": "passed", "better": "failed", "gone": "passed"}
    ours = {"same": "failed", "worse": "failed", "better": "passed", "new": "passed"}
    assert differing(local, ours) == ["better", "gone", "new", "worse"]


def test_outcomes_that_overlap_in_any_run_make_a_test_unsteady() -> None:
    local = [{"a": "passed", "b": "passed"}, {"a": "failed", "b": "passed"}, {"a": "passed", "b": "passed"}]
    ours = [{"a": "failed", "b": "failed"}, {"a": "failed"}, {"a": "failed", "b": "failed"}]
    assert settle(["a", "b"], local, ours) == (["a"], ["b"])


def test_a_list_must_be_complete_and_up_to_date() -> None:
    result = Comparison(local={}, ours={}, unsteady=("shaky",), differing=("listed", "not listed"))
    known = {"listed": "why", "shaky": "why", "mended": "why"}
    assert result.unexplained(known) == ["not listed"]
    assert result.outdated(known) == ["mended"]


def test_every_pinned_project_can_be_read_and_every_difference_has_a_reason() -> None:
    projects = read_pins()
    assert len(projects) >= 6
    assert all(project.version for project in projects.values())
    assert all(reason.strip() for project in projects.values() for reason in project.known.values())
    assert all(PINS.with_name(f"{one.plugin}.py").exists() for one in projects.values() if one.plugin)
