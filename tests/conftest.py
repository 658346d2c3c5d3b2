"""Models are timed within a tenth of a second, not three: no text depends on how well."""

from collections.abc import Iterator
from functools import partial

import pytest


@pytest.fixture(scope="module", autouse=True)
def briefly_timed() -> Iterator[None]:
    from specrouter.execution import model_times
    from specrouter.execution.time_profile import profile_model

    briefly = partial(profile_model, budget_s=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_times, "profile_model", briefly)
        yield
