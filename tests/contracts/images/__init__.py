"""What the contract on image placeholders needs: a tokenizer and an image processor of K3's kind, without files."""
