"""For CUDA only: kernels that `nvrtc` compiles, and copies by the device's copy engine."""
