# A hub for a teaching lab: 60 students and their teachers share two GPUs. The guide is docs/teaching.md.
# The hub runs as root: it starts servers as the users of the machine and runs the broker that moves their kernels' memory.

from fractional_gpu_hub import configure
from fractional_gpu_hub.service import add_page

c = get_config()  # noqa

configure(
    c,
    spawner="fractional-gpu-local",
    config_file="/etc/jupyter/jupyter_gpu_config.py",
)

c.JupyterHub.bind_url = "https://:443"
c.JupyterHub.ssl_key = "/etc/jupyterhub/tls/key.pem"
c.JupyterHub.ssl_cert = "/etc/jupyterhub/tls/cert.pem"
c.JupyterHub.authenticator_class = "pam"
c.JupyterHub.load_groups = {
    "students": {"users": []},  # filled by the authenticator, the admin page or the API
    "teachers": {"users": ["grace"]},
}
c.Authenticator.allow_all = True
c.Authenticator.admin_users = {"grace"}

# How long a student waits for a place before the hub gives up, and how long a server may take to start (seconds).
c.FractionalGPUMixin.gpu_wait = 600
c.Spawner.http_timeout = 60

# Cull servers, never kernels: a suspended kernel costs nothing but host memory, and holds a student's variables.
c.JupyterHub.load_roles = [
    {
        "name": "idle-culler",
        "services": ["idle-culler"],
        "scopes": ["list:users", "read:users:activity", "read:servers", "delete:servers"],
    }
]
c.JupyterHub.services.append(
    {
        "name": "idle-culler",
        "command": ["python3", "-m", "jupyterhub_idle_culler", "--timeout=43200"],  # 12 hours
    }
)

# The page about the GPUs, /services/gpu/: students see and steer what is theirs, teachers everything.
add_page(c, admin_groups=["teachers"])
