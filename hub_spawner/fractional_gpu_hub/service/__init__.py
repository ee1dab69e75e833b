"""The hub's live GPU page. It shows devices, servers, kernels, and the queue with the reasons for waiting, and lets users act on them.

    from fractional_gpu_hub.service import add_page
    add_page(c, admins=["grace"])  # after `configure`, and after an assignment to `c.JupyterHub.load_roles`

The hub then runs `python -m fractional_gpu_hub.service`.
"""

from fractional_gpu_hub.service.configuration import ADMIN_SCOPE, READ_SCOPE, add_page

__all__ = ["ADMIN_SCOPE", "READ_SCOPE", "add_page"]
