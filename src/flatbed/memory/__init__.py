"""The pool of K/V memory: how many bytes, where they come from, when they are committed and given back."""
