"""Sampling a row at a time, where rows sampled together could make each other round differently.

On CUDA the number of threads that add up a row depends on the number of rows; and top-p looks at all rows to decide
how it sorts, which decides which of two equally probable tokens goes first.
"""

from __future__ import annotations

import numpy as np
import torch

from flatbed.sampling.sampler import Drawn, Part, Sampled, Sampler


class RowSampler(Sampler):
    """Draws the tokens of a step row by row, but for greedy ones that ask for nothing else."""

    def sample(self, plan: Drawn, logits: torch.Tensor) -> Sampled:
        rows, _ = plan.sampled_rows()
        plain = ~(self._temperature[rows] > 0) & (self._penalty[rows] == 1) & ~self._special[rows]
        if len(rows) < 2 or bool((plain & ~self._logprobs[rows]).all()):
            return super().sample(plan, logits)
        each = [super(RowSampler, self).sample(Part(plan, np.array([i])), logits[i : i + 1]) for i in range(len(rows))]
        sampled = Sampled(torch.cat([one.tokens for one in each]), torch.cat([one.finite for one in each]))
        if self._logprobs[rows].any():
            unasked = torch.zeros(1, device=logits.device)  # of rows that do not ask; nobody reads it
            sampled.logprobs = torch.cat([unasked if one.logprobs is None else one.logprobs for one in each])
            sampled.raw_logprobs = torch.cat(
                [unasked if one.raw_logprobs is None else one.raw_logprobs for one in each]
            )
        return sampled
