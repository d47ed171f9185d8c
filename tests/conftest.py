"""Settings of all tests."""

from hypothesis import settings

# Examples are the same in every run, and none fails for taking its time on a busy machine.
settings.register_profile("tests", deadline=None, derandomize=True)
settings.load_profile("tests")
