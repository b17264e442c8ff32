"""What the contracts of K3's DSpark drafter share: drafter checkpoints, oracle, kernels, the real drafter on CPU."""
