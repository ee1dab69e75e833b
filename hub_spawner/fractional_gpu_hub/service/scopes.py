"""The names of the page's scopes at the hub."""

__all__ = ["ADMIN_SCOPE", "READ_SCOPE"]

READ_SCOPE = "custom:fractional-gpu:read"
ADMIN_SCOPE = "custom:fractional-gpu:admin"
