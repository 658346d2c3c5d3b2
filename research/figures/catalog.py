"""All figures, by name."""

from collections.abc import Mapping

from research.figures import adaserve, cluster, slos_serve, specrouter
from research.figures.figure import Figure

_ALL = (*adaserve.FIGURES, *slos_serve.FIGURES, *specrouter.FIGURES, *cluster.FIGURES)
FIGURES: Mapping[str, Figure] = {one.name: one for one in _ALL}
