"""EXP-001: does the spec read from a model that was never loaded say what the model caches?"""
