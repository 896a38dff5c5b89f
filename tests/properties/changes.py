"""Changes of messages that are valid: a few bytes, or one field."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st


@st.composite
def changed(draw: st.DrawFn, messages: st.SearchStrategy[bytes]) -> bytes:
    """Draw a message with one to four changes of its bytes."""
    data = bytearray(draw(messages))
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["change", "insert", "remove", "cut", "repeat"])):
            case "change":
                data[position : position + 1] = draw(st.binary(min_size=1, max_size=1))
            case "insert":
                data[position:position] = draw(st.binary(min_size=1, max_size=5))
            case "remove":
                del data[position : position + draw(st.integers(1, 40))]
            case "cut":
                del data[position:]
            case "repeat":
                data[position:position] = data[position : position + 40]
    return bytes(data)


def replaced(tree: Any, path: list[int], value: object) -> Any:
    """Return a nested list with the element on a path replaced. Indices wrap around."""
    if not path or not isinstance(tree, list) or not tree:
        return value
    index = path[0] % len(tree)
    return [*tree[:index], replaced(tree[index], path[1:], value), *tree[index + 1 :]]
