"""Derivatives of a network: its linearization, losses, and derivatives in its inputs."""
