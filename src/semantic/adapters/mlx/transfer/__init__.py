"""Copies between device and host memory by the device's copy engine, beside all computation.

Used on CUDA, where the host cannot read a device's arrays in place. Threads of their own wait for
the copies; the thread that runs MLX only says what lies where. Where there is no copy engine to
use (a CPU, Metal's unified memory), block bodies take the way through MLX's arrays.
"""
