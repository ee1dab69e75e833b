"""Invented figures for a few weeks, as in a broker's ledger: six users, some of them in three groups, two devices, pools and prices."""

import random
import time
from collections.abc import Iterator

from fractional_gpu.core.metering.usage import HOUR_MS, SHARE_HOUR, Party, Usage, UsageKey, UsageRow

__all__ = ["month_of_use"]

_USERS = {"ada": "vision", "bob": "vision", "dave": "teaching", "eve": "teaching", "lise": "language", "otto": ""}
_NOTEBOOKS = ("train.ipynb", "eval.ipynb", "a long name of a notebook that nobody has shortened, version 2.ipynb")
_DEVICES = ("GPU-0", "GPU-1")
_HOUR_US = 3_600_000_000


def month_of_use(until_s: int, days: int = 24, seed: int = 1) -> Iterator[UsageRow]:
    chance = random.Random(seed)
    for back in range(24 * days):
        hour_s = until_s // 3600 * 3600 - 3600 * back
        local = time.gmtime(hour_s)
        works = 8 <= local.tm_hour < 19 and local.tm_wday < 5
        free_us = dict.fromkeys(_DEVICES, _HOUR_US)
        for number, (user, group) in enumerate(_USERS.items()):
            if chance.random() < (0.75 if works else 0.1):
                device = _DEVICES[number % 2]
                usage = _hour(chance, 1200 if works else 800, free_us[device])
                free_us[device] -= usage.occupied_us
                party = Party(
                    "default" if number % 2 else "large", user, group, _NOTEBOOKS[local.tm_mday % 3], seated=True
                )
                yield UsageRow(UsageKey(hour_s, f"lease-{user}-{local.tm_yday}", device, "EUR"), party, usage)
        for device, left_us in free_us.items():
            idle = Usage(occupied_us=left_us, energy_mj=60 * left_us // 1000)
            yield UsageRow(
                UsageKey(hour_s, "", device, "EUR"), Party("large" if device == "GPU-0" else "default"), idle
            )


def _hour(chance: random.Random, price_milli: int, free_us: int) -> Usage:
    milli = chance.choice((125, 250, 500))
    held_ms = min(chance.randint(HOUR_MS // 4, HOUR_MS), free_us // 1000)
    busy_ms, saved_ms = int(held_ms * chance.random()), HOUR_MS - held_ms
    return Usage(
        reserved_ms=HOUR_MS,
        held_ms=held_ms,
        busy_ms=busy_ms,
        suspended_ms=saved_ms,
        reserved_share=HOUR_MS * milli,
        held_share=held_ms * milli,
        busy_share=busy_ms * milli,
        suspended_share=saved_ms * milli,
        charged_share=held_ms * milli,
        device_mib_ms=held_ms * 20_480,
        host_mib_ms=saved_ms * 20_480,
        moved_mib=40_960,
        occupied_us=held_ms * milli,
        energy_mj=busy_ms * 300,
        charge_milli=price_milli * held_ms * milli // SHARE_HOUR,
        resident_milli=price_milli * HOUR_MS * milli // SHARE_HOUR,
        whole_milli=price_milli,
    )
