"""HTTP routes that report what leases used and what it cost. `broker.accounting.reports` decides which figures a peer may see."""

import time
from typing import Any

from fractional_gpu.broker.accounting.budgets import party_of
from fractional_gpu.broker.accounting.reports import Reader, ReportQuery
from fractional_gpu.broker.accounting.terms import charge_terms
from fractional_gpu.broker.api.handler import Call, Described, serve
from fractional_gpu.broker.api.lease_service import LeaseService
from fractional_gpu.broker.clock import wall_ms
from fractional_gpu.broker.seats.rules import minute_of_week
from fractional_gpu.broker.services.status import view_of
from fractional_gpu.config.budgets import parse_amount
from fractional_gpu.core.metering.budgets import Subject
from fractional_gpu.core.metering.tariffs import Tariff
from fractional_gpu.core.metering.usage import ACCOUNTS
from fractional_gpu.core.model import LeaseView
from fractional_gpu.host.accounts import account_name, user_name
from fractional_gpu.protocol import routes
from fractional_gpu.protocol.accounts import (
    EVER_S,
    USAGE_BY,
    USAGE_ONLY,
    BudgetExtension,
    BudgetList,
    Cost,
    UsageQuery,
    UsageReport,
)
from fractional_gpu.protocol.errors import BadRequestError, NotFoundError
from fractional_gpu.protocol.limits import MAX_NAME
from fractional_gpu.protocol.routes import EmptyRequest
from fractional_gpu.protocol.status import ShareAdvice
from fractional_gpu.reports.sums import periods_of


def _reader_of(call: Call[Any]) -> Reader:
    if call.peer.admin:
        return Reader(administrator=True)
    seats = call.service.seats
    if (seat := seats.find(seats.draws.of_token(call.peer.token) or "")) is not None:
        return Reader(owner=seat.owner, seated=True, group=seat.group)
    return Reader(owner=user_name(call.peer.credentials.uid))


async def _usage(call: Call[UsageQuery]) -> UsageReport:
    query, service, reader = call.body, call.service, _reader_of(call)
    by = tuple(one for one in query.by.split(",") if one)
    if not set(by) <= set(USAGE_BY) or len(set(by)) < len(by):
        raise BadRequestError(
            f"invalid value for 'by': {query.by[:MAX_NAME]!r}; choose from {', '.join(USAGE_BY)}, each at most once",
            reason="bad-query",
        )
    asked = {name: getattr(query, name) for name in USAGE_ONLY}
    only = {name: int(value) if name == "seated" else value for name, value in asked.items() if value is not None}
    entries, carbon, note = await service.usage.answer(reader, ReportQuery(by, query.since_s, query.until_s, only))
    return UsageReport(
        by=list(by),
        since_s=query.since_s,
        until_s=query.until_s,
        entries=entries,
        simulated=service.broker.monitor.kind == "simulated",
        scope=service.usage.scope(reader, by),
        devices={one.device_id: one.name for one in service.broker.devices.values()},
        carbon=carbon.text if carbon is not None else "",
        note=note,
        advice=await _advice(service, reader, query) if query.advice or "notebook" in by else [],
        visible=service.usage.visible,
        periods=periods_of(entries),
    )


async def _advice(service: LeaseService, reader: Reader, query: UsageQuery) -> list[ShareAdvice]:
    owner, seated = query.user, query.seated
    if not reader.administrator:
        if owner not in (None, reader.owner) or seated not in (None, reader.seated):
            return []
        owner, seated = reader.owner, reader.seated
    return await service.broker.habits.of_notebooks(query.pool, owner, seated=seated)


async def _cost(call: Call[EmptyRequest]) -> Cost:
    service = call.service
    view = view_of(service.broker, call.kernel)
    checked = Reader(administrator=True)  # the peer may see the lease, so the query names it and its user
    user: dict[str, str | int] = {"user": view.spec.owner, "seated": int(bool(view.spec.seat))}
    day_s, month_s = _beginnings()
    lease, carbon, note = await service.usage.answer(checked, ReportQuery((), 0, EVER_S, {"lease": view.spec.lease_id}))
    today, _, _ = await service.usage.answer(checked, ReportQuery((), day_s, EVER_S, user))
    month, _, _ = await service.usage.answer(checked, ReportQuery((), month_s, EVER_S, user))
    tariff = service.seats.forecasts.hub(view.spec.pool).tariff
    return Cost(
        lease_id=view.spec.lease_id,
        pool=view.spec.pool,
        simulated=service.broker.monitor.kind == "simulated",
        lease=lease,
        today=today,
        month=month,
        terms=charge_terms(tariff),
        now_milli=_now_milli(tariff, view),
        currency=tariff.currency,
        carbon=carbon.text if carbon is not None else "",
        note=note,
        budgets=service.seats.budgets.status(party_of(view.spec)),
    )


def _budgets(call: Call[EmptyRequest]) -> BudgetList:
    budgets, reader = call.service.seats.budgets, _reader_of(call)
    if reader.administrator:
        return BudgetList(budgets=budgets.all(), scope="all")
    owner = reader.owner if reader.seated else account_name(call.peer.credentials.uid)
    return BudgetList(budgets=budgets.seen_by(owner, reader.group, seated=reader.seated), scope="own")


async def _extend(call: Call[BudgetExtension]) -> BudgetList:
    request, keeper = call.body, call.service.seats.budgets
    subject = Subject(request.kind, request.name, request.account)
    if request.account not in ({"", *ACCOUNTS} if request.kind == "user" else {""}):
        raise BadRequestError(
            f"invalid account {request.account[:MAX_NAME]!r}; for a user, choose {' or '.join(ACCOUNTS)}, or leave it out to extend the "
            "user's budgets in both accounts; groups have no accounts",
            reason="bad-account",
        )
    try:
        unit, amount, currency = parse_amount(request.amount)
    except ValueError as error:
        raise BadRequestError(f"amount={request.amount[:MAX_NAME]!r}: {error}", reason="bad-amount") from None
    budgets = keeper.matching(subject, unit, currency)
    if not budgets:
        have = ", ".join(sorted({f"{one.kind} {one.name}: {one.text}" for one in call.service.settings.budgets}))
        raise NotFoundError(
            f"{request.kind[:MAX_NAME]} {request.name[:MAX_NAME]!r} has no budget in the same unit as {request.amount[:MAX_NAME]!r}; "
            f"budgets: {have or 'none (c.GPUBroker.budgets sets them)'}",
            reason="unknown-budget",
        )
    if request.until_s is not None and request.until_s * 1000 <= wall_ms():
        raise BadRequestError("the end time is in the past; give a later one, or leave it out", reason="bad-amount")
    await keeper.extend(subject, budgets, amount, request.until_s)
    changed = [one for one in keeper.all() if subject.includes(Subject(one.kind, one.name, one.account))]
    return BudgetList(budgets=changed, scope="all")


def _extended(call: Call[BudgetExtension]) -> Described:
    request = call.body
    whose = f"{request.kind}/{request.name}" + (f" ({request.account})" if request.account else "")
    return whose, {"amount": request.amount, "until_s": request.until_s}


def _beginnings() -> tuple[int, int]:
    now = time.localtime(wall_ms() / 1000)
    day = time.mktime((now.tm_year, now.tm_mon, now.tm_mday, 0, 0, 0, 0, 0, -1))
    month = time.mktime((now.tm_year, now.tm_mon, 1, 0, 0, 0, 0, 0, -1))
    return int(day), int(month)


def _now_milli(tariff: Tariff, view: LeaseView) -> int:
    charged = tariff.charged_milli(
        held=view.reserved_mib > 0, busy=view.busy, suspended=bool(view.saved_mib) and not view.reserved_mib
    )
    return (
        tariff.price_at(minute_of_week(wall_ms() / 1000))
        * view.spec.fraction_milli
        * view.spec.devices
        * charged
        // 1_000_000
    )


serve(routes.USAGE, _usage)
serve(routes.COST, _cost)
serve(routes.BUDGETS, _budgets)
serve(routes.EXTEND_BUDGET, _extend, _extended)
