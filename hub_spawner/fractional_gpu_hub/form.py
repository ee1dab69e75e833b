"""The spawn page's form: plain HTML, one group of radio buttons. It needs no script, and no colour or position carries meaning.

Every pool is a fieldset with a legend; every choice is a radio button with its own label, and what to expect of it as its description,
so that a keyboard and a screen reader meet the same page as everybody else.
"""

from html import escape

from fractional_gpu.core.units import format_fraction, format_memory
from fractional_gpu.protocol.seats import FractionOffer, Offers, PoolOffer
from fractional_gpu_hub.options import FIELD, WITHOUT

__all__ = ["gpu_form"]


def gpu_form(
    offers: Offers | None, *, chosen: tuple[str, int] | None, without: bool, allow_without: bool, problem: str = ""
) -> str:
    """Return the form. `chosen`: pool and fraction of the last time; `without`: it was none; `problem`: why nothing is on offer."""
    checked = _checked(offers, chosen, without=without and allow_without)
    parts = ['<fieldset class="gpu-choice"><legend>GPU for your server</legend>']
    if problem:
        parts.append(f'<p role="alert" class="alert alert-warning">{escape(problem)}</p>')
    if offers is not None:
        if offers.simulated:
            parts.append("<p>These GPUs are simulated: for trying out, they compute nothing.</p>")
        if not offers.pools and not problem:
            parts.append("<p>There is no pool of GPUs for you; ask your administrator.</p>")
        parts += [_pool(pool, checked) for pool in offers.pools]
    if allow_without:
        parts.append(
            _radio(WITHOUT, "gpu-none", "No GPU", "starts at once", checked=checked == WITHOUT, disabled=False)
        )
    parts.append("</fieldset>")
    return "\n".join(parts)


def _checked(offers: Offers | None, chosen: tuple[str, int] | None, *, without: bool) -> str:
    """Return the value that is chosen already: that of the last time where it can still be had, else the default."""
    if offers is None or without:
        return WITHOUT
    there = {(pool.pool, one.fraction_milli) for pool in offers.pools if not pool.why_not for one in pool.fractions}
    default = (offers.default_pool, offers.default_fraction_milli)
    for pool, milli in (chosen, default) if chosen is not None else (default,):
        if (pool, milli) in there:
            return f"{pool}/{milli}"
    return WITHOUT


def _pool(pool: PoolOffer, checked: str) -> str:
    devices = "1 GPU" if pool.devices == 1 else f"{pool.devices} GPUs"
    facts = [
        f"{devices}, {format_memory(pool.free_mib)} of {format_memory(pool.capacity_mib)} not in use now",
        {0: "no server has a place", 1: "1 server has a place"}.get(pool.seats, f"{pool.seats} servers have a place"),
    ]
    if pool.waiting:
        facts.append("1 waits for one" if pool.waiting == 1 else f"{pool.waiting} wait for one")
    if pool.hours:
        facts.append(f"open {pool.hours}")
    lines = [
        f"<fieldset><legend>Pool {escape(pool.pool)}</legend>",
        f"<p>{escape('; '.join(facts))}.</p>",
    ]
    if pool.why_not:
        lines.append(f"<p><strong>Not available:</strong> {escape(pool.why_not)}.</p>")
    lines += [_fraction(pool, one, checked) for one in pool.fractions]
    lines.append("</fieldset>")
    return "\n".join(lines)


def _fraction(pool: PoolOffer, one: FractionOffer, checked: str) -> str:
    value = f"{pool.pool}/{one.fraction_milli}"
    label = f"{format_fraction(one.fraction_milli)} GPU, {format_memory(one.memory_mib)}"
    if one.price:
        label += f", {one.price}"
    disabled = bool(pool.why_not or one.why_not)
    hint = "" if pool.why_not else one.sentence
    return _radio(
        value, f"gpu-{pool.pool}-{one.fraction_milli}", label, hint, checked=value == checked, disabled=disabled
    )


def _radio(value: str, identity: str, label: str, hint: str, *, checked: bool, disabled: bool) -> str:
    name = escape(identity, quote=True)
    attributes = (
        f'type="radio" class="form-check-input" name="{FIELD}" id="{name}" value="{escape(value, quote=True)}" required'
    )
    if hint:
        attributes += f' aria-describedby="{name}-hint"'
    attributes += " checked" if checked else ""
    attributes += " disabled" if disabled else ""
    text = f'<label class="form-check-label" for="{name}">{escape(label)}</label>'
    if hint:
        text += f' <small id="{name}-hint">({escape(hint)})</small>'
    return f'<div class="form-check"><input {attributes}> {text}</div>'
