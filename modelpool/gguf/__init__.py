"""GGUF files, as llama.cpp and what is built on it write them, as checkpoints."""
