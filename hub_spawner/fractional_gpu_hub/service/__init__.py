"""The hub's live page about its GPUs: the devices, servers and kernels, the queue with its reasons, and actions on them.

    from fractional_gpu_hub.service import add_page
    add_page(c, admins=["grace"])  # after `configure`, and after an assignment to `c.JupyterHub.load_roles`

The hub then runs `python -m fractional_gpu_hub.service`.
"""

from fractional_gpu_hub.service.configuration import ADMIN_SCOPE, READ_SCOPE, add_page

__all__ = ["ADMIN_SCOPE", "READ_SCOPE", "add_page"]
