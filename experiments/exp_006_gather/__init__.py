"""EXP-006: what does it cost to turn an agent's blocks into caches again?"""
