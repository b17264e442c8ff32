"""Build, check and explain vLLM wheels that carry the Kimi-K3 patch series."""
