"""EXP-005: is the engine's answer byte for byte that of mlx_lm.generate?"""
