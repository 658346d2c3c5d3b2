"""Questions to the simulator whose answers stand in docs/figures.md: each module is a program."""
