"""Triton's interpreter has to be chosen before anything imports Triton: its own functions are wrapped by then.

Without a CUDA device the kernels run interpreted (tests/kernels); with one they are compiled (tests/gpu), and
TRITON_INTERPRET=1 chooses the interpreter all the same.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
