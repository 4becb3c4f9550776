"""The operator sweep: every operator PyTorch describes in its own test database, against CPU eager."""
