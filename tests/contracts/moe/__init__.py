"""What the contracts on NVFP4 experts share: a stand-in for flashinfer, configs on CPU, float64 oracles."""
