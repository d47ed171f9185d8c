"""Linear solvers, the damping and the length of steps."""
