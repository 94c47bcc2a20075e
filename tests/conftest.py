"""What has to be so before any test runs.

Triton's interpreter has to be chosen before anything imports Triton, whose own functions are wrapped by then: without
a CUDA device the kernels run interpreted (tests/kernels), with one they are compiled (tests/gpu), and
TRITON_INTERPRET=1 chooses the interpreter all the same.
"""

from __future__ import annotations

import os
import signal

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that starts the tests in the background lets them ignore Ctrl-C, which some of them send.
signal.signal(signal.SIGINT, signal.default_int_handler)
