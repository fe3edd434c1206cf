"""Property tests are seeded, and a slow machine is no failure."""

from hypothesis import settings

settings.register_profile("prfaas", deadline=None, derandomize=True)
settings.load_profile("prfaas")
