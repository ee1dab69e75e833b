"""`jupyter gpu budget` shows how much of each user's and group's budget is left, or adds to a budget."""

import argparse
import time
from datetime import datetime
from typing import TYPE_CHECKING, Final

from fractional_gpu.client.client import BrokerClient
from fractional_gpu.commands.terminal.arguments import Parser
from fractional_gpu.commands.terminal.connection import RUN_ONE, running_broker
from fractional_gpu.commands.terminal.text import Style, UsageError, answer, line
from fractional_gpu.core.metering.usage import ACCOUNTS
from fractional_gpu.core.units import parse_duration_ms
from fractional_gpu.protocol.accounts import BudgetExtension, BudgetList, BudgetStatus
from fractional_gpu.reports.columns import budget_names

if TYPE_CHECKING:
    from rich.text import Text

NO_BUDGETS: Final = (
    f"and only a running broker knows the remaining budgets; {RUN_ONE}. Set budgets with c.GPUBroker.budgets in "
    "jupyter_gpu_config.py"
)

EPILOG = """\
examples:
  jupyter gpu budget                                        your budgets; for administrators, all budgets
  jupyter gpu budget --user ada --add "10 GPU hours"        more for ada, until her budget resets
  jupyter gpu budget --group students --add "50 EUR" --until 2026-12-24

--add adds the amount to all of that user's or group's budgets in the same unit. Only administrators can add, and the audit log records
it. The pool's `over_budget` sets what happens when a budget is used up: no kernel is ended, and nothing is lost.
"""


def configure(parser: Parser) -> None:
    parser.describe("Show the remaining budgets, or add to one.", EPILOG)
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--user", metavar="NAME", help="only this user's budgets")
    whose.add_argument("--group", metavar="NAME", help="only this group's budgets")
    parser.argument(
        "--account",
        None,
        "with --user: only the hub user or only the machine user of that name (default: both)",
        choices=ACCOUNTS,
    )
    parser.argument("--add", "AMOUNT", "add to the budget, such as '10 GPU hours', '50 EUR' or '5 kWh'")
    parser.argument(
        "--until",
        "WHEN",
        "with --add: a date, a time, or a duration such as 7d (default: until the budget resets)",
    )
    parser.flag("--json", "print the budgets as JSON")
    parser.add_socket()


def run(options: argparse.Namespace) -> int:
    adds = options.add is not None
    if adds and not (options.user or options.group):
        raise UsageError(
            '--add needs --user or --group, for example: `jupyter gpu budget --user NAME --add "10 GPU hours"`'
        )
    if not adds and options.until is not None:
        raise UsageError("--until can only be used with --add")
    if options.account is not None and not options.user:
        raise UsageError(f"--account {options.account} needs --user NAME")
    until_s = None if options.until is None else _until(options.until)
    with running_broker(options.socket, without=NO_BUDGETS) as running, BrokerClient(running.socket_path) as client:
        if adds:
            kind, name = ("user", options.user) if options.user else ("group", options.group)
            asked = BudgetExtension(
                kind=kind, name=name, amount=options.add, until_s=until_s, account=options.account or ""
            )
            found = client.extend_budget(asked)
        else:
            found = client.budgets()
    shown = [one for one in found.budgets if adds or _is_wanted(one, options)]
    answer(options, BudgetList(budgets=shown, scope=found.scope), lambda _: _listed(shown))
    return 0


def _is_wanted(budget: BudgetStatus, options: argparse.Namespace) -> bool:
    if options.user:
        is_account = options.account is None or budget.account == options.account
        return is_account and (budget.kind, budget.name) == ("user", options.user)
    return not options.group or (budget.kind, budget.name) == ("group", options.group)


def _until(text: str) -> int:
    try:
        return int(datetime.fromisoformat(text).timestamp())
    except ValueError:
        pass
    try:
        return int(time.time()) + parse_duration_ms(text) // 1000
    except ValueError:
        raise UsageError(
            f"--until {text[:60]!r} is not valid; give a date or time such as 2026-12-24 or 2026-12-24T18:00, or a duration such as 7d"
        ) from None


def _listed(budgets: list[BudgetStatus]) -> "list[Text]":
    if not budgets:
        return [line("no budget applies, or nothing has been spent yet (set budgets with c.GPUBroker.budgets)")]
    lines = []
    names = budget_names(budgets)
    for one in sorted(budgets, key=lambda one: (one.kind, one.name, one.account, one.text)):
        state = ("used up", Style.WRONG) if one.used_up else f"{one.left_text} left"
        reset = "" if one.until_s is None else f"; resets {_moment(one.until_s)}"
        more = "" if one.amount_text in one.text else f" (of {one.amount_text}, including additions)"
        lines.append(line(f"{names(one)}: {one.text}: {one.spent_text} spent, ", state, f"{more}{reset}"))
    return lines


def _moment(at_s: int) -> str:
    at = time.localtime(at_s)
    return time.strftime("%Y-%m-%d" if (at.tm_hour, at.tm_min) == (0, 0) else "%Y-%m-%d at %H:%M", at)
