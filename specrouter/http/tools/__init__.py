"""Tool calls: what chats may call, how model families write calls, and how they are read back."""
