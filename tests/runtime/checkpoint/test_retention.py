"""What may be deleted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpjob.runtime.checkpoint.manifest import Kind
from hpjob.runtime.checkpoint.retention import Retention

KINDS: st.SearchStrategy[dict[int, Kind]] = st.dictionaries(
    st.integers(1, 60), st.sampled_from(["permanent", "ephemeral"]), min_size=1
)


@given(kinds=KINDS, keep_last=st.integers(1, 5), every=st.none() | st.integers(1, 20), data=st.data())
def test_only_older_ones_go_and_never_more_than_asked(
    kinds: dict[int, Kind], keep_last: int, every: int | None, data: st.DataObject
) -> None:
    verified = data.draw(st.sampled_from(sorted(kinds)))
    gone = Retention(keep_last=keep_last, keep_every_steps=every).superfluous(kinds, verified)
    assert all(step < verified for step in gone)
    left = sorted(kinds.keys() - set(gone))
    permanent = [step for step in sorted(kinds) if kinds[step] == "permanent" and step <= verified]
    assert set(permanent[-keep_last:]) <= set(left)
    if every:
        assert all(step in left for step in permanent if step % every == 0)
    assert [step for step in left if step < verified and kinds[step] == "ephemeral"] == []
