"""Helpers that strategies, callbacks, data and recipes share.

They know Lightning's namespaces and internals, the checkpoint hooks of modules, strategies that shard weights, and
optional packages.
"""
