"""The magics `%gpu`, `%%gpu`, `%%gpu measure` and `%%cpu`: their commands, arguments, completion and actions."""
