"""Runs of vLLM's real engine on a GPU with the tiny Kimi-K3, and what they are compared with."""
