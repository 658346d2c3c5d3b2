"""Kernels without a GPU: Triton's interpreter, for whole processes, before anything imports Triton.

Where a CUDA device is, the same tests run on it instead. Where there is no Triton they are skipped.
"""

import os
from importlib.util import find_spec

import pytest
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is installed for tests on Linux x86-64 only"
)
