"""The hub's page about its GPUs, live: devices, servers, kernels, the queue with its reasons, and actions on them.

    from fractional_gpu_hub.service import add_page
    add_page(c, admins=["grace"])                 # after `configure`, and after `c.JupyterHub.load_roles` where a site sets that

`python -m fractional_gpu_hub.service` is the process that the hub then runs.
"""

from fractional_gpu_hub.service.configuration import ADMIN_SCOPE, READ_SCOPE, add_page

__all__ = ["ADMIN_SCOPE", "READ_SCOPE", "add_page"]
