"""Helpers that strategies, callbacks, data and recipes share: Lightning's internals, sharded weights, optional packages."""
