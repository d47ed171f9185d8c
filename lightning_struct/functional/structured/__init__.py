"""Structured matrices: products with Krylov, Toeplitz-like and tridiagonal operators."""
