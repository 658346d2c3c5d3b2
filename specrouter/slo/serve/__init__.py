"""SLOs-Serve: who is admitted, and what each cycle reads and decodes for whom."""
