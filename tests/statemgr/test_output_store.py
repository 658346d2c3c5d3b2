"""Earlier outputs: bounded, fair and apart by tenant."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from statemgr import OutputStore
from tests.statemgr.test_suffix_index import texts_of

OUTPUTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 5), max_size=90)), max_size=30
)


def texts(store: OutputStore, tenant: str) -> list[list[int]]:
    index = store.of(tenant)
    return [] if index is None else texts_of(index)[:-1]


def finds(store: OutputStore, tenant: str, context: list[int]) -> bool:
    index = store.of(tenant)
    return index is not None and bool(index.matches(array("i", context)))


@given(OUTPUTS, st.integers(0, 400))
def test_a_store_keeps_the_last_outputs_of_each_tenant_within_its_bound(
    outputs: list[tuple[str, list[int]]], most: int
) -> None:
    store = OutputStore(most)
    for tenant, tokens in outputs:
        store.keep(tenant, tokens)
        assert len(store) <= most
    for tenant in "abc":
        kept = texts(store, tenant)
        given_ = [tokens[-(most - 65) :] for name, tokens in outputs if name == tenant]
        long_enough = [tokens for tokens in given_ if len(tokens) > 4]
        assert kept == long_enough[len(long_enough) - len(kept) :]
    assert len(store) == sum(
        64 + sum(len(tokens) + 1 for tokens in texts(store, name))
        for name in "abc"
        if store.of(name) is not None
    )


def test_who_sends_much_pushes_out_nobody_else() -> None:
    store = OutputStore(1000)
    store.keep("quiet", [1, 2, 3, 4, 5, 6])
    for start in range(200):
        store.keep("busy", list(range(start, start + 50)))
    assert finds(store, "quiet", [1, 2, 3, 4])
    assert not finds(store, "busy", [1, 2, 3, 4]), "the oldest made room"
    assert finds(store, "busy", [200, 201, 202, 203])


def test_two_tenants_never_find_each_others_outputs() -> None:
    store = OutputStore(10_000)
    store.keep("one", [1, 2, 3, 4, 5, 6])
    store.keep("two", [7, 8, 9, 10, 11, 12])
    assert finds(store, "one", [1, 2, 3, 4])
    assert finds(store, "two", [7, 8, 9, 10])
    assert not finds(store, "one", [7, 8, 9, 10])
    assert not finds(store, "two", [1, 2, 3, 4])
    assert store.of("three") is None
