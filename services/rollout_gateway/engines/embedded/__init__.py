"""The embedded PyTorch engine: exactly lossless speculation, CPU first."""
