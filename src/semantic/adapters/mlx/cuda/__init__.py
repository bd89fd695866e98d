"""CUDA only: kernels that `nvrtc` compiles, and copies by the device's copy engine.

The folder has kernels for mlx_lm's recurrences and convolutions, and for a batch's rows that read
keys together. `first_kernels` starts a process for each kernel that MLX would compile at first use.
"""
