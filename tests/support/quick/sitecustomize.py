"""Python imports this at its start where this folder is the first in PYTHONPATH that has such a module; `injected` has one, too."""

import quick_start  # type: ignore[import-not-found]  # noqa: F401 - next to this file
