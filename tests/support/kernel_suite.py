"""jupyter_kernel_test's suite on one kernelspec: `python -m tests.support.kernel_suite NAME` prints each test's outcome as JSON."""

import json
import sys
import unittest
from typing import Any
from unittest import mock

import jupyter_kernel_test

_PATIENCE_S = 60.0


class Suite(jupyter_kernel_test.KernelTests):  # type: ignore[misc]  # the package has no types
    """Everything that the suite can request from a Python kernel."""

    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('test', file=sys.stderr)"
    completion_samples = ({"text": "zi", "matches": {"zip"}}, {"text": "imp", "matches": {"import "}})
    complete_code_samples = ("1", "print('hello, world')", "def f(x):\n  return x*2\n\n\n")
    incomplete_code_samples = ("print('''hello", "def f(x):\n  x*2")
    invalid_code_samples = ("import = 7q",)
    code_page_something = "zip?"
    code_generate_error = "raise ValueError"
    code_execute_result = (
        {"code": "1+2+3", "result": "6"},
        {"code": "[n*n for n in range(1, 4)]", "result": "[1, 4, 9]"},
    )
    code_display_data = (
        {"code": "from IPython.display import HTML, display; display(HTML('<b>test</b>'))", "mime": "text/html"},
        {"code": "from IPython.display import Math, display; display(Math('\\\\frac{1}{2}'))", "mime": "text/latex"},
    )
    code_history_pattern = "1?2*"
    supported_history_operations = ("tail", "range", "search")
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"

    def execute_helper(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the suite's
        """Like the suite's own, which waits a tenth of a second for each message: too short while other tests run."""
        channel = self.kc.iopub_channel
        get = channel.get_msg

        def get_patiently(timeout: float) -> Any:  # noqa: ANN401 - as above
            return get(timeout=max(timeout, _PATIENCE_S))

        with mock.patch.object(channel, "get_msg", get_patiently):
            return super().execute_helper(*args, **kwargs)


class _Outcomes(unittest.TestResult):
    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, str] = {}

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        super().stopTest(test)
        name = test.id().rpartition(".")[2]
        bad: list[tuple[Any, str]] = [*self.failures, *self.errors]
        broken = [text for failed, text in bad if failed is test]
        left_out = [reason for skipped, reason in self.skipped if skipped is test]
        self.outcomes[name] = "failed" if broken else f"skipped: {left_out[0]}" if left_out else "passed"
        sys.stderr.write("".join(broken))


def main() -> None:
    Suite.kernel_name = sys.argv[1]
    result = _Outcomes()
    unittest.defaultTestLoader.loadTestsFromTestCase(Suite).run(result)
    sys.stdout.write(json.dumps(result.outcomes))


if __name__ == "__main__":
    main()
