"""SLOs-Serve: which requests are admitted, and the prompt tokens and drafts of each cycle."""
