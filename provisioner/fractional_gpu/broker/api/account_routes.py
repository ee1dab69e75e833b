"""The routes that show what leases used and what it costs. Who sees whose figures: `broker.accounting.reports`."""

import re
import time
from typing import Final

from fractional_gpu.broker.accounting.budgets import party_of
from fractional_gpu.broker.accounting.reports import Question, Reader
from fractional_gpu.broker.accounting.terms import charge_terms
from fractional_gpu.broker.api.handler import Handler
from fractional_gpu.broker.clock import wall_ms
from fractional_gpu.config.budgets import parse_amount
from fractional_gpu.core.metering.budgets import Subject
from fractional_gpu.core.metering.tariffs import Tariff
from fractional_gpu.core.metering.usage import ACCOUNTS
from fractional_gpu.core.model import LeaseView
from fractional_gpu.host.accounts import account_name, user_name
from fractional_gpu.protocol.accounts import USAGE_BY, USAGE_ONLY, BudgetExtension, BudgetList, Cost, UsageReport
from fractional_gpu.protocol.advice import ShareAdvice
from fractional_gpu.protocol.errors import BadRequestError, ForbiddenError, NotFoundError
from fractional_gpu.protocol.limits import MAX_NAME
from fractional_gpu.reports.sums import periods_of

_LEASE: Final = r"/v1/leases/([0-9a-zA-Z_-]{1,64})"
_SECONDS: Final = re.compile(r"\d{1,12}", re.ASCII)
_EVER_S: Final = 10**12 - 1


def reader_of(handler: Handler) -> Reader:
    """Return who asks: by the token of a lease or seat, or else by the peer's uid."""
    peer = handler.peer
    if peer.admin:
        return Reader(administrator=True)
    if (seat := handler.service.seats.draws.seat_of_token(peer.token)) is not None:
        return Reader(owner=seat.owner, seated=True, group=seat.group_name)
    return Reader(owner=user_name(peer.credentials.uid))


class _Usage(Handler):
    async def get(self) -> None:
        question = self._question()
        reader = reader_of(self)
        entries, carbon, note = await self.service.usage.answer(reader, question)
        broker = self.service.broker
        self.reply(
            UsageReport(
                by=list(question.by),
                since_s=question.since_s,
                until_s=question.until_s,
                entries=entries,
                simulated=broker.monitor.kind == "simulated",
                scope=self.service.usage.scope(reader, question.by),
                devices={one.device_id: one.name for one in broker.devices.values()},
                carbon=carbon.text if carbon is not None else "",
                note=note,
                advice=await self._advice(reader, question) if self._is_advised(question) else [],
                visible=self.service.usage.visible,
                periods=periods_of(entries),
            )
        )

    async def _advice(self, reader: Reader, question: Question) -> list[ShareAdvice]:
        """Return what is suggested for the notebooks that the reader sees, of the user and pool that are asked for."""
        only = question.only
        seated = bool(only["seated"]) if "seated" in only else None
        owner = str(only["user"]) if "user" in only else None
        if not reader.administrator and (owner not in (None, reader.owner) or seated not in (None, reader.seated)):
            return []
        return await self.service.broker.habits.of_notebooks(
            str(only["pool"]) if "pool" in only else None,
            owner if reader.administrator else reader.owner,
            seated=seated if reader.administrator else reader.seated,
        )

    def _is_advised(self, question: Question) -> bool:
        """Whether advice on shares is wanted: with sums by notebook, and where the query asks for it. Raises BadRequestError."""
        text = self.get_query_argument("advice", "0")
        if text not in {"0", "1"}:
            raise BadRequestError(
                f"advice={text[:MAX_NAME]!r} is not allowed: give 1 for advice on shares, or leave it out",
                reason="bad-usage-query",
            )
        return text == "1" or "notebook" in question.by

    def _question(self) -> Question:
        """Return what the query asks. Raises BadRequestError with what is allowed."""
        by = tuple(one for one in self.get_query_argument("by", "").split(",") if one)
        if not set(by) <= set(USAGE_BY) or len(set(by)) < len(by):
            raise BadRequestError(
                f"by={','.join(by)[:MAX_NAME]!r} is not allowed; allowed: each of {', '.join(USAGE_BY)} at most once",
                reason="bad-usage-query",
            )
        only: dict[str, str | int] = {}
        for name in USAGE_ONLY:
            value = self.get_query_argument(name, None, strip=False)
            if value is not None:
                only[name] = value
            if value is not None and len(value) > MAX_NAME:
                raise BadRequestError(
                    f"{name} has more than {MAX_NAME} characters; name one that exists", reason="bad-usage-query"
                )
        if "seated" in only:
            only["seated"] = self._seated(str(only["seated"]))
        return Question(by, self._seconds("since_s", 0), self._seconds("until_s", _EVER_S), only)

    @staticmethod
    def _seated(text: str) -> int:
        if text not in {"0", "1"}:
            raise BadRequestError(
                f"seated={text!r} is not allowed: give 1 for users of the hub, 0 for those of the machine",
                reason="bad-usage-query",
            )
        return int(text)

    def _seconds(self, name: str, default: int) -> int:
        text = self.get_query_argument(name, str(default))
        if not _SECONDS.fullmatch(text):
            raise BadRequestError(
                f"{name}={text[:MAX_NAME]!r} is not allowed: give whole seconds since 1970", reason="bad-usage-query"
            )
        return int(text)


class _Cost(Handler):
    async def get(self, lease_id: str) -> None:
        kernel = self.find(lease_id)
        view = self.service.broker.arbiter.lease(kernel.lease_id)
        if view is None:
            raise BadRequestError("the lease has just ended", reason="unknown-lease")
        checked = Reader(administrator=True)  # `find` has checked the peer: the questions name the lease and its user
        user: dict[str, str | int] = {"user": view.spec.owner, "seated": int(bool(view.spec.seat))}
        usage = self.service.usage
        lease, carbon, note = await usage.answer(checked, Question((), 0, _EVER_S, {"lease": kernel.lease_id}))
        day_s, month_s = _beginnings()
        today, _, _ = await usage.answer(checked, Question((), day_s, _EVER_S, user))
        month, _, _ = await usage.answer(checked, Question((), month_s, _EVER_S, user))
        tariff = self.service.seats.forecasts.hub(view.spec.pool).tariff
        self.reply(
            Cost(
                lease_id=kernel.lease_id,
                pool=view.spec.pool,
                simulated=self.service.broker.monitor.kind == "simulated",
                lease=lease,
                today=today,
                month=month,
                terms=charge_terms(tariff),
                now_milli=_now_milli(tariff, view),
                currency=tariff.currency,
                carbon=carbon.text if carbon is not None else "",
                note=note,
                budgets=self.service.seats.budgets.status(party_of(view.spec)),
            )
        )


class _Budgets(Handler):
    def get(self) -> None:
        budgets, reader = self.service.seats.budgets, reader_of(self)
        owner = reader.owner if reader.seated else account_name(self.peer.credentials.uid)
        seen = budgets.all() if reader.administrator else budgets.seen_by(owner, reader.group, seated=reader.seated)
        self.reply(BudgetList(budgets=seen, scope="all" if reader.administrator else "own"))


class _Extend(Handler):
    async def post(self) -> None:
        if not self.peer.admin:
            raise ForbiddenError(
                f"uid {self.peer.credentials.uid} may not do this: only administrators add to budgets",
                reason="not-admin",
            )
        request = self.decode_body(BudgetExtension)
        keeper, subject = self.service.seats.budgets, Subject(request.kind, request.name, request.account)
        if request.account not in ({"", *ACCOUNTS} if request.kind == "user" else {""}):
            raise BadRequestError(
                f"account={request.account[:MAX_NAME]!r} is not allowed: of a user it is {' or '.join(ACCOUNTS)}, or left out for both; "
                "groups have none",
                reason="bad-account",
            )
        try:
            unit, amount, currency = parse_amount(request.amount)
        except ValueError as error:
            raise BadRequestError(f"amount={request.amount[:MAX_NAME]!r}: {error}", reason="bad-amount") from None
        budgets = keeper.matching(subject, unit, currency)
        if not budgets:
            have = ", ".join(sorted({f"{one.kind} {one.name}: {one.text}" for one in self.service.settings.budgets}))
            raise NotFoundError(
                f"{request.kind[:MAX_NAME]} {request.name[:MAX_NAME]!r} has no budget in the unit of {request.amount[:MAX_NAME]!r}; "
                f"budgets: {have or 'none (c.GPUBroker.budgets sets them)'}",
                reason="unknown-budget",
            )
        if request.until_s is not None and request.until_s * 1000 <= wall_ms():
            raise BadRequestError(
                "the time until which it is added has passed; give a later one, or none", reason="bad-amount"
            )
        whose = f"{request.kind}/{request.name}" + (f" ({request.account})" if request.account else "")
        async with self.audited("budget.extend", whose, amount=request.amount, until_s=request.until_s):
            await keeper.extend(subject, budgets, amount, request.until_s)
        self.reply(
            BudgetList(
                budgets=[one for one in keeper.all() if subject.includes(Subject(one.kind, one.name, one.account))],
                scope="all",
            )
        )


def _beginnings() -> tuple[int, int]:
    """Return the beginnings of the local day and month, seconds since 1970."""
    now = time.localtime(wall_ms() / 1000)
    day = time.mktime((now.tm_year, now.tm_mon, now.tm_mday, 0, 0, 0, 0, 0, -1))
    month = time.mktime((now.tm_year, now.tm_mon, 1, 0, 0, 0, 0, 0, -1))
    return int(day), int(month)


def _now_milli(tariff: Tariff, view: LeaseView) -> int:
    """Return what an hour of the lease costs as it is now, thousandths."""
    local = time.localtime(wall_ms() / 1000)
    minute = (local.tm_wday * 24 + local.tm_hour) * 60 + local.tm_min
    charged = tariff.charged_milli(
        held=view.reserved_mib > 0, busy=view.busy, suspended=bool(view.saved_mib) and not view.reserved_mib
    )
    return tariff.price_at(minute) * view.spec.fraction_milli * view.spec.devices * charged // 1_000_000


ACCOUNT_ROUTES: tuple[tuple[str, type[Handler]], ...] = (
    ("/v1/usage", _Usage),
    ("/v1/budgets", _Budgets),
    ("/v1/budgets/extend", _Extend),
    (_LEASE + "/cost", _Cost),
)
