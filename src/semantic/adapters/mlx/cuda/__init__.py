"""CUDA only: kernels that `nvrtc` compiles, and copies by the device's copy engine.

mlx_lm's recurrences and convolutions, rows of a batch that read keys together, and kernels that MLX
compiles at first use have a kernel or a process here.
"""
