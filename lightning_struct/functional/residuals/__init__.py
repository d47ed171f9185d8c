"""Residuals of a module and the rows of their Jacobian."""
