"""The hub's page about its GPUs: devices, servers, kernels, who waits and why, live; and what may be done about them.

    from hub_spawner.service import add_page
    add_page(c, admins=["grace"])                 # after `configure`, and after `c.JupyterHub.load_roles` where a site sets that

`python -m hub_spawner.service` is the process that the hub then runs.
"""

from hub_spawner.service.configuration import add_page
from hub_spawner.service.scopes import ADMIN_SCOPE, READ_SCOPE

__all__ = ["ADMIN_SCOPE", "READ_SCOPE", "add_page"]
