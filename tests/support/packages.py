"""Stand-ins for packages that a kernel may import: as much of their modules and call chains as a test needs, written into a folder."""

from collections.abc import Mapping
from pathlib import Path

__all__ = ["CUPY", "TORCH_PROFILER", "write"]


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


CUPY = {
    "cupy/__init__.py": "from cupy import cuda\n",
    "cupy/cuda/__init__.py": "from cupy.cuda.memory import malloc_managed\n",
    "cupy/cuda/memory.py": "def malloc_managed(size):\n    'Allocates.'\n    return ('managed', size)\n",
}

# torch 2.13.0: `torch.profiler.profile` works through `torch.autograd.profiler.profile`, which calls these two of torch._C.
TORCH_PROFILER = {
    "torch/__init__.py": "import torch.autograd\nimport torch.profiler\nimport torch.cuda.profiler\n",
    "torch/autograd/__init__.py": """
import enum
class ProfilerActivity(enum.Enum):
    CPU = 0
    CUDA = 2
calls = []
def _prepare_profiler(config, activities): calls.append("prepare")
def _enable_profiler(config, activities, scopes=None): calls.append("enable")
""",
    "torch/autograd/profiler.py": """
from torch.autograd import ProfilerActivity, _enable_profiler, _prepare_profiler
class profile:
    def __init__(self, use_device=None):
        self.kineto_activities = {ProfilerActivity.CPU}
        if use_device == "cuda": self.kineto_activities.add(ProfilerActivity.CUDA)
    def _prepare_trace(self): _prepare_profiler(None, self.kineto_activities)
    def _start_trace(self): _enable_profiler(None, self.kineto_activities)
    def __enter__(self):
        self._prepare_trace()
        self._start_trace()
        return self
    def __exit__(self, *_): pass
""",
    "torch/profiler/__init__.py": "from .profiler import profile\nfrom torch.autograd import ProfilerActivity\n",
    "torch/profiler/profiler.py": """
import torch.autograd.profiler as prof
from torch.autograd import ProfilerActivity
class profile:
    def __init__(self, activities): self.use_device = "cuda" if ProfilerActivity.CUDA in activities else None
    def __enter__(self):
        self.profiler = prof.profile(use_device=self.use_device)
        self.profiler._prepare_trace()
        self.profiler._start_trace()
        return self
    def __exit__(self, *_): pass
""",
    "torch/cuda/__init__.py": "def is_initialized(): return False\n",
    "torch/cuda/profiler.py": "def start(): return 'cudaProfilerStart'\n",
    "torch/profiler/_cupti_monitor.py": "def start_collection(folder): return folder\n",
}
