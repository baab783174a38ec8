"""The engine's own forward of Llama, Qwen2 and Qwen3 checkpoints, and the draw of a token."""
