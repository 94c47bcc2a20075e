"""Triton kernels. Triton is optional: a module of kernels is imported where it is first used, never from here."""
