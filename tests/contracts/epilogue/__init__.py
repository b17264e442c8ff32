"""What the contract of DSpark's context-KV epilogue needs: the drafter's steps in a process of their own."""
