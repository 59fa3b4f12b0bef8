"""Good bytes with a few of them changed, and what an error about them must be."""

from __future__ import annotations

from hypothesis import strategies as st

from rlspeed.errors import RlspeedError

# (what, where as a share of the length, with which bytes)
Edit = tuple[str, float, bytes]
EDITS: st.SearchStrategy[list[Edit]] = st.lists(
    st.tuples(
        st.sampled_from(["flip", "write", "insert", "remove", "repeat", "cut", "swap lines", "drop line"]),
        st.floats(0.0, 1.0),
        st.one_of(
            st.binary(min_size=1, max_size=6),
            st.sampled_from(
                [b"\x00", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\n", b"\r\n", b"\xef\xbb\xbf", b"{", b"}", b'"']
                + [
                    b"[",
                    b"]",
                    b":",
                    b": ",
                    b"- ",
                    b"-1",
                    b"0",
                    b"1e999",
                    b"NaN",
                    b"null",
                    b"true",
                    b"  ",
                    b"&a ",
                    b"*a",
                ]
                + [
                    b"999999999999999999999",
                    b"<<: ",
                    b"!!python/object ",
                    b"#",
                    b"'",
                    b"\xc3",
                    b"\\ud800",
                    b"4000000000",
                ]
            ),
        ),
    ),
    max_size=5,
)


def damaged(good: bytes, edits: list[Edit]) -> bytes:
    """`good` after the edits, one after the other."""
    data = good
    for what, share, piece in edits:
        at, size = int(share * len(data)), len(piece)
        if what == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << (piece[0] % 8))]) + data[at + 1 :]
        elif what == "write":
            data = data[:at] + piece + data[at + size :]
        elif what == "insert":
            data = data[:at] + piece + data[at:]
        elif what == "remove":
            data = data[:at] + data[at + piece[0] :]
        elif what == "repeat":
            data = data[:at] + data[max(0, at - piece[0]) :]
        elif what == "cut":
            data = data[:at]
        else:
            lines = data.split(b"\n")
            i, j = int(share * (len(lines) - 1)), piece[0] % len(lines)
            if what == "swap lines":
                lines[i], lines[j] = lines[j], lines[i]
            else:
                del lines[i]
            data = b"\n".join(lines)
    return data


def refused(error: RlspeedError) -> None:
    """The error is the user's to mend, and says where and what."""
    assert error.exit_code == 2
    assert error.faults
    assert all(f.where and f.found for f in error.faults)
