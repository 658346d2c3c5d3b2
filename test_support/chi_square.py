"""Do counts follow known probabilities? Chi-square tests whose cells are large enough."""

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEAST_EXPECTED = 5.0
_CELLS = 12  # of one variable in a joint test: its likeliest values, and the rest


def fit_p_value(counts: Ints, probabilities: Floats) -> float:
    """The chance of counts at least this far from `probabilities`; both of shape [n].

    Cells expected fewer than five times are pooled; a pool that is still too small joins the
    smallest of the others. A count in a cell of probability zero gives 0.
    """
    if counts[probabilities == 0].any():
        return 0.0
    expected = probabilities / probabilities.sum() * counts.sum()
    large = expected >= LEAST_EXPECTED
    seen = np.append(counts[large], counts[~large].sum()).astype(np.float64)
    wanted = np.append(expected[large], expected[~large].sum())
    if wanted[-1] < LEAST_EXPECTED and len(wanted) > 1:
        smallest = int(wanted[:-1].argmin())
        seen[smallest] += seen[-1]
        wanted[smallest] += wanted[-1]
        seen, wanted = seen[:-1], wanted[:-1]
    if len(wanted) < 2:
        return 1.0
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    return float(stats.chi2.sf(statistic, len(wanted) - 1))


def independence_p_value(first: Ints, second: Ints, p_first: Floats, p_second: Floats) -> float:
    """Are paired draws [N] of known distributions [V] each independent?

    Values are folded to the likeliest few and the rest, so that joint cells are large.
    """
    fold_first, q_first = _fold(p_first)
    fold_second, q_second = _fold(p_second)
    width = len(q_second)
    cells = fold_first[first] * width + fold_second[second]
    counts = np.bincount(cells, minlength=len(q_first) * width)
    return fit_p_value(counts, np.outer(q_first, q_second).ravel())


def correlation_p_value(first: Floats, second: Floats) -> float:
    """The chance of a correlation at least this large between independent variables [N]."""
    r = np.corrcoef(first, second)[0, 1]
    return float(2 * stats.norm.sf(abs(r) * np.sqrt(len(first))))


def uniform_p_value(values: Floats) -> float:
    """Kolmogorov-Smirnov: the chance of values [N] at least this far from uniform on (0, 1)."""
    return float(stats.kstest(values, "uniform").pvalue)


def _fold(probabilities: Floats) -> tuple[Ints, Floats]:
    """A cell for each value [V], and the cells' probabilities."""
    likeliest = np.argsort(-probabilities, kind="stable")[: _CELLS - 1]
    cell = np.full(len(probabilities), len(likeliest), dtype=np.int64)
    cell[likeliest] = np.arange(len(likeliest))
    folded = np.zeros(len(likeliest) + 1)
    np.add.at(folded, cell, probabilities)
    return cell, folded
