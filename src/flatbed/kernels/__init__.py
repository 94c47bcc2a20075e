"""Triton kernels. Nothing is imported here: Triton is optional, and a kernel module is imported where it is first used."""
