"""What the contracts of Kimi-K3's FP8_PB_WO path share: checkpoint, oracle, kernels, real modules on CPU."""
