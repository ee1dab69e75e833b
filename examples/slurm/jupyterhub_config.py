# A hub in front of Slurm: servers are jobs with a share of a GPU. The nodes need what docs/clusters.md says; the hub runs no broker.
#
# On the hub's machine: pip install './jupyter_fractional_gpu-0.1.0-py3-none-any.whl[slurm]' (as on the nodes), Slurm's client commands, and a `slurm.conf` that they find.
# The hub's users are users of the cluster. Where the hub runs as root, it becomes the user for sbatch, squeue and scancel:
c = get_config()  # noqa: F821 - JupyterHub's

c.JupyterHub.spawner_class = "fractional-gpu-slurm"
c.BatchSpawnerBase.exec_prefix = "sudo -E -u {username}"  # as another user: a sudoers rule for sbatch, squeue and scancel, with SETENV

# Each pool's partition. Nodes of other partitions are not offered.
c.FractionalGPUSlurmSpawner.gpu_partitions = {"default": "gpu"}
# Where Jupyter is installed on the nodes, if not at the same place as on the hub.
c.FractionalGPUSlurmSpawner.gpu_path = "/opt/jupyterhub/bin:/usr/local/bin:/usr/bin:/bin"
c.Spawner.cmd = ["jupyterhub-singleuser"]

# Host memory of a server beside its share's saved state; and how long it may wait in Slurm's queue, seconds.
c.EngineGPUMixin.gpu_base_memory = "4GiB"
c.EngineGPUMixin.gpu_wait = 900
c.BatchSpawnerBase.req_runtime = "12:00:00"
c.BatchSpawnerBase.req_nprocs = "2"

# Servers on the nodes must reach the hub, and the proxy the servers.
c.JupyterHub.hub_ip = "0.0.0.0"
c.JupyterHub.cleanup_servers = False  # jobs outlive a restart of the hub

# The page with all nodes, and on which of them servers run: /services/gpu/
from fractional_gpu_hub.service import add_page

add_page(c, admins=["grace"], cluster="slurm")
