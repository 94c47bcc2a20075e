"""The tensors of one forward pass, made from a plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from flatbed.attention.base import Batch
from flatbed.memory.transfer import upload
from flatbed.scheduling.plan import BatchPlan


@dataclass
class StepInputs:
    """What the model is given.

    Attributes:
        input_ids, position_ids: int64 [1, T].
        logits_at: int64 [samples], which of the T tokens a logits row is needed for.
        batch: what attention needs.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logits_at: torch.Tensor
    batch: Batch


def step_inputs(plan: BatchPlan, last_tokens: torch.Tensor, block_size: int, device: torch.device) -> StepInputs:
    """Tensors for `plan`. `last_tokens` [rows] on the device holds the token that each decoding row computes next."""
    decodes = len(plan.rows)
    chunks = plan.chunks
    counts = np.fromiter((c.end - c.start for c in chunks), np.int64, len(chunks))
    rows = np.concatenate([plan.rows, np.fromiter((c.row for c in chunks), np.int64, len(chunks))]).astype(np.int64)
    lengths = np.concatenate([plan.positions + 1, np.fromiter((c.end for c in chunks), np.int64, len(chunks))])
    lengths = lengths.astype(np.int64)
    per_sequence = np.concatenate([np.ones(decodes, np.int64), counts])
    starts = np.concatenate([[0], np.cumsum(per_sequence)])
    width = max(1, -(-int(lengths.max()) // block_size))
    tables = plan.tables[rows, :width]

    # Each token's position is its sequence's length, less how far the token is from the sequence's end.
    sequence_of = np.repeat(np.arange(len(rows)), per_sequence)
    positions = lengths[sequence_of] - starts[sequence_of + 1] + np.arange(starts[-1])
    slot_blocks = tables[sequence_of, positions // block_size].astype(np.int64)
    slot_offsets = positions % block_size

    prompt_tokens = np.array([t for c in chunks for t in c.tokens], np.int64)
    sampled = np.concatenate([np.arange(decodes), starts[1:][decodes:][[c.last for c in chunks]] - 1])
    parts = (positions, slot_blocks, slot_offsets, prompt_tokens, rows[:decodes], sampled.astype(np.int64))
    sent = upload(np.concatenate(parts), device).split([len(part) for part in parts])
    positions_t, blocks_t, offsets_t, ids, decode_rows, logits_at = sent
    if decodes:
        ids = torch.cat([last_tokens[decode_rows], ids])
    return StepInputs(
        input_ids=ids[None],
        position_ids=positions_t[None],
        logits_at=logits_at,
        batch=Batch(decodes, starts, lengths, tables, blocks_t, offsets_t, device),
    )
