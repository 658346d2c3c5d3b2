"""Figures of the papers, drawn again from the simulator."""
