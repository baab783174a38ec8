"""The policy trainer's step beside a plain loop of transformers and torch."""
