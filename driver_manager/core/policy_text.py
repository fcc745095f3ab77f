"""A policy's text, of a file or an annotation, as plain values: what JSON could say too, in YAML or JSON."""

from typing import Any, Final

import yaml  # type: ignore[import-untyped,unused-ignore]

LONGEST_REASON: Final = 300
_STANDARD: Final = "tag:yaml.org,2002:"
"""What `!!` stands for."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc,unused-ignore]
    """Plain values only.

    An alias can stand for a value of any size; of a key that is there twice one would be lost; a tag asks for a conversion, which fails in
    ways of its own where the value does not suit it.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not taken")
        if event.tag is not None:
            raise yaml.YAMLError(f"tags ({event.tag.replace(_STANDARD, '!!')}) are not taken")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for number, key in enumerate(keys) if key in keys[:number]]
        if twice:
            raise yaml.YAMLError(f"{twice[0]!r} is there twice")
        return super().construct_mapping(node, deep)


def plain_values(text: str) -> Any:
    """What a text says.

    Raises:
        ValueError: it is neither YAML nor JSON, or not plain; with why, on one line.
    """
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())[:LONGEST_REASON]) from error
