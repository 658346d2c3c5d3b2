"""GGUF files, as llama.cpp and projects based on it write them, as checkpoints."""
