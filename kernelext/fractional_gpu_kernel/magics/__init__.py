"""`%gpu`, `%%gpu` and `%%cpu`: their commands, arguments, completion and actions."""
