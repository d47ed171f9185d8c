"""Structured matrices: products with Krylov, Toeplitz-like, subdiagonal and tridiagonal displacement structure."""
