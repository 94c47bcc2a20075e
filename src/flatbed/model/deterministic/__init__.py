"""`deterministic=True`: a request's tokens and log-probabilities are the same bits whatever runs beside it.

A request's numbers are those of its tokens, and a token's row of numbers passes through the model beside the rows of
other tokens. What those are changes from step to step: neighbours, chunks of a prompt, a graph's padding, a prompt that
is computed again after a preemption or not at all because the cache has it. So everything is made to hold for single
rows: **a row of every intermediate result is a function of the same row before it, of the weights, and (in attention)
of the K/V of the tokens before it**, in the same order of operations, however many rows there are and wherever among
them it stands. From that follows all else: K/V of a token is the same bits whether it was computed by a decode, in a
chunk of any size, again after a preemption, or by another request with the same beginning.

What would break it, and what is done instead::

      what depends on the batch        why                              instead                              where
      matrix products                  libraries choose tiles and       CPU: only numbers of rows that a     products
                                       split-K by the number of rows    probe found to give the same bits;
                                                                        CUDA: a kernel without split-K
      attention                        decode divides K/V by what the   tiles of keys at fixed positions,    attention
                                       batch holds; prefill adds up in  added up in order; one code for
                                       another order than decode        decode and prefill
      functions of single numbers      on the CPU, what is left of a    numbers are padded to whole          elementwise
      (SiLU, GELU, ...)                vector is other code's work      vectors
      sums and means along a row       on CUDA, threads a row depend    CUDA: a kernel with one program      operators
                                       on the number of rows            a row
      norms, softmax, rotary           a row at a time already          launched alike for all numbers       decoder_ops
      embedding                                                         of rows
      sampling                         reductions of torch on CUDA;     such rows one at a time              sampling
                                       ties in top-p

The model's own code is not changed: while the shadow runs, a dispatch mode (`operators.BatchInvariant`) stands between
it and PyTorch's operators, replaces those above, lets pass what is known to treat rows one by one, and **refuses every
operator it does not know, by name**. When an engine is built, one token is run through the model, which meets every
operator, and then a few batches around the same tokens, which must give the same logits bit for bit (`check`).

The one thing that stays a condition: the same machine, versions, dtype, number of CPU threads and block of settings
that choose kernels. Another GPU, or another number of threads, may give other bits.

The idea of making each row's order of operations fixed, rather than only each run's, is described in "Defeating
Nondeterminism in LLM Inference" (Thinking Machines Lab, 2025); vLLM and SGLang call it batch invariance.
"""
