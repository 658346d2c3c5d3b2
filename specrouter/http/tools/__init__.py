"""Tool calls: the functions of a chat, the formats of model families, and their parsers."""
