"""A CPU build of PyTorch that plays an Apple GPU, as tests/pretend_cuda.py plays CUDA: it refuses float64, too.

Not seen: operations that MPS has not, and the numbers of its kernels.
"""

import torch

from tests.pretend_cuda import PretendCuda


class PretendMps(PretendCuda):
    kind = "mps"

    def put(self, x, gpu=True):
        if gpu and isinstance(x, torch.Tensor) and x.dtype == torch.float64:
            self.refuse("float64")
        return super().put(x, gpu)

    def backend(self):
        return [(torch.backends.mps, {"is_available": lambda: True})]
