"""Preconditioners, Kronecker factors, and the inverses of recursive least squares."""
