"""EXP-003: does mlx-lm's own BatchGenerator give the same answer when our caches are injected?"""
