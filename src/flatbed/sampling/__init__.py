"""From logits to tokens: parameters of each row, random numbers, the sampler."""
