"""EXP-004: does an agent's cache survive a batch, a file and another process?"""
