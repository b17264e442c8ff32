"""What the contract on MLA decoding over FlashAttention needs: a stand-in for the kernel, and K3's layer on CPU."""
