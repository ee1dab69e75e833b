"""Names that people gave, such as a hub's users and servers: those that could steer what shows them are refused."""

__all__ = ["unprintable"]


def unprintable(name: str) -> str:
    """Return the first character that cannot be shown safely (control and direction marks), in words; empty: there is none.

    The words are printable themselves: `U+202E (right-to-left override)`.
    """
    import unicodedata  # noqa: PLC0415 - kernels import this module, and name nobody

    for character in name:
        if not character.isprintable():
            known = unicodedata.name(character, "control character").lower()
            return f"U+{ord(character):04X} ({known})"
    return ""
