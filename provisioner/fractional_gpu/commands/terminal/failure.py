"""The error of the commands: a sentence for the person at the terminal, and an exit code."""

__all__ = ["CommandError", "UsageError"]


class CommandError(Exception):
    """The command could not do what it was asked; the message says why and what to do. Exit code 1."""

    exit_code = 1


class UsageError(CommandError):
    """The arguments make no sense together or a value is not allowed. Exit code 2."""

    exit_code = 2
