"""What contracts about merged linear layers of any model share."""
