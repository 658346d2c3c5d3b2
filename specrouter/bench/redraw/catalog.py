"""All figures, by name."""

from collections.abc import Mapping

from specrouter.bench.redraw import adaserve, cluster, slos_serve, specrouter
from specrouter.bench.redraw.figure import Figure

_ALL = (*adaserve.FIGURES, *slos_serve.FIGURES, *specrouter.FIGURES, *cluster.FIGURES)
FIGURES: Mapping[str, Figure] = {one.name: one for one in _ALL}
